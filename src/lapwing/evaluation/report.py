"""Compare models on the same data: numbers with intervals, differences and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing import metrics
from lapwing.errors import BadData, brief, nearest
from lapwing.evaluation.columns import (
    COST_COLUMNS,
    MOST,
    PRINTED,
    SCORES,
    SHARES,
    STRANGE,
    Column,
    Estimate,
    bootstrap_interval,
    cell,
    column_of,
    findings_of,
    resampled,
    share_interval,
    statistics_of,
    summary,
    title,
)
from lapwing.evaluation.figures import figures_of, galleries_of
from lapwing.evaluation.page import write_page
from lapwing.evaluation.scoring import Result
from lapwing.model.calls import outside_autocast
from lapwing.predictive import Prediction
from lapwing.predictive.table import html_table

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Report:
    """How models compare on the same data. Made by `lapwing.evaluate`.

    The first model is the baseline, with which the others are compared item by item. Pictures of single items and the
    findings are about the last model.

    Examples:
        >>> report = lapwing.evaluate({"MAP": model, "Laplace": la}, test_loader, ood={"noise": noise})
        >>> print(report.table())
        >>> report.to_html("report.html")
    """

    __repr__ = brief

    results: Mapping[str, Result]
    bins: int = 15
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> type[Prediction]:
        """The kind of prediction that was scored: of classes, labels or numbers.

        Examples:
            >>> report.kind.__name__
            'ClassPrediction'
        """
        return list(self.results.values())[-1].kind

    @property
    def baseline(self) -> str:
        """The name of the first model, with which the others are compared.

        Examples:
            >>> report.baseline
            'MAP'
        """
        return next(iter(self.results))

    @property
    def places(self) -> tuple[str, ...]:
        """The names of the out-of-distribution sets.

        Examples:
            >>> report.places
            ('noise',)
        """
        return tuple(next(iter(self.results.values())).outside)

    def columns(self) -> tuple[Column, ...]:
        """Return the columns that at least one model fills, in order.

        Examples:
            >>> [column.name for column in report.columns()][:3]
            ['accuracy', 'nll', 'ece']
        """
        outside = tuple(
            Column(column_of(metric, score, place), more)
            for place in self.places
            for score in STRANGE
            for metric, more in (("auroc", True), ("fpr95", False))
        )
        rows = [self.row(name) for name in self.results]
        return tuple(c for c in (*SCORES, *outside, *COST_COLUMNS) if any(c.name in row for row in rows))

    @outside_autocast
    def row(self, name: str) -> dict[str, float]:
        """Return the values of one model by column.

        Examples:
            >>> accuracy = report.row("Laplace")["accuracy"]
        """
        return dict(self._rows[name])

    @cached_property
    def _rows(self) -> dict[str, dict[str, float]]:
        return {name: self._row(result) for name, result in self.results.items()}

    def _row(self, result: Result) -> dict[str, float]:
        row = summary(result.items, self.bins)
        for place, outside in result.outside.items():
            for score in STRANGE:
                if score in result.scores and score in outside.scores:
                    pair = result.scores[score], outside.scores[score]
                    row[column_of("auroc", score, place)] = metrics.auroc(*pair).item()
                    row[column_of("fpr95", score, place)] = metrics.fpr95(*pair).item()
        row["seconds"] = result.cost.seconds
        if result.cost.peak_bytes is not None:
            row["peak_mb"] = result.cost.peak_bytes / 1e6
        return row

    @outside_autocast
    def interval(self, name: str, column: str) -> Estimate:
        """Return the value of a column and its 95 % interval, (value, low, high); the bounds are NaN if it has none.

        Intervals come from 1,000 resamples of the items with a fixed seed. Time and memory are measured once and have
        no interval; nor does a score that does not vary.

        Examples:
            >>> value, low, high = report.interval("Laplace", "nll")
        """
        value = self._value(name, column)
        samples = self._samples[name].get(column)
        if samples is None:
            return value, math.nan, math.nan
        count = self.results[name].count
        if column in SHARES and value in (0.0, 1.0):
            return (value, *share_interval(value, count))
        return (value, *bootstrap_interval(value, samples))

    @outside_autocast
    def difference(self, name: str, column: str, baseline: str | None = None) -> Estimate:
        """Return by how much a column of a model exceeds that of the baseline: (value, low, high) of a 95 % interval.

        Both models are scored on the same resamples, so that items that are hard for both do not widen the interval.

        Examples:
            >>> value, low, high = report.difference("Laplace", "nll")  # below zero if Laplace is better
        """
        other = self.baseline if baseline is None else baseline
        value = self._value(name, column) - self._value(other, column)
        mine, theirs = self._samples[name].get(column), self._samples[other].get(column)
        if mine is None or theirs is None:
            return value, math.nan, math.nan
        if torch.equal(mine, theirs):
            return value, value, value
        return (value, *bootstrap_interval(value, mine - theirs))

    def verdict(self, name: str, column: str, baseline: str | None = None) -> int:
        """Return 1 if a model is measurably better than the baseline, −1 if it is worse, else 0.

        Examples:
            >>> report.verdict("Laplace", "nll") in (-1, 0, 1)
            True
        """
        better = next(c.more_is_better for c in self.columns() if c.name == column)
        other = self.baseline if baseline is None else baseline
        if better is None or column not in self._samples[name] or column not in self._samples[other]:
            return 0
        _, low, high = self.difference(name, column, other)
        sign = 1 if better else -1
        return sign if low > 0 else -sign if high < 0 else 0

    def _value(self, name: str, column: str) -> float:
        if name not in self.results:
            raise BadData(f"the report has no model {name!r}: choose from {', '.join(self.results)}")
        if column not in self._rows[name]:
            raise BadData(f"{name} has no column {column!r}: choose from {', '.join(self._rows[name])}")
        return self._rows[name][column]

    @cached_property
    def _samples(self) -> dict[str, dict[str, Tensor]]:
        """The values of all columns in all resamples."""
        first = next(iter(self.results.values()))
        sizes = {"test": first.count, **{place: outside.count for place, outside in first.outside.items()}}
        longest = max(len(values) for result in self.results.values() for values in result.scores.values())
        statistics = {name: statistics_of(result, self.bins) for name, result in self.results.items()}
        return resampled(statistics, sizes, min(longest, MOST))

    @outside_autocast
    def table(self, *columns: str) -> str:
        """Return the report as text, one line per model; `columns` such as "nll", "auroc notMNIST" choose and order.

        Without `columns`, scores of strangeness other than uncertainty, epistemic and novelty are left out.

        Examples:
            >>> print(report.table("accuracy", "nll", "ece"))
        """
        chosen = self._chosen(columns) if columns else self._printed()
        lines = [["", *(title(c.name) for c in chosen)]]
        for name in self.results:
            row = self.row(name)
            lines.append([name, *(cell(c.name, row.get(c.name)) for c in chosen)])
        widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:]))]).rstrip()
            for line in lines
        )

    __str__ = table

    @outside_autocast
    def findings(self) -> tuple[str, ...]:
        """Return the findings as plain sentences, with the uncertainty of each number.

        Examples:
            >>> for sentence in report.findings():
            ...     print(sentence)
        """
        return findings_of(self)

    @outside_autocast
    def to_dict(self) -> dict[str, Any]:
        """Return everything that is printed, ready for JSON, with 95 % intervals where there are any.

        {"task", "bins", "findings", "models": {name: {column: value, …, "items", "intervals": {column: [low, high]},
        "differences": {column: [value, low, high]}, "ood": {place: {column: value}}}}}.

        Examples:
            >>> nll = report.to_dict()["models"]["Laplace"]["nll"]
        """
        models = {}
        for name, result in self.results.items():
            row = self.row(name)
            places: dict[str, dict[str, float]] = {place: {} for place in result.outside}
            for column in [column for column in row if " " in column]:
                metric, _, place = column.partition(" ")
                places[place][metric] = row.pop(column)
            spans = {column: self.interval(name, column)[1:] for column in self._rows[name]}
            known = [column for column in self._rows[name] if column in self._rows[self.baseline]]
            gaps = {column: self.difference(name, column) for column in known if name != self.baseline}
            models[name] = {
                **row,
                "items": result.count,
                "intervals": {column: list(span) for column, span in spans.items() if math.isfinite(span[0])},
                "differences": {column: list(gap) for column, gap in gaps.items() if math.isfinite(gap[1])},
                "ood": places,
            }
        return {"task": self.kind.kind, "bins": self.bins, "findings": list(self.findings()), "models": models}

    def to_frame(self) -> pandas.DataFrame:
        """Return the whole table as a pandas data frame: one row per model, one column per score.

        Examples:
            >>> best = report.to_frame().sort_values("nll")
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_frame() needs pandas: pip install 'lapwing-torch[pandas]'") from error
        return pandas.DataFrame(
            {name: self.row(name) for name in self.results}, index=[column.name for column in self.columns()]
        ).T

    @outside_autocast
    def _repr_html_(self) -> str:
        columns = self._printed()
        rows = [[name, *(cell(c.name, self.row(name).get(c.name)) for c in columns)] for name in self.results]
        count = self.results[self.baseline].count
        note = " ".join([f"{count:,} test items; NLL in nats per item.", *self.findings()])
        return html_table(["", *(title(c.name) for c in columns)], rows, note=note)

    @outside_autocast
    def figures(self) -> dict[str, Figure]:
        """Return the pictures by name. Pictures of single items are about the last model.

        Examples:
            >>> figures = report.figures()
        """
        groups = [*figures_of(self), *galleries_of(self)]
        return {picture.name: picture.figure for group in groups for picture in group.pictures}

    @outside_autocast
    def to_html(
        self,
        path: str | Path,
        *,
        heading: str = "Evaluation",
        notes: tuple[str, ...] = (),
        facts: Mapping[str, str] | None = None,
    ) -> Path:
        """Write one self-contained page: findings, tables with intervals, pictures, single items, settings.

        `notes` are paragraphs below the heading, `facts` such as {"seed": "0"} join the settings at the end. The page
        loads nothing from elsewhere, follows the reader's dark mode, fits a phone, and can be printed.

        Examples:
            >>> report.to_html("report.html", heading="Flowers", notes=["Three species."])
        """
        return write_page(self, Path(path), heading, notes, facts or {})

    def _printed(self) -> tuple[Column, ...]:
        """Return the columns that a table of one line per model has room for."""
        return tuple(c for c in self.columns() if " " not in c.name or c.name.partition(" ")[0] in PRINTED)

    def _chosen(self, names: tuple[str, ...]) -> tuple[Column, ...]:
        known = {column.name: column for column in self.columns()}
        missing = [name for name in names if name not in known]
        if missing:
            raise BadData(
                f"the report has no column {missing[0]!r}: choose from {', '.join(known)}{nearest(missing[0], known)}"
            )
        return tuple(known[name] for name in names)
