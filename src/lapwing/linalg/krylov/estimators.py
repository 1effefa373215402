"""Traces and diagonals from products with random vectors, each with a standard error."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.linalg.krylov.lanczos import _orthonormal_rows
from lapwing.linalg.krylov.results import Estimate, Matvec, gram


def signs(n: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """n rows of random signs, in the length, dtype and device of `like` (…, P)."""
    bits = torch.randint(0, 2, (n, like.shape[-1]), generator=generator, device=like.device)
    return (2 * bits - 1).to(like.dtype)


def spheres(n: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """n rows uniform on the sphere of radius √P."""
    rows = torch.randn(n, like.shape[-1], generator=generator, dtype=like.dtype, device=like.device)
    return rows * (like.shape[-1] ** 0.5 / rows.double().norm(dim=-1, keepdim=True)).to(like.dtype)


def hutchinson(matvec: Matvec, probes: Tensor) -> Estimate:
    """tr A from zᵀ A z over rows z of `probes` with E z zᵀ = I."""
    each = (probes.double() * matvec(probes).double()).sum(-1)
    return _mean(each, len(probes))


def hutchpp(matvec: Matvec, like: Tensor, products: int, generator: torch.Generator | None = None) -> Estimate:
    """tr A by Hutch++ (Meyer, Musco, Musco, Woodruff 2021): exact on a range found with a third of the products.

    The error falls like 1/products instead of 1/√products for positive semi-definite A.
    """
    k = max(1, products // 3)
    basis = _orthonormal_rows(matvec(signs(k, like, generator)))
    inside = (basis.double() * matvec(basis).double()).sum() if len(basis) else torch.zeros((), dtype=torch.float64)
    z = signs(max(2, products - 2 * k), like, generator)
    z = z - gram(z, basis).to(z) @ basis
    rest = hutchinson(matvec, z)
    return Estimate(inside + rest.value, rest.error, rest.probes, 2 * k + len(z))


def xtrace(matvec: Matvec, like: Tensor, products: int, generator: torch.Generator | None = None) -> Estimate:
    """tr A by XTrace (Epperly, Tropp, Webber 2024): every probe serves both the range and the remainder.

    With Q = orth(A Ω) and Q_i = orth(A Ω without column i), the estimates tr(Q_i A Q_iᵀ) + r_iᵀ A r_i, where
    r_i = (I − Q_iᵀQ_i)ω_i rescaled to √(P − rank), are exchangeable, unbiased and averaged.
    """
    m = max(2, products // 2)
    omega = spheres(m, like, generator)
    y = matvec(omega)
    basis, leave = _leave_one_out(y)
    images = matvec(basis)
    core = gram(basis, images)  # Q A Qᵀ
    inner, half = gram(omega, basis), gram(omega, images)  # Q ω and Q A ω, (m, j)
    kept = inner - (inner * leave).sum(-1, keepdim=True) * leave  # Q_i ω_i in the basis of Q
    outside = (omega.double().square().sum(-1) - kept.square().sum(-1)).clamp(min=1e-300)
    scale = (like.shape[-1] - (len(basis) - 1)) / outside
    whole = (omega.double() * y.double()).sum(-1)
    rest = whole - 2 * (half * kept).sum(-1) + ((kept @ core) * kept).sum(-1)
    return _mean(core.trace() - ((leave @ core) * leave).sum(-1) + scale * rest, m + len(basis))


def _leave_one_out(y: Tensor) -> tuple[Tensor, Tensor]:
    """Q = orth(Y) and, row by row, the unit vector s_i (in Q's basis) that span(Y without row i) lacks."""
    q = _orthonormal_rows(y)
    if len(q) < len(y):  # dependent rows: the range is exhausted, and leaving one out loses nothing
        return q, torch.zeros(len(y), len(q), dtype=torch.float64, device=y.device)
    leave = torch.linalg.inv(gram(q, y))  # Y = Rᵀ Q; row i of R⁻¹ is orthogonal to all columns of R but the i-th
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
    share = (gram(y, basis) * leave).sum(-1, keepdim=True)  # (I − Q_iᵀQ_i) A ω_i = share · s_i
    each = full - lost * (leave.to(images) @ images).double() + omega.double() * share * lost
    return Estimate(each.mean(0), each.std(0) / m**0.5, m, m + len(basis))


def _mean(each: Tensor, products: int) -> Estimate:
    n = len(each)
    error = each.std() / n**0.5 if n > 1 else torch.full_like(each[0], torch.inf)
    return Estimate(each.mean(), error, n, products)
