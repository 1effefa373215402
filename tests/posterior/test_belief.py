"""A belief determines its posterior, and changing one part of it reads no data."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.errors import NotPositiveDefinite, UnsupportedOperation
from lapwing.evidence import evidence_of
from lapwing.linalg import Dense
from lapwing.posterior import Belief


def fitted(structure: str = "full") -> tuple[lapwing.Laplace, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x, y = torch.randn(20, 2, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    la = lapwing.fit(net, (x, y), lapwing.Gaussian(0.5), structure=structure, prior=0.7)
    return la, la.curvature.dense()


@pytest.mark.parametrize("tempers_prior", [False, True])
def test_the_posterior_is_the_formula(tempers_prior: bool) -> None:
    la, curvature = fitted()
    tempered = lapwing.Tempered(2.0, prior=tempers_prior)
    belief = Belief.of(la.curvature, 0.3, lapwing.Gaussian(0.5), tempered)
    eye = torch.eye(len(curvature), dtype=torch.float64)
    expected = 2 / 0.25 * curvature + 0.3 * (2 if tempers_prior else 1) * eye
    torch.testing.assert_close(belief.posterior.precision.dense(), expected)
    assert torch.equal(belief.posterior.mean, la.params.flat)


def test_a_change_is_a_new_belief_with_its_own_posterior() -> None:
    la, _ = fitted()
    first = la.belief.posterior
    changed = replace(la.belief, prior=lapwing.Prior(5.0))
    assert la.belief.posterior is first
    torch.testing.assert_close(changed.posterior.precision.dense(), la.replace(prior=5.0).posterior.precision.dense())
    assert evidence_of(changed).item() == pytest.approx(la.replace(prior=5.0).log_evidence().item())


def test_a_prior_may_be_a_mean_and_a_matrix() -> None:
    la, curvature = fitted()
    size = len(curvature)
    root = torch.randn(size, size, dtype=torch.float64)
    matrix, mean = Dense(root @ root.T + torch.eye(size)), torch.randn(size, dtype=torch.float64)
    belief = Belief.of(la.curvature, (mean, matrix), la.likelihood)
    assert belief.resolved_prior[1] is matrix
    torch.testing.assert_close(belief.offset, la.params.flat - mean)
    distance = belief.offset @ matrix.dense() @ belief.offset
    torch.testing.assert_close(belief.log_joint, la.log_likelihood - 0.5 * distance)


def test_what_is_missing_is_said() -> None:
    la, _ = fitted()
    apart = replace(la.curvature, params=None)
    with pytest.raises(UnsupportedOperation, match="pass mean="):
        _ = Belief.of(apart, 1.0, la.likelihood).weights
    there = Belief.of(apart, 0.7, la.likelihood, mean=la.params.flat)
    torch.testing.assert_close(there.posterior.variance, la.posterior.variance)
    negative = replace(la.curvature, matrix=Dense(-la.curvature.dense()), factor=lapwing.Hessian())
    with pytest.raises(NotPositiveDefinite, match="repair"):
        Belief.of(negative, 1e-3, la.likelihood).require_posterior()
    repaired = replace(Belief.of(negative, 1e-3, la.likelihood), repair=True)
    assert torch.linalg.eigvalsh(repaired.posterior.precision.dense()).min() > 0
    assert repaired.prior_in_use[1].diagonal()[0].item() == pytest.approx(1e-3 + repaired.posterior.increase)
