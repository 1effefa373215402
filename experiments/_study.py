"""Experiments whose outcome is one number per row and column: repeated over seeds, judged, drawn and written.

    study("lowrank", ABOUT, "Ways to a low-rank curvature", run, judge, given)

`run(seed, given)` returns the table of one seed as a mapping from row to column to number. `judge(mean)` takes the
means over seeds and returns what a page quotes or asks, with verdicts (`Claim`, `answered`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments._cache import each_seed
from experiments._results import Claim, Result, Scores, gathered, spread

PANELS = 5  # panels of a figure per line
LEAST = 2e-3  # width of a panel at least, as a share of its values


def study(
    name: str,
    about: Mapping[str, Any],
    title: str,
    run: Callable[[int, argparse.Namespace], Scores],
    judge: Callable[[Scores], Sequence[Claim]],
    given: argparse.Namespace,
    *,
    notes: Sequence[str] = (),
    figure: Callable[[Mapping[str, Mapping[str, list[float]]]], Any] | None = None,
) -> None:
    """Run every seed, print the table and the verdicts, and write page, figure and data where `--out` says."""
    seeds = list(range(given.first, given.first + given.seeds))
    each, mean = gathered(each_seed(name, run, given))
    rows = [{"": row, **{column: spread(values) for column, values in cells.items()}} for row, cells in each.items()]
    claims = judge(mean)
    if about.get("page"):
        notes = [
            *notes,
            f"The rules were written when earlier results stood on [another page]({about['page']}) already.",
        ]
    result = Result(name, title, about["paper"], given.command, seeds).with_rows(rows).with_claims(*claims)
    result = result.with_sentence(claims[0].found).with_notes(
        *notes, *(["± is the standard deviation over seeds."] if len(seeds) > 1 else [])
    )
    result.with_data(scores=each).finish(given.out, lambda: (figure or dots)(each))


def told(values: Mapping[str, float], digits: int = 3) -> str:
    """Return "name value, name value", with semicolons where names have commas."""
    between = "; " if any("," in name for name in values) else ", "
    return between.join(f"{name} {value:.{digits}g}" for name, value in values.items())


def dots(each: Mapping[str, Mapping[str, list[float]]]) -> Any:
    """Draw one panel per column, with a line per row that has it: a dot per seed and a bar at the mean."""
    from matplotlib.figure import Figure

    groups: dict[tuple[str, ...], list[str]] = {}  # columns by the rows that have them
    for column in dict.fromkeys(column for cells in each.values() for column in cells):
        groups.setdefault(tuple(row for row, cells in each.items() if column in cells), []).append(column)
    lines = [
        (rows, columns[k : k + PANELS]) for rows, columns in groups.items() for k in range(0, len(columns), PANELS)
    ]
    wide = max(len(columns) for _, columns in lines)
    heights = [0.7 + 0.24 * len(rows) for rows, _ in lines]
    canvas = Figure(figsize=(2.5 + 2.2 * wide, sum(heights)), layout="constrained")
    parts = canvas.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)[:, 0]
    for (rows, columns), part in zip(lines, parts):
        panels = part.subplots(1, wide, sharey=True, squeeze=False)[0]
        for axes, column in zip(panels, columns):
            found = [each[row][column] for row in rows]
            for k, values in enumerate(found):
                axes.plot(values, [k] * len(values), ".", color="#2b6cb0", ms=5)
                axes.plot([sum(values) / len(values)], [k], "|", color="black", ms=11)
            low, high = min(map(min, found)), max(map(max, found))
            sizes = sorted(abs(value) for values in found for value in values)
            usual = sizes[len(sizes) // 2]
            if low > 0 and high > 100 * low:
                axes.set_xscale("log")
            elif low < 0 < usual and sizes[-1] > 1000 * usual:  # one value would hide how the others differ
                near, far = (10 ** math.ceil(math.log10(size)) for size in (2 * usual, -low))
                axes.set_xscale("symlog", linthresh=near, linscale=2)
                axes.set_xticks([-far, -near, 0, near])
            else:
                axes.locator_params(axis="x", nbins=4)  # labels of more overlap
                axes.ticklabel_format(axis="x", useOffset=False)
                if 0 < high - low < LEAST * abs(high):  # whose labels would have too many digits
                    axes.set_xlim((low + high - LEAST * abs(high)) / 2, (low + high + LEAST * abs(high)) / 2)
            axes.set_title(column, loc="left", fontsize=9)
            axes.grid(axis="y", lw=0.3)
            axes.tick_params(labelsize=8)
        panels[0].set_yticks(range(len(rows)), rows)
        panels[0].set_ylim(len(rows) - 0.5, -0.5)
        for axes in panels[len(columns) :]:
            axes.axis("off")
    return canvas
