"""Evidence tuning reaches the only maximum from any start, and says what it could not decide.

Tuning matrix-free posteriors by the evidence, against Newton's method on the full matrix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lapwing
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.errors import IncompatiblePrior, NotPositiveDefinite, UnsupportedOperation
from lapwing.evidence import Groups, Tuning, log_evidence, tune_evidence
from lapwing.evidence.ascent import maximize
from lapwing.evidence.maximize import _fit, _objective, tune_probes
from lapwing.evidence.settings import partition
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.linalg import PSD, Dense, Diagonal, LowRank
from lapwing.posterior import Prior, Tempered
from tests.evidence.problems import OF_THE_BELIEF, Handmade, Problem, believed, linear, mlp


def groups_of(problem: Problem, kind: str) -> Groups:
    size = problem.theta.numel()
    if kind == "layerwise":
        return Groups.layerwise(problem.names, problem.flat_names, problem.sizes)
    return Groups.scalar(size) if kind == "scalar" else Groups.parameterwise(size)


def evidence_of(problem: Problem, structure: str, prior: Prior, likelihood: Likelihood, **kwargs: Any) -> torch.Tensor:
    resolved = prior.resolve(problem.flat_names, problem.sizes)
    return log_evidence(problem.curvature(structure), resolved, likelihood, mean=problem.theta, **kwargs)


def run(problem: Problem, structure: str, kind: str, **kwargs: Any) -> Tuning:
    groups = groups_of(problem, kind)
    given = {name: kwargs.pop(name) for name in OF_THE_BELIEF if name in kwargs}
    return tune_evidence(problem.belief(groups, structure, **given), groups, **kwargs)


def by_hand(matrix: PSD, theta: torch.Tensor, groups: Groups, start: float = 1.0) -> Tuning:
    curvature = Handmade(matrix, torch.zeros(1).double())
    return tune_evidence(believed(curvature, Categorical(), groups, theta, start=start), groups)


CASES = [
    ("full", "scalar"),
    ("full", "layerwise"),
    ("full", "parameterwise"),
    ("blockdiag", "scalar"),
    ("blockdiag", "layerwise"),
    ("blockdiag", "parameterwise"),
    ("diag", "scalar"),
    ("diag", "layerwise"),
    ("diag", "parameterwise"),
    ("kron", "scalar"),
    ("kron", "layerwise"),
    ("ekfac", "layerwise"),
]


@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize(("structure", "kind"), CASES)
def test_derivatives(structure: str, kind: str, noise: bool) -> None:
    """Value = log_evidence; gradient and Newton's matrix against autograd of log_evidence and finite differences."""
    problem = mlp(Gaussian(0.5), n=12, hidden=3)
    groups = groups_of(problem, kind)
    curvature = problem.curvature(structure)
    belief = problem.belief(groups, structure, center=0.1, temperature=0.6)
    fit = _fit(belief, noise)
    objective, _ = _objective(belief, groups, fit)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(groups.count + noise, dtype=torch.float64, generator=generator)

    def exact(x: torch.Tensor) -> torch.Tensor:
        log_tau, u = fit.split(x)
        prior = Prior(groups.expand(log_tau.exp()), 0.1).resolve(problem.flat_names, problem.sizes)
        likelihood = Gaussian((0.5 * u).exp()) if noise else problem.likelihood
        return log_evidence(curvature, prior, likelihood, mean=problem.theta, temperature=0.6)

    torch.testing.assert_close(objective.value(x), exact(x), rtol=1e-11, atol=1e-11)
    gradient, curve = objective.derivatives(x)
    expected = torch.autograd.functional.jacobian(exact, x)
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-9)
    step = 1e-5
    columns = []
    for direction in torch.eye(len(x), dtype=torch.float64):
        ahead, behind = (objective.derivatives(x + sign * step * direction)[0] for sign in (1, -1))
        columns.append((behind - ahead) / (2 * step))
    hessian = torch.stack(columns)
    torch.testing.assert_close(curve.diagonal(), hessian.diagonal(), rtol=1e-5, atol=1e-7)
    assert torch.linalg.eigvalsh((hessian + hessian.T) / 2).min() > -1e-6  # concave
    free = torch.ones(len(x), dtype=torch.bool)
    torch.testing.assert_close(hessian @ curve.solve(gradient, free), gradient, rtol=1e-4, atol=1e-5)
    free[0] = False
    part = curve.solve(gradient, free)
    assert part[0] == 0
    torch.testing.assert_close((hessian @ part)[1:], gradient[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("start", [1e-8, 1e-3, 1.0, 1e4, 1e8])
@pytest.mark.parametrize(("structure", "kind"), CASES)
def test_converges_from_any_start(structure: str, kind: str, start: float) -> None:
    problem = mlp(Categorical(), n=12, outputs=3, hidden=3)
    tuning = run(problem, structure, kind, start=start)
    assert tuning.converged
    assert tuning.iterations <= 60
    values = tuning.setting.precision.clone().requires_grad_()
    groups = groups_of(problem, kind)
    found = evidence_of(problem, structure, Prior(groups.expand(values)), problem.likelihood)
    assert tuning.scores[1].item() == pytest.approx(-found.item(), abs=1e-9)
    (gradient,) = torch.autograd.grad(found, values)
    assert (gradient * values).abs().max() < 2e-4  # stationary in log τ: ½g²/h below 1e-10 nats
    assert tuning.scores[1] <= tuning.scores[0]


@pytest.mark.parametrize("start", [1e-6, 1.0, 1e6])
def test_prior_and_noise_together_reach_the_marginal_maximum(start: float) -> None:
    """On a dense grid of (τ, σ), none is better; and the same optimum is found from every start."""
    problem = linear(mode=False, seed=2)
    tuning = run(problem, "full", "scalar", start=start, learn=("prior", "dispersion"))
    assert tuning.converged
    assert isinstance(tuning.likelihood, Gaussian)
    best = evidence_of(problem, "full", tuning.prior, tuning.likelihood)
    assert tuning.score == pytest.approx(-best.item(), abs=1e-9)
    tau, sigma = tuning.setting.precision.item(), float(tuning.likelihood.noise)
    for a in torch.linspace(-1, 1, 9).exp().tolist():
        for b in torch.linspace(-1, 1, 9).exp().tolist():
            assert evidence_of(problem, "full", Prior(tau * a), Gaussian(sigma * b)) <= best + 1e-9


def test_noise_alone_keeps_the_prior() -> None:
    problem = linear()
    tuning = run(problem, "full", "scalar", start=3.0, learn=("dispersion",))
    assert tuning.setting.precision.item() == pytest.approx(3.0)
    assert tuning.setting.dispersion != pytest.approx(0.16)
    assert tuning.messages == ()


def test_vector_noise_keeps_its_ratios() -> None:
    likelihood = Gaussian(torch.tensor([0.2, 0.8], dtype=torch.float64))
    problem = mlp(likelihood)
    tuning = run(problem, "full", "layerwise", learn=("prior", "dispersion"))
    noise = tuning.likelihood.noise  # type: ignore[attr-defined]
    assert (noise[1] / noise[0]).item() == pytest.approx(4.0)
    assert tuning.likelihood.same_curvature(likelihood)
    best = evidence_of(problem, "full", tuning.prior, tuning.likelihood)
    assert tuning.score == pytest.approx(-best.item(), abs=1e-9)


def test_mackay_fixed_point() -> None:
    """At the maximum τ = γ/‖θ̂‖², γ the effective number of parameters."""
    problem = mlp(Categorical(), outputs=3)
    tuning = run(problem, "full", "scalar")
    tau = tuning.setting.precision.item()
    eigenvalues = torch.linalg.eigvalsh(problem.ggn).clamp(min=0)
    effective = (eigenvalues / (eigenvalues + tau)).sum()
    assert tau == pytest.approx((effective / problem.theta.square().sum()).item(), rel=1e-6)


def test_parameterwise_diagonal_solves_its_quadratic() -> None:
    """q τ² + q e τ − e = 0 for each weight."""
    problem = mlp(Categorical(), outputs=3)
    tau = run(problem, "diag", "parameterwise", bounds=(1e-14, 1e14)).setting.precision
    e, q = problem.ggn.diagonal(), problem.theta.square()
    expected = (-q * e + (q**2 * e**2 + 4 * q * e).sqrt()) / (2 * q)
    torch.testing.assert_close(tau, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("tempered", [Tempered(0.3), Tempered(4.0), Tempered(4.0, prior=True)], ids=str)
def test_tempered(tempered: Tempered) -> None:
    problem = mlp(Categorical(), outputs=3)
    tuning = run(problem, "ekfac", "layerwise", temperature=tempered)
    best = evidence_of(problem, "ekfac", tuning.prior, problem.likelihood, temperature=tempered)
    assert tuning.score == pytest.approx(-best.item(), abs=1e-9)
    assert tuning.temperature is tempered
    for factor in (0.9, 1.1):
        other = Prior.per_block(tuning.setting.precision * factor, problem.names)
        assert evidence_of(problem, "ekfac", other, problem.likelihood, temperature=tempered) < best


def test_prior_mean_is_kept() -> None:
    problem = mlp(Categorical(), outputs=3)
    center = 0.9 * problem.theta
    tuning = run(problem, "full", "scalar", center=center)
    assert tuning.prior.mean is center
    best = evidence_of(problem, "full", tuning.prior, problem.likelihood)
    assert tuning.score == pytest.approx(-best.item(), abs=1e-9)
    assert tuning.setting.precision > 10 * run(problem, "full", "scalar").setting.precision


def test_infinite_and_uninformed_precisions_are_capped_and_named() -> None:
    layout_groups = Groups.layerwise((("a",), ("b",), ("c",)), ("a", "b", "c"), (2, 2, 2))
    theta = torch.tensor([1.0, 2.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    matrix = Diagonal(torch.tensor([5.0, 5.0, 5.0, 5.0, 0.0, 0.0], dtype=torch.float64))
    tuning = by_hand(matrix, theta, layout_groups, start=0.25)
    precision = tuning.setting.precision
    assert tuning.converged
    assert precision[1] == pytest.approx(1e10)
    assert precision[2] == pytest.approx(0.25)
    assert any("infinite" in m and "block 1 (b)" in m for m in tuning.messages)
    assert any("no curvature" in m and "block 2 (c)" in m for m in tuning.messages)
    assert "block 2 (c)" in tuning.table()


def test_zero_residuals_cap_the_noise() -> None:
    problem = linear(noise=1e-3)
    curvature = problem.curvature()
    perfect = Handmade(curvature.matrix, torch.tensor([25.0, 0.0], dtype=torch.float64))
    groups = Groups.scalar(4)
    belief = believed(perfect, Gaussian(1.0), groups, problem.theta)
    tuning = tune_evidence(belief, groups, learn=("prior", "dispersion"))
    assert any("noise runs to its bound" in m for m in tuning.messages)


def test_low_rank_and_many_groups() -> None:
    torch.manual_seed(0)
    basis, values = torch.randn(5, 40, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    low, dense = LowRank(basis, values, torch.zeros(40).double()), Dense((basis.T * values) @ basis)
    theta = torch.randn(40, dtype=torch.float64)
    for groups in (Groups.scalar(40), Groups(torch.arange(40) // 10, 4)):
        found = [by_hand(m, theta, groups) for m in (low, dense)]
        torch.testing.assert_close(found[0].setting.precision, found[1].setting.precision, rtol=1e-4, atol=0)


def test_majorized_newton_agrees_with_the_exact_one() -> None:
    problem = mlp(Categorical(), n=12, outputs=3, hidden=3)
    groups = groups_of(problem, "parameterwise")
    belief = problem.belief(groups)
    objective, _ = _objective(belief, groups, _fit(belief, False))
    start = torch.zeros(groups.count, dtype=torch.float64)
    bounds = start - 23, start + 23
    exact = maximize(objective, start, *bounds)
    slow = maximize(replace(objective, exact=0), start, *bounds, tolerance=1e-8, limit=1000)  # type: ignore[type-var]
    assert slow.value == pytest.approx(exact.value, abs=1e-5)


@pytest.mark.parametrize("groups", [Groups.scalar(3), Groups(torch.arange(3), 3)], ids=["scalar", "parameterwise"])
def test_the_evidence_of_an_indefinite_hessian_has_no_maximum(groups: Groups) -> None:
    matrix = Dense(torch.diag(torch.tensor([3.0, 1.0, -0.5], dtype=torch.float64)))
    theta = torch.full((3,), 0.6, dtype=torch.float64)
    with pytest.raises(NotPositiveDefinite, match=r"smallest eigenvalue is -0\.5.*factor='ggn'"):
        by_hand(matrix, theta, groups, start=5.0)


@pytest.mark.parametrize("start", [1e-8, 1.0, 1e8])
def test_float32_curvature_with_rounding_below_zero(start: float) -> None:
    torch.manual_seed(0)
    rows = 3 * torch.randn(10, 60)  # rounding stays far below the precisions found
    matrix = Dense(rows.T @ rows)
    assert torch.linalg.eigvalsh(matrix.matrix.double()).min() < 0
    theta, groups = torch.randn(60).double(), Groups(torch.arange(60) // 20, 3)
    found = [by_hand(m, theta, groups, start=start) for m in (matrix, Dense(rows.double().T @ rows.double()))]
    assert found[0].converged
    torch.testing.assert_close(found[0].setting.precision, found[1].setting.precision, rtol=1e-2, atol=0)


def test_refusals() -> None:
    problem = mlp(Categorical(), outputs=3)
    with pytest.raises(ValueError, match="temperature"):
        run(problem, "full", "scalar", learn=("temperature",))
    with pytest.raises(UnsupportedOperation, match="Categorical has no dispersion to learn"):
        run(problem, "full", "scalar", learn=("dispersion",))
    with pytest.raises(IncompatiblePrior, match="groups of 3"):
        tune_evidence(problem.belief(groups_of(problem, "scalar")), Groups.scalar(3))
    with pytest.raises(IncompatiblePrior, match="block 0"):
        run(problem, "ekfac", "parameterwise")
    with pytest.raises(ValueError, match="no block holds"):
        Groups.layerwise((("a",),), ("a", "b"), (1, 1))


def test_layerwise_prior_is_written_by_name() -> None:
    problem = mlp(Categorical(), outputs=3)
    tuning = run(problem, "kron", "layerwise")
    assert isinstance(tuning.prior.precision, dict)
    assert set(tuning.prior.precision) == set(problem.flat_names)
    picked = Groups.layerwise(problem.names, problem.flat_names, problem.sizes, torch.tensor([0, 16, 37]))
    assert picked.index.tolist() == [0, 0, 1]


def fits(structure: object) -> tuple[lapwing.Laplace, lapwing.Laplace]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 2)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    y = torch.sin(x[:, :2]) + 0.3 * torch.randn(40, 2, dtype=torch.float64)
    return tuple(lapwing.fit(model, (x, y), lapwing.Gaussian(1.0), structure=s) for s in ("full", structure))  # type: ignore[return-value]


@pytest.mark.parametrize("learn", [("prior",), ("prior", "dispersion")])
@pytest.mark.parametrize("kind", ["scalar", "layerwise"])
def test_it_finds_the_maximum_of_the_full_evidence(kind: str, learn: tuple[str, ...]) -> None:
    full, free = fits(MatrixFree(rank=60, probes=8, tolerance=1e-8))
    groups = partition(kind, full.curvature.names, full.params)
    truth = tune_evidence(full.belief, groups, learn=learn)
    found = tune_probes(free.belief, groups, tolerance=1e-4, iterations=300, learn=learn)
    assert found.converged
    torch.testing.assert_close(found.setting.precision, truth.setting.precision, rtol=1e-2, atol=0)
    torch.testing.assert_close(found.scores[1], truth.scores[1], rtol=1e-4, atol=1e-3)
    if "dispersion" in learn:
        assert found.setting.dispersion == pytest.approx(truth.setting.dispersion, rel=1e-2)


def test_it_says_when_it_stops_early_and_what_it_is_for() -> None:
    full, free = fits(MatrixFree(rank=8, probes=2, steps=2))
    groups = Groups.scalar(full.params.size)
    found = tune_probes(free.belief, groups, iterations=1)
    assert not found.converged
    assert any("not converged" in message for message in found.messages)
    with pytest.raises(UnsupportedOperation, match="matrixfree"):
        tune_probes(full.belief, groups)


def test_tune_comes_here_for_matrix_free_posteriors() -> None:
    full, free = fits(MatrixFree(rank=60, probes=8, tolerance=1e-8))
    with pytest.warns(UserWarning, match="evidence"):
        truth, found = (la.tune(learn=("prior", "noise")) for la in (full, free))
    assert float(found.log_evidence()) == pytest.approx(float(truth.log_evidence()), abs=0.05)
    assert any("standard error" in message for message in found.tuning.messages)


def test_samples_give_the_same_within_monte_carlo_error() -> None:
    full, free = fits(MatrixFree(rank=40, columns=64, tolerance=1e-5))
    groups = partition("layerwise", full.curvature.names, full.params)
    truth = tune_evidence(full.belief, groups)
    near = groups.applied(free.belief, truth.setting.precision * 1.5)
    found = tune_probes(near, groups, samples=64, tolerance=2e-2)
    assert found.converged
    torch.testing.assert_close(found.setting.precision, truth.setting.precision, rtol=0.2, atol=0)
    assert float(found.scores[1]) == pytest.approx(float(truth.scores[1]), abs=0.3)
