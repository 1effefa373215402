"""The look that all plots share: colors, fonts and panels, in figures that pyplot does not keep alive."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lapwing.errors import BadData
from lapwing.model.calls import as_tensors

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2328", "#59636e", "#d8dce2"
INSIDE = "#2b6cb0"
OUTSIDE = ("#c2410c", "#7c3aed", "#0f766e", "#be185d")
MODELS = ("#59636e", "#c2410c", "#2b6cb0", "#0f766e", "#7c3aed", "#be185d", "#8a6d00")
LINES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))  # so that colors are not all that tells curves apart
DASHED = (0, (4, 3))
PANEL = 3.1  # inches
PER_ROW = 3
POINTS = 300  # of a curve: more are not seen
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.dpi": 110,
    "savefig.facecolor": "white",
}


def array(tensor: Any) -> NDArray:
    return torch.as_tensor(as_tensors(tensor)).detach().cpu().numpy()


def row(values: Any) -> Tensor:
    """Return values as one float64 row on the CPU."""
    return torch.as_tensor(as_tensors(values)).detach().double().cpu().flatten()


def thinned(x: Tensor, y: Tensor) -> tuple[NDArray, NDArray]:
    """Return at most `POINTS` points of a curve, evenly spread, its ends among them."""
    if len(x) > POINTS:
        kept = torch.linspace(0, len(x) - 1, POINTS).round().long()
        x, y = x[kept], y[kept]
    return array(x), array(y)


def matplotlib() -> ModuleType:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'lapwing-torch[report]'") from error
    return matplotlib


def style() -> Any:
    """Return a context in which figures have the house style; the user's settings come back afterwards."""
    return matplotlib().rc_context(STYLE)


def blank(width: float, height: float) -> Figure:
    """Return a figure outside pyplot: no global list keeps it alive and no window opens."""
    matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def grid(panels: int, rows_each: int = 1, width: float = PANEL) -> tuple[Figure, list[tuple[Axes, ...]]]:
    """Return panels of `rows_each` axes on top of each other, up to three panels per row."""
    if not panels:
        raise BadData("there is nothing to draw: pass at least one model")
    columns = min(PER_ROW, panels)
    rows = -(-panels // columns)
    heights = [3, 1][:rows_each]
    figure = blank(columns * width, rows * PANEL * (1.2 if rows_each > 1 else 0.85))
    spec = figure.add_gridspec(rows * rows_each, columns, height_ratios=heights * rows)
    return figure, [
        tuple(figure.add_subplot(spec[(k // columns) * rows_each + part, k % columns]) for part in range(rows_each))
        for k in range(panels)
    ]


def one(width: float = 4.2, height: float = 3.1) -> tuple[Figure, Axes]:
    """Return a figure with one panel."""
    figure = blank(width, height)
    return figure, figure.add_subplot()


def looks(k: int) -> dict[str, Any]:
    """Return color and line style of the k-th curve."""
    return {"color": MODELS[k % len(MODELS)], "linestyle": LINES[k % len(LINES)], "linewidth": 1.6}


def dot(axes: Axes, place: int, value: float, low: float, high: float, color: str, words: str) -> None:
    """Draw a value with its interval in one row of a plot."""
    drawn = axes.plot([low, high], [place, place], color=color, linewidth=2.3, alpha=0.45)
    for artist in (*drawn, *axes.plot([value], [place], "o", color=color, markersize=5)):
        tip(artist, words)


def tip(artist: Artist, text: str) -> None:
    """Give an artist a text that the HTML page shows while the mouse is over it."""
    artist.set_gid(f"tip {text}")


def diagonal(axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=DASHED, zorder=1)


def lattice(axes: Axes) -> None:
    axes.grid(color=GRID, linewidth=0.7)


def percent(axes: Axes, *which: str) -> None:
    """Write the ticks of the axes named "x" and "y" as percentages."""
    from matplotlib.ticker import PercentFormatter

    for name in which:
        getattr(axes, f"{name}axis").set_major_formatter(PercentFormatter(1.0, symbol=" %", decimals=None))
