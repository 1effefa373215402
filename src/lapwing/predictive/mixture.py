"""Several posteriors of one problem as one: a Laplace approximation at each of K modes, mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.errors import BadData, UnsupportedOperation
from lapwing.likelihoods.marginal import Marginal, MixtureMarginal, NormalMarginal
from lapwing.predictive.function import MixtureFunction
from lapwing.predictive.links import ClassLaw
from lapwing.predictive.prediction import ClassPrediction, LabelPrediction, Prediction, ValuePrediction


class Component(Protocol):
    """What a mixture needs of a `Laplace` object."""

    def predict(self, x: Any, **options: Any) -> Prediction: ...

    def log_evidence(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Mixture:
    """Σ_k w_k q_k(θ): deep ensembles whose members know their own uncertainty (Eschenhagen et al. 2021).

    `weights` are "uniform", "evidence" (w_k ∝ p(D|M_k), for members fitted to the same data) or a tensor (K,).
    `predict` takes the options of `Laplace.predict` and mixes the members' predictions exactly: probabilities and
    densities by weight, uncertainties by the laws of total entropy and of total variance, so that disagreement between
    members counts as epistemic. Members share one likelihood, noise included.

    Example: `Mixture([la1, la2, la3]).predict(x).probs`.
    """

    members: Sequence[Component]
    weights: str | Tensor = "uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))
        if not self.members:
            raise BadData("a mixture needs at least one member")
        if isinstance(self.weights, str):
            if self.weights not in ("uniform", "evidence"):
                raise ValueError(f"weights={self.weights!r}: use 'uniform', 'evidence' or a tensor, one a member")
            return
        weights = torch.as_tensor(self.weights)
        if weights.shape != (len(self.members),) or not bool((weights >= 0).all() & (weights.sum() > 0)):
            raise ValueError(f"expected {len(self.members)} weights ≥ 0 with a positive sum, got {weights.tolist()}")

    @property
    def probabilities(self) -> Tensor:
        """w, (K,) float64, summing to one."""
        if isinstance(self.weights, Tensor):
            return self.weights.double() / self.weights.double().sum()
        if self.weights == "uniform":
            return torch.full((len(self.members),), 1 / len(self.members), dtype=torch.float64)
        return torch.stack([member.log_evidence().detach().double().cpu() for member in self.members]).softmax(0)

    @property
    def network(self) -> Any:
        """The network of the first member, which says where inputs belong and what labels mean."""
        return getattr(self.members[0], "network", None)

    def predict(self, x: Any, **options: Any) -> Prediction:
        """The mixture of the members' predictions at x."""
        return mix([member.predict(x, **options) for member in self.members], self.probabilities)

    def log_evidence(self) -> Tensor:
        """log Σ_k w_k p(D|M_k) of the mixture as one model, with its weights as prior probabilities of the members."""
        if self.weights == "evidence":
            raise UnsupportedOperation("weights that come from the evidence are no prior; use 'uniform' or a tensor")
        each = torch.stack([member.log_evidence() for member in self.members])
        return (each + self.probabilities.log().to(each)).logsumexp(0)


def mix(parts: Sequence[Prediction], weights: Tensor) -> Prediction:
    """Σ_k w_k p_k(y) of predictions of the same kind at the same inputs."""
    first = parts[0]
    kinds = {type(part).__name__ for part in parts}
    if len(kinds) > 1 or any(part.function.mean.shape != first.function.mean.shape for part in parts):
        raise BadData(f"members predict different things ({', '.join(sorted(kinds))}): mix those of one problem")
    if any(part.likelihood.spec() != first.likelihood.spec() for part in parts):
        raise UnsupportedOperation(
            f"members have different likelihoods ({'; '.join(str(part.likelihood.spec()) for part in parts)}): give "
            "them one, with la.replace(likelihood=...)"
        )
    weights = weights.to(first.function.mean)
    mixed = type(first)(
        MixtureFunction([part.function for part in parts], weights),
        first.likelihood,
        link="mixture",
        samples=first.samples,
        seed=first.seed,
        score=lambda: torch.stack([w * part.novelty for w, part in zip(weights, parts)]).sum(0),
        scalar=first.scalar,
        shifted=first.shifted,
    )
    # The mixture's law replaces the one that the prediction would compute from `function` by Monte Carlo.
    if isinstance(first, ClassPrediction | LabelPrediction):
        mixed.__dict__["_law"] = _mixed_law([part._law for part in parts], weights)
    elif isinstance(first, ValuePrediction):
        mixed.__dict__["_marginal"] = _mixed_marginal([part._marginal for part in parts], weights)
    else:
        raise UnsupportedOperation(f"predictions of type {type(first).__name__} cannot be mixed")
    return mixed


def _mixed_law(laws: Sequence[ClassLaw], weights: Tensor) -> ClassLaw:
    """log Σ w p, and Σ w E[entropy]: the members' entropies are what remains when member and f are known."""
    log_probs = _log_mix([law.log_probs for law in laws], weights)

    def expected() -> Tensor:
        return torch.stack([w * law.expected_entropy() for w, law in zip(weights, laws)]).sum(0)

    return ClassLaw(log_probs, expected)


def _log_mix(values: Sequence[Tensor], weights: Tensor) -> Tensor:
    stacked = torch.stack(list(values))
    return (stacked + weights.log().to(stacked).reshape(-1, *(1,) * (stacked.ndim - 1))).logsumexp(0)


def _mixed_marginal(parts: Sequence[Marginal], weights: Tensor) -> BlendedMarginal:
    """Law of total variance: E[Var] over members, and Var of what members expect."""
    mean = torch.stack([w * part.mean for w, part in zip(weights, parts)]).sum(0)
    aleatoric = torch.stack([w * part.aleatoric for w, part in zip(weights, parts)]).sum(0)
    spread = [w * (part.epistemic + (part.mean - mean).square()) for w, part in zip(weights, parts)]
    return BlendedMarginal(mean, aleatoric, torch.stack(spread).sum(0), tuple(parts), weights)


@dataclass(frozen=True, eq=False)
class BlendedMarginal(Marginal):
    """y ~ Σ_k w_k p_k(y) of whole marginals p_k."""

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    parts: tuple[Marginal, ...]
    weights: Tensor

    def log_prob(self, y: Tensor) -> Tensor | None:
        values = [part.log_prob(y) for part in self.parts]
        known = [value for value in values if value is not None]
        return _log_mix(known, self.weights) if len(known) == len(values) else None

    def quantile(self, level: float) -> Tensor:
        """By bisection between the smallest and the largest of the members' quantiles."""
        each = torch.stack([part.quantile(level) for part in self.parts])
        lower, upper = each.amin(0).double(), each.amax(0).double()
        for _ in range(60):
            middle = (lower + upper) / 2
            reached = self.cdf(middle) >= level
            lower, upper = torch.where(reached, lower, middle), torch.where(reached, middle, upper)
        return upper.to(self.mean.dtype)

    def cdf(self, y: Tensor) -> Tensor:
        """p(output ≤ y), output by output."""
        return torch.stack([w * _cdf(part, y) for w, part in zip(self.weights, self.parts)]).sum(0)


def _cdf(part: Marginal, y: Tensor) -> Tensor:
    if isinstance(part, NormalMarginal):
        return torch.special.ndtr((y - part.mean) / (part.aleatoric + part.epistemic).sqrt())
    if isinstance(part, MixtureMarginal):
        values = part.components.cdf(y.to(part.log_weights))
        return (values * part._log_weights(values.ndim).exp()).sum(0)
    if isinstance(part, BlendedMarginal):
        return part.cdf(y)
    raise UnsupportedOperation(f"{type(part).__name__} has no distribution function")
