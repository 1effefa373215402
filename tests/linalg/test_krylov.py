"""Krylov methods against dense algebra."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lapwing.errors import NotConverged, NotPositiveDefinite
from lapwing.linalg.krylov import lanczos, largest_eigenpairs, slq_logdet, xdiag
from lapwing.linalg.solvers import Preconditioner, Sketch, conjugate_gradients, differentiable_solve, nystrom

P = 120


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonal(size: int = P) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator(1), dtype=torch.float64))[0]


def spectrum(decay: float = 0.85, size: int = P) -> Tensor:
    return 1e3 * decay ** torch.arange(size, dtype=torch.float64)


def curvature(decay: float = 0.85, size: int = P) -> Tensor:
    basis = orthogonal(size)
    dense = (basis * spectrum(decay, size)) @ basis.T
    return (dense + dense.T) / 2


def shifted(tau: float = 1.0) -> Tensor:
    return curvature() + tau * torch.eye(P, dtype=torch.float64)


def rows(n: int, seed: int = 2, size: int = P) -> Tensor:
    return torch.randn(n, size, generator=generator(seed), dtype=torch.float64)


class Counted:
    """A matvec that counts the vectors it was given."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.count = matrix, 0

    def __call__(self, v: Tensor) -> Tensor:
        self.count += len(v)
        return v @ self.matrix.to(v.dtype)


class TestConjugateGradients:
    @pytest.mark.parametrize("columns", [1, 3, 8])
    @pytest.mark.parametrize("check", [7, 50])
    def test_solves_to_the_tolerance_it_says(self, columns: int, check: int) -> None:
        a, b = Counted(shifted()), rows(columns)
        found = conjugate_gradients(a, b, tolerance=1e-9, check=check)
        true = (b - found.x @ shifted()).norm(dim=-1) / b.norm(dim=-1)
        assert found.converged
        assert found.products == a.count
        torch.testing.assert_close(found.residuals, true, rtol=1e-6, atol=1e-14)
        torch.testing.assert_close(found.x, torch.linalg.solve(shifted(), b.T).T, rtol=1e-6, atol=1e-8)

    def test_a_loose_tolerance_is_checked_without_a_product(self) -> None:
        a, b = Counted(shifted()), rows(3)
        found = conjugate_gradients(a, b, tolerance=1e-4, check=4)
        true = (b - found.x @ shifted()).norm(dim=-1) / b.norm(dim=-1)
        assert found.converged
        assert found.products == a.count == 3 * found.iterations
        torch.testing.assert_close(found.residuals, true, rtol=1e-6, atol=1e-12)

    def test_a_block_needs_fewer_steps_than_its_columns(self) -> None:
        single = max(conjugate_gradients(Counted(shifted()), b[None], tolerance=1e-8).iterations for b in rows(8))
        block = conjugate_gradients(Counted(shifted()), rows(8), tolerance=1e-8).iterations
        assert block <= 0.6 * single

    def test_dependent_zero_and_badly_scaled_columns(self) -> None:
        b = rows(3)
        b = torch.cat([b, b[:1] + b[1:2], torch.zeros(1, P, dtype=b.dtype), 1e8 * b[:1], 1e-8 * b[2:]])
        found = conjugate_gradients(Counted(shifted()), b, tolerance=1e-8)
        torch.testing.assert_close(found.x, torch.linalg.solve(shifted(), b.T).T, rtol=1e-5, atol=1e-14)

    def test_a_good_preconditioner_saves_steps_and_changes_nothing(self) -> None:
        b = rows(2)
        m = Preconditioner(Sketch(orthogonal().T[:40].contiguous(), spectrum()[:40]), torch.tensor(1.0))
        plain = conjugate_gradients(Counted(shifted()), b, tolerance=1e-9)
        better = conjugate_gradients(Counted(shifted()), b, tolerance=1e-9, precondition=m.solve)
        assert better.iterations < plain.iterations / 2
        torch.testing.assert_close(better.x, plain.x, rtol=1e-6, atol=1e-8)

    def test_a_start_is_used(self) -> None:
        b = rows(2)
        exact = torch.linalg.solve(shifted(), b.T).T
        assert conjugate_gradients(Counted(shifted()), b, start=exact, tolerance=1e-8).iterations == 0

    def test_non_convergence_is_not_silent(self) -> None:
        with pytest.raises(NotConverged, match=r"the largest is .*Allow more iterations"):
            conjugate_gradients(Counted(shifted(1e-3)), rows(2), iterations=3, tolerance=1e-10)
        with pytest.warns(UserWarning, match="above the relative residual"):
            conjugate_gradients(Counted(shifted(1e-3)), rows(2), iterations=3, tolerance=1e-10, unconverged="warn")
        found = conjugate_gradients(
            Counted(shifted(1e-3)), rows(2), iterations=3, tolerance=1e-10, unconverged="accept"
        )
        assert not found.converged

    def test_an_unreachable_tolerance_ends(self) -> None:
        with pytest.raises(NotConverged):
            conjugate_gradients(Counted(shifted()), rows(2).float(), tolerance=1e-14, iterations=10_000)

    def test_an_indefinite_matrix_is_refused(self) -> None:
        with pytest.raises(NotPositiveDefinite, match="Add a prior"):
            conjugate_gradients(Counted(shifted() - 500 * torch.eye(P, dtype=torch.float64)), rows(4))


class TestLanczos:
    def test_basis_is_orthonormal_and_tridiagonalizes(self) -> None:
        found = lanczos(Counted(curvature()), rows(3), 30)
        for v, t in zip(found.basis, found.dense()):
            torch.testing.assert_close(v @ v.T, torch.eye(30, dtype=v.dtype), rtol=0, atol=1e-12)
            torch.testing.assert_close(v @ curvature() @ v.T, t, rtol=1e-9, atol=1e-9)

    def test_quadrature_is_exact_for_polynomials(self) -> None:
        start = rows(2)
        nodes, weights = lanczos(Counted(curvature()), start, 4).quadrature()
        power = torch.linalg.matrix_power(curvature(), 7)  # degree 2m − 1
        torch.testing.assert_close((weights * nodes**7).sum(-1), ((start @ power) * start).sum(-1), rtol=1e-9, atol=0)

    def test_an_exhausted_space_ends_early_and_exactly(self) -> None:
        v = orthogonal().T[:3].sum(0, keepdim=True)
        found = lanczos(Counted(curvature()), v.contiguous(), 50)
        nodes, weights = found.quadrature()
        assert found.alphas.shape[-1] == 3
        torch.testing.assert_close((weights * nodes).sum(-1), spectrum()[:3].sum()[None], rtol=1e-10, atol=0)

    def test_largest_eigenpairs(self) -> None:
        found = largest_eigenpairs(Counted(curvature()), rows(4), 10, tolerance=1e-9)
        torch.testing.assert_close(found.values, spectrum()[:10], rtol=1e-9, atol=0)
        image = found.vectors @ curvature() - found.values[:, None] * found.vectors
        assert float(image.norm(dim=-1).max()) < 1e-8 * 1e3
        with pytest.raises(NotConverged, match="allow more steps"):
            largest_eigenpairs(Counted(curvature(0.99)), rows(2), 10, tolerance=1e-12, steps=6)


class TestNystrom:
    def test_exact_at_full_rank_and_below_before(self) -> None:
        half = rows(9)
        a = half.T @ half
        found = nystrom(Counted(a), half, 20, generator())
        assert found.rank == 9
        torch.testing.assert_close(found.matvec(rows(3)), rows(3) @ a, rtol=1e-7, atol=1e-7)
        part = nystrom(Counted(curvature()), half, 30, generator())
        rest = curvature() - (part.basis.T * part.values) @ part.basis
        assert float(torch.linalg.eigvalsh(rest).min()) > -1e-9 * 1e3

    @pytest.mark.parametrize("diagonal", ["constant", "general"])
    def test_preconditioner_is_the_inverse_of_what_it_says(self, diagonal: str) -> None:
        d = torch.tensor(2.0, dtype=torch.float64) if diagonal == "constant" else rows(1)[0].square() + 0.1
        sketch = nystrom(Counted(curvature()), rows(1), 30, generator())
        dense = (sketch.basis.T * sketch.values) @ sketch.basis + torch.diag(d.expand(P))
        m = Preconditioner(sketch, d)
        v = rows(4)
        torch.testing.assert_close(m.solve(v), torch.linalg.solve(dense, v.T).T, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(m.logdet_ratio(), dense.logdet() - d.expand(P).log().sum())
        torch.testing.assert_close(m.inverse_diagonal(), torch.linalg.inv(dense).diagonal(), rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(m.power(m.power(v, 0.5), 0.5), m.power(v, 1.0))


class TestLogdet:
    def test_preconditioned_quadrature_is_unbiased_for_a_rough_sketch(self) -> None:
        a = curvature()
        m = Preconditioner(nystrom(Counted(a), a, 40, generator(7)), torch.tensor(1.0, dtype=torch.float64))
        white = lambda v: m.power(m.power(v, -0.5) @ shifted(), -0.5)  # noqa: E731
        found = slq_logdet(white, a, probes=8, steps=25, generator=generator())
        truth = shifted().logdet()
        value = m.logdet_ratio() + found.value
        assert abs(float(value - truth)) < 4 * float(found.error)
        assert float(found.error) < 0.01 * float(truth)

    @pytest.mark.parametrize("steps", [3, 5, 8, 15, 40])
    def test_the_error_holds_what_too_few_steps_leave(self, steps: int) -> None:
        truth = shifted(0.1).logdet()
        found = slq_logdet(Counted(shifted(0.1)), shifted(), probes=8, steps=steps, generator=generator(4))
        assert abs(float(found.value - truth)) < 4 * float(found.error)

    def test_exhausted_spaces_have_no_truncation(self) -> None:
        eye = 3 * torch.eye(P, dtype=torch.float64)
        found = slq_logdet(Counted(eye), eye, probes=3, steps=20, generator=generator())
        assert float(found.error) < 1e-10 * float(found.value)
        torch.testing.assert_close(found.value, eye.logdet())


class TestGradients:
    def test_solve_in_operator_parameters_and_right_hand_side(self) -> None:
        small = curvature(0.5, 12)

        def function(c: Tensor, d: Tensor, b: Tensor) -> Tensor:
            matrix = lambda v: c * (v @ small) + d * v  # noqa: E731
            fixed = lambda v: c.detach() * (v @ small) + d.detach() * v  # noqa: E731
            solve = lambda v: conjugate_gradients(fixed, v, tolerance=1e-13, unconverged="accept").x  # noqa: E731
            return differentiable_solve(matrix, b, solve)

        c = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        d = (rows(1, size=12)[0].square() + 1).requires_grad_()
        assert torch.autograd.gradcheck(function, (c, d, rows(2, size=12).requires_grad_()), atol=1e-6)


def test_xdiag() -> None:
    a = curvature(0.9)
    each = torch.stack([xdiag(Counted(a), a, 60, generator(k)).value for k in range(40)])
    spread = each.std(0) / math.sqrt(40)
    assert float(((each.mean(0) - a.diagonal()) / spread.clamp(min=1e-12)).square().mean()) < 2
    half = rows(5)
    exact = xdiag(lambda v: v @ half.T @ half, half, 40, generator()).value
    torch.testing.assert_close(exact, half.square().sum(0), rtol=1e-9, atol=1e-9)
