"""Plots of the settings that tuning tried, of scores against the temperature, and of the evidence of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.errors import BadData
from lapwing.evidence import Tuning
from lapwing.evidence.curves import TemperatureCurve
from lapwing.evidence.evidence import Comparison
from lapwing.evidence.loop import Moment
from lapwing.model.calls import outside_autocast
from lapwing.plots.style import DASHED, INSIDE, LINES, MUTED, OUTSIDE, array, blank, dot, grid, lattice, one, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALIKE = 1e-3  # nats per item: settings closer than this are equally good for any purpose


@outside_autocast
def surface(tuning: Tuning) -> Figure:
    """Plot how much worse than the best each setting of a tuning is, over prior precision and temperature.

    Colors show the excess over the lowest score, so that settings within thousandths of a nat can be told apart; the
    title says so if all are that close. The colors end at twice the distance from the lowest score to the worst
    baseline, so that hopeless settings do not hide the rest. Baselines are lines in the color bar, and a ring marks
    the chosen setting.

    Examples:
        >>> plots.surface(la.tune(val_loader).tuning).savefig("surface.png")
    """
    kept = [k for k, setting in enumerate(tuning.settings) if not setting.deterministic]
    kept = [k for k in kept if bool(tuning.scores[k].isfinite())]
    if not kept:
        raise BadData("there is nothing to draw: only the network without a posterior was tried")
    x = torch.tensor([tuning.settings[k].narrow for k in kept])
    y = torch.tensor([tuning.settings[k].temperature for k in kept])
    low = float(tuning.scores[kept].min())
    excess = tuning.scores[kept] - low
    span = 2 * (max(tuning.baselines.values(), default=low) - low)
    span = min(span, float(excess.max())) if span > 0 else float(excess.max())
    unit, factor = _unit(span)
    order = excess.argsort(descending=True)  # the best of several settings at one place on top
    with style():
        figure, axes = one(5.4, 3.5)
        dots = axes.scatter(
            array(x[order]), array(y[order]), c=array(excess[order] / factor), cmap="viridis_r", vmin=0,
            vmax=span / factor or 1.0, s=46, linewidths=0,
        )  # fmt: skip
        what = "−log evidence" if tuning.method == "evidence" else "NLL per item"
        beyond = "max" if float(excess.max()) > span else "neither"
        bar = figure.colorbar(dots, ax=axes, label=f"{what} above {low:.4g}, in {unit}", extend=beyond)
        for k, (name, score) in enumerate(sorted(tuning.baselines.items(), key=lambda item: item[1])):
            if 0 <= score - low <= span:
                drawn = bar.ax.axhline((score - low) / factor, color=OUTSIDE[0], linewidth=1.4)
                drawn.set_label(f"{name} (line {k + 1} in the color bar)")
        axes.set(xscale="log", yscale="log", xlabel="prior precision τ", ylabel="temperature T")
        if not tuning.deterministic:
            at = tuning.setting
            axes.plot([at.narrow], [at.temperature], "o", mfc="none", mec=OUTSIDE[0], mew=2, markersize=12)
        axes.set_title(_surface_title(tuning, float(excess.max())), fontsize=8, fontweight="normal")
        if len(set(y.tolist())) == 1:
            axes.set_yticks([float(y[0])], [f"{float(y[0]):g}"])
            axes.minorticks_off()
        return figure


def _unit(span: float) -> tuple[str, float]:
    """Return a unit in which a span of nats has few digits, by name and size."""
    if span >= 0.1 or span == 0:
        return "nats", 1.0
    power = next(k for k in (2, 3, 4, 5, 6, 9, 12) if span >= 10.0**-k or k == 12)
    return f"10$^{{-{power}}}$ nats", 10.0**-power


def _surface_title(tuning: Tuning, widest: float) -> str:
    lines = [f"chosen: {tuning.setting}"]
    if tuning.method != "evidence" and widest < ALIKE:
        lines.append(f"all settings are within {widest:.1g} nats per item: equally good here")
    named = ", ".join(f"{name} {score:.4g}" for name, score in tuning.baselines.items())
    if named:
        lines.append(f"lines in the color bar: {named}")
    return "\n".join(lines)


@outside_autocast
def temperature(curve: TemperatureCurve) -> Figure:
    """Plot NLL, accuracy and entropy of all data against the temperature.

    These are the figures of Chen, Yu, Li and Lim, "Generalized Laplace Approximation", section 5.

    Examples:
        >>> curve = la.temperature_curve(test_loader, ood={"noise": noise})
        >>> plots.temperature(curve).savefig("temperature.png")
    """
    panels: dict[str, dict[str, Tensor]] = {"NLL": {"test": curve.nll}}
    if curve.accuracy is not None:
        panels["accuracy"] = {"test": curve.accuracy}
    panels["entropy"] = {"test": curve.entropy, **curve.outside}
    if curve.auroc:
        panels["AUROC of the entropy"] = dict(curve.auroc)
    with style():
        figure, places = grid(len(panels))
        for (name, lines), (axes,) in zip(panels.items(), places):
            for k, (label, values) in enumerate(lines.items()):
                color = INSIDE if label == "test" else OUTSIDE[(k - ("test" in lines)) % len(OUTSIDE)]
                how = LINES[0 if label == "test" else 1 + k % (len(LINES) - 1)]
                axes.plot(
                    array(curve.temperatures), array(values), marker="o", color=color, markersize=3, label=label,
                    linestyle=how,
                )  # fmt: skip
            axes.set(title=name, xscale="log", xlabel="temperature T")
            axes.ticklabel_format(axis="y", useOffset=False)
            lattice(axes)
            axes.legend(loc="best")
        return figure


@outside_autocast
def evidence(source: Any) -> Figure:
    """Plot the log evidence of compared models, or of a training (`Trained`, or its `history`).

    For a result of `lapwing.compare` it shows how far each model is below the best, in nats, with bars for the error of
    the evidence. For a training with the evidence it shows the log evidence against the steps.

    Examples:
        >>> comparison = lapwing.compare({"wide": la, "narrow": la.replace(prior=10.0)})
        >>> plots.evidence(comparison).savefig("evidence.png")
    """
    if isinstance(source, Comparison):
        return _compared(source)
    moments: Sequence[Moment] = getattr(source, "history", source)
    if not moments:
        raise BadData("there is nothing to draw: the history holds no moment at which the evidence was computed")
    with style():
        figure, axes = one(4.6, 3.1)
        steps = [moment.step for moment in moments]
        axes.plot(steps, [moment.evidence for moment in moments], color=INSIDE, marker="o", markersize=3)
        axes.set(xlabel="step", ylabel="log evidence (nats)")
        axes.ticklabel_format(axis="y", useOffset=False)
        lattice(axes)
        return figure


def _compared(comparison: Comparison) -> Figure:
    found = sorted(comparison.candidates.items(), key=lambda item: -item[1].log_evidence)
    best = found[0][1].log_evidence
    with style():
        figure = blank(4.8, 1.1 + 0.34 * len(found))
        axes = figure.add_subplot()
        for place, (name, candidate) in enumerate(found):
            at, wide = candidate.log_evidence - best, candidate.uncertainty
            words = f"{name}: log evidence {candidate.log_evidence:.1f}, off by at most about {wide:.3g}"
            dot(axes, place, at, at - wide, at + wide, INSIDE, words)
        labels = [f"{name} ({c.structure}, {c.parameters:,} weights)" for name, c in found]
        axes.set_yticks(range(len(found)), labels)
        axes.axvline(0.0, color=MUTED, linewidth=1, linestyle=DASHED)
        axes.set(xlabel=f"log evidence minus {best:.6g}, in nats", ylim=(len(found) - 0.4, -0.6))
        lattice(axes)
        return figure
