"""What tuning tried and what it scored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.posterior import Prior, Tempered


@dataclass(frozen=True, eq=False)
class Setting:
    """One candidate: a precision per group (G,), a temperature and, where it is free, the dispersion φ (σ²).

    `logit_temperature` divides the logits before the link. `deterministic` is the limit τ → ∞: the network without a
    posterior (with a logit temperature: temperature scaling); its precision is empty.
    """

    precision: Tensor
    temperature: float = 1.0
    dispersion: float | None = None
    deterministic: bool = False
    logit_temperature: float = 1.0

    @property
    def narrow(self) -> float:
        """The geometric mean of the precisions, infinite in the deterministic limit: orders settings by width."""
        return float("inf") if self.deterministic else self.precision.double().log().mean().exp().item()

    def __str__(self) -> str:
        if self.deterministic:
            parts = ["deterministic"]
        elif len(self.precision) == 1:
            parts = [f"prior {self.precision.item():.4g}"]
        else:
            low, high = self.precision.min().item(), self.precision.max().item()
            parts = [f"prior {low:.3g} … {high:.3g} ({len(self.precision)} values)"]
        parts += [f"T {self.temperature:.4g}"] if self.temperature != 1.0 else []
        parts += [f"logits / {self.logit_temperature:.4g}"] if self.logit_temperature != 1.0 else []
        parts += [f"noise {self.dispersion**0.5:.4g}"] if self.dispersion is not None else []
        return ", ".join(parts)


Rule = Callable[[Sequence[Setting], Tensor, Mapping[str, float]], int]
"""Picks one of the settings from their scores (lower is better) and the scores of the baselines."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """The result of `tune`: every setting tried, its score, and the one chosen.

    Scores are negative log-likelihoods per held-out datum for `method="validation"` and `"loo"`, and minus the log
    evidence for `"evidence"`: lower is better throughout. `prior`, `temperature`, `likelihood` and `logit_temperature`
    (None: as it was) are what the chosen setting means for a `Laplace` object.
    """

    method: str
    settings: tuple[Setting, ...]
    scores: Tensor
    best: int
    prior: Prior
    temperature: Tempered
    likelihood: Likelihood
    iterations: int = 0
    converged: bool = True
    baselines: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    logit_temperature: float | None = None

    @property
    def setting(self) -> Setting:
        """The chosen setting."""
        return self.settings[self.best]

    @property
    def score(self) -> float:
        """The score of the chosen setting."""
        return self.scores[self.best].item()

    @property
    def deterministic(self) -> bool:
        """Whether the network without a posterior won."""
        return self.setting.deterministic

    def table(self, rows: int = 12) -> str:
        """The best settings, the baselines and the messages, as text."""
        unit = "−log evidence" if self.method == "evidence" else "NLL"
        order = self.scores.argsort()[:rows].tolist()
        shown = order if self.best in order else [*order[:-1], self.best]
        lines = [f"{self.method}: {len(self.settings)} settings, {self.iterations} iterations", f"{unit:>16}  setting"]
        for k in shown:
            mark = "  ← chosen" if k == self.best else ""
            lines.append(f"{self.scores[k].item():16.6g}  {self.settings[k]}{mark}")
        lines += [f"{score:16.6g}  {name}" for name, score in self.baselines.items()]
        return "\n".join([*lines, *self.messages])


def lowest(settings: Sequence[Setting], scores: Tensor, baselines: Mapping[str, float]) -> int:
    """The setting with the lowest score."""
    return int(scores.nan_to_num(float("inf")).argmin())


def widest(slack: float = 0.0) -> Rule:
    """The smallest prior precision among settings that score no worse than every baseline (plus `slack`).

    Wide where there are no data, and still not above the MAP's or temperature scaling's NLL. Where no setting reaches
    the baselines, the lowest score.
    """

    def rule(settings: Sequence[Setting], scores: Tensor, baselines: Mapping[str, float]) -> int:
        bar = min(baselines.values(), default=float("-inf")) + slack
        good = [k for k, score in enumerate(scores.tolist()) if score <= bar and not settings[k].deterministic]
        if not good:
            return lowest(settings, scores, baselines)
        return min(good, key=lambda k: (settings[k].narrow, scores[k].item()))

    return rule


def with_dispersion(likelihood: Likelihood, dispersion: float | Tensor) -> Likelihood:
    """The same likelihood with another φ: a Gaussian whose noise is multiplied by a common factor."""
    if not isinstance(likelihood, Gaussian):
        raise TypeError(f"{type(likelihood).__name__} has no noise to learn; only Gaussian(noise) has")
    factor = (torch.as_tensor(dispersion, dtype=torch.float64) / likelihood.dispersion.detach()).sqrt()
    noise = torch.as_tensor(likelihood.noise, dtype=torch.float64).detach() * factor
    return Gaussian(noise)
