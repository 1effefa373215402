"""Diagonals and log-determinants from products with random vectors, each with a standard error."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lapwing.linalg.krylov.lanczos import Tridiagonal, _orthonormal_rows, lanczos
from lapwing.linalg.krylov.results import Estimate, Matvec, dots


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
    q = _orthonormal_rows(y)
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
