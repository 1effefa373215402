"""Prior precisions and noise by the evidence where the curvature is known by products alone: MacKay's fixed point."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperation
from lapwing.evidence.evidence import FittedCurvature, log_evidence
from lapwing.evidence.groups import Groups
from lapwing.evidence.tuning import Setting, Tuning
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD
from lapwing.posterior import Tempered, resolve_temperature

BOUNDS = (1e-10, 1e10)


def tune_probes(
    curvature: FittedCurvature,
    likelihood: Likelihood,
    groups: Groups,
    *,
    mean: Tensor,
    start: float | Tensor = 1.0,
    center: float | Tensor = 0.0,
    temperature: float | Tensor | Tempered = 1.0,
    learn: Sequence[str] = ("prior",),
    tolerance: float = 1e-3,
    iterations: int = 30,
    samples: int | None = None,
) -> Tuning:
    """`tune_evidence` for matrix-free curvature: τ_g ← γ_g / ‖θ̂ − μ₀‖²_g with γ_g = Σ_{p∈g} (1 − τ_g Σ_pp).

    The effective numbers γ_g come from the solver's fixed probes, deflated by the sketch, so that the same noise enters
    every step and the iteration converges (MacKay 1992; for noise φ ← Σ r² / (N K − γ)). The mode θ̂ is held fixed, as
    everywhere. Stops when no logarithm moves by more than `tolerance`. Every step costs one block of solves over data.
    `samples` takes γ_g = E Σ_{p∈g} z_p (cGz)_p over so many posterior samples z instead, with fixed noise: EM by
    sample-then-optimize (Antorán et al. 2023), for a posterior that has no sketch to deflate by.
    """
    if not curvature.matrix.iterative:
        raise UnsupportedOperation("tune_probes is for structure='matrixfree'; tune_evidence needs no data passes")
    unknown = set(learn) - {"prior", "noise"}
    if unknown or not learn:
        raise ValueError(f"the evidence can learn 'prior' and 'noise', not {sorted(unknown) or 'nothing'}")
    if "noise" in learn and not likelihood.dispersion_name:
        raise UnsupportedOperation(f"{type(likelihood).__name__} has no noise to learn; only Gaussian(noise) has")
    tempered = resolve_temperature(temperature)
    offset = mean.detach().double() - torch.as_tensor(center, dtype=torch.float64, device=mean.device).detach()
    squares = groups.total(offset.square())
    tau = torch.as_tensor(start, dtype=torch.float64, device=mean.device).detach().expand(groups.count).clone()
    first = Setting(tau.clone(), float(tempered.T), _dispersion(likelihood, learn))
    family, moved, step = likelihood, math.inf, 0
    while moved > tolerance and step < iterations:
        gamma = _effective(curvature, groups, tau, family, tempered, samples)
        moved, step = 0.0, step + 1
        if "prior" in learn:
            known = (gamma > 0) & (squares > 0)
            scale = float(tempered.T) if tempered.prior else 1.0
            fresh = torch.where(known, gamma.clamp(min=1e-12) / (scale * squares.clamp(min=1e-300)), tau).clamp(*BOUNDS)
            moved, tau = float((fresh / tau).log().abs().max()), fresh
        if "noise" in learn:
            before = float(family.dispersion)
            step_ahead = family.dispersion_step(curvature.statistics, gamma.sum() / float(tempered.T))
            family = family.with_dispersion(before * math.exp(float(step_ahead)))
            moved = max(moved, abs(math.log(float(family.dispersion) / before)))
    chosen = Setting(tau, float(tempered.T), _dispersion(family, learn))
    scores = [
        -_value(curvature, groups, setting, f, mean, center, tempered)
        for setting, f in ((first, likelihood), (chosen, family))
    ]
    scaled, prior = _sum(curvature, groups, tau, family, tempered)
    error = (scaled + prior).logdet_error() / 2
    messages = [f"matrix-free: the log evidence has a standard error of {error:.3g}"]
    if moved > tolerance:
        messages.append(f"not converged after {step} iterations: a logarithm still moves by {moved:.3g}")
    return Tuning(
        "evidence", (first, chosen), torch.tensor(scores, dtype=torch.float64), 1, groups.prior(tau, center), tempered,
        family, step, moved <= tolerance, messages=tuple(messages),
    )  # fmt: skip


def _dispersion(likelihood: Likelihood, learn: Sequence[str]) -> float | None:
    return float(likelihood.dispersion) if "noise" in learn else None


def _sum(
    curvature: FittedCurvature, groups: Groups, tau: Tensor, likelihood: Likelihood, tempered: Tempered
) -> tuple[PSD, PSD]:
    """The two terms of the posterior precision: T/φ·H and the prior."""
    scale = tempered.likelihood_scale(likelihood.dispersion.detach(), curvature.dispersion_power)
    return curvature.matrix.scale(scale), groups.diagonal(tau).scale(tempered.prior_scale)


def _effective(
    curvature: FittedCurvature,
    groups: Groups,
    tau: Tensor,
    likelihood: Likelihood,
    tempered: Tempered,
    samples: int | None,
) -> Tensor:
    """γ_g of every group, (G,)."""
    scaled, prior = _sum(curvature, groups, tau, likelihood, tempered)
    return groups.total(scaled.determined_shares(prior, samples))


def _value(
    curvature: FittedCurvature,
    groups: Groups,
    setting: Setting,
    likelihood: Likelihood,
    mean: Tensor,
    center: float | Tensor,
    tempered: Tempered,
) -> float:
    prior = torch.as_tensor(center, dtype=torch.float64, device=mean.device), groups.diagonal(setting.precision)
    with torch.no_grad():
        return float(log_evidence(curvature, prior, likelihood, mean=mean.double(), temperature=tempered))
