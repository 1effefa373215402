"""The answer to a query: a distribution over targets y."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliLaw
from torch.distributions import Categorical as CategoricalLaw
from torch.distributions import Poisson as PoissonLaw

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.likelihood import masked
from lapwing.likelihoods.marginal import Marginal, MixtureMarginal
from lapwing.linalg.generators import require_generator
from lapwing.model.convention import are_tokens, shift
from lapwing.model.module import outside_autocast
from lapwing.predictive.fixed import fixed_generator
from lapwing.predictive.function import FunctionDistribution, GaussianFunction
from lapwing.predictive.links import LINKS, ClassLaw, entropy, inner_law

TARGETS = 1024
"""Draws of y, at least, where its law has no quantiles or entropy in closed form."""

COARSE = 0.01
"""Estimated total variation of probabilities from their exact values at which a prediction warns."""

_CLASSES = ("probs", "label", "confidence")
_VALUES = ("variance", "stddev", "interval")


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(ABC):
    """p(y | x) = ∫ p(y | f) p(f) df for a batch of inputs. Built by `predict_targets`.

    Shapes: y is (B, *event) for classes and (B, *event, K) for K labels, counts or values; without the K where the
    network returned (B,) (`scalar`). `entropy` and `log_prob` are one number an item, (B, *event), except that several
    binary labels have an entropy each. Everything but `sample` is the same for an item whatever else is in the batch,
    unless a generator was given.
    """

    function: FunctionDistribution
    likelihood: Likelihood
    link: str
    samples: int | None = None
    seed: int | None = None
    score: Tensor | Callable[[], Tensor] | None = None
    scalar: bool = False
    shifted: bool = False  # position t predicts the label at t + 1

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """E[y]; the probabilities for classes and labels."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """Of p(y), in nats; the differential entropy for values."""

    @property
    @abstractmethod
    def total(self) -> Tensor:
        """Uncertainty of y = aleatoric + epistemic: the entropy for classes and labels, else the variance."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """What would remain if the weights were known: E_f[entropy of p(y|f)], else E_f[Var(y|f)]."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """What more data would remove: the mutual information of y and f, else Var_f(E[y|f])."""

    def log_prob(self, y: Any) -> Tensor:
        """log p(y), (B, *event), over all outputs of an item together; soft labels give Σ q log p.

        Labels of a language model mean what they mean to its own loss: those of position t + 1 are taken at t.
        """
        if self.shifted:
            y = torch.as_tensor(y)
            y = shift(y) if are_tokens(y) else y
        return self.log_prob_of_targets(y)

    @abstractmethod
    def log_prob_of_targets(self, y: Any) -> Tensor:
        """log p(y) of targets that stand at the position that predicts them."""

    @cached_property
    @outside_autocast
    def novelty(self) -> Tensor:
        """How unlike the training data the input is: a score that does not depend on the tuned prior."""
        if self.score is None:
            raise UnsupportedOperation(
                "this prediction was made without a novelty score: use Laplace.predict(x).novelty."
            )
        return self.score() if callable(self.score) else self.score

    @outside_autocast
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, *shape of y) draws: f from `function` (joint over inputs where it is), then y given f. Without a
        generator they come from a fixed seed, the same at every call."""
        require_generator(generator, self.function.mean.device)
        generator = fixed_generator(self.function.mean.device) if generator is None else generator
        return self._outside(self.likelihood.sample_target(self.function.sample(n, generator), generator))

    def _outside(self, values: Tensor) -> Tensor:
        """Without the last dimension where the network returned (B,) and targets are (B, 1) inside."""
        return values[..., 0] if self.scalar and self._event_shape == (1,) else values

    @cached_property
    def _event_shape(self) -> torch.Size:
        return self.likelihood.law(self.function.mean).event_shape

    def _generator(self) -> torch.Generator | None:
        """Fresh at each use, so that results do not depend on the order in which they are asked for."""
        return None if self.seed is None else torch.Generator(self.function.mean.device).manual_seed(self.seed)

    @cached_property
    @outside_autocast
    def _points(self) -> Tensor:
        return self.function.points(self.function.usual if self.samples is None else self.samples, self._generator())

    @outside_autocast
    def _mixture_log_prob(self, y: Tensor) -> Tensor:
        """log (1/S) Σ_s p(y | f_s) for canonical targets."""
        points = self._points
        parts = self.likelihood.log_prob(points, y[None])
        return parts.logsumexp(0) - math.log(len(points))

    def __repr__(self) -> str:
        shape = tuple(self.function.mean.shape)
        return f"{type(self).__name__}({type(self.likelihood).__name__}, outputs {shape}, link={self.link!r})"

    def __getattr__(self, name: str) -> Any:
        if name in _CLASSES + _VALUES:
            kind = "classification" if name in _CLASSES else "regression"
            raise AttributeError(
                f".{name} is for {kind}; a prediction of {type(self.likelihood).__name__} has .mean, .entropy, .total, "
                f".aleatoric, .epistemic and .{', .'.join(_VALUES if name in _CLASSES else _CLASSES)}."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@dataclass(frozen=True, eq=False, repr=False)
class ClassPrediction(Prediction):
    """Over classes, (B, *event): Categorical, BradleyTerry and every likelihood whose conditional is categorical."""

    @cached_property
    @outside_autocast
    def _law(self) -> ClassLaw:
        law = LINKS[self.link](self.function, self.likelihood, self.samples, self._generator())
        if self.samples is None and law.error is not None and bool((law.error > COARSE).any()):
            warnings.warn(_coarse(law.error), stacklevel=2)
        return law

    @property
    def monte_carlo_error(self) -> Tensor | None:
        """The estimated total variation between `probs` and their exact values, (B, *event). None where there is
        nothing to estimate it from: links without Monte Carlo, networks of an ensemble, one draw."""
        return self._law.error

    @cached_property
    def probs(self) -> Tensor:
        """(B, *event, C), the classes last wherever the network has them."""
        return self._law.log_probs.exp()

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def label(self) -> Tensor:
        """The most probable class, (B, *event)."""
        return self._law.log_probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """The probability of `label`."""
        return self.probs.amax(-1)

    @cached_property
    @outside_autocast
    def entropy(self) -> Tensor:
        return entropy(self._law.log_probs)

    @property
    def total(self) -> Tensor:
        return self.entropy

    @cached_property
    def aleatoric(self) -> Tensor:
        return self._law.expected_entropy()

    @property
    def epistemic(self) -> Tensor:
        return (self.entropy - self.aleatoric).clamp(min=0)

    def log_prob_of_targets(self, y: Any) -> Tensor:
        f, log_probs = self.function.mean, self._law.log_probs
        y = self.likelihood.targets(f, y)
        if y.ndim == log_probs.ndim:
            return torch.where(y > 0, y * log_probs, 0.0).sum(-1)
        mask = self.likelihood.mask(f, y)
        index = y if mask is None else y.masked_fill(~mask, 0)
        return masked(log_probs.gather(-1, index.long()[..., None])[..., 0], mask)


@dataclass(frozen=True, eq=False, repr=False)
class LabelPrediction(Prediction):
    """Over binary labels: `probs`, `label` and `confidence` have the shape of y.

    Several labels have an entropy and a split each, (B, *event, K); a single logit has those of its item, (B, *event).
    """

    @cached_property
    @outside_autocast
    def _law(self) -> ClassLaw:
        return LINKS[self.link](self.function, self.likelihood, self.samples, self._generator())

    @cached_property
    def probs(self) -> Tensor:
        """p(label = 1)."""
        return self._outside(self._law.log_probs[..., 1].exp())

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def label(self) -> Tensor:
        """0 or 1, the more probable."""
        return self._outside(self._law.log_probs.argmax(-1))

    @property
    def confidence(self) -> Tensor:
        """The probability of `label`."""
        return self._outside(self._law.log_probs.amax(-1).exp())

    @cached_property
    @outside_autocast
    def entropy(self) -> Tensor:
        return self._each_label(entropy(self._law.log_probs))

    @property
    def total(self) -> Tensor:
        return self.entropy

    @cached_property
    def aleatoric(self) -> Tensor:
        return self._each_label(self._law.expected_entropy())

    @property
    def epistemic(self) -> Tensor:
        return (self.entropy - self.aleatoric).clamp(min=0)

    def _each_label(self, values: Tensor) -> Tensor:
        return values[..., 0] if self._event_shape == (1,) else values

    def log_prob_of_targets(self, y: Any) -> Tensor:
        """Several labels together by Monte Carlo, since they share f; soft ones as Σ q log p of each label."""
        y = self.likelihood.targets(self.function.mean, y)
        if self._event_shape.numel() > 1 and bool(((y == 0) | (y == 1)).all()):
            return self._mixture_log_prob(y)
        log_probs = self._law.log_probs
        parts = torch.where(y > 0, y * log_probs[..., 1], 0.0) + torch.where(y < 1, (1 - y) * log_probs[..., 0], 0.0)
        return parts.sum(-1) if self._event_shape else parts


@dataclass(frozen=True, eq=False, repr=False)
class ValuePrediction(Prediction):
    """Over numbers: Gaussian (closed form), heteroscedastic and counts (quadrature), any other by Monte Carlo."""

    @cached_property
    @outside_autocast
    def _marginal(self) -> Marginal:
        marginal = None if self.link == "mc" else self.likelihood.marginal(self.function)
        return self._sampled_marginal() if marginal is None else marginal

    def _sampled_marginal(self) -> Marginal:
        """(1/S) Σ_s p(y | f_s)."""
        points = self._points
        law = inner_law(self.likelihood, points)
        centers = law.mean
        return MixtureMarginal(
            law,
            centers.new_full((len(points),), -math.log(len(points))),
            mean=centers.mean(0),
            aleatoric=law.variance.mean(0),
            epistemic=centers.var(0, correction=0),
            event_dims=len(self._event_shape) - len(law.event_shape),
            whole=True,
        )

    @property
    def mean(self) -> Tensor:
        return self._outside(self._marginal.mean)

    @property
    def variance(self) -> Tensor:
        """Of y, the noise included."""
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
        """Lower and upper bound of the central interval that holds each output with this probability."""
        if not 0 < level < 1:
            raise ValueError(f"interval level {level}: it is a probability between 0 and 1, such as 0.95.")
        levels = ((1 - level) / 2, (1 + level) / 2)
        try:
            lower, upper = (self._marginal.quantile(q) for q in levels)
        except (NotImplementedError, UnsupportedOperation):  # torch knows no distribution function for this law
            lower, upper = torch.quantile(self._targets, self._targets.new_tensor(levels), dim=0)
        return self._outside(lower), self._outside(upper)

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
        """Closed form for Gaussians, quadrature for one output, else −E[log p(y)] over draws of y."""
        value = self._marginal.entropy()
        if value is None:
            value = -torch.stack([self._log_prob(y) for y in self._targets[:512]]).mean(0)
        return value

    @cached_property
    @outside_autocast
    def _targets(self) -> Tensor:
        """(S, *shape of y), y_s ~ p(y | f_s): every item with the same random numbers, whatever batch it is in.

        Where f has fewer points than `TARGETS` (one, of a network without a posterior), each of them is drawn from as
        often as the others.
        """
        points = self._points
        points = points.repeat(-(-TARGETS // len(points)), *[1] * (points.ndim - 1))
        items = points.reshape(len(points), -1, points.shape[-1])
        device = points.device
        draws = [self.likelihood.sample_target(items[:, i], fixed_generator(device)) for i in range(items.shape[1])]
        return torch.stack(draws, 1).reshape(len(points), *points.shape[1:-1], *draws[0].shape[1:])


def _coarse(error: Tensor) -> str:
    many = f"{int((error > COARSE).sum())} of {error.numel()} items"
    return (
        f"the probabilities of {many} are estimated to within a total variation of {float(error.max()):.2g} only "
        f"(`.monte_carlo_error`; {COARSE:g} is aimed at): their logits are uncertain in many directions. Pass samples= "
        "with a larger number, or tune the prior on held-out data, which makes most posteriors narrower."
    )


def predict_targets(
    function: FunctionDistribution,
    likelihood: Likelihood,
    *,
    link: str = "auto",
    samples: int | None = None,
    novelty: Tensor | Callable[[], Tensor] | None = None,
    scalar: bool = False,
    shifted: bool = False,
    generator: torch.Generator | None = None,
) -> Prediction:
    """The prediction that follows from a distribution of f: of classes, labels or values, as p(y | f) is.

    `link="auto"` takes what is exact or nearly so (closed form, quadrature in one dimension), else Monte Carlo in
    output space. `scalar`: the network returned (B,). `shifted`: position t predicts the label at t + 1.
    """
    law = inner_law(likelihood, function.mean)
    leaf: type[Prediction] = ValuePrediction
    if isinstance(law, CategoricalLaw):
        leaf = ClassPrediction
    elif isinstance(law, BernoulliLaw):
        leaf = LabelPrediction
    seed = None
    if generator is not None:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return leaf(
        function,
        likelihood,
        link=choose_link(link, function, likelihood),
        samples=samples,
        seed=seed,
        score=novelty,
        scalar=scalar,
        shifted=shifted,
    )


def choose_link(link: str, function: FunctionDistribution, likelihood: Likelihood) -> str:
    """The link asked for if it is possible; for "auto" the best that is."""
    possible = [name for name in likelihood.links if _possible(name, function, likelihood)]
    if link == "auto":
        return "quadrature" if "quadrature" in possible else possible[0]
    if link not in possible:
        raise UnsupportedOperation(
            f'link="{link}" is not possible for {type(likelihood).__name__} with {function.mean.shape[-1]} outputs and '
            f'{type(function).__name__}: use "auto", {", ".join(repr(name) for name in possible)}.'
        )
    return link


def _possible(name: str, function: FunctionDistribution, likelihood: Likelihood) -> bool:
    """Quadrature and closed forms are for Gaussian f; two classes and two parameters a target need its covariance."""
    if name not in ("exact", "quadrature"):
        return True
    if not isinstance(function, GaussianFunction):
        return False
    law = inner_law(likelihood, function.mean)
    if name == "exact" or isinstance(law, BernoulliLaw | PoissonLaw):
        return True
    pairs = not isinstance(law, CategoricalLaw) or function.mean.shape[-1] == 2
    return pairs and function.has_covariance
