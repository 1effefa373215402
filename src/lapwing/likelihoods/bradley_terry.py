"""Preference learning: which of two candidates is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalLaw

from lapwing.errors import BadData
from lapwing.likelihoods.categorical import class_log_prob, class_score, class_targets, sample_classes
from lapwing.likelihoods.likelihood import Likelihood, as_target, promote


@dataclass(frozen=True, eq=False)
class BradleyTerry(Likelihood):
    """p(candidate i is preferred | f) = exp f_i / (exp f_0 + exp f_1) for rewards f (B, 2) of two candidates.

    y (B,) in {0, 1} is the index of the preferred one; soft preferences are (B, 2). Λ = p₀p₁ (1, −1)(1, −1)ᵀ.
    """

    links: ClassVar[tuple[str, ...]] = ("quadrature", "mc")

    @property
    def has_logits(self) -> bool:
        return True

    @property
    def takes_class_indices(self) -> bool:
        return True

    def conditional(self, f: Tensor) -> CategoricalLaw:
        return CategoricalLaw(logits=f, validate_args=False)

    def outputs(self, raw: Tensor) -> Tensor:
        if raw.ndim < 2 or raw.shape[-1] != 2:
            raise BadData(
                f"outputs of shape {tuple(raw.shape)}: BradleyTerry needs the rewards of two candidates, (B, 2). "
                "Stack them: torch.stack([reward(x0), reward(x1)], -1)."
            )
        return promote(raw)

    def targets(self, f: Tensor, y: Any) -> Tensor:
        return class_targets(f, as_target(f, y), None)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return class_log_prob(f, y, None)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return class_score(f, y, None)

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        log_p = promote(f).log_softmax(-1)
        size = (log_p.sum(-1) / 2).exp()
        return torch.stack([size, -size], -1)[..., None]

    def sample_target(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return sample_classes(f, generator)

    def spec(self) -> dict[str, Any]:
        return {"family": "BradleyTerry"}
