"""Lanczos' method with full re-orthogonalization, for several starts at once, and the eigenpairs it gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg.krylov.results import Matvec, Policy, dots, report


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
    block = _orthonormal_rows(start)
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
        fresh = _complement(images[-len(block) :], basis)
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


def _orthonormal_rows(v: Tensor) -> Tensor:
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


def _complement(w: Tensor, basis: Tensor) -> Tensor:
    """An orthonormal basis of what the rows of w have outside the basis."""
    before = float(w.double().norm())
    for _ in range(2):
        w = w - dots(w, basis).to(w) @ basis
    if float(w.double().norm()) <= 1e3 * torch.finfo(w.dtype).eps * before:
        return w[:0]
    w = _orthonormal_rows(w)
    return _orthonormal_rows(w - dots(w, basis).to(w) @ basis)
