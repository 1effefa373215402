"""One step of learning from the evidence: precisions and noise moved towards MacKay's fixed point, a bounded way.

At fixed weights the evidence has its only maximum where (MacKay 1992, Eq. 3.10)

    τ_g = γ_g / ‖θ_g − μ_g‖²,    φ = RSS / (NK − γ),    γ_g = −∂(log|H/φ + Π| − log|Π|)/∂ log τ_g.

In logarithms x ← log γ(x) − log q has a slope between −1 and 0 in each coordinate, so that half a step at a time
converges. While the weights still move, going all the way would chase them: the move of a step has a bound.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.evidence.groups import Groups
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Belief

ITERATIONS = 60
TOLERANCE = 1e-3  # in log-precision, a step: the weights move on anyway
BOUNDS = (1e-8, 1e10)


@dataclass(frozen=True, eq=False)
class Moved:
    """Precisions (G,) and likelihood after a step, the log evidence there, and γ."""

    precision: Tensor
    likelihood: Likelihood
    evidence: float
    effective: float


def move(
    belief: Belief,
    groups: Groups,
    precision: Tensor,
    *,
    learn: tuple[str, ...] = ("prior",),
    reach: float = 1.0,
    bounds: tuple[float, float] = BOUNDS,
    tolerance: float = TOLERANCE,
) -> Moved:
    """Go from `precision` (G,) and the belief's noise towards the maximum of the evidence.

    Each log τ and log φ moves by at most `reach`. A group without curvature keeps its precision: the evidence says
    nothing about it.
    """
    curvature, likelihood = belief.curvature, belief.likelihood
    squares = groups.squares(belief)
    start = precision.double().log()
    noise = likelihood.dispersion.detach().double().log()
    low, high = (torch.tensor(b, dtype=torch.float64, device=start.device).log() for b in bounds)
    x, u = start, noise
    for _ in range(ITERATIONS):
        bracket, effective = _effective(belief, groups, x, u)
        there, further = x, u
        if "prior" in learn:
            target = (effective.clamp_min(1e-30) / squares.clamp_min(1e-30)).log()
            target = torch.where(effective > 0, target, x)
            there = _within(0.5 * (x + target), start, reach).clamp(low, high)
        if "noise" in learn:
            taken = belief.power * effective.sum()
            step = likelihood.with_dispersion(u.exp()).dispersion_step(curvature.statistics, taken)
            further = _within(u + 0.5 * step, noise, reach)
        change = max((there - x).abs().max().item(), (further - u).abs().item())
        x, u = there, further
        if change < tolerance:
            break
    bracket, effective = _effective(belief, groups, x, u)
    told = likelihood.with_dispersion(u.exp()) if "noise" in learn else likelihood
    fit = told.log_likelihood(curvature.statistics).detach()
    value = fit - 0.5 * (x.exp() * squares).sum() - 0.5 * bracket
    return Moved(x.exp(), told, value.item(), effective.sum().item())


def _effective(belief: Belief, groups: Groups, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """log|H/φᵏ + Π| − log|Π| and γ (G,)."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        scaled = belief.curvature.matrix.scale((-belief.power * u).exp())
        bracket = scaled.logdet_ratio(groups.diagonal(x.exp()))
        (slope,) = torch.autograd.grad(bracket, x)
    return bracket.detach(), -slope


def _within(x: Tensor, center: Tensor, reach: float) -> Tensor:
    return torch.minimum(torch.maximum(x, center - reach), center + reach)
