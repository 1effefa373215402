"""Distribution functions of regressions whose noise is uncertain over many orders of magnitude."""

import pytest
import torch

import lapwing
from lapwing.predictive import GaussianFunction, predict_targets


@pytest.mark.parametrize(("mean", "variances"), [((1.0, 0.0), (0.2, 100.0)), ((0.5, 5.0), (0.1, 1600.0))])
def test_distribution_functions_hold_however_wide_the_noise_is(
    mean: tuple[float, float], variances: tuple[float, float]
) -> None:
    likelihood, f = lapwing.HeteroscedasticGaussian(), torch.tensor([mean]).double()
    covariance = torch.diag(torch.tensor(variances).double())[None]
    p = predict_targets(GaussianFunction(f, covariance), likelihood)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1_000_000, 2, generator=generator, dtype=torch.float64)
    y = likelihood.sample_target(f + noise * torch.tensor(variances).double().sqrt(), generator)
    for at in (-10.0, 0.0, 0.5, 3.0, 50.0):
        found = float(p._marginal.cdf(torch.tensor([[at]]).double()))
        assert found == pytest.approx(float((y <= at).double().mean()), abs=0.0025)


@pytest.mark.parametrize(
    ("mean", "variances"),
    [
        ((-0.31, 18.56), (3.8, 136.7)),
        ((53.7, 54.9), (381.5, 502.6)),
        ((1.0, 0.0), (0.2, 100.0)),
        ((-3.7, 1.9), (94.0, 88.0)),
    ],
)
def test_quantiles_hold_however_wide_the_noise_is(mean: tuple[float, float], variances: tuple[float, float]) -> None:
    """The share of draws below a quantile is its level, also where components reach over fifty orders of magnitude."""
    likelihood, f = lapwing.HeteroscedasticGaussian(), torch.tensor([mean]).double()
    covariance = torch.diag(torch.tensor(variances).double())[None]
    p = predict_targets(GaussianFunction(f, covariance), likelihood)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1_000_000, 2, generator=generator, dtype=torch.float64)
    y = likelihood.sample_target(f + noise * torch.tensor(variances).double().sqrt(), generator)
    for level in (0.025, 0.25, 0.5, 0.75, 0.975):
        assert float((y <= p.quantile(level)).double().mean()) == pytest.approx(level, abs=0.003)
