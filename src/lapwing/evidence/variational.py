"""The variational lower bound of the evidence for inducing points, and the prior that maximizes it."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lapwing.errors import IncompatiblePrior, UnsupportedOperation
from lapwing.evidence.evidence import FittedCurvature, ResolvedPrior, log_evidence
from lapwing.evidence.groups import Groups
from lapwing.evidence.tuning import Setting, Tuning
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Tempered, resolve_temperature

BOUNDS = (1e-10, 1e10)


class ScaledCurvature(FittedCurvature, Protocol):
    """What the bound reads of a `Curvature` besides."""

    @property
    def state(self) -> Mapping[str, Tensor]: ...
    @property
    def n_data(self) -> float: ...
    @property
    def seen(self) -> float: ...


def variational_bound(
    curvature: ScaledCurvature,
    prior: ResolvedPrior,
    likelihood: Likelihood,
    *,
    mean: Tensor,
    temperature: float | Tensor | Tempered = 1.0,
) -> Tensor:
    """The ELBO of structure='valla': never above the log evidence of the full GGN, a differentiable float64 scalar.

    `log_evidence` of the compressed curvature minus ½ c/τ·(tr G − tr VGVᵀ) (Titsias 2009, Eq. 9): for Q ⪯ K,
    log|I + K| ≤ log|I + Q| + tr(K − Q). Equal to the log evidence once nothing of G is left outside the span.

        bound = variational_bound(la.curvature, la._resolved_prior, la.likelihood, mean=la.params.flat)
    """
    tempered = resolve_temperature(temperature)
    tau = prior[1].constant()
    if tau is None:
        raise IncompatiblePrior("the variational bound is for one prior precision for all weights; use a scalar prior")
    scale = tempered.likelihood_scale(likelihood.dispersion, curvature.dispersion_power)
    value = log_evidence(curvature, prior, likelihood, mean=mean, temperature=tempered)
    return value - 0.5 * scale * _excess(curvature) / (tau * tempered.prior_scale)


def _excess(curvature: ScaledCurvature) -> Tensor:
    if "excess" not in curvature.state:
        raise UnsupportedOperation("only structure='valla' has a variational bound: it knows what its span leaves out")
    ratio = curvature.n_data / curvature.seen
    return curvature.state["excess"].double() * ratio


def tune_bound(
    curvature: ScaledCurvature,
    likelihood: Likelihood,
    groups: Groups,
    *,
    mean: Tensor,
    start: float | Tensor = 1.0,
    center: float | Tensor = 0.0,
    temperature: float | Tensor | Tempered = 1.0,
    learn: Sequence[str] = ("prior",),
) -> Tuning:
    """Maximize `variational_bound` over one prior precision: concave in log τ, so its slope is bisected.

    ∂/∂log τ = ½[Σ c e/(c e + τ) + c t/τ − τ‖θ̂ − μ₀‖²], e the eigenvalues inside the span and t the trace outside.
    """
    if tuple(learn) != ("prior",) or groups.count != 1:
        raise UnsupportedOperation("inducing points learn one prior precision (learn='prior', prior='scalar')")
    inside = curvature.matrix.eigenvalues()
    assert inside is not None  # of the span, without a prior
    tempered = resolve_temperature(temperature)
    scale = tempered.likelihood_scale(likelihood.dispersion.detach(), curvature.dispersion_power)
    inner = scale / tempered.prior_scale
    values, outside = inner * inside, inner * _excess(curvature)
    offset = mean.detach().double() - torch.as_tensor(center, dtype=torch.float64, device=mean.device).detach()
    square = tempered.prior_scale * offset.square().sum()
    low, high = (math.log(bound) for bound in BOUNDS)
    for _ in range(100):
        middle = (low + high) / 2
        tau = math.exp(middle)
        slope = (values / (values + tau)).sum() + outside / tau - tau * square
        low, high = (middle, high) if float(slope) > 0 else (low, middle)
    found = torch.tensor([math.exp(low)], dtype=torch.float64, device=mean.device)
    first = torch.as_tensor(start, dtype=torch.float64, device=mean.device).detach().reshape(-1)[:1]
    settings = tuple(Setting(tau, float(tempered.T), None) for tau in (first, found))
    scores = torch.stack([-_value(curvature, s, likelihood, groups, mean, center, tempered) for s in settings])
    message = "the prior maximizes the variational lower bound of the evidence (inducing points)"
    return Tuning(
        "evidence", settings, scores, 1, groups.prior(found, center), tempered, likelihood, 100, True,
        messages=(message,),
    )  # fmt: skip


def _value(
    curvature: ScaledCurvature,
    setting: Setting,
    likelihood: Likelihood,
    groups: Groups,
    mean: Tensor,
    center: float | Tensor,
    tempered: Tempered,
) -> Tensor:
    prior = torch.as_tensor(center, dtype=torch.float64, device=mean.device), groups.diagonal(setting.precision)
    with torch.no_grad():
        return variational_bound(curvature, prior, likelihood, mean=mean.double(), temperature=tempered)
