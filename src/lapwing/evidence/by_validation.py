"""Prior, temperature and noise of the smallest NLL on held-out data: a grid and a descent from one pass."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lapwing.errors import BadData, UnsupportedOperation
from lapwing.evidence.descent import SUBSET, descend, fit_logits
from lapwing.evidence.evidence import FittedCurvature
from lapwing.evidence.groups import Groups
from lapwing.evidence.nodes import Nodes
from lapwing.evidence.scoring import (
    LOGITS,
    SCALING,
    Score,
    baselines,
    best_dispersion,
    best_logit_temperature,
    check_logit_temperature,
    counted,
    describe,
    linked,
)
from lapwing.evidence.sweep import Batch, Sweep, collect
from lapwing.evidence.tuning import Rule, Setting, Trials, Tuning, lowest, with_dispersion
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.linalg import PSD, Kronecker
from lapwing.linalg.shifts import blocks_of, eigenvalues
from lapwing.posterior import Tempered, resolve_temperature

LEARNABLE = ("prior", "temperature", "logit_temperature", "noise")
GRID: Mapping[str, tuple[float, ...]] = {
    "prior": tuple(10 ** (k / 2) for k in range(-8, 11)),
    "temperature": tuple(10.0**k for k in range(-1, 5)),
}
HOPELESS = 1.5  # times the best baseline: a loss that no logit temperature mends
LOGIT_RANGE = (0.05, 20.0)
DETERMINISTIC = 1e12  # the precision that stands for a network without a posterior
MEMORY = 2 * 1024**3


def default_learn(likelihood: Likelihood) -> tuple[str, ...]:
    """What held-out data choose unless told otherwise."""
    return ("prior", "temperature", "logit_temperature") if isinstance(likelihood, LOGITS) else ("prior", "temperature")


def tune_validation(
    curvature: FittedCurvature,
    likelihood: Likelihood,
    groups: Groups,
    batches: Iterable[Batch],
    *,
    start: float | Tensor = 1.0,
    center: float | Tensor = 0.0,
    temperature: float | Tensor | Tempered = 1.0,
    logit_temperature: float = 1.0,
    learn: Sequence[str] = ("prior", "temperature"),
    grid: Mapping[str, Sequence[float]] | None = None,
    score: Score | None = None,
    rule: Rule = lowest,
    steps: int = 20,
    memory: int = MEMORY,
    split: float | None = None,
) -> Tuning:
    """Minimize the NLL of held-out data over precisions (one per group), temperature and noise.

    `batches` yields (f (B, *event, C), canonical targets, rows of ∂f/∂θ) and is read once. Every candidate of the grid
    (a common precision × temperatures × noise levels, as standard deviations) is scored afresh under the link that
    prediction will use (`score`); from the best, `steps` of L-BFGS move all of them, precisions separately. The network
    without a posterior is always among the candidates, and `rule` picks from all of them. What is not in `learn` keeps
    the value given by `start` (() or (G,)), `temperature` and `likelihood`.

    `split` = √n tunes Ritter's factored damping of Kronecker blocks instead of the exact sum (`factored_precision`).
    The covariances come from a rational approximation in τ/T whose relative error is bounded and reported.
    """
    return search(
        curvature,
        likelihood,
        groups,
        batches,
        start=start,
        center=center,
        temperature=temperature,
        logit_temperature=logit_temperature,
        learn=learn,
        grid=grid,
        score=score,
        rule=rule,
        steps=steps,
        memory=memory,
        split=split,
        method="validation",
    )


def search(
    curvature: FittedCurvature,
    likelihood: Likelihood,
    groups: Groups,
    batches: Iterable[Batch],
    *,
    start: float | Tensor,
    center: float | Tensor,
    temperature: float | Tensor | Tempered,
    logit_temperature: float,
    learn: Sequence[str],
    grid: Mapping[str, Sequence[float]] | None,
    score: Score | None,
    rule: Rule,
    steps: int,
    memory: int,
    split: float | None,
    method: str,
    prepare: Callable[[Sweep, Setting], Sweep] | None = None,
) -> Tuning:
    """The pass, the grid, the descent and the choice. `prepare` sees the pass and the setting that is now in force."""
    learned = _learned(learn, grid, likelihood)
    tempered = resolve_temperature(temperature)
    first = torch.as_tensor(start, dtype=torch.float64).detach().cpu().expand(groups.count)
    T = torch.as_tensor(tempered.T, dtype=torch.float64).item()
    chosen = {**GRID, **(grid or {})}
    taus = [torch.full_like(first, tau) for tau in chosen["prior"]] if "prior" in learned else [first]
    heats = [float(t) for t in chosen["temperature"]] if "temperature" in learned else [T]
    phi = likelihood.dispersion.item()
    dispersions: list[float | None] = [None]
    if "noise" in learned:
        noises, batches = (grid["noise"], batches) if grid and "noise" in grid else _noise_grid(batches, likelihood)
        dispersions = [float(s) ** 2 for s in noises]
    phis = [phi if d is None else d for d in dispersions]
    box = _box(taus, heats, phis, learned)
    spanned = box if prepare is None else _box([*taus, first], [*heats, T], [*phis, phi], learned)
    span = _span(spanned, curvature.dispersion_power, tempered.prior)
    nodes = Nodes.spanning(*span, _largest(curvature.matrix), _largest_factor(curvature.matrix, split))
    sweep = collect(
        curvature.matrix,
        groups,
        batches,
        nodes,
        likelihood,
        power=curvature.dispersion_power,
        tempers_prior=tempered.prior,
        score=score or linked(),
        memory=memory,
        split=split,
    )
    sweep = sweep if prepare is None else prepare(sweep, Setting(first, T))
    rivals = baselines(sweep.f, sweep.y, sweep.likelihood, noise="noise" in learned)
    divisors = [float(v) for v in (grid or {}).get("logit_temperature", (logit_temperature,))]
    settings = [
        Setting(tau, t, d, logit_temperature=s)
        for tau, t, d, s in itertools.product(taus, heats, dispersions, divisors)
    ]
    if "logit_temperature" in learned and "logit_temperature" not in (grid or {}):
        settings = _with_logits(sweep, settings, rivals)
    losses = [sweep.losses(setting) for setting in settings]
    iterations = 0
    scores = [loss.mean().item() for loss in losses]
    if steps and (len(settings) > 1 or "logit_temperature" in learned) and math.isfinite(min(scores)):
        refined, iterations = descend(sweep, settings[scores.index(min(scores))], box, learned, steps)
        settings.append(refined)
        losses.append(sweep.losses(refined))
    limit, loss = _limit(sweep, learned, logit_temperature)
    settings.append(limit)
    losses.append(loss)
    trials = Trials(tuple(settings), torch.stack(losses), rivals)
    return _choose(sweep, groups, trials, learned, rule, tempered, center, iterations, method)


def _with_logits(sweep: Sweep, settings: Sequence[Setting], rivals: Mapping[str, Tensor]) -> list[Setting]:
    """Each setting with its logit temperature: temperature scaling's times the ratio of the two on a few data.

    The ratio, unlike the temperatures themselves, hardly depends on which data these are.
    """
    few = sweep.subset(SUBSET)
    whole, part = (best_logit_temperature(each.f, each.y, each.likelihood) for each in (sweep, few))
    bar = HOPELESS * rivals[SCALING].mean().item()
    found, last = [], part
    for setting in reversed(settings):  # from narrow to wide, each from where its neighbor ended
        guess = replace(setting, logit_temperature=last)
        if few.nll(guess) < bar:
            guess = fit_logits(few, guess)
        last = guess.logit_temperature
        found.append(replace(setting, logit_temperature=last * whole / part))
    return found[::-1]


def _limit(sweep: Sweep, learned: Sequence[str], logit_temperature: float) -> tuple[Setting, Tensor]:
    """The network without a posterior, with what else is learned at its best, and its losses."""
    f, y, likelihood = sweep.f, sweep.y, sweep.likelihood
    fitted = None
    if "noise" in learned:
        assert isinstance(likelihood, Gaussian)
        fitted = best_dispersion(f, y, likelihood)
        likelihood = with_dispersion(likelihood, fitted)
    if "logit_temperature" in learned:
        logit_temperature = best_logit_temperature(f, y, likelihood)
    empty = torch.empty(0, dtype=torch.float64)
    setting = Setting(empty, 1.0, fitted, deterministic=True, logit_temperature=logit_temperature)
    losses = -likelihood.log_prob(f / logit_temperature, y).double().reshape(-1)
    return setting, counted(f, y, likelihood, losses)


def _learned(
    learn: Sequence[str], grid: Mapping[str, Sequence[float]] | None, likelihood: Likelihood
) -> tuple[str, ...]:
    unknown = [name for name in (*learn, *(grid or {})) if name not in LEARNABLE]
    if unknown or not learn:
        raise ValueError(f"held-out data can choose {', '.join(LEARNABLE)}, not {unknown or 'nothing'}")
    idle = [name for name in (grid or {}) if name not in learn]
    if idle:
        raise ValueError(f"grid has candidates for {idle[0]!r}, which is not in learn={tuple(learn)}")
    bad = [(name, v) for name, values in (grid or {}).items() for v in values if not (v > 0 and math.isfinite(v))]
    if bad or any(len(values) == 0 for values in (grid or {}).values()):
        raise ValueError(f"candidates must be positive, finite and at least one, got {bad or grid}")
    if "noise" in learn and not isinstance(likelihood, Gaussian):
        raise UnsupportedOperation(f"{type(likelihood).__name__} has no noise to learn; only Gaussian(noise) has")
    if "logit_temperature" in learn:
        check_logit_temperature(1.0, likelihood)
    return tuple(learn)


def _noise_grid(batches: Iterable[Batch], likelihood: Likelihood) -> tuple[list[float], Iterable[Batch]]:
    """Standard deviations around that of the residuals of the first batch, and the batches, the first put back."""
    assert isinstance(likelihood, Gaussian)
    rest = iter(batches)
    first = next(rest, None)
    if first is None:
        raise BadData("the validation data hold no batch")
    fitted = math.sqrt(best_dispersion(first[0], first[1], likelihood))
    return [fitted * 2 ** (k / 4) for k in range(-10, 5)], itertools.chain([first], rest)


def _box(
    taus: Sequence[Tensor], heats: Sequence[float], dispersions: Sequence[float], learned: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """The range of each quantity: that of its candidates, and half a decade beyond for the descent where it moves."""
    values = {"prior": torch.cat(list(taus)).tolist(), "temperature": heats, "noise": dispersions}
    margin = {name: math.sqrt(10) if name in learned else 1.0 for name in values}
    ranges = {name: (min(each) / margin[name], max(each) * margin[name]) for name, each in values.items()}
    return ranges | {"logit_temperature": LOGIT_RANGE}


def _span(box: Mapping[str, tuple[float, float]], power: int, tempers_prior: bool) -> tuple[float, float]:
    """The smallest and largest ρ = τ φ^k/T in the box."""
    least, most = (1.0, 1.0) if tempers_prior else box["temperature"]
    (low, high), (quiet, loud) = box["prior"], box["noise"]
    return low * quiet**power / most, high * loud**power / least


def nodes_for(
    curvature: FittedCurvature,
    precision: Tensor,
    temperatures: Sequence[float],
    likelihood: Likelihood,
    tempers_prior: bool,
    split: float | None = None,
) -> Nodes:
    """Nodes that serve these precisions at these temperatures."""
    box = _box([precision], temperatures, [likelihood.dispersion.item()], ())
    span = _span(box, curvature.dispersion_power, tempers_prior)
    return Nodes.spanning(*span, _largest(curvature.matrix), _largest_factor(curvature.matrix, split))


def _largest_factor(matrix: PSD, split: float | None) -> float | None:
    """A number that no eigenvalue of a damped Kronecker factor exceeds; None without damping."""
    if split is None:
        return None
    found = 0.0
    for block in blocks_of(matrix):
        if isinstance(block, Kronecker):
            left, right = (side.max().item() * math.sqrt(float(block.factor)) for side in block.eigenvalues)
            found = max(found, left / split, right * split)
    return found


def _largest(matrix: PSD) -> float:
    """A number no eigenvalue exceeds."""
    tops = []
    for block in blocks_of(matrix):
        values = eigenvalues(block)
        tops.append(block.trace().item() if values is None else values.max().item())
    return max(tops)


def _choose(
    sweep: Sweep,
    groups: Groups,
    trials: Trials,
    learned: Sequence[str],
    rule: Rule,
    tempered: Tempered,
    center: float | Tensor,
    iterations: int,
    method: str,
) -> Tuning:
    best = rule(trials)
    setting = trials.settings[best]
    if "logit_temperature" in learned and not setting.deterministic:
        trials = _polished(sweep, trials, best)
        best = len(trials.settings) - 1
        setting = trials.settings[best]
    precision = torch.full((groups.count,), DETERMINISTIC).double() if setting.deterministic else setting.precision
    T = tempered.T if setting.deterministic else setting.temperature
    likelihood = sweep.likelihood
    return Tuning(
        method,
        trials.settings,
        trials.scores,
        best,
        groups.prior(precision, center),
        Tempered(T, tempered.prior),
        likelihood if setting.dispersion is None else with_dispersion(likelihood, setting.dispersion),
        iterations,
        baselines={name: losses.mean().item() for name, losses in trials.baselines.items()},
        messages=_messages(sweep, trials, best, learned),
        logit_temperature=setting.logit_temperature,
    )


def _polished(sweep: Sweep, trials: Trials, best: int) -> Trials:
    """The chosen setting once more, its logit temperature fitted to all data instead of a few."""
    fitted = fit_logits(sweep, trials.settings[best])
    losses = sweep.losses(fitted)
    if losses.mean() > trials.losses[best].mean():
        fitted, losses = trials.settings[best], trials.losses[best]
    return replace(trials, settings=(*trials.settings, fitted), losses=torch.cat([trials.losses, losses[None]]))


def _messages(sweep: Sweep, trials: Trials, best: int, learned: Sequence[str]) -> tuple[str, ...]:
    settings, scores = trials.settings, trials.scores
    setting = settings[best]
    posteriors = [k for k, s in enumerate(settings) if not s.deterministic]
    messages = []
    if setting.deterministic:
        messages.append(
            f"no posterior beat the network without one (NLL {scores[best]:.5g}, best posterior "
            f"{scores[posteriors].min():.5g}): the prior is now so narrow that predictions are the network's own"
        )
    elif "prior" in learned:
        tried = [settings[k].narrow for k in posteriors]
        if len(set(tried)) > 2 and not min(tried) * 1.001 < setting.narrow < max(tried) * 0.999:
            messages.append(f"the chosen precision {setting.narrow:.3g} is at the edge of the grid: pass a wider one")
    top = lowest(trials)
    if scores[best] > scores[top]:
        mean, error = (value[best].item() for value in trials.excess(trials.losses[top]))
        messages.append(
            f"the lowest NLL is {scores[top]:.5g} at {settings[top]}; the data do not tell the chosen setting from it "
            f"({mean:.2g} ± {error:.2g} more per item)"
        )
    used = torch.cat([sweep.rho(settings[k]) for k in posteriors])
    messages.append(
        f"{len(settings)} settings from one pass over {len(sweep.f)} data; variances are right to a relative "
        f"{sweep.nodes.error(used):.1g}; {describe({n: v.mean().item() for n, v in trials.baselines.items()})}"
    )
    return tuple(messages)
