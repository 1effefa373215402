"""Intervals against metrics of items that are really repeated, closed forms, and SciPy's bootstrap."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import lapwing
from lapwing import metrics
from lapwing.evaluation import columns
from lapwing.evaluation.columns import Entries
from lapwing.likelihoods import Gaussian


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weights(*sizes: int) -> dict[str, Tensor]:
    names = ["test", "far"][: len(sizes)]
    return next(iter(columns.weight_chunks(dict(zip(names, sizes)), 7, 7)))


def repeated(values: Tensor, counts: Tensor, owner: Tensor | None = None) -> Tensor:
    """The entries of items that are drawn so often."""
    counts = counts.long() if owner is None else counts.long()[owner]
    return values.repeat_interleave(counts)


@pytest.mark.parametrize("clustered", [False, True])
def test_statistics_are_the_metrics_of_repeated_items(clustered: bool) -> None:
    n, m = 40, 25
    owner = torch.arange(n).repeat_interleave(3)[:100] if clustered else None  # the last items have fewer entries
    others = torch.arange(m).repeat_interleave(2) if clustered else None
    size, far = (100, 50) if clustered else (n, m)
    score = torch.randint(20, (size,)).double()  # with ties
    strange = torch.randint(30, (far,)).double()
    confidence, correct = torch.rand(size).double(), (torch.rand(size) > 0.4).double()
    count = 34 if clustered else n
    given = weights(count, m)
    inside, outside = Entries(score, owner, count), Entries(strange, others, m)
    entries = Entries(confidence, owner, count)
    found = {
        "mean": columns.mean_of(inside)(given),
        "ece": columns.ece_of(entries, correct, 7)(given),
        "auroc": columns.auroc_of(inside, outside, "far")(given),
        "fpr95": columns.fpr95_of(inside, outside, "far")(given),
    }
    for r in range(7):
        w, v = given["test"][r], given["far"][r]
        a, b = repeated(score, w, owner), repeated(strange, v, others)
        assert found["mean"][r].item() == pytest.approx(a.mean().item())
        table = metrics.reliability(repeated(confidence, w, owner), repeated(correct, w, owner), 7)
        assert found["ece"][r].item() == pytest.approx(table.gap.item())
        assert found["auroc"][r].item() == pytest.approx(metrics.auroc(a, b).item())
        assert found["fpr95"][r].item() == pytest.approx(metrics.fpr95(a, b).item())


def test_resamples_draw_as_many_items_as_there_are_and_are_the_same_in_any_chunks() -> None:
    sizes = {"test": 30, "far": 11}
    whole = list(columns.weight_chunks(sizes, 10, 10))
    parts = list(columns.weight_chunks(sizes, 10, 3))
    assert all((w.sum(1) == sizes[side]).all() for side, w in whole[0].items())
    for side, w in whole[0].items():
        assert torch.equal(torch.cat([part[side] for part in parts]), w)


def test_the_interval_of_a_mean_is_that_of_the_central_limit() -> None:
    values = torch.randn(400, dtype=torch.float64)
    samples = columns.resampled({"a": {"m": columns.mean_of(Entries(values, None, 400))}}, {"test": 400}, 400)
    low, high = columns.bootstrap_interval(values.mean().item(), samples["a"]["m"])
    error = 1.96 * values.std().item() / 20
    assert low == pytest.approx(values.mean().item() - error, abs=0.1 * error)
    assert high == pytest.approx(values.mean().item() + error, abs=0.1 * error)


def test_the_interval_of_a_root_mean_square_is_that_of_scipy() -> None:
    values = torch.randn(200, dtype=torch.float64).square()
    statistic = columns.mean_of(Entries(values, None, 200), torch.sqrt)
    samples = columns.resampled({"a": {"m": statistic}}, {"test": 200}, 200)["a"]["m"]
    found = columns.bootstrap_interval(values.mean().sqrt().item(), samples)
    theirs = stats.bootstrap(
        (values.numpy(),), lambda v, axis: np.sqrt(v.mean(axis)), method="BCa", n_resamples=4000, random_state=0
    ).confidence_interval
    width = theirs.high - theirs.low
    assert found == pytest.approx((theirs.low, theirs.high), abs=0.12 * width)


def test_the_correction_moves_a_biased_interval_over_the_value() -> None:
    samples = torch.randn(1000, dtype=torch.float64) + 1.0
    low, high = columns.bootstrap_interval(0.0, samples)
    assert low < 0 < high
    assert high < torch.quantile(samples, 0.975).item() - 1  # Φ⁻¹ moves twice the bias down


def test_what_does_not_vary_or_is_not_finite_has_no_interval() -> None:
    assert all(math.isnan(v) for v in columns.bootstrap_interval(1.0, torch.ones(10)))
    assert all(math.isnan(v) for v in columns.bootstrap_interval(math.inf, torch.rand(10)))
    assert all(math.isnan(v) for v in columns.bootstrap_interval(1.0, torch.tensor([1.0, torch.inf])))


def test_a_share_of_one_has_the_interval_of_clopper_and_pearson() -> None:
    theirs = stats.binomtest(30, 30).proportion_ci(0.95, "exact")
    assert columns.share_interval(1.0, 30) == pytest.approx((theirs.low, theirs.high))
    theirs = stats.binomtest(0, 30).proportion_ci(0.95, "exact")
    assert columns.share_interval(0.0, 30) == pytest.approx((theirs.low, theirs.high))


def test_many_entries_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MOST", 50)
    values = torch.arange(500.0)
    thin = Entries(values, None, 500).thinned()
    assert len(thin.values) == 50
    assert thin.owner is not None
    assert torch.equal(values[thin.owner], thin.values)


def test_differences_are_paired() -> None:
    """Two regressions that differ by a little on every item: the difference is far surer than either NLL."""
    model = nn.Linear(3, 1)
    x = torch.randn(500, 3)
    y = model(x).detach() + torch.randn(500, 1)
    report = lapwing.evaluate({"a": Shifted(model, 0.0), "b": Shifted(model, 0.3)}, (x, y))
    value, low, high = report.difference("b", "nll")
    assert value == pytest.approx(report.row("b")["nll"] - report.row("a")["nll"])
    losses = {s: -torch.distributions.Normal(model(x).detach() + s, 1.0).log_prob(y)[:, 0] for s in (0.0, 0.3)}
    gaps = losses[0.3] - losses[0.0]
    error = 1.96 * gaps.std().item() / 500**0.5
    assert (low, high) == pytest.approx((value - error, value + error), abs=0.2 * error)
    alone = report.interval("a", "nll")
    assert alone[2] - alone[1] > 1.5 * (high - low)
    assert report.verdict("b", "nll") == -1
    assert report.verdict("a", "nll", "b") == 1
    assert report.verdict("b", "stddev") == 0
    assert report.difference("b", "stddev") == (0.0, 0.0, 0.0)


class Shifted:
    """A regression with unit noise whose mean is off by `shift`."""

    def __init__(self, model: nn.Module, shift: float) -> None:
        self.model, self.shift, self.likelihood = model, shift, Gaussian(1.0)

    def predict(self, x: Tensor):
        with torch.no_grad():
            f = self.model(x) + self.shift
        function = lapwing.predictive.SampledFunction(None, f[None])
        return lapwing.predictive.predict_targets(function, self.likelihood)


def test_pixels_of_an_image_are_drawn_together() -> None:
    """All pixels of an image are right or wrong at once: the accuracy is as unsure as that of the images."""
    n, pixels = 40, 50
    right = (torch.rand(n) > 0.3).double()
    owner = torch.arange(n).repeat_interleave(pixels)
    entries = Entries(right.repeat_interleave(pixels), owner, n)
    samples = columns.resampled({"a": {"m": columns.mean_of(entries)}}, {"test": n}, n)["a"]["m"]
    assert samples.std().item() == pytest.approx((right.var(correction=0) / n).sqrt().item(), rel=0.1)


def test_one_item_has_no_interval() -> None:
    data = (torch.randn(1, 5), torch.zeros(1).long())
    report = lapwing.evaluate({"a": nn.Linear(5, 3)}, data, likelihood="classification")
    assert math.isnan(report.interval("a", "nll")[1])
    assert report.findings()


def test_unknown_models_and_columns_are_named() -> None:
    data = (torch.randn(20, 5), torch.randint(3, (20,)))
    report = lapwing.evaluate({"a": nn.Linear(5, 3)}, data, likelihood="classification")
    with pytest.raises(lapwing.BadData, match="no model 'b': choose from a"):
        report.interval("b", "nll")
    with pytest.raises(lapwing.BadData, match="no column 'rmse': choose from"):
        report.difference("a", "rmse")
