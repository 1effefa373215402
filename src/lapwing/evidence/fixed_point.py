"""MacKay's fixed point of the evidence: one bounded step during training, or all of it for matrix-free curvature.

At fixed weights the evidence has its only maximum where (MacKay 1992, Eq. 3.10)

    τ_g = γ_g / ‖θ_g − μ_g‖²,    φ = RSS / (NK − γ),    γ_g = −∂(log|H/φ + Π| − log|Π|)/∂ log τ_g.

In logarithms, x ← log γ(x) − log q has a slope between −1 and 0 in each coordinate, so that half steps converge. While
the weights are still being trained, the full way would chase them; so a step moves by a bounded amount.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperation
from lapwing.evidence.evidence import evidence_of
from lapwing.evidence.groups import Groups
from lapwing.evidence.tuning import Setting, Tuning
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD
from lapwing.posterior import Belief

ITERATIONS = 60
TOLERANCE = 1e-3  # change of a log-precision per step below which it stops: the weights move on anyway
BOUNDS = (1e-8, 1e10)
PROBE_BOUNDS = (1e-10, 1e10)


@dataclass(frozen=True, eq=False)
class Moved:
    """The result of a step: precisions (G,), likelihood, the log evidence there, and γ."""

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
        if "dispersion" in learn:
            taken = belief.power * effective.sum()
            step = likelihood.with_dispersion(u.exp()).dispersion_step(curvature.statistics, taken)
            further = _within(u + 0.5 * step, noise, reach)
        change = max((there - x).abs().max().item(), (further - u).abs().item())
        x, u = there, further
        if change < tolerance:
            break
    bracket, effective = _effective(belief, groups, x, u)
    told = likelihood.with_dispersion(u.exp()) if "dispersion" in learn else likelihood
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


def tune_probes(
    belief: Belief,
    groups: Groups,
    *,
    learn: Sequence[str] = ("prior",),
    tolerance: float = 1e-3,
    iterations: int = 30,
    samples: int | None = None,
) -> Tuning:
    """`tune_evidence` for matrix-free curvature: τ_g ← γ_g / ‖θ̂ − μ₀‖²_g with γ_g = Σ_{p∈g} (1 − τ_g Σ_pp).

    The effective numbers γ_g come from the solver's fixed probes, deflated by the sketch, so that the same noise enters
    every step and the iteration converges (MacKay 1992; for noise φ ← Σ r² / (N K − γ)). The mode θ̂ stays fixed. The
    iteration stops when no logarithm moves by more than `tolerance`; every step costs one block of solves over data.
    With `samples`, γ_g = E Σ_{p∈g} z_p (cGz)_p comes from that many posterior samples z with fixed noise instead: EM by
    sample-then-optimize (Antorán et al. 2023), for a posterior without a sketch.
    """
    if not belief.curvature.matrix.iterative:
        raise UnsupportedOperation("tune_probes is for structure='matrixfree'; tune_evidence needs no data passes")
    belief.likelihood.learned_names(tuple(learn))
    squares = groups.squares(belief)
    tau = groups.precisions(belief).to(squares.device)
    first, begin = tau, groups.applied(belief, tau)
    belief = begin
    prior_scale = float(belief.temperature.prior_scale)
    moved, step = math.inf, 0
    while moved > tolerance and step < iterations:
        gamma = _effective_by_probes(belief, groups, samples)
        moved, step = 0.0, step + 1
        if "prior" in learn:
            known = (gamma > 0) & (squares > 0)
            best = gamma.clamp(min=1e-12) / (prior_scale * squares.clamp(min=1e-300))
            fresh = torch.where(known, best, tau).clamp(*PROBE_BOUNDS)
            moved, tau = float((fresh / tau).log().abs().max()), fresh
            belief = groups.applied(belief, tau)
        if "dispersion" in learn:
            taken = min(belief.power, 1) * gamma.sum() / float(belief.temperature.T)
            ahead = float(belief.likelihood.dispersion_step(belief.curvature.statistics, taken))
            likelihood = belief.likelihood.with_dispersion(float(belief.likelihood.dispersion) * math.exp(ahead))
            belief, moved = replace(belief, likelihood=likelihood), max(moved, abs(ahead))
    settings = [_setting(values, each, learn) for values, each in ((first, begin), (tau, belief))]
    with torch.no_grad():
        scores = torch.tensor([-float(evidence_of(each)) for each in (begin, belief)], dtype=torch.float64)
    scaled, prior = _sum(belief)
    error = (scaled + prior).logdet_error() / 2
    messages = [f"matrix-free: the log evidence has a standard error of {error:.3g}"]
    if moved > tolerance:
        messages.append(f"not converged after {step} iterations: a logarithm still moves by {moved:.3g}")
    return Tuning.of(
        "evidence", belief, groups, settings, scores, 1, iterations=step, converged=moved <= tolerance,
        messages=tuple(messages),
    )  # fmt: skip


def _setting(precision: Tensor, belief: Belief, learn: Sequence[str]) -> Setting:
    dispersion = float(belief.likelihood.dispersion) if "dispersion" in learn else None
    return Setting(precision, float(belief.temperature.T), dispersion)


def _sum(belief: Belief) -> tuple[PSD, PSD]:
    """The two terms of the posterior precision: T/φ·H and the prior."""
    prior = belief.resolved_prior[1].scale(belief.temperature.prior_scale)
    return belief.curvature.matrix.scale(belief.scale.detach()), prior


def _effective_by_probes(belief: Belief, groups: Groups, samples: int | None) -> Tensor:
    """γ_g of every group, (G,)."""
    scaled, prior = _sum(belief)
    return groups.total(scaled.determined_shares(prior, samples))
