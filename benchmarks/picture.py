"""The log–log picture of growth: time and memory against the number of data and against width."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.growth import Point, slope

COLORS = {"fit-kron": "#1f6feb", "fit-diag": "#d97706"}
PEER_COLORS = {"fit-kron": "#7a869a", "fit-diag": "#b08968"}


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Four panels: rows are time and memory, columns are N and width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    panels = figure.subplots(2, 2, sharex="col")
    for column, axis in enumerate(("N", "width")):
        for row, what in enumerate(("seconds", "peak")):
            panel(panels[row][column], [point for point in points if point[0] == axis], what)
        panels[1][column].set_xlabel({"N": "data N (LeNet-5)", "width": "width (MLP 784-w-w-10, N = 512)"}[axis])
    panels[0][0].set_ylabel("CPU seconds")
    panels[1][0].set_ylabel("peak memory above the model, MB")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)


def panel(axes: Any, points: Sequence[Point], what: str) -> None:
    from matplotlib.ticker import LogLocator

    scale = 1e-6 if what == "peak" else 1.0
    for name, color in COLORS.items():
        chosen = [point for point in points if point[2].cell.operation == name]
        curve(axes, [(x, getattr(o.ours, what)) for _, x, o in chosen], scale, f"Lapwing {name}", color, "o-")
        theirs = [(x, getattr(o.peers[0], what)) for _, x, o in chosen if o.peers]
        curve(axes, theirs, scale, f"laplace-torch {name}", PEER_COLORS[name], "s--")
    gradient = {x: o.ours.gradient if what == "seconds" else o.ours.gradient_peak for _, x, o in points}
    curve(axes, list(gradient.items()), scale, "one gradient epoch", "#111827", "-:")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(True, which="major", alpha=0.3)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top * (top / bottom) ** 0.35)  # room for the legend above the curves
    axes.legend(fontsize=7, frameon=False, loc="upper left")


def curve(
    axes: Any, pairs: Sequence[tuple[float, float | None]], scale: float, label: str, color: str, style: str
) -> None:
    known = sorted((x, y * scale) for x, y in pairs if y is not None)
    if not known:
        return
    sizes, values = zip(*known)
    power = slope(sizes, values)
    label = f"{label}" + ("" if power is None else f" (power {round(power, 2) + 0.0:.2f})")
    marker, line = style[0].replace("-", ""), style[1:]
    axes.plot(sizes, values, marker=marker, linestyle=line, color=color, label=label, markersize=4)
