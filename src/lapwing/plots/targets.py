"""Plots of predictions against targets: reliability, coverage, risk, intervals and residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing import metrics
from lapwing.errors import BadData
from lapwing.model.calls import outside_autocast
from lapwing.plots.style import (
    DASHED,
    INK,
    INSIDE,
    MUTED,
    OUTSIDE,
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

SHOWN = 600  # points of a parity plot: more hide each other
Bounds = tuple[Tensor, Tensor, Tensor]  # mean, lower and upper


@outside_autocast
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


@outside_autocast
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


@outside_autocast
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


@outside_autocast
def band(
    x: Tensor, prediction: Any, *, data: tuple[Tensor, Tensor] | None = None, level: float = 0.95, title: str = ""
) -> Figure:
    """Plot the mean and the central interval of predictions of one number over inputs of one dimension.

    `prediction` is a `Prediction` of `x`, or (mean, lower, upper). The inner, darker band is the doubt about the
    function, which more data would remove; the outer one includes the noise. `data`, a pair of inputs and targets, is
    drawn as points.

    Examples:
        >>> grid = torch.linspace(-4, 4, 200)[:, None]
        >>> plots.band(grid, regression.predict(grid), data=(inputs, targets)).savefig("band.png")
    """
    at = row(x)
    mean, lower, upper = bounds(prediction, level)
    if not len(at) == len(mean) == len(lower) == len(upper):
        raise BadData(
            f"a band needs one number per input of one dimension: got {len(at)} inputs and {len(mean)} predictions"
        )
    order = at.argsort()
    at, mean, lower, upper = at[order], mean[order], lower[order], upper[order]
    with style():
        figure, axes = one(5.2, 3.3)
        name = f"{100 * level:g} % of new targets"
        axes.fill_between(array(at), array(lower), array(upper), color=INSIDE, alpha=0.18, linewidth=0, label=name)
        doubt = getattr(prediction, "epistemic", None)
        if doubt is not None and not isinstance(prediction, tuple):
            wide = NormalDist().inv_cdf((1 + level) / 2) * row(doubt).sqrt()[order]
            axes.fill_between(
                array(at), array(mean - wide), array(mean + wide), color=INSIDE, alpha=0.35, linewidth=0,
                label="doubt about the mean",
            )  # fmt: skip
        axes.plot(array(at), array(mean), color=INSIDE, linewidth=1.6, label="mean")
        if data is not None:
            axes.plot(array(row(data[0])), array(row(data[1])), ".", color=INK, markersize=3.5, label="data", alpha=0.7)
        axes.set(title=title, xlabel="x", ylabel="y")
        axes.legend(loc="best")
        return figure


def bounds(prediction: Any, level: float) -> Bounds:
    """Return mean, lower and upper bound of a prediction, one row each; a triple is returned as it is."""
    if isinstance(prediction, tuple):
        mean, lower, upper = prediction
    else:
        mean, (lower, upper) = prediction.mean, prediction.interval(level)
    return row(mean), row(lower), row(upper)


@outside_autocast
def parity(predictions: Any, targets: Tensor, *, level: float = 0.95) -> Figure:
    """Plot predictions with their intervals against the targets, one panel per model.

    `predictions` maps names to a `Prediction` or to (mean, lower, upper), or is one of these. Intervals that contain
    their target touch the diagonal; the others have another color. If there are many items, an even selection is drawn.

    Examples:
        >>> plots.parity({"Laplace": regression.predict(inputs)}, targets).savefig("parity.png")
    """
    truth, predictions = row(targets), named(predictions)
    if not len(truth):
        raise BadData("there is nothing to draw: the targets are empty")
    chosen = torch.linspace(0, len(truth) - 1, min(SHOWN, len(truth))).round().long()
    with style():
        figure, panels = grid(len(predictions), width=4.0)
        for (name, prediction), (axes,) in zip(predictions.items(), panels):
            mean, lower, upper = (part[chosen] for part in _fitting(bounds(prediction, level), truth, name))
            y = truth[chosen]
            held = (lower <= y) & (y <= upper)
            for inside, color in ((held, INSIDE), (~held, OUTSIDE[0])):
                words = f"{'holds' if color == INSIDE else 'misses'} the target"
                bars = array(lower[inside]), array(upper[inside])
                axes.vlines(array(y[inside]), *bars, color=color, alpha=0.3, lw=0.9)
                axes.plot(array(y[inside]), array(mean[inside]), "o", color=color, markersize=2.6, label=words)
            every = torch.cat([y, lower, upper])
            ends = [float(every.min()), float(every.max())]
            axes.plot(ends, ends, color=MUTED, linewidth=1, linestyle=DASHED, zorder=1)
            axes.set(title=name, xlabel="target", ylabel="prediction")
            axes.legend(loc="lower right", title=f"{100 * level:g} % interval", title_fontsize=8)
        return figure


def _fitting(parts: Bounds, truth: Tensor, name: str) -> Bounds:
    if any(len(part) != len(truth) for part in parts):
        raise BadData(f"{name}: {len(parts[0]):,} predictions and {len(truth):,} targets; pass one per target")
    return parts


def named(predictions: Any) -> Mapping[str, Any]:
    """Return predictions by name; a single prediction needs no name."""
    return predictions if isinstance(predictions, Mapping) else {"": predictions}


@outside_autocast
def residuals(predictions: Any, targets: Tensor) -> Figure:
    """Plot (target − mean) / standard deviation as a histogram beside the standard normal, one panel per model.

    `predictions` maps names to a `Prediction` or to (mean, standard deviation), or is one of these. A histogram
    narrower than the curve means that intervals are too wide; heavier tails mean outliers, or noise that varies.

    Examples:
        >>> plots.residuals({"Laplace": regression.predict(inputs)}, targets).savefig("residuals.png")
    """
    truth, predictions = row(targets), named(predictions)
    edges = torch.linspace(-4, 4, 33, dtype=torch.float64)
    normal = (-0.5 * edges.square()).exp() / (2 * torch.pi) ** 0.5
    with style():
        figure, panels = grid(len(predictions))
        for (name, prediction), (axes,) in zip(predictions.items(), panels):
            pair = prediction if isinstance(prediction, tuple) else (prediction.mean, prediction.stddev)
            z = (truth - row(pair[0])) / row(pair[1])
            far = int((z.abs() > 4).sum())
            share = torch.histogram(z.clamp(-4, 4), edges).hist / (len(z) * 0.25)
            drawn = axes.stairs(array(share), array(edges), fill=True, color=INSIDE, alpha=0.45)
            tip(drawn, f"{name}: mean {z.mean():.2f}, standard deviation {z.std(correction=0):.2f}, {far} beyond ±4")
            axes.plot(array(edges), array(normal), color=INK, linewidth=1.2, linestyle=DASHED, label="if calibrated")
            axes.set(title=name, xlabel="(target − mean) / standard deviation", ylabel="density", xlim=(-4, 4))
            lattice(axes)
            axes.legend(loc="upper right")
        return figure
