"""The pictures of a report, in groups with an explanation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from lapwing import metrics, plots
from lapwing.evaluation.columns import STRANGE, Numbers, column_of, doubt_and_loss, score_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure with its name and a sentence that says what it shows, for those who cannot see it."""

    name: str
    words: str
    figure: Figure


@dataclass(frozen=True, eq=False)
class Group:
    """Pictures that belong together, of the test data (`place` is None) or of an outside set."""

    title: str
    text: str
    pictures: tuple[Picture, ...]
    place: str | None = None


def figures_of(report: Numbers) -> list[Group]:
    """Return the pictures that compare models."""
    labels = "correct" in report.results[report.baseline].items
    groups = [_reliability(report)] if labels else _numbers(report)
    groups.append(_risk(report, labels))
    return groups + [_outside(report, place) for place in report.places]


def _reliability(report: Numbers) -> Group:
    pictures = []
    for name, result in report.results.items():
        curve = result.items["confidence"], result.items["correct"]
        gap = metrics.reliability(*curve, report.bins).gap
        words = f"Accuracy of {name} among predictions of similar confidence; the calibration error is {gap:.3f}."
        pictures.append(Picture(f"Reliability of {name}", words, plots.reliability({name: curve}, report.bins)))
    text = (
        "Accuracy among predictions of similar confidence. Points on the dashed line are calibrated; below it a model "
        "is overconfident."
    )
    return Group("Are the probabilities right?", text, tuple(pictures))


def _risk(report: Numbers, labels: bool) -> Group:
    label = "error rate" if labels else "mean squared error"
    curves = {name: doubt_and_loss(result) for name, result in report.results.items()}
    words = f"The {label} among the most certain predictions, against the share of items that are answered."
    picture = Picture("Risk and coverage", words, plots.risk_coverage(curves, label=label))
    text = (
        "A model that knows when it does not know can leave its least certain items to somebody else. The further a "
        "curve falls to the left, the more this helps."
    )
    return Group("Does it help to leave out doubtful items?", text, (picture,))


def _numbers(report: Numbers) -> list[Group]:
    results = report.results
    first = next(iter(results.values()))
    levels = [float(key.removeprefix("covered ")) for key in first.items if key.startswith("covered ")]
    shares = {n: [r.items[f"covered {level}"].mean().item() for level in levels] for n, r in results.items()}
    spread = {n: r.items["stddev"] for n, r in results.items()}
    coverage = Picture(
        "Coverage",
        "Share of targets inside central intervals, against the share that was promised.",
        plots.coverage(levels, shares),
    )
    sharpness = Picture(
        "Sharpness",
        "Share of predictions with at most a given standard deviation.",
        plots.ecdf(spread, label="standard deviation"),
    )
    residuals = [
        Picture(
            f"Residuals of {n}",
            f"Histogram of (target − mean) / standard deviation of {n} beside the standard normal curve.",
            plots.residuals({n: (r.items["mean"], r.items["stddev"])}, r.items["truth"]),
        )
        for n, r in results.items()
        if bool((r.items["stddev"] > 0).all())
    ]
    text = (
        "Below the dashed line of the first picture a model is overconfident. Among models with the right coverage the "
        "sharper one, with the smaller standard deviations, is better. The residuals of a calibrated model follow the "
        "curve."
    )
    return [_fit(report), Group("Are the intervals right?", text, (coverage, sharpness, *residuals))]


def _fit(report: Numbers) -> Group:
    pictures = []
    for name, result in report.results.items():
        items = result.items
        bounds = items["mean"], items["lower"], items["upper"]
        if result.x is not None:
            words = f"Mean and 95 % interval of {name} over the inputs, with the targets as points."
            figure = plots.band(result.x, bounds, data=(result.x, items["truth"]), title=name)
        else:
            words = f"Predictions of {name} with their 95 % intervals against the targets."
            figure = plots.parity({name: bounds}, items["truth"])
        pictures.append(Picture(f"Predictions of {name}", words, figure))
    text = "Predictions with their 95 % intervals" + (
        " over the inputs." if pictures and report.results[report.baseline].x is not None else
        ", against the targets. An interval that touches the dashed line holds its target."
    )  # fmt: skip
    return Group("Predictions and targets", text, tuple(pictures))


def _outside(report: Numbers, place: str) -> Group:
    name, result = list(report.results.items())[-1]
    outside = result.outside[place].scores
    named = partial(score_name, report)
    own = [s for s in STRANGE if s in result.scores and s in outside]
    ours = [s for s in own if s in ("uncertainty", "epistemic", "novelty")]
    best = max(ours, key=lambda s: report.row(name)[column_of("auroc", s, place)])
    areas = "; ".join(f"{named(s)} {report.row(name)[column_of('auroc', s, place)]:.3f}" for s in own)
    roc = plots.roc({named(s): result.scores[s] for s in own}, {named(s): outside[s] for s in own}, title=name)
    label = f"{named(best)} of {name}"
    parts = plots.separation(result.scores[best], outside[best], label=label, names=("test", place))
    dots = plots.scores(score_areas(report, place), title="All models and scores")
    pictures = (
        Picture(f"Scores on {place}", f"AUROC with 95 % intervals of every score of every model on {place}.", dots),
        Picture(f"ROC on {place}", f"{place} found against test items flagged, under {name}. AUROC: {areas}.", roc),
        Picture(
            f"Separation of {place}",
            f"Histograms of the {named(best)} of {name} for test items, upwards, and for {place}, downwards.",
            parts,
        ),
    )
    text = (
        f"Items of {place} are unlike the training data, and a good score is higher for them than for test items. The "
        "AUROC is the probability that it is; FPR95 is the share of outside items accepted when 95 % of test items are."
    )
    return Group(f"Can it tell {place} from the test data?", text, pictures, place)


def score_areas(report: Numbers, place: str) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Return the AUROC and interval of every score by model."""
    areas: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name, scores in distinct_scores(report, place).items():
        areas[name] = {}
        for score in scores:
            value, low, high = report.interval(name, column_of("auroc", score, place))
            areas[name][score_name(report, score)] = (value, *((value, value) if math.isnan(low) else (low, high)))
    return areas


def distinct_scores(report: Numbers, place: str) -> dict[str, list[str]]:
    """Return the names of scores by model, without scores for which an earlier model has the same values."""
    seen: dict[str, list[torch.Tensor]] = {}
    found: dict[str, list[str]] = {}
    for name, result in report.results.items():
        found[name] = []
        for score in STRANGE:
            if column_of("auroc", score, place) not in report.row(name):
                continue
            values = result.outside[place].scores[score]
            alike = (v.shape == values.shape and torch.allclose(v, values, rtol=1e-5) for v in seen.get(score, ()))
            if score in ("uncertainty", "epistemic", "novelty") or not any(alike):
                seen.setdefault(score, []).append(values)
                found[name].append(score)
    return found


def galleries_of(report: Numbers) -> list[Group]:
    """Return the items that are most uncertain and most wrong under the last model, if they are pictures."""
    name, result = list(report.results.items())[-1]
    lists = {"Most uncertain: test": result.examples.get("uncertain", ())}
    lists["Most wrong: test"] = result.examples.get("wrong", ())
    for place, outside in result.outside.items():
        lists[f"Most uncertain: {place}"] = outside.examples.get("uncertain", ())
    groups = []
    for title, examples in lists.items():
        shown = [(e.picture, e.score, e.caption) for e in examples if e.picture is not None]
        if not shown or len({picture.shape for picture, _, _ in shown}) > 1:
            continue
        images, scores, captions = zip(*shown)
        ranks = torch.tensor(scores, dtype=torch.float64).nan_to_num(posinf=math.inf)
        figure = plots.uncertain_images(torch.stack(images), ranks, captions)
        groups.append(Group(title, f"Under {name}.", (Picture(title, f"{len(images)} items.", figure),)))
    return groups
