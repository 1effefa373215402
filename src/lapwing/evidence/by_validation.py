"""Prior, temperature and noise of the smallest NLL on held-out data: a grid and a descent from one pass."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lapwing.errors import BadData, UnsupportedOperation
from lapwing.evidence.evidence import FittedCurvature
from lapwing.evidence.groups import Groups
from lapwing.evidence.nodes import Nodes
from lapwing.evidence.scoring import Score, baselines, best_dispersion, describe, linked
from lapwing.evidence.sweep import Batch, Sweep, collect
from lapwing.evidence.tuning import Rule, Setting, Tuning, lowest, with_dispersion
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.linalg import PSD
from lapwing.linalg.shifts import blocks_of, eigenvalues
from lapwing.posterior import Tempered, resolve_temperature

LEARNABLE = ("prior", "temperature", "noise")
GRID: Mapping[str, tuple[float, ...]] = {
    "prior": tuple(10 ** (k / 2) for k in range(-6, 11)),
    "temperature": tuple(10 ** (k / 2) for k in range(-2, 7)),
}
DETERMINISTIC = 1e12  # the precision that stands for a network without a posterior
MEMORY = 2 * 1024**3


def tune_validation(
    curvature: FittedCurvature,
    likelihood: Likelihood,
    groups: Groups,
    batches: Iterable[Batch],
    *,
    start: float | Tensor = 1.0,
    center: float | Tensor = 0.0,
    temperature: float | Tensor | Tempered = 1.0,
    learn: Sequence[str] = ("prior", "temperature"),
    grid: Mapping[str, Sequence[float]] | None = None,
    score: Score | None = None,
    rule: Rule = lowest,
    steps: int = 20,
    memory: int = MEMORY,
) -> Tuning:
    """Minimize the NLL of held-out data over precisions (one per group), temperature and noise.

    `batches` yields (f (B, *event, C), canonical targets, rows of ∂f/∂θ) and is read once. Every candidate of the grid
    (a common precision × temperatures × noise levels, as standard deviations) is scored afresh under the link that
    prediction will use (`score`); from the best, `steps` of L-BFGS move all of them, precisions separately. The network
    without a posterior is always among the candidates, and `rule` picks from all of them. What is not in `learn` keeps
    the value given by `start` (() or (G,)), `temperature` and `likelihood`.

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
        learn=learn,
        grid=grid,
        score=score,
        rule=rule,
        steps=steps,
        memory=memory,
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
    learn: Sequence[str],
    grid: Mapping[str, Sequence[float]] | None,
    score: Score | None,
    rule: Rule,
    steps: int,
    memory: int,
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
    nodes = Nodes.spanning(*_span(spanned, curvature.dispersion_power, tempered.prior), _largest(curvature.matrix))
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
    )
    sweep = sweep if prepare is None else prepare(sweep, Setting(first, T))
    settings = [Setting(tau, t, d) for tau, t, d in itertools.product(taus, heats, dispersions)]
    scores = [sweep.nll(setting) for setting in settings]
    iterations = 0
    if steps and len(settings) > 1 and math.isfinite(min(scores)):
        refined, iterations = _descend(sweep, settings[scores.index(min(scores))], box, learned, steps)
        settings.append(refined)
        scores.append(sweep.nll(refined))
    return _choose(sweep, groups, settings, scores, learned, rule, tempered, center, iterations, method)


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
    return {name: (min(each) / margin[name], max(each) * margin[name]) for name, each in values.items()}


def _span(box: Mapping[str, tuple[float, float]], power: int, tempers_prior: bool) -> tuple[float, float]:
    """The smallest and largest ρ = τ φ^k/T in the box."""
    least, most = (1.0, 1.0) if tempers_prior else box["temperature"]
    (low, high), (quiet, loud) = box["prior"], box["noise"]
    return low * quiet**power / most, high * loud**power / least


def _largest(matrix: PSD) -> float:
    """A number no eigenvalue exceeds."""
    tops = []
    for block in blocks_of(matrix):
        values = eigenvalues(block)
        tops.append(block.trace().item() if values is None else values.max().item())
    return max(tops)


def _descend(
    sweep: Sweep, setting: Setting, box: Mapping[str, tuple[float, float]], learned: Sequence[str], steps: int
) -> tuple[Setting, int]:
    """L-BFGS on the total NLL in log τ, log T, log φ, each by a sigmoid inside its range, chunk by chunk over items."""
    phi = sweep.likelihood.dispersion.item() if setting.dispersion is None else setting.dispersion
    start = {
        "prior": setting.precision.double(),
        "temperature": torch.tensor(setting.temperature, dtype=torch.float64),
        "noise": torch.tensor(phi, dtype=torch.float64),
    }
    wide = {name: (math.log(low), math.log(high)) for name, (low, high) in box.items() if name in learned}
    moving = {name: torch.logit((start[name].log() - low) / (high - low)) for name, (low, high) in wide.items()}
    moving = {name: z.requires_grad_() for name, z in moving.items()}
    optimizer = torch.optim.LBFGS(  # tolerances in nats of the whole data set
        list(moving.values()),
        max_iter=steps,
        max_eval=2 * steps,
        tolerance_grad=1e-3,
        tolerance_change=1e-3,
        line_search_fn="strong_wolfe",
    )

    def values() -> tuple[Tensor, Tensor, Tensor]:
        inside = {name: (low + (high - low) * moving[name].sigmoid()).exp() for name, (low, high) in wide.items()}
        now = {**start, **inside}
        return now["prior"], now["temperature"], now["noise"]

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            tau, T, dispersion = values()
            coefficients = sweep.coefficients(tau, T, dispersion)
            leaf = coefficients.detach().requires_grad_()
            noise = dispersion.detach().requires_grad_("noise" in moving)
            total = torch.zeros((), dtype=torch.float64)
            for part in sweep.parts(leaf, noise, (T / dispersion).item()):
                part.backward()
                total += part.detach().cpu()
            pulled = [(coefficients, leaf.grad), (dispersion, noise.grad)]
            roots = [(value, grad) for value, grad in pulled if grad is not None and value.requires_grad]
            torch.autograd.backward([value for value, _ in roots], [grad for _, grad in roots])
        return total

    optimizer.step(closure)
    count = int(optimizer.state[next(iter(moving.values()))].get("n_iter", 0))
    tau, T, dispersion = (value.detach() for value in values())
    return Setting(tau, T.item(), dispersion.item() if "noise" in moving else setting.dispersion), count


def _choose(
    sweep: Sweep,
    groups: Groups,
    settings: list[Setting],
    scores: list[float],
    learned: Sequence[str],
    rule: Rule,
    tempered: Tempered,
    center: float | Tensor,
    iterations: int,
    method: str,
) -> Tuning:
    rivals = baselines(sweep.f, sweep.y, sweep.likelihood, noise="noise" in learned)
    fitted = None
    if "noise" in learned:
        assert isinstance(sweep.likelihood, Gaussian)
        fitted = best_dispersion(sweep.f, sweep.y, sweep.likelihood)
    settings.append(Setting(torch.empty(0, dtype=torch.float64), 1.0, fitted, deterministic=True))
    scores.append(rivals.get("MAP, noise fitted", rivals["MAP"]))
    table = torch.tensor(scores, dtype=torch.float64)
    best = rule(settings, table, rivals)
    setting = settings[best]
    precision = torch.full((groups.count,), DETERMINISTIC).double() if setting.deterministic else setting.precision
    T = tempered.T if setting.deterministic else setting.temperature
    likelihood = sweep.likelihood
    return Tuning(
        method,
        tuple(settings),
        table,
        best,
        groups.prior(precision, center),
        Tempered(T, tempered.prior),
        likelihood if setting.dispersion is None else with_dispersion(likelihood, setting.dispersion),
        iterations,
        baselines=rivals,
        messages=_messages(sweep, settings, table, best, rivals, learned),
    )


def _messages(
    sweep: Sweep,
    settings: Sequence[Setting],
    scores: Tensor,
    best: int,
    rivals: Mapping[str, float],
    learned: Sequence[str],
) -> tuple[str, ...]:
    setting = settings[best]
    messages = []
    if setting.deterministic:
        others = torch.cat([scores[:best], scores[best + 1 :]])
        messages.append(
            f"no posterior beat the network without one (NLL {scores[best]:.5g}, best posterior "
            f"{others.min():.5g}): the prior is now so narrow that predictions are the network's own"
        )
    elif "prior" in learned:
        tried = [s.narrow for s in settings if not s.deterministic]
        if len(set(tried)) > 2 and not min(tried) * 1.001 < setting.narrow < max(tried) * 0.999:
            messages.append(f"the chosen precision {setting.narrow:.3g} is at the edge of the grid: pass a wider one")
    used = torch.cat([sweep.rho(s) for s in settings if not s.deterministic])
    messages.append(
        f"{len(settings)} settings from one pass over {len(sweep.f)} data; variances are right to a relative "
        f"{sweep.nodes.error(used):.1g}; {describe(rivals)}"
    )
    return tuple(messages)
