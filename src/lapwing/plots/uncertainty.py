"""Plots of scores: how they are distributed, which items have the highest, how well they detect outside items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing import metrics
from lapwing.errors import BadData
from lapwing.model.calls import outside_autocast
from lapwing.plots.style import (
    DASHED,
    INK,
    INSIDE,
    MODELS,
    MUTED,
    OUTSIDE,
    array,
    blank,
    diagonal,
    dot,
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


@outside_autocast
def entropies(
    inside: Mapping[str, Tensor], outside: Mapping[str, Mapping[str, Tensor]], *, label: str = "entropy"
) -> Figure:
    """Plot histograms of an uncertainty on test items and on items from elsewhere, one panel per model.

    `inside` maps model names to scores (N,); `outside` maps model names to {data set: scores}. Well separated
    histograms are what out-of-distribution detection needs.

    Examples:
        >>> inside, outside = la.predict(x).entropy, la.predict(noise).entropy
        >>> plots.entropies({"Laplace": inside}, {"Laplace": {"noise": outside}}).savefig("entropies.png")
    """
    everything = [s for scores in outside.values() for s in scores.values()] + list(inside.values())
    low, high = min(float(s.min()) for s in everything), max(float(s.max()) for s in everything)
    edges = torch.linspace(low, high if high > low else low + 1, 31, dtype=torch.float64)
    with style():
        figure, panels = grid(len(inside))
        for (name, scores), (axes,) in zip(inside.items(), panels):
            _histogram(axes, scores, edges, INSIDE, "test")
            for (place, others), color in zip(outside.get(name, {}).items(), OUTSIDE):
                area = metrics.auroc(scores, others)
                _histogram(axes, others, edges, color, f"{place} (AUROC {area:.3f})")
            axes.set(title=name, xlabel=label, xlim=(float(edges[0]), float(edges[-1])))
            # most test items fall into the first bin: a root scale keeps the rest visible, and zero at the bottom
            axes.set_yscale("function", functions=(lambda y: abs(y) ** 0.5, lambda y: y**2))
            axes.set(yticks=[0.01, 0.1, 0.3, 1.0], yticklabels=["1 %", "10 %", "30 %", "100 %"], ylim=(0, 1))
            axes.legend(loc="upper right", handlelength=1)
        panels[0][0].set_ylabel("share of items (root scale)")
        return figure


def _histogram(axes: Axes, scores: Tensor, edges: Tensor, color: str, label: str) -> None:
    share = torch.histogram(scores.double().cpu().flatten(), edges).hist / scores.numel()
    axes.stairs(array(share), array(edges), fill=True, color=color, alpha=0.3)
    axes.stairs(array(share), array(edges), color=color, linewidth=1.3, label=label)


@outside_autocast
def separation(
    inside: Tensor, outside: Tensor, *, label: str = "entropy", names: tuple[str, str] = ("test", "outside")
) -> Figure:
    """Plot the histogram of a score on test items upwards and on outside items downwards, on one axis.

    So neither histogram hides the other. The vertical axis grows like a square root, so that a few items among many are
    still visible.

    Examples:
        >>> inside, outside = la.predict(x).novelty, la.predict(noise).novelty
        >>> plots.separation(inside, outside, label="novelty").savefig("separation.png")
    """
    one_side, other_side = row(inside), row(outside)
    area = metrics.auroc(one_side, other_side)
    low, high = float(min(one_side.min(), other_side.min())), float(max(one_side.max(), other_side.max()))
    edges = torch.linspace(low, high if high > low else low + 1, 41, dtype=torch.float64)
    with style():
        figure, axes = one(4.2, 3.0)
        reach = 0.0
        for scores, sign, color, name in zip((one_side, other_side), (1, -1), (INSIDE, OUTSIDE[0]), names):
            share = torch.histogram(scores, edges).hist / len(scores)
            reach = max(reach, 1.08 * float(share.max()) ** 0.5)
            drawn = axes.stairs(sign * array(share.sqrt()), array(edges), fill=True, color=color, alpha=0.6, label=name)
            tip(drawn, f"{name}: {len(scores):,} items, median {scores.median():.3g}")
        axes.axhline(0, color=INK, linewidth=0.8)
        ticks = [0.01, 0.1, 0.3, 1.0]
        places = [sign * tick**0.5 for sign in (1, -1) for tick in ticks]
        axes.set_yticks(places, 2 * [f"{tick:.0%}".replace("%", " %") for tick in ticks])
        axes.set(xlabel=label, ylabel="share of items", ylim=(-reach, reach), xlim=(float(edges[0]), float(edges[-1])))
        axes.set_title(f"AUROC {area:.3f}", fontsize=9, fontweight="normal")
        axes.legend(loc="best", handlelength=1)
        return figure


@outside_autocast
def roc(inside: Mapping[str, Tensor] | Tensor, outside: Mapping[str, Tensor] | Tensor, *, title: str = "") -> Figure:
    """Plot the share of outside items found against the share of test items flagged by mistake, one line per score.

    Both arguments map names of scores to their values, which grow with strangeness, or are the values of one score. The
    legend has the AUROC, which is the area under a line.

    Examples:
        >>> p, q = la.predict(x), la.predict(noise)
        >>> inside, outside = {"entropy": p.entropy, "novelty": p.novelty}, {"entropy": q.entropy, "novelty": q.novelty}
        >>> plots.roc(inside, outside).savefig("roc.png")
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


@outside_autocast
def scores(
    areas: Mapping[str, Mapping[str, tuple[float, float, float]]], *, title: str = "", label: str = "AUROC"
) -> Figure:
    """Plot the AUROC of every score of every model as a dot with its interval.

    `areas` maps models to {score: (value, low, high)}, as `Report.interval` gives them.

    Examples:
        >>> areas = {"MAP": {"entropy": (0.93, 0.91, 0.95)}, "Laplace": {"novelty": (0.95, 0.93, 0.96)}}
        >>> plots.scores(areas).savefig("scores.png")
    """
    lines = [(model, name, k) for k, (model, found) in enumerate(areas.items()) for name in found]
    if not lines:
        raise BadData("there is nothing to draw: no model has a score")
    with style():
        figure = blank(4.2, 0.9 + 0.27 * len(lines))
        axes = figure.add_subplot()
        for place, (model, name, k) in enumerate(lines):
            value, low, high = areas[model][name]
            words = f"{model}, {name}: {label} {value:.4f}, 95 % interval {low:.4f} to {high:.4f}"
            dot(axes, place, value, low, high, MODELS[k % len(MODELS)], words)
        axes.set_yticks(range(len(lines)), [f"{model}: {name}" for model, name, _ in lines])
        axes.axvline(0.5, color=MUTED, linewidth=1, linestyle=DASHED)
        axes.set(title=title, xlabel=f"{label} (0.5 is chance)", ylim=(len(lines) - 0.4, -0.6))
        axes.set_xlim(right=1.0 + 0.02)
        lattice(axes)
        return figure


@outside_autocast
def ecdf(curves: Mapping[str, Tensor], label: str = "entropy") -> Figure:
    """Plot the share of items with a score of at most x, one line per model (Louizos and Welling 2017, Fig. 2).

    On out-of-distribution items a line that rises late is better.

    Examples:
        >>> plots.ecdf({"Laplace": la.predict(noise).entropy}).savefig("ecdf.png")
    """
    with style():
        figure, axes = one()
        for k, (name, scores) in enumerate(curves.items()):
            ordered = row(scores).sort().values
            share = torch.arange(1, len(ordered) + 1) / len(ordered)
            (line,) = axes.step(array(ordered), array(share), where="post", label=name, **looks(k))
            tip(line, f"{name}: median {ordered.median():.3g}")
        axes.set(xlabel=label, ylabel="share of items at or below", ylim=(0, 1.01))
        percent(axes, "y")
        lattice(axes)
        if curves:
            axes.legend(loc="best")
        return figure


@outside_autocast
def uncertain_images(
    images: Tensor, scores: Tensor, captions: Sequence[str] | None = None, *, count: int = 16
) -> Figure:
    """Show the `count` images of highest score, highest first, each with its score or its caption.

    `images` is (N, H, W), (N, 1, H, W) or (N, 3, H, W); each is stretched to its own range of gray or color.

    Examples:
        >>> classifier = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        >>> la = lapwing.fit(classifier, (images, y), "classification")
        >>> plots.uncertain_images(images, la.predict(images).entropy, count=4).savefig("uncertain.png")
    """
    images = images.detach().float().cpu()
    images = images[:, None] if images.ndim == 3 else images
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise BadData(f"images must be (N, H, W), (N, 1, H, W) or (N, 3, H, W), got {tuple(images.shape)}")
    order = scores.cpu().argsort(descending=True)[:count]
    columns = min(8, len(order))
    rows = -(-len(order) // columns)
    with style():
        figure = blank(columns * 1.05, rows * 1.4)
        for place, index in enumerate(order.tolist()):
            axes = figure.add_subplot(rows, columns, place + 1)
            axes.imshow(array(stretched(images[index])), cmap="gray_r", interpolation="nearest", vmin=0, vmax=1)
            axes.set_axis_off()
            text = captions[index] if captions is not None else f"{scores[index]:.2f}"
            axes.set_title(text, fontsize=7.5, fontweight="normal", loc="center", color=INK, pad=2)
        return figure


def stretched(image: Tensor) -> Tensor:
    """Convert (C, H, W) to (H, W) or (H, W, 3) in [0, 1]."""
    low, high = image.min(), image.max()
    image = (image - low) / (high - low) if high > low else torch.zeros_like(image)
    return image[0] if image.shape[0] == 1 else image.movedim(0, -1)
