"""The setting of smallest NLL on held-out data.

`tune_validation` reads the data once (`heldout.collect`), and `search` then works on what was kept: it scores a grid of
settings, descends from the best of them, adds the network without a posterior, and lets a rule choose among all.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import NotConverged
from lapwing.evidence.candidates import (
    GRID,
    Candidates,
    Labeled,
    box_of,
    check_learned,
    default_learn,
    dispersion_grid,
    fit_logits,
    log_spreads,
)
from lapwing.evidence.drawnoutputs import collect_draws, nodes_of_draws
from lapwing.evidence.heldout import PADDING, PER_DECADE, Batch, GramSweep, Nodes, Sweep, collect
from lapwing.evidence.scores import Score, baselines, counted, held_near, linked
from lapwing.evidence.settings import Groups, Rule, Setting, Trials, Tuning, lowest
from lapwing.posterior import Belief
from lapwing.predictive.predictive import Pushed

BISECTIONS = 3  # bisections of the decade between two priors of the grid
OPTIONAL = ("temperature",)  # learned by default, but only where that helps
HELD_NOISE = 2.0  # how many items the noise in force weighs when the noise of the network alone is fitted
MEMORY = 2 * 1024**3
EDGE = 1e-3  # a start at the end of its range is moved inside by this share of it: the sigmoid never reaches the end
TOLERANCE = 1e-5  # nats per item below which the descent stops


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
    usual = GRID
    if "dispersion" in learned and "dispersion" not in (grid or {}):
        shown, batches = dispersion_grid(batches, belief.likelihood)
        usual = {**GRID, "dispersion": shown}
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
