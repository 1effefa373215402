"""Traces, diagonals, densities and least squares from products with a matrix: tried, and not used by the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg.krylov import (
    Estimate,
    Matvec,
    Policy,
    _leave_one_out,
    dots,
    lanczos,
    orthonormal_rows,
    signs,
    spheres,
)
from lapwing.linalg.solvers import Sketch, Solution
from lapwing.linalg.spectrum import tangent


def hutchinson(matvec: Matvec, probes: Tensor) -> Estimate:
    """tr A from zᵀ A z over rows z of `probes` with E z zᵀ = I."""
    each = (probes.double() * matvec(probes).double()).sum(-1)
    return _mean(each, len(probes))


def hutchpp(matvec: Matvec, like: Tensor, products: int, generator: torch.Generator | None = None) -> Estimate:
    """tr A by Hutch++ (Meyer, Musco, Musco, Woodruff 2021): exact on a range found with a third of the products.

    The error falls like 1/products instead of 1/√products for positive semi-definite A.
    """
    k = max(1, products // 3)
    basis = orthonormal_rows(matvec(signs(k, like, generator)))
    inside = (basis.double() * matvec(basis).double()).sum() if len(basis) else torch.zeros((), dtype=torch.float64)
    z = signs(max(2, products - 2 * k), like, generator)
    z = z - dots(z, basis).to(z) @ basis
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
    core = dots(basis, images)  # Q A Qᵀ
    inner, half = dots(omega, basis), dots(omega, images)  # Q ω and Q A ω, (m, j)
    kept = inner - (inner * leave).sum(-1, keepdim=True) * leave  # Q_i ω_i in the basis of Q
    outside = (omega.double().square().sum(-1) - kept.square().sum(-1)).clamp(min=1e-300)
    scale = (like.shape[-1] - (len(basis) - 1)) / outside
    whole = (omega.double() * y.double()).sum(-1)
    rest = whole - 2 * (half * kept).sum(-1) + ((kept @ core) * kept).sum(-1)
    return _mean(core.trace() - ((leave @ core) * leave).sum(-1) + scale * rest, m + len(basis))


def _mean(each: Tensor, products: int) -> Estimate:
    n = len(each)
    error = each.std() / n**0.5 if n > 1 else torch.full_like(each[0], torch.inf)
    return Estimate(each.mean(), error, n, products)


@dataclass(frozen=True, eq=False)
class Density:
    """Eigenvalues of a sketch and, for each of b probes, the quadrature of the rest: tr f(A) for any f with f(0) = 0.

    `nodes`, `weights` (b, m) come from probes outside the sketch. One density serves every f: all scales and constant
    priors of a curvature.
    """

    values: Tensor  # (k,)
    nodes: Tensor
    weights: Tensor
    products: int

    def trace(self, f: Callable[[Tensor], Tensor]) -> Estimate:
        """Σ f(λ) over the sketch plus the mean over probes; differentiable in what f closes over."""
        each = (self.weights * f(self.nodes.clamp(min=0))).sum(-1)
        n = len(each)
        error = each.detach().std() / n**0.5 if n > 1 else torch.full_like(each.detach()[0], torch.inf)
        return Estimate(f(self.values).sum() + each.mean(), error, n, self.products)


def deflated_density(
    matvec: Matvec, sketch: Sketch, like: Tensor, *, probes: int = 8, steps: int = 20,
    generator: torch.Generator | None = None,
) -> Density:  # fmt: skip
    """Project the sketch out of A and run Lanczos' method from random probes in the complement.

    Plain quadrature spends its variance on a few large eigenvalues; without them it is small. Exact eigenvectors in
    the sketch give no bias; approximate ones one of second order in ‖(I − UᵀU) A Uᵀ‖.
    """
    basis = sketch.basis

    def project(v: Tensor) -> Tensor:
        for _ in range(2):
            v = v - (v.to(basis.dtype) @ basis.T @ basis).to(v.dtype)
        return v

    start = project(spheres(probes, like, generator))
    free = like.shape[-1] - sketch.rank
    start = start * (free**0.5 / start.double().norm(dim=-1, keepdim=True).clamp(min=1e-300)).to(start)
    steps = max(1, min(steps, free))
    if free <= 0:
        none = torch.zeros(probes, 1, dtype=torch.float64, device=like.device)
        return Density(sketch.values, none, none, 0)
    found = lanczos(lambda v: project(matvec(project(v))), start, steps, keep=False)
    nodes, weights = found.quadrature()
    return Density(sketch.values, nodes, weights, probes * steps)


def differentiable_logdet(matvec: Matvec, value: Tensor, probes: Tensor, solved: Tensor) -> Tensor:
    """log |A(θ)| with the gradient E[(A⁻¹z)ᵀ ∂A z] of tr(A⁻¹ ∂A), from probes z (k, P) and A⁻¹ z.

    The same probes as the value's make the gradient that of the estimate; it is unbiased for any.
    """
    surrogate = (solved.detach().double() * matvec(probes.detach()).double()).sum(-1).mean()
    return value.detach() + tangent(surrogate)


def lsmr(
    matvec: Matvec,
    transposed: Matvec,
    rhs: Tensor,
    *,
    damping: float = 0.0,
    tolerance: float = 1e-8,
    iterations: int = 1000,
    unconverged: Policy = "raise",
) -> Solution:
    """min_x ‖A x − b‖² + damping²‖x‖² for rows b (k, m); `matvec` maps (k, P) → (k, m), `transposed` back.

    Fong and Saunders 2011. In exact arithmetic it is MINRES on the normal equations, whose residual falls
    monotonically, but it never squares the condition number. `residuals` of the result are
    ‖Aᵀ(b − A x) − damping² x‖ / ‖Aᵀ b‖, computed afresh. Columns run one by one.
    """
    found = [_single(matvec, transposed, b[None], damping, tolerance, iterations) for b in rhs]
    x = torch.cat([part[0] for part in found])
    start = transposed(rhs).double().norm(dim=-1)
    slope = transposed(rhs - matvec(x)) - damping**2 * x
    residuals = slope.double().norm(dim=-1) / torch.where(start > 0, start, 1.0)
    count = max((part[1] for part in found), default=0)
    products = 2 * sum(part[1] for part in found) + 3 * len(rhs)
    return Solution(x, residuals, tolerance, count, products).demand(unconverged, "LSMR")


def _single(
    matvec: Matvec, transposed: Matvec, b: Tensor, damping: float, tolerance: float, iterations: int
) -> tuple[Tensor, int]:
    beta = float(b.double().norm())
    u = b / beta if beta else b
    v = transposed(u)
    alpha = float(v.double().norm())
    x = torch.zeros_like(v)
    if alpha * beta == 0:
        return x, 0
    v = v / alpha
    zetabar, alphabar, rho, rhobar, cbar, sbar = alpha * beta, alpha, 1.0, 1.0, 1.0, 0.0
    h, hbar = v, torch.zeros_like(v)
    goal = 0.5 * tolerance * abs(zetabar)
    for step in range(1, iterations + 1):
        u = matvec(v) - alpha * u
        beta = float(u.double().norm())
        u = u / beta if beta else u
        v = transposed(u) - beta * v
        alpha = float(v.double().norm())
        v = v / alpha if alpha else v
        alphahat = math.hypot(alphabar, damping)
        rho_old, rho = rho, math.hypot(alphahat, beta)
        c, s = alphahat / rho, beta / rho
        theta, alphabar = s * alpha, c * alpha
        rhobar_old, thetabar, rhotemp = rhobar, sbar * rho, cbar * rho
        rhobar = math.hypot(rhotemp, theta)
        cbar, sbar = rhotemp / rhobar, theta / rhobar
        zeta, zetabar = cbar * zetabar, -sbar * zetabar
        hbar = h - (thetabar * rho / (rho_old * rhobar_old)) * hbar
        x = x + (zeta / (rho * rhobar)) * hbar
        h = v - (theta / rho) * h
        if abs(zetabar) <= goal or alpha == 0:
            return x, step
    return x, iterations
