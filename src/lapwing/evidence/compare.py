"""Compare fitted models side by side: evidence, size, held-out NLL and cost."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from lapwing.errors import BadData
from lapwing.evidence.evidence import effective_parameters, evidence_of, stationarity
from lapwing.model import Network, Params
from lapwing.model.batches import Batches, require_one_process
from lapwing.posterior import Belief
from lapwing.predictive import Prediction

NAT = 1.0  # a difference below one nat never counts as evidence


class Fitted(Protocol):
    """What `compare` reads of a `Laplace` object."""

    @property
    def network(self) -> Network: ...
    @property
    def params(self) -> Params: ...
    @property
    def belief(self) -> Belief: ...
    def predict(self, x: Any) -> Prediction: ...
    def batches(self, data: Any) -> Batches: ...


@dataclass(frozen=True, eq=False)
class Candidate:
    """One row of a comparison: log evidence and its uncertainty in nats, sizes, held-out NLL and its cost.

    `shift` is what the log evidence would gain at the mode of the linearized model, None if unknown. `error` is the
    standard error of a log-determinant that is estimated from probes (matrix-free), else 0. `megabytes` is None if the
    curvature exists only as products with the data.
    """

    structure: str
    parameters: int
    effective: float
    log_evidence: float
    shift: float | None
    n_data: float
    megabytes: float | None
    nll: float | None = None
    milliseconds: float | None = None
    error: float = 0.0

    @property
    def uncertainty(self) -> float:
        """How far off the evidence may be: one nat, plus the shift if it is known, plus two standard errors."""
        return NAT + (self.shift or 0.0) + 2 * self.error


@dataclass(frozen=True, eq=False)
class Comparison:
    """The candidates by name, and warnings about what they do not show.

    print(lapwing.compare({"kron": a, "diag": b}).table())
    """

    candidates: Mapping[str, Candidate]
    warnings: tuple[str, ...]

    @property
    def best(self) -> str:
        """The name with the highest evidence."""
        return max(self.candidates, key=lambda name: self.candidates[name].log_evidence)

    def table(self) -> str:
        """Return the candidates by decreasing evidence, then the warnings, as text."""
        heads = ["", "structure", "log evidence", "per datum", "weights", "effective", "MB", "held-out NLL", "ms/datum"]
        lines = [heads]
        for name, c in sorted(self.candidates.items(), key=lambda item: -item[1].log_evidence):
            evidence = [f"{c.log_evidence:.1f}", f"{c.log_evidence / c.n_data:.4f}"]
            held = ["–" if c.nll is None else f"{c.nll:.4f}"]
            held += ["–" if c.milliseconds is None else f"{c.milliseconds:.2f}"]
            sizes = [f"{c.parameters:,}", f"{c.effective:.1f}", "–" if c.megabytes is None else f"{c.megabytes:.2f}"]
            lines.append([name, c.structure, *evidence, *sizes, *held])
        widths = [max(len(line[k]) for line in lines) for k in range(len(heads))]
        rows = ["  ".join(cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(line, widths)))
                for line in lines]  # fmt: skip
        return "\n".join([*(row.rstrip() for row in rows), *self.warnings])

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain numbers, for files."""
        return {name: dict(vars(candidate)) for name, candidate in self.candidates.items()}

    def __str__(self) -> str:
        return self.table()


def compare(models: Mapping[str, Fitted], data: Any = None) -> Comparison:
    """Compare `Laplace` objects by evidence, effective parameters and cost; with `data`, also by held-out NLL.

    Tune the prior of each candidate first (`la.tune()`): the evidence of an untuned prior compares priors, not models.
    The warnings say where a difference is smaller than the known error of the approximation, where the curvature gives
    no bound, and where evidences cannot be compared at all.

        print(lapwing.compare({"small": la_small, "large": la_large}, val_loader).table())
    """
    if not models:
        raise BadData("compare needs at least one fitted model: pass {name: lapwing.fit(...)}")
    if data is not None:
        require_one_process("compare with held-out data")
    candidates = {name: _candidate(model, data) for name, model in models.items()}
    return Comparison(candidates, tuple(_beware(models, candidates)))


def _candidate(model: Fitted, data: Any) -> Candidate:
    belief = model.belief
    value = evidence_of(belief).item()
    shift = None if belief.curvature.gradient is None else abs(stationarity(belief))
    effective = effective_parameters(belief)
    nll, cost = (None, None) if data is None else _held_out(model, data)
    curvature, precision = belief.curvature, belief.posterior.precision
    error = 0.5 * precision.logdet_error()
    size = None if curvature.matrix.nbytes is None else curvature.matrix.nbytes / 1e6
    name = curvature.structure.name
    return Candidate(name, model.params.size, effective, value, shift, curvature.n_data, size, nll, cost, error)


def _held_out(model: Fitted, data: Any) -> tuple[float, float]:
    """Return the mean NLL per item that counts, and milliseconds per sample."""
    likelihood = model.belief.likelihood
    total, count, seen = 0.0, 0, 0
    begin = time.perf_counter()
    for batch in model.batches(data):
        prediction = model.predict(batch.inputs)
        f = prediction.function.mean
        y = likelihood.targets(f, batch.targets)
        mask = likelihood.mask(f, y)
        total -= prediction.log_prob_of_targets(batch.targets).double().sum().item()
        count += f[..., 0].numel() if mask is None else int(mask.sum())
        seen += f.shape[0]
    if not count:
        raise BadData("the held-out data hold no target that counts")
    return total / count, 1000 * (time.perf_counter() - begin) / seen


def _beware(models: Mapping[str, Fitted], candidates: Mapping[str, Candidate]) -> list[str]:
    found = []
    if len({c.n_data for c in candidates.values()}) > 1:
        sizes = ", ".join(f"{name} {c.n_data:g}" for name, c in candidates.items())
        found.append(f"fitted to data sets of different sizes ({sizes}): their evidences are not comparable")
    tempered = [name for name, model in models.items() if not model.belief.temperature.is_bayes]
    if tempered:
        found.append(f"{_list(tempered)}: temperature ≠ 1, so this is the evidence of a tempered likelihood")
    unbounded = [name for name, model in models.items() if model.belief.curvature.structure.bound is None]
    if unbounded:
        found.append(f"{_list(unbounded)}: the evidence of this structure is no bound of the full matrix's")
    far = [name for name, c in candidates.items() if c.shift is not None and c.shift > 10 * NAT]
    if far:
        found.append(
            f"{_list(far)}: the weights are far from a mode under this prior (shift above 10 nats); compare "
            "log_evidence(at='linear-mode') instead"
        )
    return found + _close(models, candidates)


def _close(models: Mapping[str, Fitted], candidates: Mapping[str, Candidate]) -> list[str]:
    """Warn of one network in several structures, and of neighbors whose evidences are too close to tell apart."""
    found = []
    networks: dict[int, list[str]] = {}
    for name, model in models.items():
        networks.setdefault(id(model.network.module), []).append(name)
    for names in networks.values():
        if len({candidates[name].structure for name in names}) > 1:
            found.append(f"{_list(names)}: one network in several structures; gaps are the structures', not a model's")
    order = sorted(candidates, key=lambda name: -candidates[name].log_evidence)
    for one, two in pairwise(order):
        a, b = candidates[one], candidates[two]
        gap, doubt = a.log_evidence - b.log_evidence, a.uncertainty + b.uncertainty
        if gap < doubt:
            found.append(f"{one}, {two}: {gap:.3g} nats apart, within the {doubt:.3g} that they may be off by")
    return found


def _list(names: list[str]) -> str:
    return ", ".join(names)
