"""What tuning on held-out data tries: a grid of precisions, temperatures, noise levels and logit temperatures."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lapwing.errors import BadData, NotConverged, nearest
from lapwing.evidence.heldout import Batch, Sweep
from lapwing.evidence.scores import SCALING, best_logit_temperature, held_near, require_logits
from lapwing.evidence.settings import Setting
from lapwing.likelihoods import Likelihood

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
        got = ", ".join(map(repr, unknown)) or "nothing"
        raise BadData(f"held-out data can choose {known} for {type(likelihood).__name__}, got {got}{hint}")
    idle = [name for name in (grid or {}) if name not in learn]
    if idle:
        raise BadData(f"grid has candidates for {idle[0]!r}, which is not in learn={tuple(learn)}")
    check_candidates(grid or {})
    likelihood.learned_names(tuple(learn))
    if "logit_temperature" in learn:
        require_logits(likelihood)
    return tuple(learn)


def check_candidates(grid: Mapping[str, Sequence[float]]) -> None:
    """Refuse candidates that are not positive and finite, and empty lists of candidates."""
    bad = [(name, v) for name, values in grid.items() for v in values if not (v > 0 and math.isfinite(v))]
    if bad or any(len(values) == 0 for values in grid.values()):
        raise BadData(f"candidates must be positive, finite and at least one, got {bad or grid}")


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
    ) -> "Candidates":
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

    def settled(self, sweep: Sweep) -> "Candidates":
        """Drop the temperature from what is learned if it is optional and would not help (`tells_apart`)."""
        if "temperature" not in self.optional or tells_apart(sweep):
            return self
        learned = tuple(name for name in self.learned if name != "temperature")
        return replace(self, learned=learned, temperatures=(self.temperature,))

    def including(self, now: Setting) -> "Candidates":
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


def dispersion_grid(batches: Iterable[Batch], likelihood: Likelihood) -> tuple[list[float], Iterable[Batch]]:
    """Return dispersions, as users write them, around the best of the first batch, and all batches."""
    rest = iter(batches)
    first = next(rest, None)
    if first is None:
        raise BadData("the validation data hold no batch")
    fitted = likelihood.best_dispersion(first[0], first[1])
    tried = [(fitted * 2 ** (k / 2)) ** likelihood.dispersion_unit for k in range(-10, 5)]
    return tried, itertools.chain([first], rest)


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
