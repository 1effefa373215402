"""The log evidence log p(D|M) of the Laplace approximation, what follows from it, and models compared by it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor

from lapwing.curvature import Curvature
from lapwing.errors import BadData, UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD
from lapwing.linalg.rows import added
from lapwing.linalg.spectrum import PIECE
from lapwing.model import Network, Params
from lapwing.model.batches import Batches, require_one_process
from lapwing.model.calls import outside_inference
from lapwing.posterior import Belief, Tempered
from lapwing.predictive import Prediction

NAT = 1.0  # a difference below one nat never counts as evidence


@outside_inference
def log_evidence(
    curvature: Curvature,
    prior: Any,
    likelihood: str | Likelihood,
    *,
    mean: Tensor | None = None,
    temperature: float | Tensor | Tempered = 1.0,
    at: str = "map",
) -> Tensor:
    """Return the log evidence of the Laplace approximation, a float64 scalar (MacKay 1992).

    log p(D) ≈ T·log p(D|θ̂) − ½(θ̂−μ₀)ᵀΠ(θ̂−μ₀) − ½[log|T/φ·H + Π| − log|Π|].

    `prior` is what `lapwing.fit` takes (a scalar, a dict, a tensor, a `Prior`) or its mean and precision matrix; `mean`
    is θ̂ (P,), by default the weights that the curvature was computed at. Differentiable in prior precisions, prior
    mean, noise and temperature; exact for a linear-Gaussian model at its mode. Away from the mode `at="linear-mode"`
    adds ½gᵀΣg, g the gradient of the log joint at θ̂: the value at the mode of the linearized model, exact for a
    linear-Gaussian model at any θ̂.

    Diagonal, block-diagonal and EKFAC curvature give lower bounds of the full GGN's evidence; KFAC does not. At T ≠ 1
    this is the evidence of the tempered likelihood p(D|θ)^T, which cannot choose T. `Tempered(T, prior=True)` has the
    prior N(μ₀, (TΠ)⁻¹).

    Examples:
        >>> precision = torch.tensor(1.0, requires_grad=True)
        >>> lapwing.log_evidence(la.curvature, precision, la.likelihood).backward()
        >>> slope = precision.grad
    """
    return evidence_of(Belief.of(curvature, prior, likelihood, temperature, mean), at)


def evidence_of(belief: Belief, at: str = "map") -> Tensor:
    """Return the log evidence of a belief; see `log_evidence`. Damping is left out: the sum T/φ·H + Π is exact."""
    if at not in ("map", "linear-mode"):
        raise BadData(f"at={at!r}: use 'map' (θ̂ as it is) or 'linear-mode' (the mode of the linearized model)")
    center, matrix = belief.prior_in_use
    precision = _scaled(matrix, belief.temperature.prior_scale)
    bracket = _scaled(belief.curvature.matrix, belief.scale).logdet_ratio(precision)
    fit = belief.temperature.T * belief.log_likelihood
    value = fit - 0.5 * _distance(belief.weights, center, precision) - 0.5 * bracket
    return value if at == "map" else value + _gain(belief)


def _distance(mean: Tensor, center: Tensor, precision: PSD) -> Tensor:
    """(θ̂−μ₀)ᵀΠ(θ̂−μ₀). Where μ₀ and Π are one number each, sum over pieces that stay in the processor's cache."""
    center = center.expand(mean.shape) if center.ndim == 0 else center
    single = center.stride(0) == 0 and not (center.requires_grad and center.is_leaf)
    constant = precision.constant() if precision.expanded and single else None
    if constant is not None:
        pieces = [(few.double() - center[0].double()).square().sum() for few in mean.split(PIECE)]
        return constant * added(pieces)
    offset = mean.double() - center.double()
    return (offset * precision.matvec(offset).double()).sum()


def _scaled(matrix: PSD, c: Tensor | float) -> PSD:
    """Multiply by c; return the matrix itself for c = 1, so that what it has cached is used."""
    fixed = not (isinstance(c, Tensor) and c.requires_grad)
    return matrix if fixed and float(c) == 1 else matrix.scale(c)


def stationarity(belief: Belief) -> float:
    """½gᵀΣg in nats: what the log joint would gain by moving from θ̂ to the mode of the linearized model.

    Well below one, θ̂ is a mode for the purposes of the evidence; far above, use `at="linear-mode"`.
    """
    return _gain(belief).item()


def effective_parameters(belief: Belief) -> float:
    """γ = tr(c·H (c·H + Π)⁻¹) = Σ c e/(c e + τ): how many directions the data, not the prior, determine."""
    prior = belief.prior_in_use[1].scale(belief.temperature.prior_scale)
    return belief.curvature.matrix.effective_directions(belief.scale.detach(), prior).item()


def _gain(belief: Belief) -> Tensor:
    """½gᵀΣg with g = T/φ·∇ − Π(θ̂−μ₀)."""
    curvature = belief.curvature
    if curvature.gradient is None:
        raise UnsupportedOperation(
            "this curvature holds no gradient of the log-likelihood, which the mode of the linearized model needs; fit "
            "again with a version and structure that store it, or use at='map'"
        )
    precision = belief.prior_in_use[1].scale(belief.temperature.prior_scale)
    factor = belief.temperature.likelihood_scale(belief.likelihood.common_factor)
    gradient = factor * curvature.gradient.double() - precision.matvec(belief.offset).double()
    posterior = curvature.matrix.scale(belief.scale) + precision
    return 0.5 * (gradient * posterior.solve(gradient).double()).sum()


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

    Examples:
        >>> comparison = lapwing.compare({"wide": la, "narrow": la.replace(prior=10.0)})
        >>> print(comparison.table())
    """

    candidates: Mapping[str, Candidate]
    warnings: tuple[str, ...]

    @property
    def best(self) -> str:
        """The name with the highest evidence.

        Examples:
            >>> lapwing.compare({"wide": la, "narrow": la.replace(prior=10.0)}).best
        """
        return max(self.candidates, key=lambda name: self.candidates[name].log_evidence)

    def table(self) -> str:
        """Return the candidates by decreasing evidence, then the warnings, as text.

        Examples:
            >>> print(lapwing.compare({"wide": la, "narrow": la.replace(prior=10.0)}).table())
        """
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
        """Return plain numbers, for files.

        Examples:
            >>> rows = lapwing.compare({"wide": la, "narrow": la.replace(prior=10.0)}).to_dict()
        """
        return {name: dict(vars(candidate)) for name, candidate in self.candidates.items()}

    def __str__(self) -> str:
        return self.table()


def compare(models: Mapping[str, Fitted], data: Any = None) -> Comparison:
    """Compare `Laplace` objects by evidence, effective parameters and cost; with `data`, also by held-out NLL.

    Tune the prior of each candidate first (`la.tune()`): the evidence of an untuned prior compares priors, not models.
    The warnings say where a difference is smaller than the known error of the approximation, where the curvature gives
    no bound, and where evidences cannot be compared at all.

    Examples:
        >>> kron = lapwing.fit(model, train_loader, "classification", structure="kron")
        >>> print(lapwing.compare({"full": la, "kron": kron}, val_loader).table())
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
