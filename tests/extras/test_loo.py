"""Leave-one-out against refits without each datum."""

from typing import Any

import pytest
import torch
from tests.evidence.problems import OF_THE_BELIEF, Handmade, Problem, believed, linear, mlp
from torch.distributions import Normal

from lapwing.errors import UnsupportedOperation
from lapwing.evidence import Groups, Tuning
from lapwing.evidence.heldout import Batch
from lapwing.extras.loo import tune_loo
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.linalg import DenseRows


def batches(problem: Problem) -> list[Batch]:
    return [(problem.f, problem.y, DenseRows(problem.jacobian))]


def run(curvature: Handmade, likelihood: Likelihood, data: list[Batch], **kwargs: Any) -> Tuning:
    groups = Groups.scalar(curvature.matrix.size)
    given = {name: kwargs.pop(name) for name in OF_THE_BELIEF if name in kwargs}
    belief = believed(curvature, likelihood, groups, torch.zeros(groups.size), **given)
    return tune_loo(belief, groups, data, **kwargs)


def test_exact_for_linear_regression_at_its_mode() -> None:
    """At the prior of the fit the score is that of 25 refits; with other priors only their variances are used."""
    tau, noise = 0.7, 0.4
    problem = linear(tau=tau, noise=noise)
    x, y = problem.jacobian[:, 0], problem.y[:, 0]
    taus = (0.07, 0.7, 7.0)
    expected = []
    for swept in taus:
        total = 0.0
        for n in range(len(x)):
            keep = torch.arange(len(x)) != n
            eye = torch.eye(4, dtype=torch.float64)
            fitted = x[keep].T @ x[keep] / noise**2 + tau * eye
            mean = x[n] @ torch.linalg.solve(fitted, x[keep].T @ y[keep] / noise**2)
            precision = x[keep].T @ x[keep] / noise**2 + swept * eye
            variance = x[n] @ torch.linalg.solve(precision, x[n])
            total -= Normal(mean, (variance + noise**2).sqrt()).log_prob(y[n]).item()
        expected.append(total / len(x))
    tuning = run(problem.curvature(), problem.likelihood, batches(problem), start=tau, grid={"prior": taus})
    assert tuning.method == "loo"
    assert tuning.scores[:3].tolist() == pytest.approx(expected, rel=1e-4)
    assert "experimental" in tuning.messages[0]
    assert not any("not to be trusted" in m for m in tuning.messages)


def test_temperature_counts_a_datum_t_times() -> None:
    """At T = 2 leaving a datum out is leaving out both of its copies: the tempered fit of the doubled data."""
    problem = linear(tau=0.7)
    x, y = problem.jacobian[:, 0], problem.y[:, 0]
    eye = torch.eye(4, dtype=torch.float64)
    theta = torch.linalg.solve(2 * x.T @ x / 0.16 + 0.7 * eye, 2 * x.T @ y / 0.16)
    f = (x @ theta)[:, None]
    total = 0.0
    for n in range(len(x)):
        keep = torch.arange(len(x)) != n
        precision = 2 * x[keep].T @ x[keep] / 0.16 + 0.7 * eye
        mean = x[n] @ torch.linalg.solve(precision, 2 * x[keep].T @ y[keep] / 0.16)
        variance = x[n] @ torch.linalg.solve(precision, x[n])
        total -= Normal(mean, (variance + 0.16).sqrt()).log_prob(y[n]).item()
    data = [(f, problem.y, DenseRows(problem.jacobian))]
    tuning = run(problem.curvature(), Gaussian(0.4), data, start=0.7, temperature=2.0, grid={"prior": (0.7,)})
    assert tuning.scores[0].item() == pytest.approx(total / len(x), rel=1e-4)


def test_classification_sees_further_than_the_training_data() -> None:
    problem = mlp(Categorical(), outputs=3)
    tuning = run(problem.curvature(), problem.likelihood, batches(problem))
    inside = -problem.likelihood.log_prob(problem.f, problem.y).mean().item()
    assert tuning.baselines["MAP"] > inside
    assert torch.isfinite(tuning.scores).all()


def test_leverage_of_one_is_clamped_and_reported() -> None:
    """A diagonal curvature far below the truth: every datum seems to determine its own output."""
    problem = mlp(Gaussian(0.1), n=10)
    small = Handmade(problem.matrix("diag").scale(0.01), problem.curvature().statistics)
    tuning = run(small, problem.likelihood, batches(problem), start=1e-3)
    assert any("not to be trusted" in m for m in tuning.messages)
    assert torch.isfinite(tuning.scores).all()


def test_refuses_an_empirical_fisher() -> None:
    problem = linear()
    empirical = Handmade(problem.matrix("full"), problem.curvature().statistics, dispersion_power=2)
    with pytest.raises(UnsupportedOperation, match="factor 'ggn'"):
        run(empirical, problem.likelihood, batches(problem))
