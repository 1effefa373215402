"""The numbers of a report, their 95 % intervals by the bootstrap, and the findings in sentences.

An interval says how much a number would change with other test items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import torch
from torch import Tensor

from lapwing import metrics
from lapwing.evaluation.scoring import Items, Result, Scored
from lapwing.plots.targets import answered
from lapwing.predictive import Prediction

ABSTAIN = 0.05  # of the items, the least certain ones
RESAMPLES, FEWER = 1000, 200
MANY = 50_000  # entries of a score from which on fewer resamples are drawn
MOST = 200_000  # largest number of entries of a score that the intervals of AUROC and FPR95 use
CHUNK = 2**22  # weights held at once
SEED = 0
LEVEL = 0.95

Estimate = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class Column:
    """A column of the report: a metric, and whether larger values are better (None if neither is)."""

    name: str
    more_is_better: bool | None


BETTER = {"accuracy": True, "nll": False, "ece": False, "brier": False, "entropy": None} | {
    "rmse": False, "crps": False, "coverage95": None, "stddev": None
}  # fmt: skip
SCORES = tuple(Column(name, more) for name, more in BETTER.items())
COST_COLUMNS = (Column("seconds", False), Column("peak_mb", False))
TITLES = {"nll": "NLL", "ece": "ECE", "rmse": "RMSE", "crps": "CRPS", "brier": "Brier", "peak_mb": "peak MB"}
STRANGE = ("uncertainty", "epistemic", "novelty", "energy", "maxlogit", "mahalanobis")  # scores of strangeness
WORDS = {"maxlogit": "max logit", "mahalanobis": "Mahalanobis"}
PRINTED = ("auroc", "fpr95", "auroc_epistemic", "auroc_novelty")  # of outside sets: a text table has room for these
SHARES = {"accuracy": "correct", "coverage95": "covered 0.95"}  # columns whose entries are 0 or 1


class Numbers(Protocol):
    """The part of a report that findings, pictures and pages need."""

    @property
    def results(self) -> Mapping[str, Result]: ...
    @property
    def bins(self) -> int: ...
    @property
    def data(self) -> Mapping[str, str]: ...
    @property
    def kind(self) -> type[Prediction]: ...
    @property
    def baseline(self) -> str: ...
    @property
    def places(self) -> tuple[str, ...]: ...
    def columns(self) -> tuple[Column, ...]: ...
    def row(self, name: str) -> dict[str, float]: ...
    def interval(self, name: str, column: str) -> Estimate: ...
    def difference(self, name: str, column: str, baseline: str | None = None) -> Estimate: ...
    def verdict(self, name: str, column: str, baseline: str | None = None) -> int: ...


def column_of(metric: str, score: str, place: str) -> str:
    """Return the name of the column of a metric of an outside set by a score; the uncertainty needs no name."""
    return f"{metric}{'' if score == 'uncertainty' else '_' + score} {place}"


def title(column: str) -> str:
    """Return the heading of a column."""
    name, _, place = column.partition(" ")
    if not place:
        return TITLES.get(name, name)
    metric, _, score = name.partition("_")
    return f"{metric.upper()} {place}" + (f" by {WORDS.get(score, score)}" if score else "")


def cell(column: str, value: float | None) -> str:
    """Write the value of a column as text."""
    if value is None or math.isnan(value):
        return "–"
    if column == "accuracy":
        return f"{100 * value:.2f} %"
    digits = {"seconds": 2, "peak_mb": 0}.get(column, 4)
    return f"{value:.{digits}f}"


def summary(items: Items, bins: int) -> dict[str, float]:
    """Return the value of each column from the scores of all items (`Prediction.scores`).

    The NLL sums over the labels or outputs of an item; the other scores count each label or output.
    """
    row = {"nll": -items["log_prob"].mean().item()}
    if "correct" in items:
        row["accuracy"] = items["correct"].mean().item()
        row["ece"] = metrics.reliability(items["confidence"], items["correct"], bins).gap.item()
    if "square" in items:
        row["rmse"] = items["square"].mean().sqrt().item()
        row["coverage95"] = items["covered 0.95"].mean().item()
    return row | {name: items[name].mean().item() for name in ("brier", "entropy", "crps", "stddev") if name in items}


def statistics_of(result: Result, bins: int) -> dict[str, Statistic]:
    """Return the columns of one model as functions of how often each item is drawn."""
    if result.count < 2:
        return {}

    def entries(name: str, values: Items, source: Result | Scored = result) -> Entries:
        return Entries(values[name], source.owners.get(name), source.count)

    items = result.items
    found = {"nll": mean_of(entries("log_prob", items), torch.neg)}
    means = SHARES | {name: name for name in ("brier", "entropy", "crps", "stddev")}
    found |= {column: mean_of(entries(name, items)) for column, name in means.items() if name in items}
    if "square" in items:
        found["rmse"] = mean_of(entries("square", items), torch.sqrt)
    if "correct" in items:
        found["ece"] = ece_of(entries("confidence", items), items["correct"], bins)
    for place, outside in result.outside.items():
        for score in STRANGE:
            if score in result.scores and score in outside.scores and outside.count > 1:
                inside, others = entries(score, result.scores), entries(score, outside.scores, outside)
                found[column_of("auroc", score, place)] = auroc_of(inside, others, place)
                found[column_of("fpr95", score, place)] = fpr95_of(inside, others, place)
    return found


@dataclass(frozen=True, eq=False)
class Entries:
    """Scores with one entry per item, or several: `owner` names the item of each entry (None: one per item).

    Items are resampled as a whole, with all their entries: pixels of one image are not independent.
    """

    values: Tensor
    owner: Tensor | None
    count: int

    def spread(self, weights: Tensor) -> Tensor:
        """Return the weight of each entry, (r, entries), from the weights of the items, (r, count)."""
        return weights if self.owner is None else weights[:, self.owner]

    def sums(self, *columns: Tensor, where: Tensor | None = None) -> Tensor:
        """Return the sum of each column over the entries of every item, (count, columns); `where` picks entries."""
        stacked = torch.stack(columns, 1)
        owner = torch.arange(self.count) if self.owner is None else self.owner
        if where is not None:
            stacked, owner = stacked[where], owner[where]
        return torch.zeros(self.count, stacked.shape[1], dtype=torch.float64).index_add(0, owner, stacked)

    def thinned(self) -> Entries:
        """Return an even selection of at most `MOST` entries."""
        if len(self.values) <= MOST:
            return self
        kept = torch.linspace(0, len(self.values) - 1, MOST).round().long()
        owner = torch.arange(self.count) if self.owner is None else self.owner
        return Entries(self.values[kept], owner[kept], self.count)


Statistic = Callable[[Mapping[str, Tensor]], Tensor]
"""Takes the weights of all sides, {side: (r, items)}, and returns a value per resample, (r,)."""


def mean_of(entries: Entries, finish: Callable[[Tensor], Tensor] = lambda mean: mean) -> Statistic:
    """Return the statistic finish(mean of all entries)."""
    table = entries.sums(entries.values.double(), torch.ones_like(entries.values, dtype=torch.float64))

    def statistic(weights: Mapping[str, Tensor]) -> Tensor:
        total = weights["test"] @ table
        return finish(total[:, 0] / total[:, 1])

    return statistic


def ece_of(confidence: Entries, correct: Tensor, bins: int) -> Statistic:
    """Return the expected calibration error as a statistic: Σ_b |Σ correct − Σ confidence| / Σ 1 over entries."""
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    which = torch.bucketize(confidence.values, edges[1:-1])
    gap = correct.double() - confidence.values
    each = torch.cat([confidence.sums(gap, where=which == b) for b in range(bins)], 1)  # (items, bins)
    size = confidence.sums(torch.ones_like(gap))

    def statistic(weights: Mapping[str, Tensor]) -> Tensor:
        return (weights["test"] @ each).abs().sum(1) / (weights["test"] @ size)[:, 0]

    return statistic


def auroc_of(inside: Entries, outside: Entries, place: str) -> Statistic:
    """Return the AUROC of a score as a statistic of the weights of "test" and of the outside set."""
    inside, outside = inside.thinned(), outside.thinned()
    order = inside.values.argsort()
    ordered = inside.values[order]
    below = torch.searchsorted(ordered, outside.values, right=False)
    up_to = torch.searchsorted(ordered, outside.values, right=True)

    def statistic(weights: Mapping[str, Tensor]) -> Tensor:
        w, v = inside.spread(weights["test"])[:, order], outside.spread(weights[place])
        mass = torch.nn.functional.pad(w.cumsum(1), (1, 0))
        return (v * (mass[:, below] + mass[:, up_to])).sum(1) / (2 * mass[:, -1] * v.sum(1))

    return statistic


def fpr95_of(inside: Entries, outside: Entries, place: str) -> Statistic:
    """Return the FPR95 of a score as a statistic of the weights of "test" and of the outside set."""
    inside, outside = inside.thinned(), outside.thinned()
    order, others = inside.values.argsort(), outside.values.argsort()
    ordered = inside.values[order]
    passing = torch.searchsorted(outside.values[others], ordered, right=True)  # outside items ≤ each threshold

    def statistic(weights: Mapping[str, Tensor]) -> Tensor:
        w, v = inside.spread(weights["test"])[:, order], outside.spread(weights[place])[:, others]
        mass, total = w.cumsum(1), torch.nn.functional.pad(v.cumsum(1), (1, 0))
        at = (mass >= 0.95 * mass[:, -1:] - 1e-9).int().argmax(1)  # the first threshold that keeps enough
        return total.gather(1, passing[at][:, None])[:, 0] / total[:, -1]

    return statistic


def resampled(
    statistics: Mapping[str, Mapping[str, Statistic]], sizes: Mapping[str, int], entries: int
) -> dict[str, dict[str, Tensor]]:
    """Evaluate statistics {model: {column: statistic}} on the same resamples of every side, whose items `sizes` counts.

    All models see the same resamples, so that differences between them are paired. `entries` is the largest number of
    entries of a score; with many, fewer resamples are drawn.
    """
    found: dict[str, dict[str, list[Tensor]]] = {name: {c: [] for c in own} for name, own in statistics.items()}
    count = RESAMPLES if entries <= MANY else FEWER
    for weights in weight_chunks(sizes, count, max(1, CHUNK // max(entries, *sizes.values()))):
        for name, own in statistics.items():
            for column, statistic in own.items():
                found[name][column].append(statistic(weights))
    return {name: {c: torch.cat(parts) for c, parts in own.items()} for name, own in found.items()}


def weight_chunks(sizes: Mapping[str, int], count: int, chunk: int) -> Iterator[dict[str, Tensor]]:
    """Yield how often each item is drawn in resamples with replacement, {side: (r, items)}, `count` in all."""
    generators = {side: torch.Generator().manual_seed(SEED + k) for k, side in enumerate(sizes)}
    for start in range(0, count, chunk):
        rows = min(chunk, count - start)
        weights = {}
        for side, size in sizes.items():
            drawn = torch.randint(size, (rows, size), generator=generators[side])
            ones = torch.ones(rows, size, dtype=torch.float64)
            weights[side] = torch.zeros_like(ones).scatter_add_(1, drawn, ones)
        yield weights


def bootstrap_interval(value: float, samples: Tensor) -> tuple[float, float]:
    """Return a bias-corrected percentile interval (Efron 1981): NaN if the resamples do not vary or are not finite.

    On average, resamples of a calibration error are larger than the error itself. The correction moves the percentiles
    by this bias. The value is always inside the interval.
    """
    if not math.isfinite(value) or not bool(samples.isfinite().all()) or bool((samples == samples[0]).all()):
        return math.nan, math.nan
    normal, least = NormalDist(), 0.5 / len(samples)
    share = 0.5 * float((samples < value).double().mean() + (samples <= value).double().mean())
    shift = 2 * normal.inv_cdf(min(max(share, least), 1 - least))
    reach = normal.inv_cdf((1 + LEVEL) / 2)
    levels = torch.tensor([normal.cdf(shift - reach), normal.cdf(shift + reach)], dtype=torch.float64)
    low, high = torch.quantile(samples, levels).tolist()
    return min(low, value), max(high, value)


def share_interval(value: float, count: int) -> tuple[float, float]:
    """Return the interval of a share that is 0 or 1 in all of `count` items (Clopper and Pearson 1934).

    All resamples of such items are equal, so the bootstrap would claim certainty.
    """
    bound = ((1 - LEVEL) / 2) ** (1 / count)
    return (bound, 1.0) if value > 0.5 else (0.0, 1 - bound)


def findings_of(report: Numbers) -> tuple[str, ...]:
    """Return sentences about the last model, compared with the first if there are several."""
    name = list(report.results)[-1]
    found = _alone(report, name) if name == report.baseline else _compared(report, name)
    for place in report.places:
        found += _outside(report, name, place)
    return tuple(found + _abstaining(report, name))


def _alone(report: Numbers, name: str) -> list[str]:
    row = report.row(name)
    parts = [f"an NLL of {_with_interval(report, name, 'nll')}"]
    if "accuracy" in row:
        parts = [f"an accuracy of {_with_interval(report, name, 'accuracy')}", *parts]
        parts.append(f"a calibration error (ECE) of {_with_interval(report, name, 'ece')}")
    if "rmse" in row:
        parts.append(f"an RMSE of {_with_interval(report, name, 'rmse')}")
    count = report.results[name].count
    sentences = [f"{name} has {_listed(parts)} on {count:,} test items."]
    if "coverage95" in row:
        sentences.append(_coverage(report, name))
    return sentences


def _compared(report: Numbers, name: str) -> list[str]:
    base, row = report.baseline, report.row(name)
    sentences = [_change(report, name, base, "nll", "the NLL")]
    for other in list(report.results)[1:-1]:
        sentences.append(_change(report, name, other, "nll", "the NLL"))
    if "accuracy" in row:
        sentences.append(_change(report, name, base, "accuracy", "the accuracy"))
        sentences.append(_change(report, name, base, "ece", "the calibration error (ECE)"))
    if "rmse" in row:
        sentences.append(_change(report, name, base, "rmse", "the RMSE"))
        sentences.append(_coverage(report, name) + " " + _coverage(report, base))
    return sentences


def _change(report: Numbers, name: str, other: str, column: str, what: str) -> str:
    """Say whether a model raises or lowers a column, or that there is no measurable difference."""
    before, after = report.row(other)[column], report.row(name)[column]
    value, low, high = report.difference(name, column, other)
    begin = what[0].upper() + what[1:]
    if not math.isfinite(after) or not math.isfinite(before):
        return f"{begin} of {name} is {cell(column, after)}, that of {other} {cell(column, before)}."
    if value == low == high == 0:
        return f"{begin} of {name} is that of {other}, {cell(column, after)}."
    words = f"from {cell(column, before)} to {cell(column, after)}"
    if math.isnan(low):
        return f"{name} changes {what} {words} compared with {other}; one item says nothing about others."
    if low <= 0 <= high:
        return (
            f"There is no measurable difference in {what} between {name} ({cell(column, after)}) and {other} "
            f"({cell(column, before)}): {difference_words(column, value, low, high)}."
        )
    verb, ends = ("raises", (low, high)) if value > 0 else ("lowers", (-high, -low))
    judged = {1: "better", -1: "worse", 0: "different"}[report.verdict(name, column, other)]
    size = difference_words(column, abs(value), *ends)
    return f"{name} {verb} {what} {words}, by {size}, which is {judged} than {other}."


def difference_words(column: str, value: float, low: float, high: float, *, sign: bool = False) -> str:
    """Write "value (low to high)" with two digits of the interval's half-width; shares in percentage points."""
    factor, unit = (100, " points") if column == "accuracy" else (1, "")
    spread = factor * (high - low) / 2
    digits = max(0, min(1 - math.floor(math.log10(spread)), 12)) if spread > 0 else 4
    first, *ends = (f"{factor * number:.{digits}f}".replace("-", "−") for number in (value, low, high))
    return f"{'+' if sign and value > 0 else ''}{first} ({' to '.join(ends)}){unit}"


def score_name(report: Numbers, score: str) -> str:
    """Return the name of a score of strangeness in words."""
    return report.kind.uncertainty_name if score == "uncertainty" else WORDS.get(score, score)


def _with_interval(report: Numbers, name: str, column: str) -> str:
    value, low, high = report.interval(name, column)
    span = "" if math.isnan(low) else f" ({cell(column, low)} to {cell(column, high)})"
    return f"{cell(column, value)}{span}"


def _coverage(report: Numbers, name: str) -> str:
    value, low, high = report.interval(name, "coverage95")
    held = f"{100 * value:.1f} %"
    span = "" if math.isnan(low) else f" ({100 * low:.1f} to {100 * high:.1f} %)"
    if math.isnan(low) or low <= 0.95 <= high:
        judged = "as promised" if not math.isnan(low) else "of one item"
    else:
        judged = "more than promised" if value > 0.95 else "fewer than promised: it is overconfident"
    return f"The 95 % intervals of {name} hold {held}{span} of the targets, {judged}."


def _outside(report: Numbers, name: str, place: str) -> list[str]:
    """Say how well the model's best score finds outside items, compared with the uncertainty of the baseline."""
    row, words = report.row(name), report.kind.uncertainty_name
    areas = {s: row[column_of("auroc", s, place)] for s in STRANGE if column_of("auroc", s, place) in row}
    own = {s: area for s, area in areas.items() if s in ("uncertainty", "epistemic", "novelty")}
    best = max(own, key=lambda s: own[s])
    _, low, high = report.interval(name, column_of("auroc", best, place))
    span = "" if math.isnan(low) else f" ({low:.3f} to {high:.3f})"
    by = score_name(report, best)
    text = f"{name} separates {place} from the test items with AUROC {own[best]:.3f}{span}, by its {by}"
    if name != report.baseline:
        text += f"; the {words} of {report.baseline} has {report.row(report.baseline)[f'auroc {place}']:.3f}"
    higher = {s: area for s, area in areas.items() if s not in own and area > own[best]}
    if higher:
        top = max(higher, key=lambda s: higher[s])
        text += f". The network's {score_name(report, top)} does better, with {higher[top]:.3f}"
    return [text + "."]


def _abstaining(report: Numbers, name: str) -> list[str]:
    """Say how many errors are avoided by not answering the least certain items."""
    pair = doubt_and_loss(report.results[name])
    count = len(pair[0])
    left_out = math.floor(ABSTAIN * count)
    if left_out < 1:
        return []
    _, risk = answered(*pair)
    kept = count - left_out
    if "correct" in report.results[name].items:
        errors, remaining = float(pair[1].sum()), float(risk[kept - 1]) * kept
        if errors < 1:
            return [f"{name} makes no error on {count:,} answers."]
        gone = 1 - remaining / errors
        return [
            f"Abstaining on the {100 * ABSTAIN:g} % least certain answers of {name} removes {100 * gone:.0f} % of its "
            f"errors (from {errors:.0f} of {count:,} to {remaining:.0f} of {kept:,})."
        ]
    before, after = float(risk[-1]) ** 0.5, float(risk[kept - 1]) ** 0.5
    part = f"the {100 * ABSTAIN:g} % least certain predictions of {name}"
    return [f"Leaving out {part} changes its RMSE from {before:.4g} to {after:.4g}."]


def doubt_and_loss(result: Result) -> tuple:
    """Return the uncertainty and the loss of every answer: 0 or 1 for labels, a squared error for numbers."""
    if "correct" in result.items:
        return result.items["entropy"], 1 - result.items["correct"]
    return result.items["stddev"], result.items["square"]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
