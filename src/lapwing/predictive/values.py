"""Predictions of numbers: means, variances, intervals and quantiles, and their scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.errors import BadData, UnsupportedOperation, refuse_export
from lapwing.likelihoods.likelihood import masked
from lapwing.likelihoods.marginal import BlendedMarginal, Marginal, MixtureMarginal, sample_crps
from lapwing.model.calls import as_tensors, outside_autocast
from lapwing.predictive.function import fixed_generator, shares
from lapwing.predictive.links import inner_law, law_of
from lapwing.predictive.prediction import MOST_WORDS, Prediction

TARGETS = 1024
"""Draws of y, at least, where its law has no quantiles or entropy in closed form."""

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.95)
"""Central intervals whose coverage is scored."""

DRAWS = 256  # of y, for a CRPS without closed form


@dataclass(frozen=True, eq=False, repr=False)
class ValuePrediction(Prediction):
    """A prediction of numbers: in closed form (Gaussian), by quadrature (counts, varying noise) or Monte Carlo.

    Examples:
        >>> p = regression.predict(inputs)
        >>> low, high = p.interval(0.95)
        >>> p.mean.shape, p.stddev.shape
        (torch.Size([40, 1]), torch.Size([40, 1]))
    """

    kind: ClassVar[str] = "numbers"
    uncertainty_name: ClassVar[str] = "standard deviation"
    doubt_name: ClassVar[str] = "stddev"

    @cached_property
    @outside_autocast
    def _marginal(self) -> Marginal:
        marginal: Marginal | None = None
        if self.weights is not None:
            return BlendedMarginal.of([member._marginal for member in self.members], self.weights)
        if self.link in ("exact", "quadrature"):
            marginal = self.likelihood.marginal(self.function)
        elif self.link != "mc":
            marginal = law_of(self.link, self.function, self.likelihood, self.samples, self.seed)
        return self._sampled_marginal() if marginal is None else marginal

    def _sampled_marginal(self) -> Marginal:
        """Return (1/S) Σ_s p(y | f_s)."""
        points = self._points
        law = inner_law(self.likelihood, points)
        centers = law.mean
        return MixtureMarginal(
            law,
            centers.new_full((len(points),), -math.log(len(points))),
            mean=centers.mean(0),
            aleatoric=law.variance.mean(0),
            epistemic=(centers - centers.mean(0)).square().mean(0),
            event_dims=len(self._event_shape) - len(law.event_shape),
            whole=True,
        )

    @property
    def mean(self) -> Tensor:
        return self._outside(self._marginal.mean)

    @property
    def variance(self) -> Tensor:
        """The variance of y, the noise included.

        Examples:
            >>> p = regression.predict(inputs)
            >>> torch.allclose(p.variance, p.epistemic + p.aleatoric)
            True
        """
        return self._outside(self._marginal.aleatoric + self._marginal.epistemic)

    @property
    def stddev(self) -> Tensor:
        return self.variance.sqrt()

    @property
    def total(self) -> Tensor:
        return self.variance

    @property
    def aleatoric(self) -> Tensor:
        return self._outside(self._marginal.aleatoric)

    @property
    def epistemic(self) -> Tensor:
        return self._outside(self._marginal.epistemic)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return lower and upper bounds of the central interval that holds each output with this probability.

        Examples:
            >>> low, high = regression.predict(inputs).interval(0.95)
            >>> covered = ((low <= targets) & (targets <= high)).float().mean()
        """
        if not 0 < level < 1:
            raise BadData(f"interval level {level}: it is a probability between 0 and 1, such as 0.95.")
        lower, upper = self.quantile(((1 - level) / 2, (1 + level) / 2))
        return lower, upper

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Return y with p(output ≤ y) = q, output by output; several levels come first, (len(q), *shape of y).

        Examples:
            >>> regression.predict(inputs).quantile([0.05, 0.5, 0.95]).shape
            torch.Size([3, 40, 1])
        """
        levels = torch.as_tensor(as_tensors(q), dtype=torch.float64).cpu()
        if levels.ndim > 1 or not levels.numel() or not bool(((levels > 0) & (levels < 1)).all()):
            raise BadData(f"quantile levels {q}: they are probabilities between 0 and 1, such as 0.5 or [0.1, 0.9].")
        each = levels.reshape(-1).tolist()
        try:
            found = torch.stack([self._marginal.quantile(level) for level in each])
        except (NotImplementedError, UnsupportedOperation):  # torch knows no distribution function for this law
            found = torch.quantile(self._targets, self._targets.new_tensor(each), dim=0)
        found = self._outside(found)
        return found if levels.ndim else found[0]

    def cdf(self, y: Any) -> Tensor:
        """Return p(output ≤ y), output by output: y has the shape of targets, or is one number for all.

        Of data like those of the fit, `p.cdf(y)` is uniform between 0 and 1 if the prediction is calibrated.

        Examples:
            >>> exceeds = 1 - regression.predict(inputs).cdf(0.5)  # the probability of more than 0.5
        """
        mean = self._marginal.mean
        y = torch.as_tensor(as_tensors(y)).to(mean)
        if y.ndim and y.shape not in (mean.shape, self.mean.shape, mean.shape[:-1] if mean.shape[-1:] == (1,) else ()):
            raise BadData(f"y has shape {tuple(y.shape)}; expected {tuple(self.mean.shape)}, or one number")
        y = y.reshape(mean.shape) if y.ndim else y.expand(mean.shape)
        try:
            found = self._marginal.cdf(y)
        except NotImplementedError:  # torch knows no distribution function for this law
            found = (self._targets <= y).double().mean(0)
        return self._outside(found.to(mean.dtype))

    def log_prob_of_targets(self, y: Any) -> Tensor:
        f = self.function.mean
        y = self.likelihood.targets(f, y)
        return masked(self._log_prob(y), self.likelihood.mask(f, y))

    def _log_prob(self, y: Tensor) -> Tensor:
        value = self._marginal.log_prob(y)
        return self._mixture_log_prob(y) if value is None else value

    @cached_property
    @outside_autocast
    def entropy(self) -> Tensor:
        """The differential entropy: closed form for Gaussians, quadrature for one output, else from draws of y.

        Examples:
            >>> regression.predict(inputs).entropy.shape
            torch.Size([40])
        """
        value = self._marginal.entropy()
        if value is None:
            refuse_export("the entropy of several such numbers cannot be exported, since it takes draws")
            value = torch.zeros((), device=self.function.mean.device)
            for weight, part in [(1.0, self)] if self.weights is None else zip(self.weights, self.members):
                value = value - weight * torch.stack([self._log_prob(y) for y in part._targets[:512]]).mean(0)
        return value

    @cached_property
    @outside_autocast
    def _targets(self) -> Tensor:
        """Draws y_s ~ p(y | f_s), (S, *shape of y): the same random numbers for every item, whatever its batch.

        Where f has fewer points than `TARGETS` (a network without a posterior has one), each point gets equally many
        draws. A mixture takes a share of each member's draws.
        """
        if self.weights is not None:
            each = [member._targets for member in self.members]
            counts = shares(self.weights, min(map(len, each)))
            return torch.cat([own[:: max(1, len(own) // count)][:count] for own, count in zip(each, counts) if count])
        points = self._points
        points = points.repeat(-(-TARGETS // len(points)), *[1] * (points.ndim - 1))
        items = points.reshape(len(points), -1, points.shape[-1])
        device = points.device
        if not items.shape[1]:
            return self.likelihood.sample_target(points, fixed_generator(device))
        draws = [self.likelihood.sample_target(items[:, i], fixed_generator(device)) for i in range(items.shape[1])]
        return torch.stack(draws, 1).reshape(len(points), *points.shape[1:-1], *draws[0].shape[1:])

    @property
    def uncertainty(self) -> Tensor:
        return (self.variance.flatten(1).sum(-1) if self.variance.ndim > 1 else self.variance).sqrt()

    def scores(self, y: Tensor) -> dict[str, Tensor]:
        """Return log_prob per item, and per output: what was predicted, squared error, CRPS, coverage of intervals.

        Examples:
            >>> crps = regression.predict(inputs).scores(targets)["crps"].mean()
        """
        mean = self.mean
        truth = y.reshape(mean.shape)
        covered = {}
        for level in LEVELS:
            lower, upper = self.interval(level)
            covered[f"covered {level}"] = (lower <= truth) & (truth <= upper)
        return {
            "log_prob": self.log_prob_of_targets(y),
            "square": (mean - truth).square(),
            "crps": self._crps(y, truth),
            "stddev": self.variance.sqrt(),
            "mean": mean,
            "truth": truth,
            **dict(zip(("lower", "upper"), self.interval(0.95))),
            **covered,
        }

    def described(self, index: int, y: Tensor | None = None, classes: Sequence[str] = ()) -> dict[str, str]:
        mean, spread = self.mean[index].flatten(), self.stddev[index].flatten()
        if len(mean) > MOST_WORDS:
            return super().described(index, y, classes)
        truth = "" if y is None else ", ".join(f"{float(each):.4g}" for each in y[index].flatten())
        answer = ", ".join(f"{float(each):.4g}" for each in mean)
        certainty = "± " + ", ".join(f"{float(each):.2g}" for each in spread)
        return {"truth": truth, "answer": answer, "certainty": certainty}

    def _crps(self, y: Tensor, truth: Tensor) -> Tensor:
        """Return the CRPS per output: closed form, or from draws that are the same at every call."""
        score = self._marginal.crps(y)
        return sample_crps(self.sample(DRAWS), truth) if score is None else score

    def fields(self, level: float = 0.95) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in ("mean", "stddev", "epistemic", "aleatoric")}
        found["lower"], found["upper"] = self.interval(level)
        return found
