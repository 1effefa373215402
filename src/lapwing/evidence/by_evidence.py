"""Prior precisions and noise that maximize the log evidence: Newton in the cached eigenbasis, without data."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lapwing.errors import IncompatiblePrior, NotPositiveDefinite, UnsupportedOperation
from lapwing.evidence.by_probes import tune_probes
from lapwing.evidence.evidence import FittedCurvature
from lapwing.evidence.groups import Groups
from lapwing.evidence.newton import Concave, Optimum, maximize
from lapwing.evidence.objective import CovarianceEvidence, Fit, SpectralEvidence
from lapwing.evidence.tuning import Setting, Tuning
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Tempered, resolve_temperature

BOUNDS = (1e-10, 1e10)


def tune_evidence(
    curvature: FittedCurvature,
    likelihood: Likelihood,
    groups: Groups,
    *,
    mean: Tensor,
    start: float | Tensor = 1.0,
    center: float | Tensor = 0.0,
    temperature: float | Tensor | Tempered = 1.0,
    learn: Sequence[str] = ("prior",),
    bounds: tuple[float, float] = BOUNDS,
    tolerance: float = 1e-10,
) -> Tuning:
    """Maximize the log evidence over one precision per group and, with "noise" in `learn`, the dispersion φ.

    `mean` is θ̂ (P,), `center` the prior mean, `start` the first precisions, () or (G,). The function is concave in
    (log τ, log φ) [MATH, Convexity], so Newton converges from any start to the only maximum, up to `tolerance` nats.
    A group whose maximum lies at infinity ends at a bound and a message says so. A group without curvature is left at
    its start: the evidence says nothing about it. No data are read, but by matrix-free curvature (`tune_probes`).
    """
    if curvature.matrix.iterative:
        return tune_probes(
            curvature, likelihood, groups, mean=mean, start=start, center=center, temperature=temperature, learn=learn
        )
    unknown = set(learn) - {"prior", "noise"}
    if unknown or not learn:
        raise ValueError(
            f"the evidence can learn 'prior' and 'noise', not {sorted(unknown) or 'nothing'}; it grows without limit "
            "or vanishes with the temperature, which needs held-out data"
        )
    tempered = resolve_temperature(temperature)
    squares = groups.total((mean.detach().double() - _flat(center, mean)).square())
    fit = _fit(curvature, likelihood, tempered, "noise" in learn)
    objective, informed = _objective(curvature, groups, squares, fit, tempered)
    first = torch.as_tensor(start, dtype=torch.float64, device=squares.device).detach().expand(groups.count)
    low, high = (torch.full_like(squares, math.log(bound)) for bound in bounds)
    fixed = ~informed if "prior" in learn else torch.ones_like(informed)
    low, high = torch.where(fixed, first.log(), low), torch.where(fixed, first.log(), high)
    x = torch.cat([first.log(), fit.start[None]]) if fit.learned else first.log()
    if fit.learned:
        reach = math.log(1e12)
        low, high = torch.cat([low, fit.start[None] - reach]), torch.cat([high, fit.start[None] + reach])
    with torch.no_grad():
        possible = _lifted(objective, x, low, high, groups.count)
        begin = objective.value(x.clamp(low, high)).item()
        found = maximize(objective, possible, low, high, tolerance=tolerance)
    messages = _messages(found, groups, squares, fixed if "prior" in learn else None, low, high)
    return _tuning(found, x, begin, groups, fit, likelihood, tempered, center, messages)


def _lifted(objective: Concave, x: Tensor, low: Tensor, high: Tensor, count: int) -> Tensor:
    """The start, with precisions raised until the posterior is positive definite (Hessians, float32 rounding)."""
    shift = torch.zeros_like(x)
    for _ in range(30):
        try:
            if torch.isfinite(objective.value((x + shift).clamp(low, high))):
                objective.derivatives((x + shift).clamp(low, high))
                return x + shift
        except NotPositiveDefinite:
            pass
        shift[:count] += 2.0
    raise NotPositiveDefinite("no prior precision up to the upper bound makes the posterior positive definite")


def _flat(center: float | Tensor, mean: Tensor) -> Tensor:
    return torch.as_tensor(center, dtype=torch.float64, device=mean.device).detach()


def _fit(curvature: FittedCurvature, likelihood: Likelihood, tempered: Tempered, learned: bool) -> Fit:
    if learned and not likelihood.dispersion_name:
        raise UnsupportedOperation(f"{type(likelihood).__name__} has no noise to learn; only Gaussian(noise) has")
    statistics = curvature.statistics
    T = torch.as_tensor(tempered.T, dtype=torch.float64, device=statistics.device).detach()
    start = likelihood.dispersion.detach().double().log().to(statistics.device)

    def log_likelihood(log_dispersion: Tensor) -> Tensor:
        if not learned:
            return T * likelihood.log_likelihood(statistics).detach()
        return T * likelihood.with_dispersion(log_dispersion.exp()).log_likelihood(statistics)

    return Fit(log_likelihood, start, curvature.dispersion_power, learned)


def _objective(
    curvature: FittedCurvature, groups: Groups, squares: Tensor, fit: Fit, tempered: Tempered
) -> tuple[Concave, Tensor]:
    """The evidence as a function of log τ and log φ, and which groups it says anything about, (G,)."""
    matrix = curvature.matrix
    if groups.size != matrix.size:
        raise IncompatiblePrior(f"groups of {groups.size} weights do not fit a curvature over {matrix.size}")
    T = torch.as_tensor(tempered.T, dtype=torch.float64).item()
    prior_scale = T if tempered.prior else 1.0
    scaled = matrix.scale(T / prior_scale)  # τ' = prior_scale·τ: shift log τ, so that both forms are one
    squares = squares * prior_scale
    informed = groups.total((matrix.diagonal().detach().double() > 0).double()) > 0
    spectrum = scaled.grouped_eigenvalues(groups.index)
    if spectrum is None or bool((spectrum[0] < 0).any()):
        return CovarianceEvidence(scaled.cleaned(), groups, squares, fit), informed
    values, group = spectrum
    seen = values > 0
    return SpectralEvidence(values[seen].log(), group.to(values.device)[seen], squares, fit), informed


def _messages(
    found: Optimum, groups: Groups, squares: Tensor, silent: Tensor | None, low: Tensor, high: Tensor
) -> tuple[str, ...]:
    messages = []
    count = groups.count
    if silent is not None:
        tau = found.x[:count]
        free = ~silent
        messages += _named(groups, silent, "have no curvature and the evidence says nothing of them: kept at the start")
        messages += _named(groups, free & (tau >= high[:count]), "want to be infinite (θ̂ is at the prior mean): capped")
        messages += _named(groups, free & (tau <= low[:count]), "want no prior at all: capped at the lower bound")
    if len(found.x) > count and not bool(low[-1] < found.x[-1] < high[-1]):
        messages.append("the noise runs to its bound: the residuals are zero or the data too few; capped")
    if not found.converged:
        messages.append(f"not converged after {found.iterations} iterations: {found.slope:.3g} nats may be left")
    return tuple(messages)


def _named(groups: Groups, which: Tensor, what: str, shown: int = 3) -> list[str]:
    index = which.nonzero()[:, 0].tolist()
    if not index:
        return []
    labels = ", ".join(groups.label(k) for k in index[:shown]) + (", …" if len(index) > shown else "")
    return [f"{len(index)} of {groups.count} precisions {what} ({labels})"]


def _tuning(
    found: Optimum,
    x: Tensor,
    begin: float,
    groups: Groups,
    fit: Fit,
    likelihood: Likelihood,
    tempered: Tempered,
    center: float | Tensor,
    messages: tuple[str, ...],
) -> Tuning:
    T = torch.as_tensor(tempered.T, dtype=torch.float64).item()
    settings = []
    for point in (x, found.x):
        log_tau, u = fit.split(point)
        settings.append(Setting(log_tau.exp(), T, u.exp().item() if fit.learned else None))
    chosen = settings[1]
    likelihood = likelihood if chosen.dispersion is None else likelihood.with_dispersion(chosen.dispersion)
    scores = torch.tensor([-begin, -found.value], dtype=torch.float64)
    return Tuning(
        "evidence",
        tuple(settings),
        scores,
        1,
        groups.prior(chosen.precision, center),
        tempered,
        likelihood,
        found.iterations,
        found.converged,
        messages=messages,
    )
