"""Prior precisions and noise that maximize the log evidence: Newton in the cached eigenbasis, without data."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lapwing.errors import IncompatiblePrior, NotPositiveDefinite
from lapwing.evidence.by_probes import tune_probes
from lapwing.evidence.groups import Groups
from lapwing.evidence.newton import Concave, Optimum, maximize
from lapwing.evidence.objective import CovarianceEvidence, Fit, SpectralEvidence
from lapwing.evidence.tuning import Setting, Tuning
from lapwing.posterior import Belief

BOUNDS = (1e-10, 1e10)


def tune_evidence(
    belief: Belief,
    groups: Groups,
    *,
    learn: Sequence[str] = ("prior",),
    bounds: tuple[float, float] = BOUNDS,
    tolerance: float = 1e-10,
) -> Tuning:
    """Maximize the log evidence over one precision per group and, with "noise" in `learn`, the dispersion φ.

    The search starts at the precisions of the belief. The function is concave in (log τ, log φ), so Newton converges
    from any start to the only maximum, up to `tolerance` nats. A group whose maximum lies at infinity ends at a bound
    and a message says so. A group without curvature is left at its start: the evidence says nothing about it. No data
    are read, except by matrix-free curvature (`tune_probes`).

        tuning = tune_evidence(la.belief, Groups.scalar(la.params.size))
    """
    if belief.curvature.matrix.iterative:
        return tune_probes(belief, groups, learn=learn)
    unknown = set(learn) - {"prior", "noise"}
    if unknown or not learn:
        raise ValueError(
            f"the evidence can learn 'prior' and 'noise', not {sorted(unknown) or 'nothing'}; it grows without limit "
            "or vanishes with the temperature, which needs held-out data"
        )
    fit = _fit(belief, "noise" in learn)
    objective, informed = _objective(belief, groups, fit)
    squares = groups.squares(belief)
    first = groups.precisions(belief).to(squares.device)
    low, high = (torch.full_like(squares, math.log(bound)) for bound in bounds)
    fixed = ~informed if "prior" in learn else torch.ones_like(informed)
    low, high = torch.where(fixed, first.log(), low), torch.where(fixed, first.log(), high)
    x = torch.cat([first.log(), fit.start[None]]) if fit.learned else first.log()
    if fit.learned:
        lowest, highest = (torch.full_like(fit.start, math.log(b)) for b in belief.likelihood.dispersion_bounds)
        low, high = torch.cat([low, lowest[None]]), torch.cat([high, highest[None]])
    with torch.no_grad():
        possible = _lifted(objective, x, low, high, groups.count)
        begin = objective.value(x.clamp(low, high)).item()
        found = maximize(objective, possible, low, high, tolerance=tolerance)
    messages = _messages(found, groups, fixed if "prior" in learn else None, low, high)
    return _tuning(found, x, begin, groups, fit, belief, messages)


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


def _fit(belief: Belief, learned: bool) -> Fit:
    likelihood, statistics = belief.likelihood, belief.curvature.statistics
    if learned:
        likelihood.learned_names(("noise",))
    T = torch.as_tensor(belief.temperature.T, dtype=torch.float64, device=statistics.device).detach()
    start = likelihood.dispersion.detach().double().log().to(statistics.device)

    def log_likelihood(log_dispersion: Tensor) -> Tensor:
        if not learned:
            return T * likelihood.log_likelihood(statistics).detach()
        return T * likelihood.with_dispersion(log_dispersion.exp()).log_likelihood(statistics)

    return Fit(log_likelihood, start, belief.power, learned)


def _objective(belief: Belief, groups: Groups, fit: Fit) -> tuple[Concave, Tensor]:
    """The evidence as a function of log τ and log φ, and which groups it says anything about, (G,)."""
    matrix = belief.curvature.matrix
    if groups.size != matrix.size:
        raise IncompatiblePrior(f"groups of {groups.size} weights do not fit a curvature over {matrix.size}")
    T = float(belief.temperature.T)
    prior_scale = T if belief.temperature.prior else 1.0
    scaled = matrix.scale(T / prior_scale)  # τ' = prior_scale·τ: shift log τ, so that both forms are one
    squares = groups.squares(belief) * prior_scale
    informed = groups.total((matrix.diagonal().detach().double() > 0).double()) > 0
    spectrum = scaled.grouped_eigenvalues(groups.index)
    if spectrum is None or bool((spectrum[0] < 0).any()):
        return CovarianceEvidence(scaled.cleaned(), groups, squares, fit), informed
    values, group = spectrum
    seen = values > 0
    return SpectralEvidence(values[seen].log(), group.to(values.device)[seen], squares, fit), informed


def _messages(found: Optimum, groups: Groups, silent: Tensor | None, low: Tensor, high: Tensor) -> tuple[str, ...]:
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
    found: Optimum, x: Tensor, begin: float, groups: Groups, fit: Fit, belief: Belief, messages: tuple[str, ...]
) -> Tuning:
    settings = []
    for point in (x, found.x):
        log_tau, u = fit.split(point)
        dispersion = u.exp().item() if fit.learned else None
        settings.append(Setting(log_tau.exp(), float(belief.temperature.T), dispersion))
    scores = torch.tensor([-begin, -found.value], dtype=torch.float64)
    return Tuning.of(
        "evidence", belief, groups, settings, scores, 1, iterations=found.iterations, converged=found.converged,
        messages=messages,
    )  # fmt: skip
