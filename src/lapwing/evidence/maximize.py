"""Choose prior precisions and noise by the largest log evidence: no held-out data, and mostly no data at all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lapwing.errors import BadData, IncompatiblePrior, NotPositiveDefinite, UnsupportedOperation
from lapwing.evidence.ascent import Concave, CovarianceEvidence, Fit, Optimum, SpectralEvidence, maximize
from lapwing.evidence.evidence import evidence_of
from lapwing.evidence.search import edge
from lapwing.evidence.settings import Groups, Setting, Tuning
from lapwing.linalg import PSD
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
    """Maximize the log evidence over one precision per group and, with "dispersion" in `learn`, the dispersion φ.

    The search starts at the precisions of the belief. The function is concave in (log τ, log φ), so Newton converges
    from any start to the only maximum, up to `tolerance` nats. A group whose maximum lies at infinity ends at a bound,
    and a message says so. A group without curvature is left at its start: the evidence says nothing about it. No data
    are read, except by matrix-free curvature (`tune_probes`).

        tuning = tune_evidence(la.belief, Groups.scalar(la.params.size))
    """
    unknown = set(learn) - {"prior", "dispersion"}
    if unknown or not learn:
        name = belief.likelihood.dispersion_name
        known = f"'prior' and {name!r}" if name else "'prior'"
        got = ", ".join(map(repr, sorted(unknown))) or "nothing"
        raise BadData(
            f"the evidence can choose {known}, got {got}. Temperatures need held-out data: la.tune(val_loader)"
        )
    if belief.curvature.matrix.iterative:
        return tune_probes(belief, groups, learn=learn)
    fit = _fit(belief, "dispersion" in learn)
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
    """Raise the precisions of the start until the posterior is positive definite (Hessians, float32 rounding)."""
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
    """Write the log-likelihood as a function of log φ."""
    likelihood, statistics = belief.likelihood, belief.curvature.statistics
    if learned:
        likelihood.learned_names(("dispersion",))
    T = torch.as_tensor(belief.temperature.T, dtype=torch.float64, device=statistics.device).detach()
    start = likelihood.dispersion.detach().double().log().to(statistics.device)

    def log_likelihood(log_dispersion: Tensor) -> Tensor:
        if not learned:
            return T * likelihood.log_likelihood(statistics).detach()
        return T * likelihood.with_dispersion(log_dispersion.exp()).log_likelihood(statistics)

    return Fit(log_likelihood, start, belief.power, learned)


def _objective(belief: Belief, groups: Groups, fit: Fit) -> tuple[Concave, Tensor]:
    """Write the evidence as a function of log τ and log φ; also return which groups it depends on, (G,)."""
    matrix = belief.curvature.matrix
    if groups.size != matrix.size:
        raise IncompatiblePrior(f"groups of {groups.size} weights do not fit a curvature over {matrix.size}")
    T = float(belief.temperature.T)
    prior_scale = T if belief.temperature.prior else 1.0
    scaled = matrix.scale(T / prior_scale)  # τ' = prior_scale·τ: shift log τ, so that both forms are one
    squares = groups.squares(belief) * prior_scale
    informed = groups.total((matrix.diagonal().detach().double() > 0).double()) > 0
    _require_semidefinite(scaled)
    spectrum = scaled.grouped_eigenvalues(groups.index)
    if spectrum is None or bool((spectrum[0] < 0).any()):
        return CovarianceEvidence(scaled.cleaned(), groups, squares, fit), informed
    values, group = spectrum
    seen = values > 0
    return SpectralEvidence(values[seen].log(), group.to(values.device)[seen], squares, fit), informed


def _require_semidefinite(matrix: PSD) -> None:
    """Refuse an exact Hessian with negative eigenvalues beyond rounding: log|T·H + τI| has no lower bound there."""
    values = matrix.eigenvalues()
    if values is None:
        return
    lowest, rounding = values.min().item(), torch.finfo(matrix.dtype).eps ** 0.5 * values.abs().max().item()
    if lowest < -rounding:
        raise NotPositiveDefinite(
            f"the curvature is indefinite: its smallest eigenvalue is {lowest:.3g}, and the evidence grows without "
            f"limit as the prior precision falls towards {-lowest:.3g}, so it has no maximum. Fit with factor='ggn', "
            "which is never indefinite, train on to a minimum, or choose the prior yourself: la.replace(prior=...)."
        )


def _messages(found: Optimum, groups: Groups, silent: Tensor | None, low: Tensor, high: Tensor) -> tuple[str, ...]:
    messages = []
    count = groups.count
    if silent is not None:
        tau = found.x[:count]
        free = ~silent
        messages += _named(groups, silent, "have no curvature: the evidence says nothing about them, they are kept")
        messages += _named(groups, free & (tau >= high[:count]), "would be infinite (θ̂ is at the prior mean): capped")
        messages += _named(groups, free & (tau <= low[:count]), "would be zero (no prior at all): capped")
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
            fresh = torch.where(known, best, tau).clamp(*BOUNDS)
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


Tune = Callable[..., Tuning]
"""A function that maximizes the evidence: `tune_evidence`, or another with the same arguments."""


def tune_grid(
    tune: Tune,
    belief: Belief,
    groups: Groups,
    grid: Mapping[str, Sequence[float]],
    *,
    learn: Sequence[str] = ("prior",),
    value: Callable[[Belief], Tensor] = evidence_of,
) -> Tuning:
    """Maximize the evidence over the candidates of `grid` for the names it has, and over all values for the others.

    Candidates for "prior" are precisions, for "dispersion" what users read (a standard deviation for Gaussians). With
    several groups of weights, each candidate is tried for all groups together, and then the candidate nearest to its
    own maximum for each group. `value` is what `tune` maximizes.
    """
    idle = [name for name in grid if name not in learn]
    if idle:
        raise BadData(f"grid has candidates for {idle[0]!r}, which is not in learn={tuple(learn)}")
    if not grid:
        return tune(belief, groups, learn=learn)
    if unknown := set(grid) - {"prior", "dispersion"}:
        raise UnsupportedOperation(
            f"the evidence can choose 'prior' and the noise, and grid= has {sorted(unknown)}. Temperatures need "
            "held-out data: la.tune(val_loader, grid=...)"
        )
    free = tuple(name for name in learn if name not in grid)
    now = groups.precisions(belief)
    precisions = [torch.full_like(now, float(tau)) for tau in grid.get("prior", ())] or [now]
    if "prior" in grid and groups.count > 1:
        best = tune(belief, groups, learn=learn).setting.precision
        choices = torch.tensor([float(tau) for tau in grid["prior"]], dtype=torch.float64)
        precisions.append(choices[(best.cpu().log()[:, None] - choices.log()).abs().argmin(1)])
    tunings = [
        _at(tune, value, family, groups, tau, free)
        for tau, family in itertools.product(precisions, _families(belief, grid.get("dispersion", ())))
    ]
    scores = torch.tensor([each.score for each in tunings], dtype=torch.float64)
    k = int(scores.nan_to_num(torch.inf).argmin())
    settings = [each.setting for each in tunings]
    if "dispersion" in learn:
        settings = [replace(each.setting, dispersion=float(each.likelihood.dispersion)) for each in tunings]
    return replace(
        tunings[k],
        settings=tuple(settings),
        scores=scores,
        best=k,
        iterations=sum(each.iterations for each in tunings),
        messages=(*tunings[k].messages, *_edges(settings[k], grid)),
    )


def _families(belief: Belief, shown: Sequence[float]) -> list[Belief]:
    """Return the belief with each of these dispersions, or unchanged if there are none."""
    told = [belief.likelihood.with_dispersion(belief.likelihood.dispersion_from(float(v))) for v in shown]
    return [replace(belief, likelihood=each) for each in told] or [belief]


def _at(
    tune: Tune,
    value: Callable[[Belief], Tensor],
    belief: Belief,
    groups: Groups,
    tau: Tensor,
    free: tuple[str, ...],
) -> Tuning:
    """Score one candidate; what `free` names is maximized over."""
    there = groups.applied(belief, tau.to(belief.weights.device))
    if free:
        tuning = tune(there, groups, learn=free)
        if "prior" in free:
            return tuning
        exact = [replace(each, precision=tau) for each in tuning.settings]  # undo the rounding of its logarithm
        return replace(tuning, settings=tuple(exact), prior=groups.prior(tau, belief.prior.mean))
    with torch.no_grad():
        score = -value(there).double().cpu().reshape(1)
    return Tuning.of("evidence", belief, groups, [Setting(tau, float(belief.temperature.T))], score, 0)


def _edges(setting: Setting, grid: Mapping[str, Sequence[float]]) -> list[str]:
    found = [edge("prior", value, grid["prior"]) for value in setting.precision.tolist()] if "prior" in grid else []
    if "dispersion" in grid and setting.dispersion is not None:
        found.append(edge(setting.unit[0], setting.dispersion ** setting.unit[1], grid["dispersion"]))
    return list(dict.fromkeys(text for text in found if text))
