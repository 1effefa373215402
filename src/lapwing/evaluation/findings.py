"""What a report found, in sentences that stand alone. Numbers in brackets are 95 % intervals."""

from __future__ import annotations

import math

from lapwing.evaluation.columns import STRANGE, WORDS, Numbers, cell, column_of
from lapwing.evaluation.scoring import Result
from lapwing.plots.calibration import answered

ABSTAIN = 0.05  # of the items, the least certain ones


def findings_of(report: Numbers) -> tuple[str, ...]:
    """Return sentences about the last model, compared with the first where there are several."""
    name = list(report.results)[-1]
    found = _alone(report, name) if name == report.baseline else _compared(report, name)
    for place in report.places:
        found += _outside(report, name, place)
    return tuple(found + _abstaining(report, name))


def _alone(report: Numbers, name: str) -> list[str]:
    row = report.row(name)
    parts = [f"an NLL of {_with_interval(report, name, 'nll')}"]
    if "accuracy" in row:
        parts = [f"an accuracy of {_with_interval(report, name, 'accuracy')}", *parts]
        parts.append(f"a calibration error (ECE) of {_with_interval(report, name, 'ece')}")
    if "rmse" in row:
        parts.append(f"an RMSE of {_with_interval(report, name, 'rmse')}")
    count = report.results[name].count
    sentences = [f"{name} has {_listed(parts)} on {count:,} test items."]
    if "coverage95" in row:
        sentences.append(_coverage(report, name))
    return sentences


def _compared(report: Numbers, name: str) -> list[str]:
    base, row = report.baseline, report.row(name)
    sentences = [_change(report, name, base, "nll", "the NLL")]
    for other in list(report.results)[1:-1]:
        sentences.append(_change(report, name, other, "nll", "the NLL"))
    if "accuracy" in row:
        sentences.append(_change(report, name, base, "accuracy", "the accuracy"))
        sentences.append(_change(report, name, base, "ece", "the calibration error (ECE)"))
    if "rmse" in row:
        sentences.append(_change(report, name, base, "rmse", "the RMSE"))
        sentences.append(_coverage(report, name) + " " + _coverage(report, base))
    return sentences


def _change(report: Numbers, name: str, other: str, column: str, what: str) -> str:
    """Say whether a model raises or lowers a column, or that there is no measurable difference."""
    before, after = report.row(other)[column], report.row(name)[column]
    value, low, high = report.difference(name, column, other)
    begin = what[0].upper() + what[1:]
    if not math.isfinite(after) or not math.isfinite(before):
        return f"{begin} of {name} is {cell(column, after)}, that of {other} {cell(column, before)}."
    if value == low == high == 0:
        return f"{begin} of {name} is that of {other}, {cell(column, after)}."
    words = f"from {cell(column, before)} to {cell(column, after)}"
    if math.isnan(low):
        return f"{name} changes {what} {words} compared with {other}; one item says nothing about others."
    if low <= 0 <= high:
        return (
            f"There is no measurable difference in {what} between {name} ({cell(column, after)}) and {other} "
            f"({cell(column, before)}): {difference_words(column, value, low, high)}."
        )
    verb, ends = ("raises", (low, high)) if value > 0 else ("lowers", (-high, -low))
    judged = {1: "better", -1: "worse", 0: "different"}[report.verdict(name, column, other)]
    size = difference_words(column, abs(value), *ends)
    return f"{name} {verb} {what} {words}, by {size}, which is {judged} than {other}."


def difference_words(column: str, value: float, low: float, high: float, *, sign: bool = False) -> str:
    """Write "value (low to high)" with two digits of the interval's half-width; shares in percentage points."""
    factor, unit = (100, " points") if column == "accuracy" else (1, "")
    spread = factor * (high - low) / 2
    digits = max(0, min(1 - math.floor(math.log10(spread)), 12)) if spread > 0 else 4
    first, *ends = (f"{factor * number:.{digits}f}".replace("-", "−") for number in (value, low, high))
    return f"{'+' if sign and value > 0 else ''}{first} ({' to '.join(ends)}){unit}"


def score_name(report: Numbers, score: str) -> str:
    """Return the name of a score of strangeness in words."""
    return report.kind.uncertainty_name if score == "uncertainty" else WORDS.get(score, score)


def _with_interval(report: Numbers, name: str, column: str) -> str:
    value, low, high = report.interval(name, column)
    span = "" if math.isnan(low) else f" ({cell(column, low)} to {cell(column, high)})"
    return f"{cell(column, value)}{span}"


def _coverage(report: Numbers, name: str) -> str:
    value, low, high = report.interval(name, "coverage95")
    held = f"{100 * value:.1f} %"
    span = "" if math.isnan(low) else f" ({100 * low:.1f} to {100 * high:.1f} %)"
    if math.isnan(low) or low <= 0.95 <= high:
        judged = "as promised" if not math.isnan(low) else "of one item"
    else:
        judged = "more than promised" if value > 0.95 else "fewer than promised: it is overconfident"
    return f"The 95 % intervals of {name} hold {held}{span} of the targets, {judged}."


def _outside(report: Numbers, name: str, place: str) -> list[str]:
    """Say how well the model's best score finds outside items, beside the uncertainty of the baseline."""
    row, words = report.row(name), report.kind.uncertainty_name
    areas = {s: row[column_of("auroc", s, place)] for s in STRANGE if column_of("auroc", s, place) in row}
    own = {s: area for s, area in areas.items() if s in ("uncertainty", "epistemic", "novelty")}
    best = max(own, key=lambda s: own[s])
    _, low, high = report.interval(name, column_of("auroc", best, place))
    span = "" if math.isnan(low) else f" ({low:.3f} to {high:.3f})"
    by = score_name(report, best)
    text = f"{name} separates {place} from the test items with AUROC {own[best]:.3f}{span}, by its {by}"
    if name != report.baseline:
        text += f"; the {words} of {report.baseline} has {report.row(report.baseline)[f'auroc {place}']:.3f}"
    higher = {s: area for s, area in areas.items() if s not in own and area > own[best]}
    if higher:
        top = max(higher, key=lambda s: higher[s])
        text += f". The network's {score_name(report, top)} does better, with {higher[top]:.3f}"
    return [text + "."]


def _abstaining(report: Numbers, name: str) -> list[str]:
    """Say what is gained by not answering the least certain items."""
    pair = doubt_and_loss(report.results[name])
    count = len(pair[0])
    left_out = math.floor(ABSTAIN * count)
    if left_out < 1:
        return []
    _, risk = answered(*pair)
    kept = count - left_out
    if "correct" in report.results[name].items:
        errors, remaining = float(pair[1].sum()), float(risk[kept - 1]) * kept
        if errors < 1:
            return [f"{name} makes no error on {count:,} answers."]
        gone = 1 - remaining / errors
        return [
            f"Abstaining on the {100 * ABSTAIN:g} % least certain answers of {name} removes {100 * gone:.0f} % of its "
            f"errors (from {errors:.0f} of {count:,} to {remaining:.0f} of {kept:,})."
        ]
    before, after = float(risk[-1]) ** 0.5, float(risk[kept - 1]) ** 0.5
    part = f"the {100 * ABSTAIN:g} % least certain predictions of {name}"
    return [f"Leaving out {part} changes its RMSE from {before:.4g} to {after:.4g}."]


def doubt_and_loss(result: Result) -> tuple:
    """Return the uncertainty and the loss of every answer: 0 or 1 for labels, a squared error for numbers."""
    if "correct" in result.items:
        return result.items["entropy"], 1 - result.items["correct"]
    return result.items["stddev"], result.items["square"]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
