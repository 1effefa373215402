"""A posterior whose prior precision was raised by `repair=True` is that of the raised prior, evidence and all."""

import pytest
import torch
from torch import nn

import lapwing
from tests.dense import assert_same, build, flat, outputs, randn

SIGMA, TAU = 0.7, 0.1


@pytest.mark.parametrize("temperature", [1.0, lapwing.Tempered(0.5, prior=True)])
@pytest.mark.parametrize("structure", ["full", "blockdiag", "diag"])
def test_evidence_and_summary_of_a_repaired_posterior(structure, temperature):
    module, x = build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))), randn(8, 3)
    y = outputs(module, x) + 2 * randn(8, 3, seed=2)
    la = lapwing.fit(
        module,
        (x, y),
        lapwing.Gaussian(SIGMA),
        structure=structure,
        factor="hessian",
        prior=TAU,
        temperature=temperature,
        repair=True,
    )
    T, both = (1.0, False) if isinstance(temperature, float) else (temperature.T, temperature.prior)
    raised = (T if both else 1.0) * TAU + la.posterior.increase
    assert la.posterior.increase > 0.1
    precision = T / SIGMA**2 * la.curvature.dense() + raised * torch.eye(31, dtype=torch.float64)
    assert_same(la.posterior.precision.dense(), precision)
    log_p = torch.distributions.Normal(outputs(module, x), SIGMA).log_prob(y).sum()
    bracket = torch.linalg.slogdet(precision / raised)[1]
    assert_same(la.log_evidence(), T * log_p - 0.5 * raised * flat(module).square().sum() - 0.5 * bracket, 1e-6)
    assert f"raised by {la.posterior.increase:.3g}" in la.summary()
    assert "nan" not in la.summary()
