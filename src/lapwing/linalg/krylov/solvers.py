"""Solves with matrices that are given by their products: block conjugate gradients, and gradients of solutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapwing.errors import NotPositiveDefinite
from lapwing.linalg.krylov.results import Matvec, Policy, Solution, dots
from lapwing.linalg.tangent import tangent

TIGHT = 1e-5  # below this tolerance, residuals are checked by one more product
STALLED = 3  # restarts in a row that did not halve the largest residual


@dataclass(frozen=True, eq=False)
class _State:
    """Residual block R = Cᵀ Q with Q M⁻¹ Qᵀ = I, and A-conjugate directions S; `image` is A x, added up with x."""

    x: Tensor
    image: Tensor
    q: Tensor  # (j, P)
    s: Tensor  # (j, P)
    c: Tensor  # (j, k) float64


def conjugate_gradients(
    matvec: Matvec,
    rhs: Tensor,
    *,
    precondition: Matvec | None = None,
    start: Tensor | None = None,
    tolerance: float = 1e-6,
    iterations: int = 1000,
    check: int = 50,
    unconverged: Policy = "raise",
) -> Solution:
    """Solve A x = b for all rows of `rhs` (k, P) in one block Krylov space; A symmetric positive definite.

    The residual block is kept M⁻¹-orthonormal (Dubrulle 2001, "Retooling the method of block conjugate gradients",
    BCGrQ), so that right-hand sides which become dependent do no harm: their directions are dropped. All columns share
    one search space, which after j steps holds j·k dimensions: on matrices with few large eigenvalues a block needs
    far fewer steps than its columns alone. Every `check` steps, and before it ends, the residual is computed from A x:
    where the recurrence has drifted from it (lost orthogonality) the search starts anew from there. It is that
    residual, relative to ‖b‖ and for every column, that must reach `tolerance`. A x is summed from the products that
    the search makes anyway; for tolerances below 1e-5 and for float32, where the rounding of that sum would matter, it
    costs one more product.
    `precondition` applies M⁻¹ ≈ A⁻¹, symmetric positive definite.
    """
    norms = rhs.double().norm(dim=-1)
    scale = torch.where(norms > 0, norms, 1.0)
    b = (rhs.double() / scale[:, None]).to(rhs.dtype)
    x = torch.zeros_like(b) if start is None else (start.double() / scale[:, None]).to(rhs.dtype)
    image = torch.zeros_like(b) if start is None else matvec(x)
    r = b - image
    steps = restarts = stalled = 0
    products = 0 if start is None else len(b)
    residuals = r.double().norm(dim=-1)
    best, state = _largest(residuals), None
    while bool((residuals > tolerance).any()) and steps < iterations and stalled < STALLED:
        if state is None:
            state = _begin(precondition, x, image, r)
        state, used, spent, claimed = _cycle(matvec, precondition, state, tolerance, min(check, iterations - steps))
        x, image = state.x, state.image
        if tolerance < TIGHT or x.dtype != torch.float64:
            image, spent = matvec(x), spent + len(b)
        r = b - image
        steps, products = steps + used, products + spent
        residuals = r.double().norm(dim=-1)
        drifted = bool(((residuals - claimed).abs() > 0.1 * claimed.clamp(min=tolerance)).any())
        if drifted or not len(state.q) or bool((claimed <= tolerance).all()):
            state, restarts = None, restarts + 1
            stalled = 0 if _largest(residuals) < 0.5 * best else stalled + 1
            best = min(best, _largest(residuals))
    found = (x.double() * scale[:, None]).to(rhs.dtype)
    solution = Solution(found, residuals, tolerance, steps, products, max(0, restarts - 1))
    return solution.demand(unconverged, "conjugate gradients")


def _largest(residuals: Tensor) -> float:
    return float(residuals.max()) if len(residuals) else 0.0


def _begin(precondition: Matvec | None, x: Tensor, image: Tensor, r: Tensor) -> _State:
    z = r if precondition is None else precondition(r)
    w, c = _orthonormalize(r, z)
    return _State(x, image, w.to(r) @ r, w.to(r) @ z, c)


def _cycle(
    matvec: Matvec, precondition: Matvec | None, state: _State, tolerance: float, steps: int
) -> tuple[_State, int, int, Tensor]:
    """Run until the recurrence claims that every column has converged, or `steps` are used."""
    used = products = 0
    while used < steps and len(state.q):
        state, count = _step(matvec, precondition, state)
        used, products = used + 1, products + count
        if bool((_claimed(state) <= 0.9 * tolerance).all()):
            break
    return state, used, products, _claimed(state)


def _claimed(state: _State) -> Tensor:
    """Residual norms by the recurrence, (k,)."""
    return ((dots(state.q, state.q) @ state.c) * state.c).sum(0).clamp(min=0).sqrt()


def _step(matvec: Matvec, precondition: Matvec | None, state: _State) -> tuple[_State, int]:
    t = matvec(state.s)
    energy = dots(state.s, t)
    values, vectors = torch.linalg.eigh((energy + energy.T) / 2)
    _require_positive(values)
    keep = values > values.max() * len(values) * torch.finfo(torch.float64).eps
    inverse = (vectors[:, keep] / values[keep]) @ vectors[:, keep].T
    like = state.x
    move = (state.c.T @ inverse).to(like)
    x, image = like + move @ state.s, state.image + move @ t
    u = state.q - inverse.to(like) @ t
    z = u if precondition is None else precondition(u)
    w, xi = _orthonormalize(u, z)
    s = w.to(like) @ z + xi.to(like) @ state.s
    return _State(x, image, w.to(like) @ u, s, xi @ state.c), len(state.s)


def _orthonormalize(r: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """W, C (j, k) with Q = W R, R = Cᵀ Q and Q M⁻¹ Qᵀ = I, for z = M⁻¹ r; dependent directions are dropped."""
    values, vectors = torch.linalg.eigh(_symmetric(dots(r, z)))
    floor = values.max().clamp(min=0) * len(values) * torch.finfo(torch.float64).eps
    keep = values > floor
    roots, basis = values[keep].sqrt(), vectors[:, keep]
    return (basis / roots).T, (basis * roots).T


def _symmetric(a: Tensor) -> Tensor:
    return (a + a.T) / 2


def _require_positive(values: Tensor) -> None:
    smallest, largest = float(values.min()), float(values.max())
    if not largest > 0 or smallest < -1e-4 * largest:
        raise NotPositiveDefinite(
            f"conjugate gradients met a direction with sᵀAs = {smallest:.3g}: the matrix is not positive definite. "
            "Add a prior with positive precision, or use the GGN, which is never indefinite."
        )


class _Inverse(torch.autograd.Function):
    """r ↦ A⁻¹ r for an r whose value is zero: nothing to solve forward, one solve backward."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.solve = solve
        return torch.zeros_like(residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            return ctx.solve(grads[0]), None


def differentiable_solve(matvec: Matvec, rhs: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
    """A(θ)⁻¹ b with gradients in b and in whatever `matvec` depends on: x = A⁻¹(b − (A(θ) − A) x).

    `solve` computes A⁻¹ b without gradients. Costs one differentiable product forward and one solve backward.
    """
    with torch.no_grad():
        x = solve(rhs.detach())
    if not torch.is_grad_enabled():
        return x
    image = matvec(x)
    if not (image.requires_grad or rhs.requires_grad):
        return x
    correction: Tensor = _Inverse.apply(tangent(rhs) - tangent(image), solve)
    return x + correction
