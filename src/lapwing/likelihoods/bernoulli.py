"""Binary classification, one logit or several labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliLaw
from torch.distributions import Independent
from torch.nn.functional import logsigmoid, softplus

from lapwing.likelihoods.likelihood import Likelihood, as_target, match_shape, promote, require, require_finite


@dataclass(frozen=True, eq=False)
class Bernoulli(Likelihood):
    """p(y_k = 1 | f) = sigmoid(f_k), independent over the C labels given f. Λ = diag(p(1−p)).

    Targets: 0 or 1, or soft labels between, of the shape of f; (B, *event) too where there is one logit.
    """

    links: ClassVar[tuple[str, ...]] = ("quadrature", "mc", "probit")

    @property
    def has_logits(self) -> bool:
        return True

    def conditional(self, f: Tensor) -> Independent:
        return Independent(BernoulliLaw(logits=f, validate_args=False), 1, validate_args=False)

    def targets(self, f: Tensor, y: Any) -> Tensor:
        y = match_shape(as_target(f, y), f.shape, f.shape[-1:], "Bernoulli").to(promote(f).dtype)
        require_finite(f, y)
        signs = bool((y.abs() == 1).all())
        hint = "For labels -1 and 1 pass (y + 1) / 2." if signs else ""
        require((y >= 0) & (y <= 1), y, "[0, 1]: Bernoulli takes labels 0 and 1 (for more classes: Categorical)", hint)
        return y

    def doubts(self, f: Tensor, y: Tensor) -> list[str]:
        f = promote(f).detach()
        if bool((f >= 0).all() & (f <= 1).all()):
            p = f.clamp(1e-6, 1 - 1e-6)
            if self.log_prob(p.logit(), y).mean() > self.log_prob(f, y).mean():
                return [
                    "the outputs of the network lie between 0 and 1 and explain the targets better as probabilities "
                    "than as logits: a sigmoid seems to be its last layer, and it will be applied twice. Return the "
                    "logits, without the sigmoid"
                ]
        return []

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """y f − log(1 + e^f), written so that neither part is large where the label is right."""
        f = promote(f)
        return -(y * softplus(-f) + (1 - y) * softplus(f)).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        f = promote(f)
        return y * torch.sigmoid(-f) - (1 - y) * torch.sigmoid(f)

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        f = promote(f)
        return torch.diag_embed(((logsigmoid(f) + logsigmoid(-f)) / 2).exp())

    def sample_target(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(promote(f).detach().sigmoid(), generator=generator)

    def spec(self) -> dict[str, Any]:
        return {"family": "Bernoulli"}
