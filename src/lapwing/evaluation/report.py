"""One table and a few pictures that say how models compare on the same data."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lapwing import metrics, plots
from lapwing.errors import BadData, brief, nearest
from lapwing.evaluation.meter import Cost
from lapwing.predictive import Prediction
from lapwing.predictive.table import html_table
from lapwing.writing import replacing

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

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


@dataclass(frozen=True, eq=False)
class Gallery:
    """The most uncertain pictures of a data set, with their uncertainty and a caption each."""

    images: Tensor
    scores: Tensor
    captions: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Outside:
    """Scores of one out-of-distribution set: the uncertainty of y and, where the model has one, the novelty."""

    uncertainty: Tensor
    novelty: Tensor | None
    gallery: Gallery | None


@dataclass(frozen=True, eq=False)
class Result:
    """The scores of one model on test items and outside items, and what predicting the test set cost."""

    kind: type[Prediction]  # of its predictions
    items: Items
    uncertainty: Tensor
    novelty: Tensor | None
    outside: Mapping[str, Outside]
    cost: Cost
    count: int
    gallery: Gallery | None


@dataclass(frozen=True, eq=False)
class Report:
    """How models compare on the same data. Made by `lapwing.evaluate`.

    Example:
        >>> report = lapwing.evaluate({"MAP": model, "Laplace": la}, test_loader, ood={"notMNIST": other_loader})
        >>> print(report.table())
        >>> report.to_html("report.html")
    """

    __repr__ = brief

    results: Mapping[str, Result]
    bins: int = 15

    @property
    def kind(self) -> type[Prediction]:
        """The kind of prediction that was scored: of classes, labels or numbers."""
        return list(self.results.values())[-1].kind

    def columns(self) -> tuple[Column, ...]:
        """Return the columns that at least one model fills, in order."""
        places = list(next(iter(self.results.values())).outside)
        outside = tuple(
            Column(f"{name} {place}", more)
            for place in places
            for name, more in (("auroc", True), ("fpr95", False), ("auroc_novelty", True))
        )
        rows = [self.row(name) for name in self.results]
        return tuple(c for c in (*SCORES, *outside, *COST_COLUMNS) if any(c.name in row for row in rows))

    def row(self, name: str) -> dict[str, float]:
        """Return the values of one model by column."""
        result = self.results[name]
        row = summary(result.items, self.bins)
        for place, outside in result.outside.items():
            row[f"auroc {place}"] = metrics.auroc(result.uncertainty, outside.uncertainty).item()
            row[f"fpr95 {place}"] = metrics.fpr95(result.uncertainty, outside.uncertainty).item()
            if result.novelty is not None and outside.novelty is not None:
                row[f"auroc_novelty {place}"] = metrics.auroc(result.novelty, outside.novelty).item()
        row["seconds"] = result.cost.seconds
        if result.cost.peak_bytes is not None:
            row["peak_mb"] = result.cost.peak_bytes / 1e6
        return row

    def table(self, *columns: str) -> str:
        """Return the report as text, one line per model; `columns` such as "nll", "auroc notMNIST" choose and order."""
        chosen = self._chosen(columns)
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

    def to_dict(self) -> dict[str, Any]:
        """Return the whole table, ready for JSON: {"task", "bins", "models": {name: {…, "ood": {place: {…}}}}}."""
        models = {}
        for name, result in self.results.items():
            row = self.row(name)
            places: dict[str, dict[str, float]] = {place: {} for place in result.outside}
            for place in places:
                for metric in ("auroc", "fpr95", "auroc_novelty"):
                    if f"{metric} {place}" in row:
                        places[place][metric] = row.pop(f"{metric} {place}")
            models[name] = {**row, "items": result.count, "ood": places}
        return {"task": self.kind.kind, "bins": self.bins, "models": models}

    def to_frame(self) -> pandas.DataFrame:
        """Return the whole table as a pandas data frame: one row per model, one column per score.

        report.to_frame().sort_values("nll")
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_frame() needs pandas: pip install pandas") from error
        return pandas.DataFrame(
            {name: self.row(name) for name in self.results}, index=[column.name for column in self.columns()]
        ).T

    def _repr_html_(self) -> str:
        columns = self.columns()
        rows = [[name, *(cell(c.name, self.row(name).get(c.name)) for c in columns)] for name in self.results]
        return html_table(["", *(title(c.name) for c in columns)], rows, note=self._legend())

    def figures(self) -> dict[str, Figure]:
        """Return the pictures by name. Those of images show the last model, which is usually the one of interest."""
        return {name: figure for name, _, figure in self._pictures()}

    def to_html(self, path: str | Path, *, heading: str = "Evaluation", notes: tuple[str, ...] = ()) -> Path:
        """Write the table and the pictures into one self-contained file and return its path."""
        columns = self._chosen(())
        best = {column.name: self._best(column) for column in columns}
        rows = [
            [(name, False), *((cell(c.name, row.get(c.name)), name in best[c.name]) for c in columns)]
            for name, row in ((name, self.row(name)) for name in self.results)
        ]
        page = render(
            title=heading,
            notes=notes,
            header=["", *(title(c.name) for c in columns)],
            rows=rows,
            legend=self._legend(),
            pictures=self._pictures(),
        )
        path = Path(path)
        with replacing(path) as part:
            part.write_text(page, encoding="utf-8")
        return path

    @property
    def _items(self) -> Items:
        return next(iter(self.results.values())).items

    @property
    def _labels(self) -> bool:
        """Whether labels were predicted, which are right or wrong."""
        return "correct" in self._items

    def _chosen(self, names: tuple[str, ...]) -> tuple[Column, ...]:
        known = {column.name: column for column in self.columns()}
        missing = [name for name in names if name not in known]
        if missing:
            raise BadData(
                f"the report has no column {missing[0]!r}: choose from {', '.join(known)}{nearest(missing[0], known)}"
            )
        return tuple(known[name] for name in names) if names else tuple(known.values())

    def _best(self, column: Column) -> set[str]:
        """Return the models that share the best printed value."""
        if column.more_is_better is None:
            return set()
        values = {name: self.row(name).get(column.name, math.nan) for name in self.results}
        values = {name: value for name, value in values.items() if not math.isnan(value)}
        if len(values) < 2:
            return set()
        top = (max if column.more_is_better else min)(values.values())
        return {name for name, value in values.items() if cell(column.name, value) == cell(column.name, top)}

    def _legend(self) -> str:
        count = next(iter(self.results.values())).count
        words = [f"{count:,} test items; NLL in nats per item."]
        if self._labels:
            words.append(f"ECE: expected calibration error of the top class, {self.bins} equal-width bins.")
        if any(result.outside for result in self.results.values()):
            words.append(
                f"AUROC and FPR95: test against outside items by {self.kind.uncertainty_name}; FPR95 is the share of "
                "outside items accepted when 95 % of test items are."
            )
            if any(result.novelty is not None for result in self.results.values()):
                words.append("“by novelty” uses the posterior's own out-of-distribution score.")
        words.append("Seconds and peak memory are for predicting the test set.")
        return " ".join(words)

    def _pictures(self) -> list[tuple[str, str, Figure]]:
        pictures = [self._calibration()]
        label = self.kind.uncertainty_name
        outside = {name: {p: o.uncertainty for p, o in r.outside.items()} for name, r in self.results.items()}
        if any(outside.values()):
            inside = {name: result.uncertainty for name, result in self.results.items()}
            text = f"The {label} of predictions for test items and for items unlike the training data."
            figure = plots.entropies(inside, outside, label=label)
            pictures.append((f"{label.capitalize()} in and out of distribution", text, figure))
        for place in next(iter(outside.values())):
            curves = {name: scores[place] for name, scores in outside.items()}
            text = "Share of outside items at or below each value: the lower the line, the more doubt, as it should be."
            pictures.append((f"{label.capitalize()} on {place}", text, plots.ecdf(curves, label=label)))
        return pictures + self._galleries()

    def _calibration(self) -> tuple[str, str, Figure]:
        if self._labels:
            curves = {n: (r.items["confidence"], r.items["correct"]) for n, r in self.results.items()}
            text = "Accuracy among predictions of similar confidence. Points on the dashed line are calibrated."
            return "Reliability", text, plots.reliability(curves, self.bins)
        levels = [float(key.removeprefix("covered ")) for key in self._items if key.startswith("covered ")]
        shares = {n: [r.items[f"covered {level}"].mean().item() for level in levels] for n, r in self.results.items()}
        text = "Share of targets inside central intervals. Below the dashed line a model is overconfident."
        return "Coverage", text, plots.coverage(levels, shares)

    def _galleries(self) -> list[tuple[str, str, Figure]]:
        name, result = list(self.results.items())[-1]
        galleries = {"test": result.gallery, **{place: o.gallery for place, o in result.outside.items()}}
        arrow = "truth → prediction, and its probability" if self.kind.kind == "classes" else "uncertainty"
        return [
            (
                f"Most uncertain: {place}",
                f"The {len(gallery.captions)} items with the highest {self.kind.uncertainty_name} under {name} "
                f"({arrow if place == 'test' else 'prediction and its probability'}).",
                plots.uncertain_images(gallery.images, gallery.scores, gallery.captions),
            )
            for place, gallery in galleries.items()
            if gallery is not None
        ]


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


def title(column: str) -> str:
    """Return the heading of a column."""
    name, _, place = column.partition(" ")
    if not place:
        return TITLES.get(name, name)
    if name == "auroc_novelty":
        return f"AUROC {place} by novelty"
    return f"{name.upper()} {place}"


def cell(column: str, value: float | None) -> str:
    """Return a value as it is printed."""
    if value is None or math.isnan(value):
        return "–"
    if column == "accuracy":
        return f"{100 * value:.2f} %"
    if column == "seconds":
        return f"{value:.2f}"
    return f"{value:.0f}" if column == "peak_mb" else f"{value:.4f}"


TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
  body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1f2328;
         max-width: 1080px; margin: 2.5rem auto; padding: 0 1.25rem; background: #fff; }
  h1 { font-size: 1.5rem; margin: 0 0 .4rem; }
  h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
  p { max-width: 46rem; margin: .3rem 0 .8rem; color: #3d444d; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; margin: 1rem 0 .4rem; font-variant-numeric: tabular-nums; }
  th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb; }
  td { white-space: nowrap; }
  th { font-weight: 600; vertical-align: bottom; max-width: 8rem; color: #59636e; border-bottom: 1.5px solid #9ca3af; }
  th:first-child, td:first-child { text-align: left; padding-left: 0; }
  td.best { font-weight: 700; color: #1d4f8c; }
  .note { font-size: .85rem; color: #6b7280; }
  img { max-width: 100%; height: auto; display: block; }
  footer { margin: 3rem 0 1rem; font-size: .8rem; color: #6b7280; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for line in notes %}<p>{{ line }}</p>
{% endfor %}
<div class="scroll"><table>
<thead><tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>
{%- for cell, best in row %}<td{% if best %} class="best"{% endif %}>{{ cell }}</td>{% endfor -%}
</tr>
{% endfor %}</tbody>
</table></div>
<p class="note">{{ legend }}</p>
{% for picture in pictures %}
<h2>{{ picture.title }}</h2>
<p>{{ picture.text }}</p>
<img alt="{{ picture.title }}" width="{{ picture.width }}" src="data:image/png;base64,{{ picture.png }}">
{% endfor %}
<footer>Written by lapwing.</footer>
</body>
</html>
"""


def render(
    *,
    title: str,
    notes: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[tuple[str, bool]]],
    legend: str,
    pictures: Sequence[tuple[str, str, Figure]],
) -> str:
    """Return the page. Rows are (cell, whether it is the best of its column); pictures are (title, text, figure)."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("the HTML report needs jinja2: pip install 'lapwing-torch[report]'") from error
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE)
    embedded = [_embed(name, text, figure) for name, text, figure in pictures]
    return template.render(title=title, notes=notes, header=header, rows=rows, legend=legend, pictures=embedded)


def _embed(title: str, text: str, figure: Figure) -> Mapping[str, str | int]:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    png = base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"title": title, "text": text, "png": png, "width": round(figure.get_figwidth() * 100)}
