"""Preferences between two candidates, and the reward of a single one after a fit to preferences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalLaw
from torch.distributions import Normal

from lapwing.errors import BadData
from lapwing.likelihoods.labels import class_log_prob, class_score, class_targets, sample_classes
from lapwing.likelihoods.likelihood import Likelihood, as_target, promote
from lapwing.likelihoods.marginal import NormalMarginal, Outputs
from lapwing.storage import register


@register(name="preference")
@dataclass(frozen=True, eq=False)
class BradleyTerry(Likelihood):
    """p(candidate i is preferred | f) = exp f_i / (exp f_0 + exp f_1) for rewards f (B, 2) of two candidates.

    y (B,) in {0, 1} is the index of the preferred one; soft preferences are (B, 2). Λ = p₀p₁ (1, −1)(1, −1)ᵀ.

    A network that also takes single items and returns one reward for each, (B,) or (B, 1), predicts the distribution of
    these rewards: `la.predict(items).mean` and `.stddev`.

        la = lapwing.fit(reward_model, (pairs, preferred), lapwing.BradleyTerry())  # or "preference"
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
        f = super().outputs(raw)
        if f.shape[-1] > 2:
            raise _no_pairs(raw)
        return f

    def predicting(self, f: Tensor) -> Likelihood:
        return Reward() if f.shape[-1] == 1 else self

    def targets(self, f: Tensor, y: Any) -> Tensor:
        if f.shape[-1] != 2:
            raise _no_pairs(f)
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


def _no_pairs(f: Tensor) -> BadData:
    return BadData(
        f"outputs of shape {tuple(f.shape)}: BradleyTerry needs the rewards of two candidates, (B, 2). "
        "Stack them: torch.stack([reward(x0), reward(x1)], -1)."
    )
