"""Do probabilities and intervals keep what they promise, and what does abstaining buy?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing import metrics
from lapwing.errors import BadData
from lapwing.plots.style import (
    INK,
    INSIDE,
    MUTED,
    array,
    diagonal,
    grid,
    lattice,
    looks,
    one,
    percent,
    row,
    style,
    thinned,
    tip,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def reliability(curves: Mapping[str, tuple[Tensor, Tensor]], bins: int = 15) -> Figure:
    """Plot accuracy against confidence for each model, with the share of items in each bin below.

    `curves` maps names to (confidence, correct), one entry per item. On the diagonal a model is calibrated; the
    calibration error is written into each panel.

    Examples:
        >>> p = la.predict(x)
        >>> plots.reliability({"Laplace": (p.confidence, p.label == y)}).savefig("reliability.png")
    """
    with style():
        figure, panels = grid(len(curves), rows_each=2)
        for (name, (confidence, correct)), (axes, below) in zip(curves.items(), panels):
            table = metrics.reliability(confidence, correct, bins)
            _reliability_panel(axes, below, table, name)
        panels[0][0].set_ylabel("accuracy")
        panels[0][1].set_ylabel("share")
        return figure


def _reliability_panel(axes: Axes, below: Axes, table: metrics.Reliability, name: str) -> None:
    bins = len(table.count)
    left = array(torch.arange(bins) / bins)
    used = array(table.count > 0)
    confidence, accuracy, count = (array(part) for part in (table.confidence, table.accuracy, table.count))
    diagonal(axes)
    bars = axes.bar(left[used], accuracy[used], 1 / bins, align="edge", color=INSIDE, alpha=0.35, linewidth=0)
    for bar, c, a, n in zip(bars, confidence[used], accuracy[used], count[used]):
        tip(bar, f"{n:,.0f} items with confidence {c:.3f}: accuracy {a:.3f}")
    axes.plot(confidence[used], accuracy[used], "o", color=INSIDE, markersize=4, zorder=4, clip_on=False)
    axes.set(title=name, xlim=(0, 1), ylim=(0, 1.02), xticklabels=[])
    axes.text(0.04, 0.93, f"ECE {table.gap:.3f}", transform=axes.transAxes, color=INK)
    below.bar(left, count / count.sum(), 1 / bins, align="edge", color=MUTED, linewidth=0)
    below.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence")


def coverage(levels: Sequence[float], observed: Mapping[str, Sequence[float]]) -> Figure:
    """Plot observed against nominal coverage of central intervals; below the diagonal a model is overconfident.

    `levels` are probabilities, and `observed` maps names to the share of targets inside the interval of each level.

    Examples:
        >>> p, levels = regression.predict(inputs), [0.5, 0.8, 0.95]
        >>> shares = [metrics.coverage(*p.interval(level), targets).item() for level in levels]
        >>> plots.coverage(levels, {"Laplace": shares}).savefig("coverage.png")
    """
    with style():
        figure, axes = one(3.6, 3.3)
        diagonal(axes)
        for k, (name, shares) in enumerate(observed.items()):
            (line,) = axes.plot(levels, shares, marker="o", markersize=3.5, label=name, **looks(k))
            tip(line, f"{name}: " + ", ".join(f"{s:.0%} at {level:.0%}" for level, s in zip(levels, shares)))
        axes.set(xlabel="promised coverage", ylabel="observed coverage", xlim=(0, 1), ylim=(0, 1.01), aspect="equal")
        percent(axes, "x", "y")
        axes.legend(loc="upper left")
        return figure


def risk_coverage(curves: Mapping[str, Any], *, label: str = "error rate") -> Figure:
    """Plot the mean loss of the most certain items against the share of items that are answered.

    `curves` maps names to (uncertainty, loss), one entry per item, or to what `metrics.rejection` returns. The loss is
    1 for an error and 0 for a right answer in classification, and a squared error for values (`label` names its mean).
    A curve that falls steeply to the left means that abstaining on few items removes much of the loss (El-Yaniv and
    Wiener 2010).

    Examples:
        >>> p = la.predict(x)
        >>> plots.risk_coverage({"Laplace": (p.entropy, p.label != y)}).savefig("risk.png")
    """
    with style():
        figure, axes = one()
        axes.set(xlabel="share of items answered, the most certain first", ylabel=label, xlim=(0, 1))
        for k, (name, curve) in enumerate(curves.items()):
            share, risk = answered(*curve) if isinstance(curve, tuple) else (curve.share, curve.risk)
            (line,) = axes.plot(*thinned(share, risk), label=name, **looks(k))
            tip(line, f"{name}: {label} {risk[-1]:.4g} if all items are answered")
        axes.set_ylim(bottom=0)
        percent(axes, "x")
        lattice(axes)
        if curves:
            axes.legend(loc="best")
        return figure


def answered(uncertainty: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares k/n of items and the mean loss of the k most certain ones, each (n,).

    Items of equal uncertainty count with the mean loss among them, so that their order does not matter.
    """
    uncertainty, loss = row(uncertainty), row(loss)
    if len(uncertainty) != len(loss) or not len(loss):
        raise BadData(f"each item needs an uncertainty and a loss, got {len(uncertainty)} and {len(loss)}")
    if uncertainty.isnan().any() or loss.isnan().any():
        raise BadData("an uncertainty or a loss is NaN: find the prediction that is not finite first")
    values, place, count = uncertainty.unique(return_inverse=True, return_counts=True)
    total = torch.zeros_like(values).index_add(0, place, loss)
    ordered = (total / count).repeat_interleave(count)  # the mean loss of each group of ties, by uncertainty
    k = torch.arange(1, len(ordered) + 1, dtype=torch.float64)
    return k / len(k), ordered.cumsum(0) / k
