"""Maximize the log evidence over prior precisions and noise, by Newton's method in the cached eigenbasis.

With x_g = log τ_g, u = log φ, q_g = ‖θ̂ − μ₀‖² over group g, k the power of φ in the precision,

    F(x, u) = T·log p(D|θ̂, u) − ½ Σ_g e^{x_g} q_g − ½ [log|T e^{−ku} H + Π(x)| − log|Π(x)|].

In an eigenbasis that the groups respect the bracket is Σ_p softplus(log T e_p − k u − x_{g(p)}), and F splits into one
term per group. Otherwise its derivatives follow from the posterior covariance Σ: with m_g = τ_g Σ_{p∈g} Σ_pp and
C_gh = τ_g τ_h Σ_{p∈g, p'∈h} Σ_pp'²,

    ∂F/∂x_g = ½(|g| − m_g − τ_g q_g),    −∂²F/∂x_g∂x_h = ½(δ_gh (m_g + τ_g q_g) − C_gh).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lapwing.errors import IncompatiblePrior, NotPositiveDefinite, UnsupportedOperation
from lapwing.evidence.candidates import check_candidates, edge
from lapwing.evidence.evidence import evidence_of
from lapwing.evidence.fixed_point import tune_probes
from lapwing.evidence.groups import Groups
from lapwing.evidence.newton import Arrow, Concave, Curve, DenseCurve, Optimum, maximize
from lapwing.evidence.tuning import Setting, Tuning
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
        raise ValueError(
            f"the evidence can learn 'prior' and 'dispersion' (the noise), not {sorted(unknown) or 'nothing'}; it "
            "grows without limit or vanishes with the temperature, which needs held-out data"
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


@dataclass(frozen=True, eq=False)
class Fit:
    """T·log p(D|θ̂) as a function of log φ, and how φ enters the precision.

    `log_likelihood` maps a 0-d log φ to T times the log-likelihood, differentiably. `learned` says whether log φ is the
    last coordinate; otherwise it stays at `start`.
    """

    log_likelihood: Callable[[Tensor], Tensor]
    start: Tensor
    power: int = 1
    learned: bool = False

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split x into log-precisions and log φ."""
        return (x[:-1], x[-1]) if self.learned else (x, self.start)

    def derivatives(self, log_dispersion: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and minus the second derivative in log φ, each (1,), or (0,) if it is not learned."""
        if not self.learned:
            empty = log_dispersion.new_zeros(0)
            return empty, empty
        with torch.enable_grad():
            u = log_dispersion.detach().clone().requires_grad_()
            (first,) = torch.autograd.grad(self.log_likelihood(u), u, create_graph=True)
            (second,) = torch.autograd.grad(first, u)
        return first.detach()[None], -second[None]


@dataclass(frozen=True, eq=False)
class SpectralEvidence(Concave):
    """F where every eigenvector lies inside one group."""

    log_eigenvalues: Tensor  # (M,) log(T·e_p) of the eigenvalues above zero
    group: Tensor  # (M,)
    squares: Tensor  # (G,)
    fit: Fit

    def value(self, x: Tensor) -> Tensor:
        log_tau, u = self.fit.split(x)
        bracket = softplus(self._exponent(log_tau, u)).sum()
        return self.fit.log_likelihood(u) - 0.5 * (log_tau.exp() * self.squares).sum() - 0.5 * bracket

    def _exponent(self, log_tau: Tensor, u: Tensor) -> Tensor:
        return self.log_eigenvalues - self.fit.power * u - log_tau[self.group]

    def _sum(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self.squares).index_add(0, self.group, values)

    def derivatives(self, x: Tensor) -> tuple[Tensor, Curve]:
        log_tau, u = self.fit.split(x)
        share = torch.sigmoid(self._exponent(log_tau, u))
        effective, spread = self._sum(share), self._sum(share * (1 - share))
        first, second = self.fit.derivatives(u)
        k, learned = self.fit.power, len(first)
        pull = log_tau.exp() * self.squares
        gradient = torch.cat([0.5 * (effective - pull), first + 0.5 * k * effective.sum()[None][:learned]])
        border = 0.5 * k * spread if learned else first
        return gradient, Arrow(0.5 * (spread + pull), border, second + 0.5 * k**2 * spread.sum()[None][:learned])


@dataclass(frozen=True, eq=False)
class CovarianceEvidence(Concave):
    """F for groups that cut through eigenvectors: a dense block with several precisions inside.

    Newton's matrix is exact for up to `exact` groups of up to `dense` weights. Beyond, it is replaced by the diagonal
    ½(m_g + τ_g q_g), an upper bound that needs marginal variances only and converges linearly.
    """

    matrix: PSD  # T·H
    groups: Groups
    squares: Tensor  # (G,)
    fit: Fit
    exact: int = 1024
    dense: int = 8192

    def _scale(self, u: Tensor) -> Tensor:
        return (-self.fit.power * u).exp()

    def value(self, x: Tensor) -> Tensor:
        log_tau, u = self.fit.split(x)
        try:
            bracket = self.matrix.scale(self._scale(u)).logdet_ratio(self.groups.diagonal(log_tau.exp()))
        except NotPositiveDefinite:  # an exact Hessian under too small a prior: no posterior, no evidence
            return x.new_tensor(-torch.inf)
        return self.fit.log_likelihood(u) - 0.5 * (log_tau.exp() * self.squares).sum() - 0.5 * bracket

    def derivatives(self, x: Tensor) -> tuple[Tensor, Curve]:
        log_tau, u = self.fit.split(x)
        tau = log_tau.exp()
        precision = self.matrix.scale(self._scale(u)) + self.groups.diagonal(tau)
        left = tau * self.groups.total(precision.inverse_diagonal().double())  # m
        effective = self.groups.total(torch.ones(self.groups.size, dtype=tau.dtype, device=tau.device)) - left
        pull = tau * self.squares
        first, second = self.fit.derivatives(u)
        k, learned = self.fit.power, len(first)
        gradient = torch.cat([0.5 * (effective - pull), first + 0.5 * k * effective.sum()[None][:learned]])
        if self.groups.count > self.exact or self.groups.size > self.dense:
            corner = second + 0.5 * k**2 * left.sum()[None][:learned]
            return gradient, Arrow(0.5 * (left + pull), torch.zeros_like(left) if learned else first, corner)
        shared = _squared_covariance(precision, self.groups) * tau * tau[:, None]  # C
        spread = left - shared.sum(1)
        curve = 0.5 * (torch.diag(left + pull) - shared)
        if learned:
            border = 0.5 * k * spread
            corner = second + 0.5 * k**2 * spread.sum()
            curve = torch.cat([torch.cat([curve, border[:, None]], 1), torch.cat([border, corner])[None]])
        return gradient, DenseCurve(curve)


def _squared_covariance(precision: PSD, groups: Groups) -> Tensor:
    """Σ_{p∈g, p'∈h} Σ_pp'², (G, G)."""
    index = groups.index.to(precision.device)
    total = torch.zeros(groups.count, groups.count, dtype=torch.float64, device=precision.device)
    for block, part in precision.blockwise(index):
        square = block.solve(torch.eye(block.size, dtype=block.dtype, device=block.device)).double().square()
        rows = torch.zeros(groups.count, block.size, dtype=square.dtype, device=square.device)
        total = total.index_add(1, part, rows.index_add(0, part, square))
    return total


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
        raise ValueError(f"grid has candidates for {idle[0]!r}, which is not in learn={tuple(learn)}")
    check_candidates(grid)
    if not grid:
        return tune(belief, groups, learn=learn)
    if unknown := set(grid) - {"prior", "dispersion"}:
        raise UnsupportedOperation(
            f"the evidence can choose 'prior' and 'dispersion' (the noise), not {sorted(unknown)}"
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
