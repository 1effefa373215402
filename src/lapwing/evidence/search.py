"""Which settings are tried on held-out data, and which one is chosen.

`tune_validation` reads the data once (`heldout.collect`), and `search` then works on what was kept: it scores a grid of
settings (`Candidates`), descends from the best of them, adds the network without a posterior, and lets a rule choose
among all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lapwing.errors import BadData, NotConverged, nearest, positives
from lapwing.evidence.drawnoutputs import collect_draws, nodes_of_draws
from lapwing.evidence.heldout import PADDING, PER_DECADE, Batch, GramSweep, Nodes, Score, Sweep, collect, linked
from lapwing.evidence.settings import (
    SCALING,
    Groups,
    Rule,
    Setting,
    Trials,
    Tuning,
    baselines,
    best_logit_temperature,
    counted,
    held_near,
    lowest,
    require_logits,
)
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Belief
from lapwing.predictive.predictive import Pushed

BISECTIONS = 3  # bisections of the decade between two priors of the grid
OPTIONAL = ("temperature",)  # learned by default, but only where that helps
HELD_NOISE = 2.0  # how many items the noise in force weighs when the noise of the network alone is fitted
MEMORY = 2 * 1024**3
EDGE = 1e-3  # a start at the end of its range is moved inside by this share of it: the sigmoid never reaches the end
TOLERANCE = 1e-5  # nats per item below which the descent stops
LEARNABLE = ("prior", "temperature", "logit_temperature", "dispersion")
GRID: Mapping[str, Sequence[float]] = {
    "prior": tuple(10.0**k for k in range(-4, 6)),
    "temperature": tuple(10.0**k for k in range(-1, 5)),
}
APART = 1.25  # how many times the spread of log-variances under the prior alone counts as telling inputs apart
HOPELESS = 1.5  # a loss this many times that of temperature scaling is not improved by a logit temperature
LOGIT_RANGE = (0.05, 20.0)
SUBSET = 1000  # samples used for a first guess of the logit temperature
STEP = 0.2  # distance in log s between the points of a parabola


def tune_validation(
    belief: Belief,
    groups: Groups,
    batches: Iterable[Batch],
    *,
    learn: Sequence[str] | None = None,
    grid: Mapping[str, Sequence[float]] | None = None,
    score: Score | None = None,
    rule: Rule = lowest,
    steps: int = 20,
    memory: int = MEMORY,
    method: str = "validation",
    prepare: Callable[[GramSweep, Setting], Sweep] | None = None,
    draws: Iterable[Pushed] | None = None,
) -> Tuning:
    """Minimize the NLL of held-out data over precisions (one per group), temperature, noise and logit temperature.

    - `batches` yields (f (B, *event, C), canonical targets, rows of ∂f/∂θ) and is read once. With `draws`, which yield
      products with ∂f/∂θ in place of its rows, items with many outputs are scored by draws of f (`collect_draws`).
    - `learn` names what the data choose; the rest keeps the value that the belief has. By default the data choose the
      prior, the temperature if it helps to tell inputs apart (`tells_apart`), and the logit temperature or a noise
      that the fit estimated.
    - `grid` has the user's candidates by name; noise levels are standard deviations. A common precision is tried for
      all groups.
    - `score` is the log-probability under the link that prediction will use.
    - `steps` of L-BFGS start at the best candidate and move every quantity, each group's precision on its own.
    - `rule` picks from all settings, among which is always the network without a posterior.
    - `prepare` may change what the pass has kept, given the setting in force (leave-one-out does).

    A damped belief is tuned as it is (`factored_precision`). The covariances come from a rational approximation in τ/T
    whose relative error is bounded and reported.
    """
    optional = tuple({*OPTIONAL} - {*(grid or {})}) if learn is None else ()
    if learn is None:
        learn = tuple(dict.fromkeys((*default_learn(belief.likelihood), *(grid or {}))))
    learned = check_learned(learn, grid, belief.likelihood)
    T, scaling = float(belief.temperature.T), belief.logit_temperature
    now = Setting(groups.precisions(belief), T, logit_temperature=scaling)
    usual, limits = GRID, None
    if "dispersion" in learned and "dispersion" not in (grid or {}):
        limits, batches = dispersion_limits(batches, belief.likelihood)
        usual = {**GRID, "dispersion": [phi**belief.likelihood.dispersion_unit for phi in limits]}
    candidates = Candidates.of(learned, grid or {}, now, belief.likelihood, optional, usual)
    # some nodes lie below every setting, and they must be solved too
    candidates = replace(candidates, least=belief.curvature.matrix.least_shift() * 10 ** (PADDING / PER_DECADE))
    box = candidates.box if prepare is None else candidates.including(now).box
    nodes = nodes_spanning(belief, box, candidates.least)
    sweep: Sweep
    if draws is not None:
        nodes = nodes_of_draws(nodes, belief.curvature.matrix.largest_eigenvalue())
        sweep = collect_draws(belief, groups, draws, nodes, memory=memory)
    else:
        kept = collect(belief, groups, batches, nodes, score=score or linked(), memory=memory)
        if prepare is not None and not candidates.solvable(kept, [now]):
            raise NotConverged(
                f"the prior in force is below {candidates.least:.2g} times the temperature, where products with this "
                "matrix-free curvature are too inexact to solve with: start from a larger prior, la.replace(prior=...)"
            )
        sweep = kept if prepare is None else prepare(kept, now)
    if limits is not None:
        best = belief.likelihood.best_dispersion(sweep.f, sweep.y)
        candidates = replace(candidates, dispersions=dispersions_around(best, limits))
    found = search(sweep, candidates, rule=rule, steps=steps)
    return Tuning.of(
        method,
        belief,
        groups,
        found.trials.settings,
        found.trials.scores,
        found.best,
        iterations=found.iterations,
        baselines={name: losses.mean().item() for name, losses in found.trials.baselines.items()},
        messages=found.messages,
        logit_temperature=found.setting.logit_temperature,
    )


@dataclass(frozen=True, eq=False)
class Found:
    """What a search tried, which setting it chose, and what to know about it."""

    trials: Trials
    best: int
    iterations: int
    messages: tuple[str, ...]

    @property
    def setting(self) -> Setting:
        """The chosen setting."""
        return self.trials.settings[self.best]


def search(sweep: Sweep, candidates: Candidates, *, rule: Rule = lowest, steps: int = 20) -> Found:
    """Score the candidates on what a pass kept, descend from the best, and choose by `rule`."""
    rivals = baselines(sweep.f, sweep.y, sweep.likelihood, dispersion="dispersion" in candidates.learned)
    given, candidates = candidates, candidates.settled(sweep)
    free, near = candidates.free, candidates.near(sweep)
    settings = candidates.settings(sweep, rivals, near)
    left_out = len(candidates.every()) - len(settings)
    losses, iterations = sweep.losses(settings), 0
    scores = losses.mean(1).tolist()
    if steps and free and (len(settings) > 1 or "logit_temperature" in free) and math.isfinite(min(scores)):
        start = settings[scores.index(min(scores))]
        refined, iterations = descend(sweep, start, candidates.box, free, steps, near)
        if candidates.solvable(sweep, [refined]):
            settings.append(refined)
            losses = torch.cat([losses, sweep.losses([refined])])
    if "prior" in candidates.given and len(settings[0].precision) > 1:
        settings, losses = by_group(sweep.losses, candidates, settings, losses)
    trials = with_limits(sweep, candidates, settings, losses, rivals, near)
    trials, best = _chosen(sweep, trials, rule, free, near, bisect=bool(steps) and "prior" in free)
    used = sweep.rho([each for each in trials.settings if not each.deterministic])
    messages = (
        *([candidates.unsolved(left_out)] if left_out else []),
        *_settled(sweep, given, candidates.learned),
        *trials.about(best, candidates.edges),
        f"{len(trials.settings)} settings from one pass over {len(sweep.f)} data; variances are right to a relative "
        f"{sweep.nodes.error(used):.1g}; {trials.rivals()}",
        *sweep.shortcuts(settings),
        *sweep.notes,
    )
    return Found(trials, best, iterations, messages)


def _chosen(
    sweep: Sweep, trials: Trials, rule: Rule, free: Sequence[str], near: float, *, bisect: bool
) -> tuple[Trials, int]:
    """Choose by the rule; with `bisect`, a rule that prefers wide priors also gets priors between those of the grid.

    The logit temperature of the choice is fitted to all data, and its losses, which may have been interpolated, are
    computed.
    """
    fitted = "logit_temperature" in free
    if bisect and rule is not lowest:
        trials = _between(sweep, trials, rule, near if fitted else None)
    best = trials.choose(rule)
    if trials.settings[best].deterministic:
        return trials, best
    if fitted:
        trials = _polished(sweep, trials, best, near)
        best = len(trials.settings) - 1
    losses = trials.losses.clone()
    losses[best] = sweep.exact_losses([trials.settings[best]])[0]
    return replace(trials, losses=losses), best


def by_group(
    score: Callable[[Sequence[Setting]], Tensor], candidates: Candidates, settings: list[Setting], losses: Tensor
) -> tuple[list[Setting], Tensor]:
    """Add settings whose groups have different candidates: from the best on, one group after the other.

    `score` gives the losses (S, N) of settings.
    """
    for group in range(len(settings[0].precision)):
        best = settings[int(losses.mean(1).nan_to_num(torch.inf).argmin())]
        more = []
        for common in candidates.precisions:
            if common[group] != best.precision[group]:
                precision = best.precision.clone()
                precision[group] = common[group]
                more.append(replace(best, precision=precision))
        if more:
            settings, losses = [*settings, *more], torch.cat([losses, score(more)])
    return settings, losses


def with_limits(
    held: Labeled,
    candidates: Candidates,
    settings: list[Setting],
    losses: Tensor,
    rivals: Mapping[str, Tensor],
    near: float,
) -> Trials:
    """Add the network without a posterior, as it is and with its usual remedy, to settings and their losses."""
    count = len(settings)
    limits = [*_limits(held, candidates, near), _limit(held, None, candidates.logit_temperature)]
    settings = [*settings, *(setting for setting, _ in limits)]
    losses = torch.cat([losses, *(loss[None] for _, loss in limits)])
    last = len(settings) - 1
    barred = {last} if {"dispersion", "logit_temperature"} & {*candidates.given} else set()
    barred = {*range(count, last + 1)} if "prior" in candidates.given else barred
    reference = min(range(count, last + 1), key=lambda k: losses[k].mean().nan_to_num(torch.inf).item())
    return Trials(tuple(settings), losses, rivals, last, frozenset(barred), reference)


def _limits(held: Labeled, candidates: Candidates, near: float) -> list[tuple[Setting, Tensor]]:
    """Score the network without a posterior under the best noise or logit temperature, or each that the user gave."""
    if not {"dispersion", "logit_temperature"} & {*candidates.learned}:
        return []
    f, y, likelihood = held.f, held.y, held.likelihood
    dispersions: Sequence[float | None] = candidates.dispersions
    if "dispersion" in candidates.free:
        dispersions = (likelihood.best_dispersion(f, y, HELD_NOISE),)
    divisors: Sequence[float] = candidates.logit_temperatures
    if "logit_temperature" in candidates.free:
        divisors = (near,)
    return [_limit(held, phi, divisor) for phi in dispersions for divisor in divisors]


def _limit(held: Labeled, dispersion: float | None, logit_temperature: float) -> tuple[Setting, Tensor]:
    """Score the network without a posterior under a noise (None: unchanged) and a logit temperature."""
    f, y, likelihood = held.f, held.y, held.likelihood
    likelihood = likelihood if dispersion is None else likelihood.with_dispersion(dispersion)
    empty = torch.empty(0, dtype=torch.float64)
    unit = likelihood.shown_as
    setting = Setting(empty, 1.0, dispersion, deterministic=True, logit_temperature=logit_temperature, unit=unit)
    losses = -likelihood.log_prob(f / logit_temperature, y).double().reshape(-1)
    return setting, counted(f, y, likelihood, losses)


def _span(box: Mapping[str, tuple[float, float]], power: int, tempers_prior: bool) -> tuple[float, float]:
    """The smallest and largest ρ = τ φ^k/T in the box."""
    least, most = (1.0, 1.0) if tempers_prior else box["temperature"]
    (low, high), (quiet, loud) = box["prior"], box["dispersion"]
    return low * quiet**power / most, high * loud**power / least


def nodes_spanning(belief: Belief, box: Mapping[str, tuple[float, float]], least: float = 0.0) -> Nodes:
    """Return nodes for settings in the box with ρ ≥ least; for a damped belief they also serve damped factors."""
    matrix, split = belief.curvature.matrix, belief.split
    low, high = (max(each, least) for each in _span(box, belief.power, belief.temperature.prior))
    largest_factor = None if split is None else matrix.largest_damped(split)
    return Nodes.spanning(low, high, matrix.largest_eigenvalue(), largest_factor)


def nodes_for(belief: Belief, precision: Tensor, temperatures: Sequence[float]) -> Nodes:
    """Return nodes for these precisions at these temperatures."""
    return nodes_spanning(belief, box_of([precision], temperatures, [belief.likelihood.dispersion.item()], ()))


def _between(sweep: Sweep, trials: Trials, rule: Rule, near: float | None) -> Trials:
    """Add priors between the chosen one and the next wider by bisection; `near` as in `fit_logits`."""
    for _ in range(BISECTIONS):
        setting = trials.settings[trials.choose(rule)]
        found = None if setting.deterministic else wider(setting, trials.settings)
        if found is None:
            break
        found = found if near is None else fit_logits(sweep, [found], near=near)[0]
        trials = trials.joined(found, sweep.losses([found])[0])
    return trials


def _polished(sweep: Sweep, trials: Trials, best: int, near: float) -> Trials:
    """Add the chosen setting again with its logit temperature fitted to all data instead of a subset."""
    (fitted,) = fit_logits(sweep, [trials.settings[best]], near=near)
    losses = sweep.losses([fitted])[0]
    if losses.mean() > trials.losses[best].mean():
        fitted, losses = trials.settings[best], trials.losses[best]
    return trials.joined(fitted, losses)


def _settled(sweep: Sweep, given: Candidates, learned: Sequence[str]) -> list[str]:
    """Say whether the temperature was tuned or kept, and why, if that was left to the data."""
    said = []
    if "temperature" in {*given.optional} & {*given.learned}:
        most, alone = log_spreads(sweep)
        fate = "tuned" if "temperature" in learned else "kept"
        said.append(
            f"the temperature is {fate}: log-variances of the held-out inputs spread by {most:.2g} at most, "
            f"{alone:.2g} under the prior alone"
        )
    return said


def descend(
    sweep: Sweep,
    setting: Setting,
    box: Mapping[str, tuple[float, float]],
    learned: Sequence[str],
    steps: int,
    near: float = 1.0,
) -> tuple[Setting, int]:
    """Minimize the total NLL by L-BFGS in the logarithms of what is learned; a sigmoid keeps each inside its range.

    A learned logit temperature is held `near` a given one (`held_near`). Returns the setting and the iterations.
    """
    phi = sweep.likelihood.dispersion.item() if setting.dispersion is None else setting.dispersion
    start = {
        "prior": setting.precision.double(),
        "temperature": torch.tensor(setting.temperature, dtype=torch.float64),
        "dispersion": torch.tensor(phi, dtype=torch.float64),
        "logit_temperature": torch.tensor(setting.logit_temperature, dtype=torch.float64),
    }
    wide = {name: (math.log(low), math.log(high)) for name, (low, high) in box.items() if name in learned}
    places = {name: (start[name].log() - low) / (high - low) for name, (low, high) in wide.items()}
    moving = {name: torch.logit(place, eps=EDGE) for name, place in places.items()}
    moving = {name: z.requires_grad_() for name, z in moving.items()}
    tolerance = max(1e-3, TOLERANCE * len(sweep.f))  # of the total, as the gradient is
    optimizer = torch.optim.LBFGS(
        list(moving.values()),
        max_iter=steps,
        max_eval=2 * steps,
        tolerance_grad=tolerance,
        tolerance_change=tolerance,
        line_search_fn="strong_wolfe",
    )

    def values() -> list[Tensor]:
        inside = {name: (low + (high - low) * moving[name].sigmoid()).exp() for name, (low, high) in wide.items()}
        return list({**start, **inside}.values())

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            tau, T, dispersion, logits = values()
            coefficients = sweep.coefficients(tau, T, dispersion)[None]
            leaf = coefficients.detach().requires_grad_()
            noise = dispersion.detach().requires_grad_("dispersion" in moving)
            divisor = logits.detach().requires_grad_("logit_temperature" in moving)
            total = torch.zeros((), dtype=torch.float64)
            for losses in sweep.parts(leaf, noise, (T / dispersion**sweep.power).detach()[None], divisor[None]):
                part = losses.sum()
                if part.requires_grad:  # a link of a user's own may have no derivative: then nothing moves
                    part.backward()
                total += part.detach().cpu()
            if "logit_temperature" in moving:
                held = held_near(divisor, near)
                held.backward()
                total += held.detach()
            pulled = [(coefficients, leaf.grad), (dispersion, noise.grad), (logits, divisor.grad)]
            roots = [(value, grad) for value, grad in pulled if grad is not None and value.requires_grad]
            if roots:
                torch.autograd.backward([value for value, _ in roots], [grad for _, grad in roots])
        return total

    optimizer.step(closure)
    count = int(optimizer.state[next(iter(moving.values()))].get("n_iter", 0))
    tau, T, dispersion, logits = (value.detach() for value in values())
    found = dispersion.item() if "dispersion" in moving else setting.dispersion
    return Setting(tau, T.item(), found, logit_temperature=logits.item()), count


def wider(setting: Setting, settings: Iterable[Setting]) -> Setting | None:
    """Return the midpoint, in log τ and log s, to the next wider setting of the same temperature and noise, if any."""
    key = (setting.temperature, setting.dispersion, False)
    alike = [each for each in settings if (each.temperature, each.dispersion, each.deterministic) == key]
    beyond = [each for each in alike if each.narrow < (1 - EDGE) * setting.narrow]
    if not beyond:
        return None
    next_one = max(beyond, key=lambda each: each.narrow)
    divisor = math.sqrt(setting.logit_temperature * next_one.logit_temperature)
    return replace(setting, precision=(setting.precision * next_one.precision).sqrt(), logit_temperature=divisor)


class Labeled(Protocol):
    """Held-out data as the network itself sees them: outputs f (N, *event, C), canonical targets, a likelihood."""

    @property
    def f(self) -> Tensor: ...

    @property
    def y(self) -> Tensor: ...

    @property
    def likelihood(self) -> Likelihood: ...


def default_learn(likelihood: Likelihood) -> tuple[str, ...]:
    """Return the names that held-out data choose by default."""
    if likelihood.learns_dispersion:
        return ("prior", "temperature", "dispersion")
    return ("prior", "temperature", "logit_temperature") if likelihood.has_logits else ("prior", "temperature")


def check_learned(
    learn: Sequence[str], grid: Mapping[str, Sequence[float]] | None, likelihood: Likelihood
) -> tuple[str, ...]:
    """Refuse names that cannot be learned, and candidates for names that are not learned."""
    unknown = [name for name in (*learn, *(grid or {})) if name not in LEARNABLE]
    if unknown or not learn:
        names = ["prior", "temperature", *["logit_temperature"] * likelihood.has_logits]
        names += [likelihood.dispersion_name] if likelihood.dispersion_name else []
        known = ", ".join(map(repr, names))
        hint = nearest(unknown[0], names) if unknown else ""
        got = ", ".join(map(repr, dict.fromkeys(unknown))) or "nothing"
        raise BadData(f"held-out data can choose {known} for {type(likelihood).__name__}, got {got}{hint}")
    idle = [name for name in (grid or {}) if name not in learn]
    if idle:
        raise BadData(f"grid has candidates for {idle[0]!r}, which is not in learn={tuple(learn)}")
    for name, values in (grid or {}).items():
        positives(f"the candidates for {name!r}", values)
    likelihood.learned_names(tuple(learn))
    if "logit_temperature" in learn:
        require_logits(likelihood)
    return tuple(learn)


def edge(name: str, value: float, candidates: Sequence[float]) -> str:
    """Return a warning if a chosen value is the smallest or largest of several candidates, else an empty text."""
    low, high = min(candidates), max(candidates)
    if low == high or low * 1.001 < value < high * 0.999:
        return ""
    return f"the chosen {name} {value:.3g} is at the edge of its grid ({low:.3g} to {high:.3g}): try a wider one"


@dataclass(frozen=True, eq=False)
class Candidates:
    """The grid: precisions (G,) × temperatures × dispersions × logit temperatures.

    Without logit temperatures, one is fitted to each point of the grid. `dispersion`, `logit_temperature` and
    `temperature` are the values in force, used where they are not learned. `optional` names are learned only where
    that helps; `given` names take no values but the user's candidates. `unit` is the
    name of the dispersion and the power of it that users read. Settings whose ρ = τ φ^k/T lies below `least` are left
    out: a matrix-free curvature cannot be solved with there.
    """

    learned: tuple[str, ...]
    precisions: tuple[Tensor, ...]
    temperatures: tuple[float, ...]
    dispersions: tuple[float | None, ...]
    logit_temperatures: tuple[float, ...]
    dispersion: float
    logit_temperature: float
    temperature: float = 1.0
    optional: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    unit: tuple[str, float] = ("noise", 0.5)
    least: float = 0.0

    @classmethod
    def of(
        cls,
        learned: tuple[str, ...],
        grid: Mapping[str, Sequence[float]],
        now: Setting,
        likelihood: Likelihood,
        optional: tuple[str, ...] = (),
        usual: Mapping[str, Sequence[float]] = GRID,
    ) -> Candidates:
        """Take candidates from `grid`, else the usual ones; what is not learned keeps the values of `now`."""
        chosen = {**usual, **grid}
        fitted = "logit_temperature" in learned
        return cls(
            learned,
            tuple(torch.full_like(now.precision, v) for v in chosen["prior"])
            if "prior" in learned
            else (now.precision,),
            tuple(map(float, chosen["temperature"])) if "temperature" in learned else (now.temperature,),
            tuple(likelihood.dispersion_from(float(v)) for v in chosen["dispersion"])
            if "dispersion" in learned
            else (None,),
            tuple(map(float, chosen.get("logit_temperature", ()))) if fitted else (now.logit_temperature,),
            likelihood.dispersion.item(),
            now.logit_temperature,
            now.temperature,
            optional,
            tuple(name for name in learned if name in grid),
            likelihood.shown_as,
        )

    def settled(self, sweep: Sweep) -> Candidates:
        """Drop the temperature from what is learned if it is optional and would not help (`tells_apart`)."""
        if "temperature" not in self.optional or tells_apart(sweep):
            return self
        learned = tuple(name for name in self.learned if name != "temperature")
        return replace(self, learned=learned, temperatures=(self.temperature,))

    def including(self, now: Setting) -> Candidates:
        """Add the setting in force to the grid."""
        precisions, temperatures = (*self.precisions, now.precision), (*self.temperatures, now.temperature)
        dispersions = (*self.dispersions, self.dispersion)
        return replace(self, precisions=precisions, temperatures=temperatures, dispersions=dispersions)

    @property
    def free(self) -> tuple[str, ...]:
        """Learned names that may take values between and beyond the candidates."""
        return tuple(name for name in self.learned if name not in self.given)

    @property
    def box(self) -> dict[str, tuple[float, float]]:
        """The range of each quantity, widened by half a decade where the descent may move it."""
        return box_of(self.precisions, self.temperatures, self._dispersions, self.free)

    @property
    def _dispersions(self) -> list[float]:
        return [self.dispersion if each is None else each for each in self.dispersions]

    @cached_property
    def _narrow(self) -> list[float]:
        return torch.stack(self.precisions).double().log().mean(1).exp().tolist()

    def edges(self, setting: Setting) -> list[str]:
        """Return a warning per quantity that was chosen at the edge of its grid."""
        power = self.unit[1]
        phi = None if setting.dispersion is None else setting.dispersion**power
        tried: dict[str, tuple[Sequence[float], float | None]] = {
            "dispersion": ([each**power for each in self._dispersions], phi),
            "logit_temperature": (self.logit_temperatures or LOGIT_RANGE, setting.logit_temperature),
        }
        if not setting.deterministic:
            tried["prior"] = (self._narrow, setting.narrow)
            tried["temperature"] = (self.temperatures, setting.temperature)
        found = []
        for name in (each for each in LEARNABLE if each in self.learned and each in tried):
            values, value = tried[name]
            said = self.unit[0] if name == "dispersion" else name
            found.append("" if value is None else edge(said, value, values))
        return [text for text in found if text]

    def settings(self, sweep: Sweep, rivals: Mapping[str, Tensor], near: float) -> list[Setting]:
        """Return the settings of the grid that can be scored; fitted logit temperatures stay close to `near`."""
        found = self.solvable(sweep, self.every())
        if not found:
            raise NotConverged(
                f"no candidate has a prior precision of at least {self.least:.2g} times its temperature, below which "
                "products with this matrix-free curvature are too inexact to solve with: try larger priors, or a "
                "network in float64"
            )
        return found if self.logit_temperatures else self._with_logits(sweep, found, rivals, near)

    def every(self) -> list[Setting]:
        """Return all settings of the grid, with a logit temperature of 1 where one will be fitted."""
        divisors = self.logit_temperatures or (1.0,)
        product = itertools.product(self.precisions, self.temperatures, self.dispersions, divisors)
        return [Setting(tau, T, phi, logit_temperature=s, unit=self.unit) for tau, T, phi, s in product]

    def solvable(self, sweep: Sweep, settings: Sequence[Setting]) -> list[Setting]:
        """Return the settings at which the curvature can be solved."""
        if not self.least:
            return list(settings)
        return [each for each, rho in zip(settings, sweep.rho(settings)) if float(rho.min()) >= self.least]

    def unsolved(self, count: int) -> str:
        """Say that so many settings of the grid were left out, and why."""
        return (
            f"{count} settings of the grid were left out: with a prior precision below {self.least:.2g} times the "
            "temperature, products with this matrix-free curvature are too inexact to solve with. A network in float64 "
            "reaches smaller ones"
        )

    def near(self, held: Labeled) -> float:
        """Return the logit temperature of temperature scaling if it is learned, else the one in force."""
        if "logit_temperature" not in self.learned:
            return self.logit_temperature
        return best_logit_temperature(held.f, held.y, held.likelihood, near=self.logit_temperature)

    def _with_logits(
        self, sweep: Sweep, settings: Sequence[Setting], rivals: Mapping[str, Tensor], near: float
    ) -> list[Setting]:
        """Fit a logit temperature to each setting on a subset of the data, and carry it over to all of them.

        What is carried over is its ratio to the logit temperature of temperature scaling, which hardly depends on the
        subset.
        """
        few = sweep.subset(SUBSET)
        whole, part = near, self.near(few)
        bar = HOPELESS * rivals[SCALING].mean().item()
        chains = [list(alike) for _, alike in itertools.groupby(settings, key=lambda each: id(each.precision))]
        guesses = [part] * len(chains)
        for k in reversed(range(max(map(len, chains)))):  # from narrow (hot) to wide, each from its neighbor
            there = [c for c, chain in enumerate(chains) if k < len(chain)]
            column = [replace(chains[c][k], logit_temperature=guesses[c]) for c in there]
            for c, each in zip(there, fit_logits(few, column, bar, part)):
                guesses[c] = each.logit_temperature
                chains[c][k] = replace(each, logit_temperature=each.logit_temperature * whole / part)
        return [setting for chain in chains for setting in chain]


def log_spreads(sweep: Sweep) -> tuple[float, float]:
    """Return the largest spread of log-variances over the inputs at any ρ, and the spread under the prior alone."""
    spreads = sweep.spreads()
    known = spreads[spreads.isfinite()]
    return (known.max().item(), known[-1].item()) if len(known) else (0.0, 0.0)


def tells_apart(sweep: Sweep) -> bool:
    """Whether the directions that the data left undetermined matter more for some inputs than for others.

    A temperature keeps the determined directions tight while the prior widens the others. That marks strange inputs
    only if the undetermined part varies more between inputs than the size of their gradients does: the spread of
    log-variances at some ρ must exceed the spread under the prior alone (the largest ρ) by a quarter.
    """
    most, alone = log_spreads(sweep)
    return most > APART * alone


def dispersion_limits(batches: Iterable[Batch], likelihood: Likelihood) -> tuple[tuple[float, float], Iterable[Batch]]:
    """Return the smallest and largest dispersion that may be tried, and all batches.

    They lie around the one in force and the best of the first batch, which may be a single item.
    """
    rest = iter(batches)
    first = next(rest, None)
    if first is None:
        raise BadData("the validation data hold no batch")
    known = likelihood.dispersion.item(), likelihood.best_dispersion(first[0], first[1])
    return (min(known) * 2.0**-5, max(known) * 2.0**6), itertools.chain([first], rest)


def dispersions_around(best: float, limits: tuple[float, float]) -> tuple[float, ...]:
    """Return dispersions to try around the best one of the network alone, inside the limits."""
    best = min(max(best, limits[0] * 2.0**5), limits[1] * 2.0**-2)
    return tuple(best * 2 ** (k / 2) for k in range(-10, 5))


def box_of(
    taus: Sequence[Tensor], heats: Sequence[float], dispersions: Sequence[float], free: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Return the range of the candidates of each quantity, widened by half a decade for the names in `free`."""
    values = {"prior": torch.cat(list(taus)).tolist(), "temperature": heats, "dispersion": dispersions}
    margin = {name: math.sqrt(10) if name in free else 1.0 for name in values}
    ranges = {name: (min(each) / margin[name], max(each) * margin[name]) for name, each in values.items()}
    return ranges | {"logit_temperature": LOGIT_RANGE}


def fit_logits(
    sweep: Sweep, settings: Sequence[Setting], bar: float = math.inf, near: float | None = None
) -> list[Setting]:
    """Give each setting a better logit temperature: the lowest point of a parabola through three losses.

    A setting whose loss reaches `bar` stays as it is: no logit temperature would help. `near` is the logit temperature
    to stay close to (`held_near`).
    """

    def losses(points: Tensor) -> Tensor:
        moved = [replace(each, logit_temperature=math.exp(u)) for each, u in zip(settings, points.tolist())]
        found = sweep.losses(moved).mean(1).cpu()
        return found if near is None else found + held_near(points.exp(), near) / len(sweep.f)

    u = torch.tensor([each.logit_temperature for each in settings], dtype=torch.float64).log()
    here = losses(u)
    hopeful = here < bar
    if not bool(hopeful.any()):
        return list(settings)
    below, above = losses(u - STEP), losses(u + STEP)
    bend, slope = below - 2 * here + above, below - above
    move = torch.where(bend > 0, STEP / 2 * slope / bend, torch.copysign(2 * STEP * torch.ones_like(slope), slope))
    best = (u + move.clamp(-3 * STEP, 3 * STEP)).exp().tolist()
    chosen = zip(settings, best, hopeful.tolist())
    return [replace(each, logit_temperature=s) if hope else each for each, s, hope in chosen]
