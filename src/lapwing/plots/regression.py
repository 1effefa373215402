"""Pictures of predicted numbers: a band around a curve, predictions against targets, residuals."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.errors import BadData
from lapwing.plots.style import DASHED, INK, INSIDE, MUTED, OUTSIDE, array, grid, lattice, one, row, style, tip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 600  # points of a parity plot: more hide each other

Bounds = tuple[Tensor, Tensor, Tensor]  # mean, lower and upper


def band(
    x: Tensor,
    prediction: Any,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    level: float = 0.95,
    title: str = "",
) -> Figure:
    """Plot the mean and the central interval of predictions of one number over inputs of one dimension.

    `prediction` is a `Prediction` of `x`, or (mean, lower, upper). The inner, darker band is what more data would
    remove (the doubt about the function), the outer one includes the noise. `data` are targets to draw as points.

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


def parity(predictions: Any, targets: Tensor, *, level: float = 0.95) -> Figure:
    """Plot predictions with their intervals against the targets, one panel per model.

    `predictions` maps names to a `Prediction` or to (mean, lower, upper), or is one of these. Intervals that hold their
    target touch the diagonal; those that miss it are drawn in another color. Of many items, an even selection is drawn.

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
    """Return predictions by name; one alone needs none."""
    return predictions if isinstance(predictions, Mapping) else {"": predictions}


def residuals(predictions: Any, targets: Tensor) -> Figure:
    """Plot (target − mean) / standard deviation as a histogram beside the standard normal, one panel per model.

    `predictions` maps names to a `Prediction` or to (mean, standard deviation), or is one of these. A histogram
    narrower than the curve belongs to intervals that are too wide, one with heavier tails to outliers or to noise that
    varies.

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
