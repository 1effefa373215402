"""Several posteriors of one problem as one: a Laplace approximation at each of K modes, mixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.errors import BadData, UnsupportedOperation, brief
from lapwing.model.calls import outside_autocast
from lapwing.predictive.function import FunctionDistribution, fixed_generator, shares
from lapwing.predictive.prediction import Prediction
from lapwing.storage import prefixed, write_file


@dataclass(frozen=True, eq=False, init=False, repr=False)
class MixtureFunction(FunctionDistribution):
    """Σ_k w_k p_k(f): several posteriors of one problem, for instance a Laplace approximation at each of K modes."""

    parts: tuple[FunctionDistribution, ...]
    weights: Tensor
    has_covariance = False

    def __init__(self, parts: Sequence[FunctionDistribution], weights: Tensor | None = None) -> None:
        like = parts[0].mean
        weights = like.new_ones(len(parts)) if weights is None else weights.to(like)
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "weights", weights / weights.sum())

    @property
    def needs_network(self) -> bool:
        return any(part.needs_network for part in self.parts)

    def scaled(self, factor: float) -> MixtureFunction:
        return MixtureFunction([part.scaled(factor) for part in self.parts], self.weights)

    def take(self, index: Tensor) -> MixtureFunction:
        return MixtureFunction([part.take(index) for part in self.parts], self.weights)

    def stored(self) -> MixtureFunction:
        return MixtureFunction([part.stored() for part in self.parts], self.weights.detach())

    @cached_property
    def mean(self) -> Tensor:
        return torch.stack([w * part.mean for w, part in zip(self.weights, self.parts)]).sum(0)

    @cached_property
    def variance(self) -> Tensor:
        """The variance by the law of total variance."""
        terms = [w * (p.variance + (p.mean - self.mean).square()) for w, p in zip(self.weights, self.parts)]
        return torch.stack(terms).sum(0)

    @cached_property
    @outside_autocast
    def covariance(self) -> Tensor:
        terms = []
        for w, part in zip(self.weights, self.parts):
            shift = part.mean - self.mean
            terms.append(w * (part.item_covariance + shift[..., :, None] * shift[..., None, :]))
        return torch.stack(terms).sum(0)

    @outside_autocast
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.weights.device
        generator = fixed_generator(device) if generator is None else generator
        which = torch.multinomial(self.weights.detach(), n, replacement=True, generator=generator)
        draws = self.mean.new_empty(n, *self.mean.shape)
        for k, part in enumerate(self.parts):
            chosen = which == k
            draws[chosen] = part.sample(int(chosen.sum()), generator)
        return draws

    def blocks(self, n: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """Yield a share of n points per part in proportion to its weight."""
        for part, count in zip(self.parts, shares(self.weights, n)):
            if count:
                yield from part.blocks(count, generator)


class Component(Protocol):
    """A member of a mixture, such as a `Laplace` object."""

    @property
    def predict(self) -> Callable[..., Prediction]: ...

    @property
    def log_evidence(self) -> Callable[[], Tensor]: ...

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...


@dataclass(frozen=True, eq=False)
class Mixture:
    """Σ_k w_k q_k(θ): deep ensembles whose members know their own uncertainty (Eschenhagen et al. 2021).

    `weights` are "uniform", "evidence" (w_k ∝ p(D|M_k), for members fitted to the same data) or a tensor (K,).
    `predict` takes the options of `Laplace.predict` and mixes the members' predictions exactly: probabilities and
    densities by weight, uncertainties by the laws of total entropy and of total variance, so that disagreement between
    members counts as epistemic. Members have likelihoods of one family; each keeps its own noise.

    Examples:
        >>> import copy
        >>> other = copy.deepcopy(model)  # in practice a network that was trained from another start
        >>> mixture = lapwing.Mixture([la, lapwing.fit(other, train_loader, "classification")])
        >>> mixture.predict(x).probs.shape
        torch.Size([8, 3])
    """

    __repr__ = brief

    members: Sequence[Component]
    weights: str | Tensor = "uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))
        if not self.members:
            raise BadData("a mixture needs at least one member")
        for member in self.members:
            if not hasattr(member, "predict"):
                raise BadData(
                    f"a member of the mixture is a {type(member).__name__}, which has no predict(x): give a network a "
                    "posterior first, with lapwing.fit"
                )
        if isinstance(self.weights, str):
            if self.weights not in ("uniform", "evidence"):
                raise BadData(f"weights={self.weights!r}: use 'uniform', 'evidence' or a tensor, one per member")
            return
        weights = torch.as_tensor(self.weights)
        if weights.shape != (len(self.members),) or not bool((weights >= 0).all() & (weights.sum() > 0)):
            raise BadData(f"expected {len(self.members)} weights ≥ 0 with a positive sum, got {weights.tolist()}")

    @property
    def probabilities(self) -> Tensor:
        """The weights w, (K,) float64, summing to one.

        Examples:
            >>> lapwing.Mixture([la, la.replace(prior=10.0)]).probabilities
            tensor([0.5000, 0.5000], dtype=torch.float64)
        """
        if isinstance(self.weights, Tensor):
            return self.weights.double() / self.weights.double().sum()
        if self.weights == "uniform":
            return torch.full((len(self.members),), 1 / len(self.members), dtype=torch.float64)
        return torch.stack([member.log_evidence().detach().double().cpu() for member in self.members]).softmax(0)

    @property
    def network(self) -> Any:
        """The network of the first member, which says where inputs belong and what labels mean."""
        return getattr(self.members[0], "network", None)

    def predict(self, x: Any, *, differentiable: bool = False, **options: Any) -> Prediction:
        """Return the mixture of the members' predictions at x.

        Examples:
            >>> p = lapwing.Mixture([la, la.replace(prior=10.0)]).predict(x, link="mc")
        """
        options |= {"differentiable": True} if differentiable else {}
        return mix([member.predict(x, **options) for member in self.members], self.probabilities)

    def log_evidence(self) -> Tensor:
        """Return log Σ_k w_k p(D|M_k): the evidence of the mixture, its weights as prior probabilities of members.

        Examples:
            >>> evidence = lapwing.Mixture([la, la.replace(prior=10.0)]).log_evidence()
        """
        if self.weights == "evidence":
            raise UnsupportedOperation("weights that come from the evidence are not a prior; use 'uniform' or a tensor")
        each = torch.stack([member.log_evidence() for member in self.members])
        return (each + self.probabilities.log().to(each)).logsumexp(0)

    def save(self, path: str | Path) -> None:
        """Write all members into one file (safetensors), atomically; `lapwing.load(path, models)` reads it.

        Examples:
            >>> mixture = lapwing.Mixture([la, la.replace(prior=10.0)])
            >>> mixture.save("mixture.lapwing")
            >>> mixture = lapwing.load("mixture.lapwing", [model, model])
        """
        tensors: dict[str, Tensor] = {}
        headers = []
        for k, member in enumerate(self.members):
            if not hasattr(member, "stored"):
                raise UnsupportedOperation(
                    f"a {type(member).__name__} in a mixture cannot be saved: only Laplace posteriors have a file"
                )
            own, header = member.stored()
            tensors |= prefixed(f"{k}.", own)
            headers.append(header)
        weights = self.weights.tolist() if isinstance(self.weights, Tensor) else self.weights
        write_file(Path(path), tensors, {"mixture": {"weights": weights, "members": headers}})


def mix(parts: Sequence[Prediction], weights: Tensor) -> Prediction:
    """Mix predictions of the same kind at the same inputs: Σ_k w_k p_k(y)."""
    first = parts[0]
    kinds = {type(part).__name__ for part in parts}
    if len(kinds) > 1 or any(part.function.mean.shape != first.function.mean.shape for part in parts):
        raise BadData(f"members predict different things ({', '.join(sorted(kinds))}): mix those of one problem")
    families = {type(part.likelihood).__name__ for part in parts}
    if len(families) > 1:
        raise BadData(f"members have different likelihoods ({', '.join(sorted(families))}): mix those of one problem")
    weights = weights.to(first.function.mean)
    return type(first)(
        MixtureFunction([part.function for part in parts], weights),
        first.likelihood,
        link="mixture",
        samples=first.samples,
        seed=first.seed,
        score=lambda: torch.stack([w * part.novelty for w, part in zip(weights, parts)]).sum(0),
        scalar=first.scalar,
        shifted=first.shifted,
        members=tuple(parts),
        weights=weights,
    )
