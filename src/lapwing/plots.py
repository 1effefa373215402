"""Pictures of predictions. Each function takes tensors and returns a matplotlib `Figure` that nobody else holds.

They need the extra `report`: pip install 'lapwing-torch[report]'.

Example:
    >>> figure = plots.reliability({"MAP": (confidence, correct)})
    >>> figure.savefig("reliability.png")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lapwing import metrics
from lapwing.errors import BadData
from lapwing.evidence import Tuning
from lapwing.evidence.curves import TemperatureCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["coverage", "ecdf", "entropies", "reliability", "surface", "temperature", "uncertain_images"]

INK, MUTED, GRID = "#1f2328", "#6b7280", "#e5e7eb"
INSIDE = "#2b6cb0"
OUTSIDE = ("#d9730d", "#7c3aed", "#0f766e", "#be185d")
MODELS = ("#6b7280", "#d9730d", "#2b6cb0", "#0f766e", "#7c3aed", "#be185d")
PANEL = 3.1  # inches
PER_ROW = 3
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
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.facecolor": "white",
}


def reliability(curves: Mapping[str, tuple[Tensor, Tensor]], bins: int = 15) -> Figure:
    """Plot accuracy against confidence for each model, with the share of items in each bin below.

    `curves` maps names to (confidence, correct), one entry an item. On the diagonal a model is calibrated; the
    calibration error is written into each panel.
    """
    with _style():
        figure, panels = _grid(len(curves), rows_each=2)
        for (name, (confidence, correct)), (axes, below) in zip(curves.items(), panels):
            table = metrics.reliability(confidence, correct, bins)
            _reliability_panel(axes, below, table, name)
        panels[0][0].set_ylabel("accuracy")
        panels[0][1].set_ylabel("share")
        return figure


def _reliability_panel(axes: Axes, below: Axes, table: metrics.Reliability, name: str) -> None:
    bins = len(table.count)
    left = _array(torch.arange(bins) / bins)
    used = _array(table.count > 0)
    confidence, accuracy, count = (_array(part) for part in (table.confidence, table.accuracy, table.count))
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    axes.bar(left[used], accuracy[used], 1 / bins, align="edge", color=INSIDE, alpha=0.35, linewidth=0)
    axes.plot(confidence[used], accuracy[used], "o", color=INSIDE, markersize=4, zorder=4, clip_on=False)
    axes.set(title=name, xlim=(0, 1), ylim=(0, 1.02), xticklabels=[])
    axes.text(0.04, 0.93, f"ECE {table.gap:.3f}", transform=axes.transAxes, color=INK)
    below.bar(left, count / count.sum(), 1 / bins, align="edge", color=MUTED, linewidth=0)
    below.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence")


def entropies(
    inside: Mapping[str, Tensor], outside: Mapping[str, Mapping[str, Tensor]], *, label: str = "entropy"
) -> Figure:
    """Plot histograms of an uncertainty on test items and on items from elsewhere, one panel per model.

    `inside` maps model names to scores (N,); `outside` maps model names to {data set: scores}. Well separated
    histograms are what out-of-distribution detection needs.
    """
    everything = [s for scores in outside.values() for s in scores.values()] + list(inside.values())
    low, high = min(float(s.min()) for s in everything), max(float(s.max()) for s in everything)
    edges = torch.linspace(low, high if high > low else low + 1, 31, dtype=torch.float64)
    with _style():
        figure, panels = _grid(len(inside))
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
    axes.stairs(_array(share), _array(edges), fill=True, color=color, alpha=0.3)
    axes.stairs(_array(share), _array(edges), color=color, linewidth=1.3, label=label)


def ecdf(curves: Mapping[str, Tensor], label: str = "entropy") -> Figure:
    """Plot the share of items with a score of at most x, one line per model (Louizos and Welling 2017, Fig. 2).

    On out-of-distribution items a lower line, one that rises late, is better.
    """
    with _style():
        figure, ((axes,),) = _grid(1, width=4.6)
        for (name, scores), color in zip(curves.items(), _cycle(len(curves))):
            ordered = scores.double().cpu().flatten().sort().values
            share = torch.arange(1, len(ordered) + 1) / len(ordered)
            axes.step(_array(ordered), _array(share), where="post", color=color, label=name, linewidth=1.6)
        axes.set(xlabel=label, ylabel="share of items at or below", ylim=(0, 1.01))
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.legend(loc="best")
        return figure


def coverage(levels: Sequence[float], observed: Mapping[str, Sequence[float]]) -> Figure:
    """Plot observed against nominal coverage of central intervals; below the diagonal a model is overconfident."""
    with _style():
        figure, ((axes,),) = _grid(1, width=4.0)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        for (name, shares), color in zip(observed.items(), _cycle(len(observed))):
            axes.plot(levels, shares, "o-", color=color, markersize=3.5, linewidth=1.4, label=name)
        axes.set(xlabel="nominal coverage", ylabel="observed coverage", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.legend(loc="upper left")
        return figure


def surface(tuning: Tuning) -> Figure:
    """Plot the score of each setting that was tried over prior precision and temperature, and mark the chosen one.

    Colors end at twice the distance from the lowest score to the worst baseline, so that hopeless settings do not
    hide the rest. Example: `plots.surface(la.tuning)`.
    """
    kept = [k for k, setting in enumerate(tuning.settings) if not setting.deterministic]
    if not kept:
        raise BadData("there is nothing to draw: only the network without a posterior was tried")
    x = torch.tensor([tuning.settings[k].narrow for k in kept])
    y = torch.tensor([tuning.settings[k].temperature for k in kept])
    scores = tuning.scores[kept]
    low = float(scores.min())
    span = 2 * (max(tuning.baselines.values(), default=float(scores.max())) - low) or 1.0
    order = scores.argsort(descending=True)  # the best of several settings at one place on top
    with _style():
        figure, ((axes,),) = _grid(1, width=5.2)
        dots = axes.scatter(
            _array(x[order]),
            _array(y[order]),
            c=_array(scores[order]),
            cmap="viridis_r",
            vmin=low,
            vmax=low + span,
            s=42,
        )
        figure.colorbar(dots, ax=axes, label="NLL" if tuning.method != "evidence" else "−log evidence", extend="max")
        axes.set(xscale="log", yscale="log", xlabel="prior precision τ", ylabel="temperature T")
        if not tuning.deterministic:
            at = tuning.setting
            axes.plot([at.narrow], [at.temperature], "o", mfc="none", mec=OUTSIDE[0], mew=2, markersize=11)
        axes.set_title(f"chosen: {tuning.setting}", fontsize=8)
        return figure


def temperature(curve: TemperatureCurve) -> Figure:
    """Plot NLL, accuracy and entropy of all data against the temperature (Generalized Laplace, section 5)."""
    panels: dict[str, dict[str, Tensor]] = {"NLL": {"test": curve.nll}}
    if curve.accuracy is not None:
        panels["accuracy"] = {"test": curve.accuracy}
    panels["entropy"] = {"test": curve.entropy, **curve.outside}
    if curve.auroc:
        panels["AUROC of the entropy"] = dict(curve.auroc)
    with _style():
        figure, grid = _grid(len(panels))
        for (name, lines), (axes,) in zip(panels.items(), grid):
            for k, (label, values) in enumerate(lines.items()):
                color = INSIDE if label == "test" else OUTSIDE[(k - ("test" in lines)) % len(OUTSIDE)]
                axes.plot(_array(curve.temperatures), _array(values), "o-", color=color, markersize=3, label=label)
            axes.set(title=name, xscale="log", xlabel="temperature T")
            axes.grid(color=GRID, linewidth=0.7)
            axes.legend(loc="best")
        return figure


def uncertain_images(
    images: Tensor, scores: Tensor, captions: Sequence[str] | None = None, *, count: int = 16
) -> Figure:
    """Show the `count` images of highest score, highest first, each with its score or its caption.

    `images` is (N, H, W), (N, 1, H, W) or (N, 3, H, W); each is stretched to its own range of gray or color.
    """
    images = images.detach().float().cpu()
    images = images[:, None] if images.ndim == 3 else images
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise BadData(f"images must be (N, H, W), (N, 1, H, W) or (N, 3, H, W), got {tuple(images.shape)}")
    order = scores.cpu().argsort(descending=True)[:count]
    columns = min(8, len(order))
    rows = -(-len(order) // columns)
    with _style():
        figure = _figure(columns * 1.05, rows * 1.4)
        for place, index in enumerate(order.tolist()):
            axes = figure.add_subplot(rows, columns, place + 1)
            axes.imshow(_array(_stretch(images[index])), cmap="gray_r", interpolation="nearest", vmin=0, vmax=1)
            axes.set_axis_off()
            text = captions[index] if captions is not None else f"{scores[index]:.2f}"
            axes.set_title(text, fontsize=7.5, fontweight="normal", loc="center", color=INK, pad=2)
        return figure


def _stretch(image: Tensor) -> Tensor:
    """Convert (C, H, W) to (H, W) or (H, W, 3) in [0, 1]."""
    low, high = image.min(), image.max()
    image = (image - low) / (high - low) if high > low else torch.zeros_like(image)
    return image[0] if image.shape[0] == 1 else image.movedim(0, -1)


def _array(tensor: Tensor) -> NDArray:
    return tensor.detach().cpu().numpy()


def _matplotlib() -> ModuleType:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'lapwing-torch[report]'") from error
    return matplotlib


def _style() -> Any:
    """Return a context in which figures have the house style; the user's settings come back afterwards."""
    return _matplotlib().rc_context(STYLE)


def _figure(width: float, height: float) -> Figure:
    """Return a figure outside pyplot: no global list keeps it alive and no window opens."""
    _matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _grid(panels: int, rows_each: int = 1, width: float = PANEL) -> tuple[Figure, list[tuple[Axes, ...]]]:
    """Return panels of `rows_each` axes on top of each other, up to three panels per row."""
    if not panels:
        raise BadData("there is nothing to draw: pass at least one model")
    columns = min(PER_ROW, panels)
    rows = -(-panels // columns)
    heights = [3, 1][:rows_each]
    figure = _figure(columns * width, rows * PANEL * (1.2 if rows_each > 1 else 0.85))
    spec = figure.add_gridspec(rows * rows_each, columns, height_ratios=heights * rows)
    return figure, [
        tuple(figure.add_subplot(spec[(k // columns) * rows_each + part, k % columns]) for part in range(rows_each))
        for k in range(panels)
    ]


def _cycle(count: int) -> list[str]:
    return [MODELS[k % len(MODELS)] for k in range(count)]
