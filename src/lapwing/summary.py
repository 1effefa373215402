"""The text of `la.summary()`: what was fitted and how, with notes."""

from __future__ import annotations

from typing import Any

from lapwing.extras.valla import variational_bound
from lapwing.predictive.table import html_table

BOUNDS = {  # how a structure's evidence compares with that of the full GGN
    None: "; this structure's evidence is not a bound of the full GGN's",
    "exact": "",
    "lower": "; a lower bound of the full GGN's",
    "upper": "; an upper bound of the full GGN's",
}


def summary(la: Any) -> str:
    """Describe a Laplace object: what was fitted and how, with notes."""
    lines = [f"Laplace posterior over {la.params.size:,} weights of {type(la.module).__name__}"]
    lines += [f"  {name:<12} {value}" for name, value in facts(la).items()]
    lines.append(f"  log-likelihood at the weights  {float(la.log_likelihood):.6g}")
    deterministic = "deterministic" in la.tuned  # also after loading, when `tuning` is gone
    if not la.belief.damped and not deterministic:
        what = "log evidence" if la.temperature.is_bayes else "log evidence of the tempered likelihood"
        lines.append(f"  {what}  {_evidence_line(la)}")
        lines += _distance_line(la)
    if la.posterior.increase:
        lines.append(f"  prior precision raised by {la.posterior.increase:.3g} to make it positive definite")
    if la.tuned:
        lines.append(f"  tuned by {la.tuned}")
    notes = [*la.curvature.notes, *(la.tuning.messages if la.tuning else ())]
    return "\n".join([*lines, *(f"  note: {note}" for note in notes)])


def facts(la: Any) -> dict[str, str]:
    """Return facts about a Laplace object by name, without any computation."""
    curvature = la.curvature
    scaled = f", logits divided by {la.logit_temperature:.4g}" if la.logit_temperature != 1.0 else ""
    return {
        "likelihood": f"{la.likelihood}",
        "structure": f"{curvature.structure.name}, factor {type(curvature.factor).__name__}",
        "data": f"{curvature.seen:g} seen, standing for {curvature.n_data:g}",
        "prior": f"{la.prior}",
        "temperature": f"{la.temperature}{scaled}",
    }


def html(la: Any) -> str:
    """Describe a Laplace object as a small table for notebooks, without any computation."""
    rows = list(facts(la).items()) + ([("tuned by", la.tuned)] if la.tuned else [])
    rows += [("note", note) for note in (*la.curvature.notes, *(la.tuning.messages if la.tuning else ()))]
    return html_table((), rows, f"Laplace posterior over {la.params.size:,} weights of {type(la.module).__name__}")


def _distance_line(la: Any) -> list[str]:
    """Say how far the weights are from the mode, if that matters and needs no iterative solve."""
    if la.curvature.gradient is None or la.posterior.precision.iterative:
        return []
    gain = la.stationarity
    if gain < 1.0:
        return []
    return [
        f"  the weights are not at the mode for this prior (log joint {gain:.4g} nats below that of the linearized "
        "model): comparisons of evidence may mislead; use log_evidence(at='linear-mode')"
    ]


def _evidence_line(la: Any) -> str:
    """Return the log evidence as text, with its standard error if it is an estimate; a summary starts no estimate."""
    precision, bound = la.posterior.precision, la.curvature.structure.bound
    if not precision.iterative:
        return f"{float(la.log_evidence()):.6g}{BOUNDS[bound]}{_variational_line(la)}"
    if precision.logdet_products:
        return f"not estimated yet: log_evidence() takes {precision.logdet_products} products"
    error = 0.5 * precision.logdet_error()
    return f"{float(la.log_evidence()):.6g} ± {error:.2g} (standard error)"


def _variational_line(la: Any) -> str:
    matrix = la.belief.resolved_prior[1]
    if "excess" not in la.curvature.state or matrix.constant() is None:
        return ""
    return f", whose variational lower bound is {float(variational_bound(la.belief)):.6g}"
