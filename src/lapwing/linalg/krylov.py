"""Eigenpairs, diagonals and log-determinants of matrices that are given by their products with blocks of row vectors.

Lanczos' method runs with full re-orthogonalization, for several starts at once. What is estimated from random vectors
comes with a standard error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lapwing.errors import NotConverged, warn

Matvec = Callable[[Tensor], Tensor]
"""A symmetric matrix as a function of blocks of row vectors: (k, P) → (k, P)."""

Policy = Literal["raise", "warn", "accept"]
"""What to do with a result that missed its tolerance."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """A Monte Carlo estimate, float64, with its standard error from `probes` independent or exchangeable probes."""

    value: Tensor
    error: Tensor
    probes: int
    products: int


def report(policy: Policy, message: str) -> None:
    """Raise `NotConverged` or warn, as the policy says."""
    if policy == "raise":
        raise NotConverged(message)
    warn(message)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Multiply A Bᵀ for blocks of rows (j, P) and (k, P), accumulated in float64 whatever the dtype."""
    if a.dtype == torch.float64 and b.dtype == torch.float64:
        return a @ b.T
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    step = max(1, 2**22 // max(1, a.shape[0] + b.shape[0]))
    for start in range(0, a.shape[1], step):
        total += a[:, start : start + step].double() @ b[:, start : start + step].double().T
    return total


@dataclass(frozen=True, eq=False)
class Tridiagonal:
    """For each of b starts, T = V A Vᵀ with V (m, P) orthonormal: alphas (b, m) on and betas (b, m−1) off its diagonal.

    `norms` (b,) are those of the starts; `coupling` (b,) is the last off-diagonal entry, what A V leaves outside V.
    A start whose Krylov space was exhausted has zeros from there on. `basis` is (b, m, P), or empty if not kept.
    """

    alphas: Tensor
    betas: Tensor
    norms: Tensor
    coupling: Tensor
    basis: Tensor

    def dense(self) -> Tensor:
        """T, (b, m, m) float64."""
        off = torch.diag_embed(self.betas, 1) if self.betas.shape[-1] else 0.0
        below = torch.diag_embed(self.betas, -1) if self.betas.shape[-1] else 0.0
        return torch.diag_embed(self.alphas) + off + below

    def quadrature(self) -> tuple[Tensor, Tensor]:
        """Nodes and weights (b, m) of Gauss quadrature: startᵀ f(A) start ≈ Σ_j weight_j f(node_j)."""
        nodes, vectors = torch.linalg.eigh(self.dense())
        return nodes, vectors[:, 0, :].square() * self.norms.square()[:, None]


def lanczos(matvec: Matvec, start: Tensor, steps: int, *, keep: bool = True) -> Tridiagonal:
    """Run `steps` steps from each row of `start` (b, P), every new vector orthogonalized twice against all before.

    Without re-orthogonalization ghost copies of converged eigenvalues appear and quadratures go wrong. Needs b·m
    vectors of memory while it runs.
    """
    norms = start.double().norm(dim=-1)
    v = _unit(start, norms)
    basis, alphas, betas = [v], [], []
    alive = norms > 0
    coupling = torch.zeros_like(norms)
    size = torch.zeros_like(norms)
    for j in range(steps):
        w = matvec(basis[-1])
        alpha = (w.double() * basis[-1].double()).sum(-1)
        alphas.append(torch.where(alive, alpha, 0.0))
        size = torch.maximum(size, w.double().norm(dim=-1))
        w, last = _orthogonal(w, basis), coupling
        coupling = w.double().norm(dim=-1)
        # dividing the last vector by a small coupling has magnified its rounding by as much
        magnified = torch.where(last > 0, size / torch.where(last > 0, last, 1.0), 1.0).clamp(min=1.0)
        floor = 100 * torch.finfo(w.dtype).eps * size * magnified
        alive = alive & (coupling > floor)
        coupling = torch.where(alive, coupling, 0.0)
        if j + 1 == steps or not bool(alive.any()):
            break
        betas.append(coupling)
        basis.append(_unit(w, coupling))
    off = torch.stack(betas, -1) if betas else norms.new_zeros(len(norms), 0)
    kept = torch.stack(basis, 1) if keep else start.new_zeros(len(start), 0, start.shape[-1])
    return Tridiagonal(torch.stack(alphas, -1), off, norms, coupling, kept)


def _unit(v: Tensor, norms: Tensor) -> Tensor:
    """v / norms, with zeros where the norm is zero."""
    inverse = torch.where(norms > 0, 1 / torch.where(norms > 0, norms, 1.0), 0.0)
    return (v.double() * inverse[:, None]).to(v.dtype)


def _orthogonal(w: Tensor, basis: list[Tensor]) -> Tensor:
    for _ in range(2):
        for q in basis:
            w = w - ((w.double() * q.double()).sum(-1, keepdim=True)).to(w.dtype) * q
    return w


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Approximate eigenvalues (k,), descending, eigenvectors as rows (k, P), and ‖A u − λ u‖ of each, (k,)."""

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int


def largest_eigenpairs(
    matvec: Matvec, start: Tensor, rank: int, *, tolerance: float = 1e-6, steps: int = 60, unconverged: Policy = "raise"
) -> Eigenpairs:
    """The `rank` largest eigenpairs by block Lanczos from the rows of `start` (b, P), fully re-orthogonalized.

    Stops when all residuals are below `tolerance` times the largest eigenvalue, or the space is exhausted (then the
    result is exact). Memory: b·steps vectors and as many products. Multiple eigenvalues need a block of their size.
    """
    block = orthonormal_rows(start)
    basis, images = block, matvec(block)
    products = len(block)
    while True:
        small = dots(basis, images)
        values, turn = torch.linalg.eigh((small + small.T) / 2)
        keep = values.argsort(descending=True)[:rank]
        values, turn = values[keep], turn[:, keep].T
        vectors = turn.to(basis) @ basis
        residuals = ((turn.to(basis) @ images).double() - values[:, None] * vectors.double()).norm(dim=-1)
        done = len(values) == rank and bool((residuals <= tolerance * values.max().clamp(min=0)).all())
        fresh = complement(images[-len(block) :], basis)
        if done or not len(fresh) or products // len(start) >= steps:
            break
        basis, images, block = torch.cat([basis, fresh]), torch.cat([images, matvec(fresh)]), fresh
        products += len(fresh)
    bound = tolerance * float(values.max().clamp(min=0))
    if len(fresh) and not done and unconverged != "accept":
        report(
            unconverged,
            f"Lanczos' method left a residual of {float(residuals.max()):.3g} above {bound:.3g}; allow more steps",
        )
    return Eigenpairs(values, vectors, residuals, products)


def orthonormal_rows(v: Tensor) -> Tensor:
    """An orthonormal basis of the span of the rows, without directions of rounding size."""
    norms = v.double().norm(dim=-1)
    v = _unit(v, norms)[norms > 0]
    for _ in range(2):
        if not len(v):
            return v
        values, vectors = torch.linalg.eigh(dots(v, v))
        keep = values > values.max() * 1e-13
        v = ((vectors[:, keep] / values[keep].sqrt()).T).to(v) @ v
    return v


def complement(w: Tensor, basis: Tensor) -> Tensor:
    """An orthonormal basis of what the rows of w have outside the basis."""
    before = float(w.double().norm())
    for _ in range(2):
        w = w - dots(w, basis).to(w) @ basis
    if float(w.double().norm()) <= 1e3 * torch.finfo(w.dtype).eps * before:
        return w[:0]
    w = orthonormal_rows(w)
    return orthonormal_rows(w - dots(w, basis).to(w) @ basis)


def signs(n: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw n rows of random signs with the length, dtype and device of `like` (…, P)."""
    bits = torch.randint(0, 2, (n, like.shape[-1]), generator=generator, device=like.device)
    return (2 * bits - 1).to(like.dtype)


def spheres(n: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw n rows uniformly from the sphere of radius √P."""
    rows = torch.randn(n, like.shape[-1], generator=generator, dtype=like.dtype, device=like.device)
    return rows * (like.shape[-1] ** 0.5 / rows.double().norm(dim=-1, keepdim=True)).to(like.dtype)


def _leave_one_out(y: Tensor) -> tuple[Tensor, Tensor]:
    """Q = orth(Y) and, row by row, the unit vector s_i (in Q's basis) that span(Y without row i) lacks."""
    q = orthonormal_rows(y)
    if len(q) < len(y):  # dependent rows: the range is exhausted, and leaving one out loses nothing
        return q, torch.zeros(len(y), len(q), dtype=torch.float64, device=y.device)
    leave = torch.linalg.inv(dots(q, y))  # Y = Rᵀ Q; row i of R⁻¹ is orthogonal to all columns of R but the i-th
    return q, leave / leave.norm(dim=-1, keepdim=True)


def xdiag(matvec: Matvec, like: Tensor, products: int, generator: torch.Generator | None = None) -> Estimate:
    """diag A, (P,), by XDiag (Epperly, Tropp, Webber 2024): exact diagonals on leave-one-out ranges plus the remainder.

    diag(Q_iᵀ Q_i A) + ω_i ∘ (I − Q_iᵀQ_i) A ω_i for random signs ω_i, averaged; `error` is the standard error (P,).
    """
    m = max(2, products // 2)
    omega = signs(m, like, generator)
    y = matvec(omega)
    basis, leave = _leave_one_out(y)
    images = matvec(basis)
    full = (basis.double() * images.double()).sum(0)
    lost = (leave.to(basis) @ basis).double()  # s_i in weight space, (m, P)
    share = (dots(y, basis) * leave).sum(-1, keepdim=True)  # (I − Q_iᵀQ_i) A ω_i = share · s_i
    each = full - lost * (leave.to(images) @ images).double() + omega.double() * share * lost
    return Estimate(each.mean(0), each.std(0) / m**0.5, m, m + len(basis))


def slq_logdet(
    matvec: Matvec, like: Tensor, *, probes: int = 8, steps: int = 20, generator: torch.Generator | None = None
) -> Estimate:
    """log |A| = E zᵀ log(A) z for a positive definite A, by Lanczos quadrature (Ubaru, Chen, Saad 2017).

    For a preconditioned A, close to the identity, few steps and probes suffice whatever the sketch: no bias but that of
    the quadrature, which for the logarithm falls exponentially with `steps`. The error includes both the spread of the
    probes and an estimate of what is left after the last step.
    """
    found = lanczos(matvec, spheres(probes, like, generator), min(steps, like.shape[-1]), keep=False)
    each = _logs(found, found.alphas.shape[-1])
    spread = each.std() / probes**0.5 if probes > 1 else torch.full_like(each[0], torch.inf)
    error = (spread.square() + _truncation(found).square()).sqrt()
    return Estimate(each.mean(), error, probes, probes * found.alphas.shape[-1])


def _logs(found: Tridiagonal, steps: int) -> Tensor:
    """zᵀ log(A) z of every probe by the first steps, (b,)."""
    part = replace(found, alphas=found.alphas[:, :steps], betas=found.betas[:, : max(0, steps - 1)])
    nodes, weights = part.quadrature()
    return (weights * nodes.clamp(min=1e-300).log()).sum(-1)


def _truncation(found: Tridiagonal) -> Tensor:
    """Estimate the rest of the series of changes d_m = v_m − v_{m−1} as a geometric one: d·r/(1 − r), at least d."""
    steps = found.alphas.shape[-1]
    if not bool((found.coupling > 0).any()):  # the Krylov spaces are exhausted: exact
        return found.alphas.new_zeros(())
    if steps == 1:
        return _logs(found, 1).mean().abs()
    values = [_logs(found, k).mean() for k in range(max(1, steps - 2), steps + 1)]
    last = (values[-1] - values[-2]).abs()
    if len(values) < 3:
        return last
    ratio = (last / (values[-2] - values[-3]).abs().clamp(min=1e-300)).clamp(max=0.95)
    return last * (ratio / (1 - ratio)).clamp(min=1.0)
