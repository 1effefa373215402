"""What an evaluation found about each model: the scores of all items, and the columns made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lapwing import metrics
from lapwing.evaluation import intervals
from lapwing.evaluation.examples import Example
from lapwing.evaluation.intervals import Entries, Estimate, Statistic
from lapwing.evaluation.meter import Cost
from lapwing.predictive import Prediction

Items = Mapping[str, Tensor]  # the scores of all items, by name


@dataclass(frozen=True)
class Column:
    """A column of the report: a metric, and whether more of it is better (None: neither)."""

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


@dataclass(frozen=True, eq=False)
class Outside:
    """Scores of strangeness of one out-of-distribution set, by name, and its most uncertain items."""

    scores: Items
    owners: Mapping[str, Tensor]
    count: int
    examples: Mapping[str, tuple[Example, ...]]

    @property
    def uncertainty(self) -> Tensor:
        """The uncertainty of y, which every model has."""
        return self.scores["uncertainty"]


@dataclass(frozen=True, eq=False)
class Result:
    """The scores of one model on test items and outside items, and what predicting the test set cost.

    `items` are scores of targets and `scores` those of strangeness; where a score has several entries per item,
    `owners` says whose they are. `examples` are the most "uncertain" and most "wrong" test items, `x` the inputs of a
    curve, and `about` the settings of the model.
    """

    kind: type[Prediction]  # of its predictions
    items: Items
    scores: Items
    outside: Mapping[str, Outside]
    cost: Cost
    count: int
    examples: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
    owners: Mapping[str, Tensor] = field(default_factory=dict)
    x: Tensor | None = None
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def uncertainty(self) -> Tensor:
        """The uncertainty of y, which every model has."""
        return self.scores["uncertainty"]

    @property
    def novelty(self) -> Tensor | None:
        """The novelty of the test items, where it was computed."""
        return self.scores.get("novelty")

    def entries(self, name: str, values: Tensor | None = None) -> Entries:
        """Return a score with the items that its entries belong to."""
        found = self.items[name] if name in self.items and values is None else values
        return Entries(self.scores[name] if found is None else found, self.owners.get(name), self.count)


class Numbers(Protocol):
    """What findings, pictures and pages read of a report."""

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


def summary(items: Items, bins: int) -> dict[str, float]:
    """Return the value of each column from the scores of all items (`Prediction.scores`).

    The NLL is that of all labels or outputs of an item together; the other scores count each of them.
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
    found = {"nll": intervals.mean_of(result.entries("log_prob"), torch.neg)}
    means = {"accuracy": "correct", "coverage95": "covered 0.95"}
    means |= {name: name for name in ("brier", "entropy", "crps", "stddev")}
    found |= {column: intervals.mean_of(result.entries(name)) for column, name in means.items() if name in result.items}
    if "square" in result.items:
        found["rmse"] = intervals.mean_of(result.entries("square"), torch.sqrt)
    if "correct" in result.items:
        found["ece"] = intervals.ece_of(result.entries("confidence"), result.items["correct"], bins)
    for place, outside in result.outside.items():
        for score in STRANGE:
            if score in result.scores and score in outside.scores and outside.count > 1:
                inside = Entries(result.scores[score], result.owners.get(score), result.count)
                others = Entries(outside.scores[score], outside.owners.get(score), outside.count)
                found[column_of("auroc", score, place)] = intervals.auroc_of(inside, others, place)
                found[column_of("fpr95", score, place)] = intervals.fpr95_of(inside, others, place)
    return found


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
    """Return a value as it is printed."""
    if value is None or math.isnan(value):
        return "–"
    if column == "accuracy":
        return f"{100 * value:.2f} %"
    digits = {"seconds": 2, "peak_mb": 0}.get(column, 4)
    return f"{value:.{digits}f}"
