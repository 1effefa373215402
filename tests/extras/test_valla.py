"""Inducing points against the exact Gaussian process and against the sparse formulas with explicit kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.curvature.test_matrixfree import problem
from torch import Tensor, nn

import lapwing
from lapwing.extras.valla import variational_bound

TAU = 0.7


def bound(la: lapwing.Laplace) -> Tensor:
    return variational_bound(la.belief)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """(n, c, P) by autograd alone."""
    rows = []
    for out in model(x).flatten():
        rows.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(out, list(model.parameters()), retain_graph=True)])
        )
    return torch.stack(rows).reshape(len(x), -1, rows[0].numel())


@pytest.mark.parametrize("name", ["mlp regression", "conv classification", "mlp heteroscedastic"])
@pytest.mark.parametrize("choice", ["greedy", "random"])
def test_all_data_as_inducing_points_give_the_exact_process(name: str, choice: str) -> None:
    model, data, likelihood = problem(name)
    full = lapwing.fit(model, data, likelihood, structure="full", prior=TAU)
    la = lapwing.fit(model, data, likelihood, structure=lapwing.VaLLA(24, choice=choice), prior=TAU)  # type: ignore[arg-type]
    torch.testing.assert_close(la.log_evidence(), full.log_evidence(), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(bound(la), full.log_evidence(), rtol=1e-6, atol=1e-6)
    x = data[0][:3] + 0.3
    one, other = (it.predict(x, joint=True).function.covariance for it in (full, la))
    torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-8)


def test_few_inducing_points_are_the_sparse_gaussian_process() -> None:
    """Mean-field aside, Titsias (2009): covariance and bound with K = J Jᵀ/τ written out."""
    model, (x, y), likelihood = problem("mlp regression")
    structure = lapwing.VaLLA(5, choice="random", seed=3)
    la = lapwing.fit(model, (x, y), likelihood, structure=structure, prior=TAU)
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))[:5]
    test = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    j, jz, jt = (jacobian(model, part).flatten(0, 1) for part in (x, x[chosen], test))
    k = lambda a, b: a @ b.T / TAU  # noqa: E731
    inverse = torch.linalg.inv(k(jz, jz))
    inner = torch.linalg.inv(k(jz, jz) + k(jz, j) @ k(j, jz))
    truth = k(jt, jt) - k(jt, jz) @ inverse @ k(jz, jt) + k(jt, jz) @ inner @ k(jz, jt)
    found = la.predict(test, joint=True).function.covariance.reshape(len(jt), len(jt))
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-8)
    q = k(j, jz) @ inverse @ k(jz, j)
    theta = la.params.flat
    shared = la.log_likelihood - 0.5 * TAU * theta.square().sum()
    eye = torch.eye(len(q), dtype=q.dtype)
    torch.testing.assert_close(la.log_evidence(), shared - 0.5 * torch.logdet(eye + q), rtol=1e-8, atol=1e-7)
    elbo = shared - 0.5 * torch.logdet(eye + q) - 0.5 * (k(j, j) - q).trace()
    torch.testing.assert_close(bound(la), elbo, rtol=1e-8, atol=1e-7)
    full = lapwing.fit(model, (x, y), likelihood, structure="full", prior=TAU)
    assert elbo < full.log_evidence() < la.log_evidence()
    assert f"variational lower bound is {float(elbo):.6g}" in la.summary()


def test_a_greedy_choice_leaves_less_outside() -> None:
    model, data, likelihood = problem("conv classification")
    left = {
        choice: sum(
            float(
                lapwing.fit(model, data, likelihood, structure=lapwing.VaLLA(4, choice, seed)).curvature.state["excess"]
            )  # type: ignore[arg-type]
            for seed in range(3)
        )
        for choice in ("greedy", "random")
    }
    assert left["greedy"] < left["random"]


def test_tuning_maximizes_the_bound_and_more_data_join(tmp_path: Path) -> None:
    model, (x, y), likelihood = problem("mlp regression")
    structure = lapwing.VaLLA(6, seed=1)
    la = lapwing.fit(model, (x[:14], y[:14]), likelihood, structure=structure, n_data=28)
    with pytest.warns(UserWarning, match="evidence"):
        tuned = la.tune()
    grid = torch.logspace(-3, 3, 400, dtype=torch.float64)
    best = max(float(bound(la.replace(prior=float(tau)))) for tau in grid)
    assert best - 1e-9 <= float(bound(tuned)) <= best + 1e-2
    with pytest.raises(lapwing.UnsupportedOperation, match="one prior precision"):
        la.tune(prior="layerwise")
    with pytest.raises(lapwing.IncompatiblePrior, match="scalar"):
        bound(la.replace(prior={"0.*": 2.0, "*": 1.0}))
    la.save(tmp_path / "valla.lapwing")
    torch.testing.assert_close(bound(lapwing.load(tmp_path / "valla.lapwing", la.module)), bound(la))
    grown = la.update((x[14:], y[14:])).curvature
    ratio = grown.n_data / grown.seen
    # n_data grows by what is seen: 28 for the first 14, and 10 more, as one curvature scaled to 38
    flat = lapwing.fit(model, (x, y), likelihood, structure="full").curvature.dense() * ratio
    basis = grown.matrix.basis
    torch.testing.assert_close(basis @ flat @ basis.T, torch.diag(grown.matrix.values), rtol=1e-6, atol=1e-8)
    assert float(grown.state["excess"]) * ratio == pytest.approx(
        float(flat.trace() - grown.matrix.values.sum()), rel=1e-6
    )


def test_refusals() -> None:
    with pytest.raises(lapwing.BadData, match="inducing"):
        lapwing.VaLLA(0)
    with pytest.raises(lapwing.BadData, match="greedy"):
        lapwing.VaLLA(4, choice="best")  # type: ignore[arg-type]
    model, data, likelihood = problem("mlp regression")
    full = lapwing.fit(model, data, likelihood, structure="full")
    with pytest.raises(lapwing.UnsupportedOperation, match="valla"):
        bound(full)


class TestAuto:
    """What "auto" takes where a full matrix is too much, and the cost that it states."""

    def wide(self, inputs: int, n: int, **options: object) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(inputs, 2))
        data = [(torch.randn(10, inputs), torch.randn(10, 2)) for _ in range(n // 10)]
        return lapwing.fit(model, data, lapwing.Gaussian(1.0), **options).summary()  # type: ignore[arg-type]

    def test_few_data_are_kept_as_rows(self) -> None:
        summary = self.wide(1000, 20)
        assert "functional, because the data have at most 40 output directions, fewer than 2,002 weights" in summary
        assert "MB" in summary

    def test_many_data_give_ekfac_and_name_the_exact_way(self) -> None:
        assert "structure='matrixfree' would be exact" in self.wide(1000, 300)

    def test_vectors_are_kept_where_factors_do_not_fit(self) -> None:
        assert "matrixfree, because Kronecker factors exceed the memory budget" in self.wide(
            1500, 300, memory=12_000_000
        )
