"""Metrics against scikit-learn, quadrature, closed forms and brute force."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import integrate, stats
from sklearn import metrics as sk

from lapwing import metrics
from lapwing.errors import BadData


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def classes(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    return (2 * logits).softmax(-1), torch.randint(5, (200,), generator=generator)


def test_classification_scores_match_sklearn(classes: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, y = classes
    assert metrics.nll(probs, y).item() == pytest.approx(sk.log_loss(y, probs, labels=range(5)), rel=1e-12)
    assert metrics.accuracy(probs, y).item() == pytest.approx(sk.accuracy_score(y, probs.argmax(-1)))
    onehot = np.eye(5)[y.numpy()]
    assert metrics.brier(probs, y).item() == pytest.approx(((probs.numpy() - onehot) ** 2).sum(1).mean(), rel=1e-12)


def test_binary_brier_is_twice_sklearns(generator: torch.Generator) -> None:
    p = torch.rand(50, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (50,), generator=generator)
    two = torch.stack([1 - p, p], -1)
    assert metrics.brier(two, y).item() == pytest.approx(2 * sk.brier_score_loss(y, p), rel=1e-12)


def test_one_hot_targets_equal_indices(classes: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, y = classes
    onehot = torch.nn.functional.one_hot(y, 5).double()
    for score in (metrics.nll, metrics.accuracy, metrics.brier, metrics.ece):
        assert score(probs, y) == score(probs, onehot)


def test_soft_targets_give_the_cross_entropy(classes: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, _ = classes
    q = probs.roll(1, 0)
    assert metrics.nll(probs, q).item() == pytest.approx(-(q * probs.log()).sum(-1).mean().item())


def test_event_dimensions_are_items(classes: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, y = classes
    for score in (metrics.nll, metrics.accuracy, metrics.brier, metrics.ece):
        assert score(probs.reshape(10, 20, 5), y.reshape(10, 20)).item() == pytest.approx(score(probs, y).item())


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_ece_matches_a_loop_over_bins(classes: tuple[torch.Tensor, torch.Tensor], bins: int) -> None:
    probs, y = classes
    confidence, label = (t.numpy() for t in probs.max(-1))
    expected = 0.0
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if inside.any():
            expected += inside.mean() * abs((label == y.numpy())[inside].mean() - confidence[inside].mean())
    assert metrics.ece(probs, y, bins=bins).item() == pytest.approx(expected, rel=1e-12)


def test_a_confidence_on_an_edge_belongs_to_the_lower_bin() -> None:
    bins = metrics.reliability(torch.tensor([0.5, 1.0, 0.3]), torch.tensor([True, False, False]), bins=2)
    assert bins.count.tolist() == [2, 1]
    assert bins.accuracy.tolist() == [0.5, 0.0]
    torch.testing.assert_close(bins.confidence, torch.tensor([0.4, 1.0], dtype=torch.float64))


def test_ece_of_calibrated_predictions_goes_to_zero(generator: torch.Generator) -> None:
    probs = torch.randn(200_000, 3, generator=generator).softmax(-1)
    y = torch.multinomial(probs, 1, generator=generator)[:, 0]
    assert metrics.ece(probs, y).item() < 0.01


def test_certain_and_wrong_is_infinite() -> None:
    assert metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])).item() == math.inf
    assert metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).item() == 0.0


def test_entropy_matches_scipy(classes: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, _ = classes
    np.testing.assert_allclose(metrics.entropy(probs).numpy(), stats.entropy(probs.numpy(), axis=1), rtol=1e-12)
    assert metrics.entropy(torch.tensor([1.0, 0.0])).item() == 0.0


@pytest.mark.parametrize("scores", ["distinct", "ties"])
def test_auroc_matches_sklearn(generator: torch.Generator, scores: str) -> None:
    inside, outside = torch.randn(80, generator=generator), torch.randn(50, generator=generator) + 0.7
    if scores == "ties":
        inside, outside = inside.round(), outside.round()
    truth = np.r_[np.zeros(80), np.ones(50)]
    expected = sk.roc_auc_score(truth, np.r_[inside, outside])
    assert metrics.auroc(inside, outside).item() == pytest.approx(expected, rel=1e-12)


def test_fpr95_matches_the_roc_curve(generator: torch.Generator) -> None:
    inside, outside = torch.randn(200, generator=generator), torch.randn(150, generator=generator) + 1.0
    # inside is the positive class, its score is minus the strangeness
    false, true, _ = sk.roc_curve(np.r_[np.ones(200), np.zeros(150)], -np.r_[inside, outside], drop_intermediate=False)
    expected = false[np.argmax(true >= 0.95)]
    assert metrics.fpr95(inside, outside).item() == pytest.approx(expected, abs=1e-12)


def test_fpr95_of_separated_scores_is_zero() -> None:
    assert metrics.fpr95(torch.zeros(10), torch.ones(10)).item() == 0.0
    assert metrics.fpr95(torch.ones(10), torch.zeros(10)).item() == 1.0


def test_rmse_and_gaussian_nll(generator: torch.Generator) -> None:
    mean, y = torch.randn(30, 2, generator=generator), torch.randn(30, 2, generator=generator)
    stddev = torch.rand(30, 2, generator=generator) + 0.1
    error = sk.root_mean_squared_error(y.flatten(), mean.flatten())
    assert metrics.rmse(mean, y).item() == pytest.approx(error, rel=1e-6)
    expected = -stats.norm.logpdf(y.numpy(), mean.numpy(), stddev.numpy()).mean()
    assert metrics.gaussian_nll(mean, stddev, y).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("mean", "stddev", "y"), [(0.0, 1.0, 0.0), (1.0, 0.3, -0.5), (-2.0, 4.0, 3.0)])
def test_crps_matches_quadrature(mean: float, stddev: float, y: float) -> None:
    below = integrate.quad(lambda x: stats.norm.cdf(x, mean, stddev) ** 2, -60, y)[0]
    above = integrate.quad(lambda x: stats.norm.sf(x, mean, stddev) ** 2, y, 60)[0]
    result = metrics.crps(torch.tensor([mean]), torch.tensor([stddev]), torch.tensor([y]))
    assert result.item() == pytest.approx(below + above, rel=1e-6)


def test_crps_from_samples_matches_all_pairs(generator: torch.Generator) -> None:
    samples, y = torch.randn(7, 4, generator=generator).double(), torch.randn(4, generator=generator).double()
    pairs = (samples[:, None] - samples[None]).abs().sum((0, 1)) / (7 * 6)
    expected = ((samples - y).abs().mean(0) - pairs / 2).mean()
    assert metrics.crps_samples(samples, y).item() == pytest.approx(expected.item(), rel=1e-12)


def test_crps_from_samples_approaches_the_closed_form(generator: torch.Generator) -> None:
    mean, stddev, y = torch.tensor([0.3]), torch.tensor([0.7]), torch.tensor([1.0])
    samples = mean + stddev * torch.randn(100_000, 1, generator=generator)
    closed = metrics.crps(mean, stddev, y).item()
    assert metrics.crps_samples(samples, y).item() == pytest.approx(closed, rel=0.01)


def test_crps_of_a_point_is_the_absolute_error() -> None:
    result = metrics.crps(torch.tensor([1.0]), torch.tensor([1e-9]), torch.tensor([3.0]))
    assert result.item() == pytest.approx(2.0)


def test_one_output_may_be_a_column() -> None:
    """Predictions (n, 1) and targets (n,) are compared item by item, not each with each."""
    mean, y = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 4.0])
    for predicted, target in ((mean[:, None], y), (mean, y[:, None])):
        assert metrics.rmse(predicted, target).item() == pytest.approx((4 / 3) ** 0.5)
        assert metrics.coverage(predicted - 1, predicted + 1, target).item() == pytest.approx(2 / 3)
    spread = torch.ones(3, 1)
    assert metrics.crps(mean[:, None], spread, y) == metrics.crps(mean, spread[:, 0], y)


def test_coverage_counts_the_edges() -> None:
    lower, upper = torch.zeros(4), torch.ones(4)
    assert metrics.coverage(lower, upper, torch.tensor([0.0, 1.0, 1.5, 0.5])).item() == 0.75


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: metrics.rmse(torch.zeros(5, 2), torch.zeros(5)), r"\(5, 2\) need targets of that shape, got \(5,\)"),
        (lambda: metrics.crps(torch.zeros(5, 1), torch.ones(5, 1), torch.zeros(1, 5)), "need targets of that shape"),
        (lambda: metrics.nll(torch.ones(2, 3) / 3, torch.tensor([0, 3])), r"target 3 is outside 0\.\.2"),
        (lambda: metrics.nll(torch.ones(2, 3) / 3, torch.tensor([0, -100])), "target -100"),
        (lambda: metrics.nll(torch.ones(2, 3) / 3, torch.tensor([0.0, 1.0])), "must be integers"),
        (lambda: metrics.nll(torch.ones(0, 3), torch.zeros(0).long()), "not empty"),
        (lambda: metrics.accuracy(torch.full((1, 2), torch.nan), torch.tensor([0])), "NaN"),
        (lambda: metrics.rmse(torch.zeros(0), torch.zeros(0)), "nothing to score"),
        (lambda: metrics.auroc(torch.zeros(3), torch.zeros(0)), "3 inside and 0 outside"),
        (lambda: metrics.auroc(torch.tensor([torch.nan]), torch.zeros(1)), "NaN"),
        (lambda: metrics.crps_samples(torch.zeros(1, 3), torch.zeros(3)), "at least 2 samples, got 1"),
        (lambda: metrics.ece(torch.ones(2, 2) / 2, torch.tensor([0, 1]), bins=0), "bins must be at least 1"),
    ],
)
def test_bad_input_says_what_came(call, words: str) -> None:
    with pytest.raises(BadData, match=words):
        call()


def test_scores_are_differentiable(generator: torch.Generator) -> None:
    logits = torch.randn(6, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    assert torch.autograd.gradcheck(lambda f: metrics.nll(f.softmax(-1), y) + metrics.brier(f.softmax(-1), y), logits)


def test_arrays_and_series_score_like_tensors(classes: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, y = classes
    series = pd.Series(y.numpy(), index=range(1000, 1200))
    assert metrics.nll(probs.numpy(), series) == metrics.nll(probs, y)
    assert metrics.ece(probs, y.numpy()) == metrics.ece(probs, y)
    torch.testing.assert_close(metrics.entropy(probs.numpy()), metrics.entropy(probs))
    lower, upper = probs[:, 0] - 0.1, probs[:, 0] + 0.1
    inside = np.mean((lower.numpy() <= probs[:, 1].numpy()) & (probs[:, 1].numpy() <= upper.numpy()))
    assert float(metrics.coverage(lower, upper, pd.Series(probs[:, 1].numpy()))) == pytest.approx(inside)
    assert metrics.auroc(lower.numpy(), upper.numpy()) == metrics.auroc(lower, upper)
    column = pd.Series(probs[:, 1].numpy())
    assert float(metrics.coverage(lower[:, None].numpy(), upper[:, None].numpy(), column)) == pytest.approx(inside)
    assert float(metrics.coverage(lower, upper, probs[:, 1:2])) == pytest.approx(inside)
    for wrong in (lower[:, None].expand(-1, 2), lower[:100, None], lower[None, :]):
        with pytest.raises(BadData, match="need targets of that shape"):
            metrics.coverage(wrong, wrong, column)
    with pytest.raises(BadData, match="need targets of that shape"):
        metrics.rmse(lower[:, None], probs[None, :, 1])
