"""Solves with matrices that are given by their products: block conjugate gradients, preconditioned by a sketch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapwing.errors import NotPositiveDefinite
from lapwing.linalg.krylov import Matvec, Policy, dots, orthonormal_rows, report
from lapwing.linalg.spectrum import tangent
from lapwing.storage import flaw_of_basis, flaw_of_values

TIGHT = 1e-5  # below this tolerance, residuals are checked by one more product
STALLED = 3  # restarts in a row that did not halve the largest residual


@dataclass(frozen=True, eq=False)
class Solution:
    """Approximate solutions x (k, P) of A x = b, with the relative residual ‖b − A x‖/‖b‖ that each row reached.

    `residuals` are computed from A x, not from a recurrence. `products` counts matrix–vector products.
    """

    x: Tensor
    residuals: Tensor  # (k,)
    tolerance: float
    iterations: int
    products: int
    restarts: int = 0

    @property
    def converged(self) -> bool:
        return bool((self.residuals <= self.tolerance).all())

    def demand(self, policy: Policy, what: str) -> Solution:
        """Return this solution if it converged; else raise `NotConverged`, warn, or accept it, as the policy says."""
        if not self.converged and policy != "accept":
            bad = int((self.residuals > self.tolerance).sum())
            report(
                policy,
                f"{what} left {bad} of {len(self.residuals)} columns above the relative residual {self.tolerance:.3g} "
                f"after {self.iterations} iterations: the largest is {float(self.residuals.max()):.3g}. "
                "Allow more iterations, use a preconditioner of higher rank, a larger prior precision, float64, "
                "or a looser tolerance.",
            )
        return self


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


@dataclass(frozen=True, eq=False)
class Sketch:
    """A ≈ Uᵀ diag(λ) U: orthonormal rows U (k, P), values λ (k,) ≥ 0 in float64, descending."""

    basis: Tensor
    values: Tensor
    products: int = 0

    def flaw(self) -> str:
        """Say why these numbers, read from a file, cannot be right; return an empty text if they can."""
        if self.basis.ndim != 2 or self.values.shape != self.basis.shape[:1]:
            return f"it has vectors of shape {tuple(self.basis.shape)} and values of {tuple(self.values.shape)}"
        return flaw_of_values("its list of eigenvalues", self.values) or flaw_of_basis(
            "its basis", self.basis, self.values
        )

    @property
    def rank(self) -> int:
        return len(self.values)

    @classmethod
    def of_rows(cls, rows: Tensor, floor: float = 1e-14) -> Sketch:
        """The eigenpairs of RᵀR for rows R (k, P)."""
        values, vectors = torch.linalg.eigh(dots(rows, rows)) if len(rows) else (rows.double()[:, 0], rows.double())
        keep = values.argsort(descending=True)
        keep = keep[values[keep] > floor * values.max().clamp(min=0)] if len(values) else keep
        values = values[keep]
        basis = ((vectors[:, keep] / values.sqrt()).T).to(rows) @ rows if len(keep) else rows[:0]
        return cls(basis, values)

    @classmethod
    def empty(cls, like: Tensor) -> Sketch:
        """The zero matrix."""
        return cls(like.new_zeros(0, like.shape[-1]), torch.zeros(0, dtype=torch.float64, device=like.device))

    def matvec(self, v: Tensor) -> Tensor:
        inner = dots(v.to(self.basis), self.basis) * self.values
        return (inner.to(self.basis) @ self.basis).to(v)


def nystrom(matvec: Matvec, like: Tensor, rank: int, generator: torch.Generator | None = None) -> Sketch:
    """A ≈ (A Ω)ᵀ (Ωᵀ A Ω)⁺ (A Ω) for a random orthonormal Ω (rank, P), computed stably.

    Tropp, Yurtsever, Udell, Cevher 2017, Algorithm 3: a small shift ν keeps the core positive definite and is taken
    off the eigenvalues at the end. Never above A; exact once `rank` reaches that of A.
    """
    rank = min(rank, like.shape[-1])
    omega = orthonormal_rows(
        torch.randn(rank, like.shape[-1], generator=generator, dtype=like.dtype, device=like.device)
    )
    y = matvec(omega)
    shift = float(y.double().norm()) * torch.finfo(y.dtype).eps
    y = y + shift * omega
    core = dots(omega, y)
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    keep = values > max(shift * 1e-3, float(values.max()) * 1e-15)
    half = ((vectors[:, keep] / values[keep].sqrt()).T).to(y) @ y  # A ≈ halfᵀ half
    sketch = Sketch.of_rows(half)
    return Sketch(sketch.basis, (sketch.values - shift).clamp(min=0), rank)


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """M = Uᵀ diag(λ) U + D for a sketch and a positive diagonal D (P,): solves and roots, without data.

    In coordinates whitened by D, M is I + Qᵀ diag(e) Q with Q orthonormal. For D = τI (Frangella, Tropp, Udell 2023)
    Q is U itself; otherwise one k × k eigen-decomposition makes it.
    """

    sketch: Sketch
    diagonal: Tensor  # (P,) or 0-d

    @cached_property
    def _whitened(self) -> tuple[Tensor, Tensor]:
        """Q (k, P) and e (k,)."""
        basis, values = self.sketch.basis, self.sketch.values
        if self.diagonal.ndim == 0 or not len(values):
            return basis, values / self.diagonal.double().mean()
        rows = basis * values.sqrt().to(basis)[:, None] * self.diagonal.rsqrt().to(basis)
        white = Sketch.of_rows(rows)
        return white.basis, white.values

    def power(self, v: Tensor, exponent: float) -> Tensor:
        """(I + Qᵀ diag(e) Q)^exponent v in whitened coordinates, (k, P)."""
        basis, values = self._whitened
        if not len(values):
            return v
        weights = (1 + values) ** exponent - 1
        inner = v.to(basis.dtype) @ basis.T * weights.to(basis.dtype)
        return v + (inner @ basis).to(v.dtype)

    def solve(self, v: Tensor) -> Tensor:
        """M⁻¹ v."""
        root = self.diagonal.rsqrt().to(v.dtype)
        return root * self.power(root * v, -1.0)

    def logdet_ratio(self) -> Tensor:
        """log |M| − log |D|."""
        return self._whitened[1].log1p().sum()

    def shares(self) -> Tensor:
        """e / (1 + e), (k,): how much of each direction the data determine."""
        values = self._whitened[1]
        return values / (1 + values)

    def inverse_diagonal(self) -> Tensor:
        """diag M⁻¹, (P,) float64."""
        basis, _ = self._whitened
        lost = (basis.square() * self.shares().to(basis)[:, None]).sum(0).double()
        return (1 - lost) / self.diagonal.double()
