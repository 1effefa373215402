"""Least squares by LSMR, for matrices that are given by their products and those of their transpose."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.linalg.krylov.results import Matvec, Policy, Solution


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
