"""How well scores tell items unlike the training data from test items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing import metrics
from lapwing.errors import BadData
from lapwing.plots.style import MODELS, MUTED, blank, diagonal, lattice, looks, one, percent, row, style, thinned, tip

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def roc(
    inside: Mapping[str, Tensor] | Tensor, outside: Mapping[str, Tensor] | Tensor, *, title: str = ""
) -> Figure:
    """Plot the share of outside items found against the share of test items flagged by mistake, one line per score.

    Both map the name of a score to its values, which grow with strangeness, or are the values of one score; the area
    under a line is the AUROC, which stands in the legend.

    Example:
        >>> p, q = la.predict(x_test), la.predict(x_other)
        >>> plots.roc({"entropy": p.entropy, "novelty": p.novelty}, {"entropy": q.entropy, "novelty": q.novelty})
    """
    if isinstance(inside, Tensor) and isinstance(outside, Tensor):
        inside, outside = {"score": inside}, {"score": outside}
    if isinstance(inside, Tensor) or isinstance(outside, Tensor):
        raise BadData("pass the values of one score for both sides, or for both a mapping from names to values")
    if not inside or inside.keys() != outside.keys():
        raise BadData(f"the scores of both sides must have the same names, got {list(inside)} and {list(outside)}")
    with style():
        figure, axes = one(4.2, 3.9)
        diagonal(axes)
        for k, (name, scores) in enumerate(inside.items()):
            flagged, found = _curve(row(scores), row(outside[name]))
            area = metrics.auroc(scores, outside[name])
            (line,) = axes.plot(*thinned(flagged, found), label=f"{name}  {area:.3f}", **looks(k))
            tip(line, f"{name}: AUROC {area:.4f}")
        axes.set(title=title, xlabel="test items flagged", ylabel="outside items found", xlim=(0, 1), ylim=(0, 1.01))
        axes.set_aspect("equal")
        percent(axes, "x", "y")
        lattice(axes)
        axes.legend(loc="lower right", title="score, AUROC", title_fontsize=8)
        return figure


def _curve(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of both sides at or above every threshold, from none to all."""
    thresholds = torch.cat([inside, outside]).unique()
    shares = []
    for side in (inside, outside):
        below = torch.searchsorted(side.sort().values, thresholds)  # of items below each threshold
        shares.append(torch.cat([torch.ones(1), 1 - below.double() / len(side), torch.zeros(1)]).flip(0))
    return shares[0], shares[1]


def scores(
    areas: Mapping[str, Mapping[str, tuple[float, float, float]]], *, title: str = "", label: str = "AUROC"
) -> Figure:
    """Plot the AUROC of every score of every model as a dot with its interval.

    `areas` maps models to {score: (value, low, high)}, as `Report.interval` gives them.

    Example:
        >>> plots.scores({"MAP": {"entropy": (0.93, 0.91, 0.95)}, "Laplace": {"novelty": (0.95, 0.93, 0.96)}})
    """
    lines = [(model, name, k) for k, (model, found) in enumerate(areas.items()) for name in found]
    if not lines:
        raise BadData("there is nothing to draw: no model has a score")
    with style():
        figure = blank(4.2, 0.9 + 0.27 * len(lines))
        axes = figure.add_subplot()
        for place, (model, name, k) in enumerate(lines):
            value, low, high = areas[model][name]
            color = MODELS[k % len(MODELS)]
            (bar,) = axes.plot([low, high], [place, place], color=color, linewidth=2.2, alpha=0.5)
            (dot,) = axes.plot([value], [place], "o", color=color, markersize=5)
            for artist in (bar, dot):
                tip(artist, f"{model}, {name}: {label} {value:.4f}, 95 % interval {low:.4f} to {high:.4f}")
        axes.set_yticks(range(len(lines)), [f"{model}: {name}" for model, name, _ in lines])
        axes.axvline(0.5, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.set(title=title, xlabel=f"{label} (0.5 is chance)", ylim=(len(lines) - 0.4, -0.6))
        axes.set_xlim(right=1.0 + 0.02)
        lattice(axes)
        return figure
