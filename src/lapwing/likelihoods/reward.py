"""The reward of a single item, after a fit to preferences between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Normal

from lapwing.errors import BadData
from lapwing.likelihoods.likelihood import Likelihood, promote
from lapwing.likelihoods.marginal import NormalMarginal, Outputs


@dataclass(frozen=True, eq=False)
class Reward(Likelihood):
    """The reward f (B, 1) of a single item, as a network fitted to preferences gives it: nobody observes it.

    Predictions are the distribution of f itself, without noise. Λ = ¼ is what a comparison with a known item of equal
    reward tells about it.

        la = lapwing.fit(model, pairs, "preference");  la.predict(items).mean
    """

    links: ClassVar[tuple[str, ...]] = ("exact", "mc")

    def conditional(self, f: Tensor) -> Normal:
        return Normal(f, torch.zeros_like(f), validate_args=False)

    def targets(self, f: Tensor, y: Any) -> Tensor:
        raise BadData(
            "rewards of single items are not observed, so that there is no log-probability of one. Predict a pair: "
            "la.predict(pairs).log_prob(preferred)."
        )

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.full_like(promote(f), 0.5)[..., None]

    def marginal(self, f: Outputs) -> NormalMarginal:
        return NormalMarginal(f.mean, torch.zeros_like(f.mean), f.variance, lambda: f.item_covariance)
