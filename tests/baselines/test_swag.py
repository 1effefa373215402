"""SWAG against its definition, on iterates that are replayed by hand."""

import pytest
import torch
from tests import dense
from torch import nn

import lapwing
from lapwing.baselines import HMC, SWAG, DeepEnsemble, MeanField
from lapwing.baselines.swag import Moments
from lapwing.errors import BadData


def test_the_moments_are_those_of_the_definition() -> None:
    iterates = dense.randn(7, 5)
    moments = Moments.empty(iterates[0])
    for theta in iterates:
        moments = moments.joined(theta, rank=3)
    assert torch.allclose(moments.mean, iterates.mean(0))
    assert torch.allclose(moments.variance, iterates.var(0, correction=0))
    expected = torch.stack([iterates[k] - iterates[: k + 1].mean(0) for k in range(4, 7)])
    assert torch.allclose(moments.deviations, expected)


def test_fit_keeps_one_iterate_per_epoch_of_plain_sgd() -> None:
    x, y = dense.randn(12, 3), dense.randn(12, 1)
    model = dense.build(lambda: nn.Linear(3, 1, bias=False))
    before = model.weight.detach().clone()
    noise, prior, rate, epochs = 0.8, 1.5, 0.05, 4
    swag = SWAG.fit(
        model, [(x, y)], lapwing.Gaussian(noise=noise), epochs=epochs, rate=rate, momentum=0.9, prior=prior, rank=3
    )
    theta, speed, iterates = before.flatten().clone(), torch.zeros(3).double(), []
    for _ in range(epochs):
        residual = x @ theta - y[:, 0]
        gradient = (x.T @ residual / noise**2 + prior * theta) / 12
        speed = 0.9 * speed + gradient
        theta = theta - rate * speed
        iterates.append(theta)
    seen = torch.stack(iterates)
    assert torch.allclose(swag.mean, seen.mean(0))
    assert torch.allclose(swag.variance, seen.var(0, correction=0))
    assert swag.deviations.shape == (3, 3)
    assert torch.equal(model.weight.detach(), before)


def test_draws_have_the_covariance_of_the_definition() -> None:
    x, y = dense.randn(20, 2), dense.randn(20, 1)
    model = dense.build(lambda: nn.Linear(2, 1))
    swag = SWAG.fit(model, (x, y), lapwing.Gaussian(noise=0.5), epochs=6, rate=0.1, rank=4, batch_size=5)
    draws = swag.sample(40_000, torch.Generator().manual_seed(1))
    D = swag.deviations
    expected = swag.variance.diag() / 2 + D.T @ D / (2 * 3)
    scale = expected.diagonal().sqrt()
    assert ((draws.T.cov() - expected) / (scale[:, None] * scale)).abs().max() < 0.05
    assert ((draws.mean(0) - swag.mean) / scale).abs().max() < 0.03
    p = swag.predict(x)
    f = torch.stack([x @ w[:2] + w[2] for w in swag.sample(30)])
    assert torch.allclose(p.function.samples[..., 0], f)


def test_later_training_of_the_module_changes_nothing() -> None:
    model = dense.build(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    x = dense.randn(16, 2)
    swag = SWAG.fit(model, (x, (x[:, 0] > 0).long()), "classification", epochs=2, rate=0.01)
    before = swag.predict(x[:1]).probs
    with torch.no_grad():
        model[1].running_mean.add_(1.0)
        model[0].weight.mul_(2.0)
    assert torch.equal(swag.predict(x[:1]).probs, before)


def test_one_iterate_is_refused() -> None:
    with pytest.raises(BadData, match="two iterates"):
        SWAG.fit(nn.Linear(2, 2), (torch.randn(4, 2), torch.arange(4) % 2), "classification", epochs=1)


@pytest.mark.parametrize("method", [SWAG, MeanField, HMC, DeepEnsemble])
def test_options_that_no_baseline_has_are_named(method: type) -> None:
    data = torch.randn(4, 2), torch.arange(4) % 2
    model = (lambda: nn.Linear(2, 2)) if method is DeepEnsemble else nn.Linear(2, 2)
    with pytest.raises(TypeError, match=rf"{method.__name__}.fit\(\) has no option 'batchsize'.*'batch_size'\?"):
        method.fit(model, data, "classification", batchsize=3)


def test_weights_of_samples_count_as_repetitions() -> None:
    """A sample of weight 2 gives the same iterates as the sample twice."""
    x, y = dense.randn(4, 3), dense.randn(4, 1)
    weights = torch.tensor([2.0, 1.0, 1.0, 1.0], dtype=x.dtype)
    twice = (torch.cat([x[:1], x]), torch.cat([y[:1], y]))
    found = []
    for batch, split in (((x, y, weights), lambda b: b), (twice, None)):
        model = dense.build(lambda: nn.Linear(3, 1, bias=False))
        swag = SWAG.fit(model, [batch], lapwing.Gaussian(noise=0.8), epochs=3, rate=0.05, split=split)
        assert swag.module is not None
        assert swag.likelihood.noise == 0.8
        found.append(swag.mean)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("method", [SWAG, MeanField])
def test_data_without_samples_are_refused(method: type) -> None:
    model = dense.build(lambda: nn.Linear(3, 1))
    ignored = [(dense.randn(2, 3), dense.randn(2, 1), torch.zeros(2))]  # of weight zero
    for data, n_data, split in (([], None, None), ([], 5, None), (ignored, None, lambda batch: batch)):
        with pytest.raises(BadData, match=r"the data holds? no samples"):
            method.fit(model, data, lapwing.Gaussian(noise=0.8), epochs=3, n_data=n_data, split=split)
