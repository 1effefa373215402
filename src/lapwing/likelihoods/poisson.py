"""Counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Independent
from torch.distributions import Poisson as PoissonLaw

from lapwing.likelihoods.likelihood import Likelihood, as_target, match_shape, promote, require, require_finite
from lapwing.likelihoods.marginal import Marginal, MixtureMarginal, Outputs, normal_nodes, safe_sqrt


@dataclass(frozen=True, eq=False)
class Poisson(Likelihood):
    """y_k ~ Poisson(exp f_k): the network emits log rates. Λ = diag(exp f).

    Targets: counts 0, 1, 2, … of the shape of f; (B, *event) too where there is one output.
    """

    links: ClassVar[tuple[str, ...]] = ("quadrature", "mc")

    def conditional(self, f: Tensor) -> Independent:
        return Independent(PoissonLaw(f.exp(), validate_args=False), 1, validate_args=False)

    def targets(self, f: Tensor, y: Any) -> Tensor:
        y = match_shape(as_target(f, y), f.shape, f.shape[-1:], "Poisson").to(promote(f).dtype)
        require_finite(f, y)
        require(
            (y >= 0) & (y == y.round()), y, "the counts 0, 1, 2, …: Poisson takes whole numbers that are not negative"
        )
        return y

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        f = promote(f)
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y - promote(f).exp()

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.diag_embed((promote(f) / 2).exp())

    def sample_target(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(promote(f).detach().exp(), generator=generator)

    def marginal(self, f: Outputs) -> Marginal:
        """A mixture over nodes of log rates; the moments are those of a lognormal rate, exactly: with E = exp(m + v/2),
        E[y] = E[Var(y|f)] = E and Var(E[y|f]) = E²(e^v − 1)."""
        mean, variance = promote(f.mean), promote(f.variance)
        x, log_weights = normal_nodes(mean.double())
        nodes = mean.double() + safe_sqrt(variance.double()) * x.reshape(-1, *(1,) * mean.ndim)
        rate = (mean + variance / 2).exp()
        spread = rate.square() * variance.expm1()
        return MixtureMarginal(PoissonLaw(nodes.exp(), validate_args=False), log_weights, rate, rate, spread)

    def spec(self) -> dict[str, Any]:
        return {"family": "Poisson"}
