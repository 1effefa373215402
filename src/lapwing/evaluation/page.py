"""Write the report as one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import datetime
import html
import importlib
import io
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapwing.evaluation.columns import (
    COST_COLUMNS,
    RESAMPLES,
    SCORES,
    SEED,
    Column,
    Numbers,
    cell,
    column_of,
    difference_words,
    findings_of,
    score_name,
    title,
)
from lapwing.evaluation.examples import Example
from lapwing.evaluation.figures import Picture, distinct_scores, figures_of
from lapwing.plots.style import GRID, INK, INSIDE, MODELS, MUTED, OUTSIDE, array, style
from lapwing.plots.uncertainty import stretched
from lapwing.storage import replacing

TEMPLATE = files("lapwing.evaluation") / "template.html"
LINES = 8  # items that are shown as rows of a table
MEANINGS = {
    "accuracy": "share of right answers",
    "nll": "mean negative log-likelihood of the targets, in nats per item: lower is better",
    "ece": "expected calibration error of the top class: lower is better",
    "brier": "squared distance of the probabilities from the truth: lower is better",
    "entropy": "mean entropy of the predictions, in nats",
    "rmse": "root mean squared error: lower is better",
    "crps": "continuous ranked probability score, in units of the target: lower is better",
    "coverage95": "share of targets inside the 95 % intervals: it should be 0.95",
    "stddev": "mean standard deviation of the predictions",
    "auroc": "probability that an outside item scores higher than a test item: higher is better",
    "fpr95": "share of outside items accepted when 95 % of test items are: lower is better",
    "seconds": "for predicting the test set once",
    "peak_mb": "peak memory above what was in use at the start",
}


@dataclass(frozen=True)
class Cell:
    """One number of a table as text, with its interval, its difference from the baseline and the verdict on it."""

    text: str
    span: str = ""
    gap: str = ""
    verdict: int = 0
    rank: float = math.nan

    @property
    def mark(self) -> str:
        """The class of the cell in the page."""
        return {1: "better", -1: "worse"}.get(self.verdict, "")


@dataclass(frozen=True)
class Row:
    """One line of a table: its first cells, such as the model and the score, and its numbers."""

    heads: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """A table with a caption, the heads of its columns and what they mean."""

    caption: str
    heads: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]


def write_page(report: Numbers, path: Path, heading: str, notes: Sequence[str], facts: Mapping[str, str]) -> Path:
    """Write the page and return its path."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("the HTML report needs jinja2: pip install 'lapwing-torch[report]'") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(
        heading=heading,
        notes=notes,
        date=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        findings=findings_of(report),
        sections=sections_of(report),
        legend=legend_of(report),
        facts=facts_of(report, facts),
        settings={name: dict(result.about) for name, result in report.results.items()},
        light=_variables(LIGHT),
        dark=_variables(DARK),
    )
    with replacing(path) as part:
        part.write_text(page, encoding="utf-8")
    return path


def sections_of(report: Numbers) -> list[dict[str, Any]]:
    """Return the sections of the page: title, text, tables, pictures as SVG, and lists of items."""
    name, result = list(report.results.items())[-1]
    groups = figures_of(report)
    pictures = [picture for group in groups for picture in group.pictures]
    drawn = {id(picture): svg_of(picture, place) for place, picture in enumerate(pictures, 1)}
    count = report.results[report.baseline].count
    sections = [_section("The numbers", "", [model_table(report, SCORES, f"Scores on {count:,} test items")])]
    for group in groups:
        tables = [] if group.place is None else [outside_table(report, group.place)]
        items = []
        if group.place is not None:
            seen = result.outside[group.place].examples.get("uncertain", ())
            items = [_items(f"Items of {group.place} that {name} is least certain about", seen)]
        sections.append(_section(group.title, group.text, tables, [drawn[id(p)] for p in group.pictures], items))
    uncertain, wrong = (result.examples.get(kind, ()) for kind in ("uncertain", "wrong"))
    lists = [_items(f"Test items that {name} is least certain about", uncertain)]
    lists.append(_items(f"Test items whose truth {name} expected least", wrong))
    if any(each["examples"] for each in lists):
        sections.append(_section("Single items", "", items=lists))
    costs = model_table(report, COST_COLUMNS, "Predicting the test set once")  # measured once, without intervals
    sections.append(_section("Time and memory", "", [costs]))
    return sections


def _section(
    name: str,
    text: str,
    tables: Sequence[Table] = (),
    pictures: Sequence[Mapping[str, str]] = (),
    items: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    return {"title": name, "text": text, "tables": tables, "pictures": pictures, "items": items}


def model_table(report: Numbers, columns: Sequence[Column], caption: str) -> Table:
    """Return the columns that the report has, one row per model, with intervals and differences."""
    known = {column.name for column in report.columns()}
    names = [column.name for column in columns if column.name in known]
    rows = tuple(Row((name,), tuple(number(report, name, c) for c in names)) for name in report.results)
    return Table(caption, ("model",), tuple((title(c), MEANINGS[c]) for c in names), rows)


def outside_table(report: Numbers, place: str) -> Table:
    """Return AUROC and FPR95 of every score of every model on an outside set."""
    rows = []
    for name, scores in distinct_scores(report, place).items():
        for score in scores:
            columns = [column_of(metric, score, place) for metric in ("auroc", "fpr95")]
            rows.append(Row((name, score_name(report, score)), tuple(number(report, name, c) for c in columns)))
    heads = tuple((name.upper(), MEANINGS[name]) for name in ("auroc", "fpr95"))
    return Table(f"{place} against the test items", ("model", "score"), heads, tuple(rows))


def number(report: Numbers, name: str, column: str) -> Cell:
    """Return one number with its interval and its difference from the baseline, marked if that is measurable."""
    if column not in report.row(name):
        return Cell("–")
    value, low, high = report.interval(name, column)
    span = "" if math.isnan(low) else f"{cell(column, low)} to {cell(column, high)}"
    if name == report.baseline or column not in report.row(report.baseline):
        return Cell(cell(column, value), span, "", 0, value)
    gap, least, most = report.difference(name, column)
    words = ""
    if least == most == 0:
        words = "no difference"
    elif not math.isnan(least):
        words = difference_words(column, gap, least, most, sign=True)
    return Cell(cell(column, value), span, words, report.verdict(name, column), value)


def legend_of(report: Numbers) -> str:
    """Explain the tables in a few sentences."""
    words = [
        "Small numbers below a value are its 95 % interval, from resampling the items with replacement "
        f"({RESAMPLES:,} times, seed {SEED})."
    ]
    if len(report.results) > 1:
        words.append(
            f"The line below is the difference from {report.baseline} on the same items, with its 95 % interval. "
            "Bold with ▲ is better and ▼ is worse, by a difference whose interval leaves out zero; without a mark, no "
            "difference was measurable. If nothing really differs, one comparison in twenty gets a mark by chance."
        )
    if "correct" in report.results[report.baseline].items:
        words.append(f"ECE has {report.bins} bins of equal width.")
    words.append("Click a column's head to sort by it.")
    return " ".join(words)


def facts_of(report: Numbers, more: Mapping[str, str]) -> dict[str, str]:
    """Return facts about data, versions and seed, with those that the caller adds."""
    found = dict(report.data)
    found["task"] = f"predictions of {report.kind.kind}"
    found |= more
    found["intervals"] = f"{RESAMPLES:,} resamples of the items, seed {SEED}"
    own = importlib.import_module("lapwing").__version__
    found["versions"] = f"Lapwing {own}, torch {torch.__version__}, Python {platform.python_version()}"
    return found


def _items(name: str, examples: Sequence[Example]) -> dict[str, Any]:
    """Return a list of items: pictures if all items have one, else rows of a table."""
    pictures = bool(examples) and all(example.picture is not None for example in examples)
    examples = examples if pictures else examples[:LINES]
    shown = [_item(example, place, pictures) for place, example in enumerate(examples, 1)]
    heads = [head for head in ("item", "truth", "answer", "certainty") if any(item[head] for item in shown)]
    return {"title": name, "pictures": pictures, "examples": shown, "heads": heads, "order": "the most extreme first"}


def _item(example: Example, place: int, pictures: bool) -> dict[str, Any]:
    words = [f"item {place}", *([f"truth {example.truth}"] if example.truth else ())]
    words += [f"predicted {example.answer}"] if example.answer else []
    return {
        "png": png_of(example.picture) if pictures and example.picture is not None else "",
        "alt": ", ".join([*words, example.certainty]),
        "item": example.text,
        "truth": example.truth,
        "answer": example.answer,
        "certainty": example.certainty,
        "wrong": example.wrong,
    }


def png_of(picture: Tensor) -> str:
    """Return a picture (C, H, W), stretched to its own range, as a data URI of a PNG."""
    from matplotlib import image

    buffer = io.BytesIO()
    pixels = array(stretched(picture.float()))
    image.imsave(buffer, pixels, cmap="gray_r", vmin=0, vmax=1, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


COLORS = dict.fromkeys((INK, MUTED, GRID, INSIDE, *OUTSIDE, *MODELS))
LIGHT = {color: color for color in COLORS}
DARK = LIGHT | {
    INK: "#e6edf3", MUTED: "#a3adb8", GRID: "#30363d", INSIDE: "#79b8ff", "#c2410c": "#ff9a62", "#7c3aed": "#c4a7ff",
    "#0f766e": "#4fd1c1", "#be185d": "#ff8cc0", "#8a6d00": "#e3c04a",
}  # fmt: skip


def _variables(colors: Mapping[str, str]) -> str:
    return " ".join(f"--{key[1:]}: {value};" for key, value in colors.items())


def svg_of(picture: Picture, place: int) -> dict[str, str]:
    """Return a figure as SVG in which colors are variables of the page, and words appear under the mouse.

    `place` makes the identifiers of this picture unique on the page.
    """
    from matplotlib import rc_context

    buffer, figure = io.BytesIO(), picture.figure
    with style(), rc_context({"svg.fonttype": "none", "svg.hashsalt": f"lapwing {place}"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue().decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="tip ([^"]*)">', r"<g><title>\1</title>", text)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for color in COLORS:
        text = text.replace(color, f"var(--{color[1:]})")
    head = f'<svg role="img" aria-label="{html.escape(picture.words)}" '
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    inside = text[text.index(">") + 1 :]
    svg = f'{head}{box[0]} xmlns:xlink="http://www.w3.org/1999/xlink">{inside}'
    return {"svg": svg, "words": picture.words, "width": str(round(figure.get_figwidth() * 96))}
