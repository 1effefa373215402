"""From a distribution over the outputs f to a prediction of y: which kind it is, and links to the law of y, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliLaw
from torch.distributions import Categorical as CategoricalLaw
from torch.distributions import Distribution, Independent
from torch.distributions import Poisson as PoissonLaw
from torch.nn.functional import logsigmoid, threshold

from lapwing.errors import UnsupportedOperation, nearest
from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.marginal import Marginal, log_mix, normal_nodes, safe_sqrt
from lapwing.predictive.function import FunctionDistribution, Known, Spread, seeded, spread_of
from lapwing.predictive.softmax import base_points, expected_softmax


@dataclass(frozen=True, eq=False)
class ClassLaw:
    """The law of labels: log_probs (..., C), a function for E_f[entropy of p(y | f)], (...), and the estimated total
    variation between the probabilities and their exact values, (...), where that is known.

    `log_probs` may be a function, called when it is needed, where the probabilities themselves are `given`. `close`:
    the error is known to be small. `parts` are the entropy of the probabilities and the mutual information, where they
    are known.
    """

    _log_probs: Tensor | Callable[[], Tensor]
    expected_entropy: Callable[[], Tensor]
    error: Tensor | None = None
    given: Tensor | None = None
    close: bool = False
    parts: tuple[Tensor, Tensor] | None = None

    @cached_property
    def log_probs(self) -> Tensor:
        return self._log_probs() if callable(self._log_probs) else self._log_probs

    @cached_property
    def probs(self) -> Tensor:
        return self.log_probs.exp() if self.given is None else self.given

    @cached_property
    def entropy(self) -> Tensor:
        """−Σ p log p; probabilities below the root of the smallest number count as zero where they are given."""
        if self.parts is not None:
            return self.parts[0]
        if self.given is None:
            return entropy(self.log_probs)
        return torch.special.entr(threshold(self.given, math.sqrt(torch.finfo(self.given.dtype).tiny), 0.0)).sum(-1)

    @classmethod
    def mixed(cls, laws: Sequence[ClassLaw], weights: Tensor) -> ClassLaw:
        """Return log Σ w p and Σ w E[entropy]: the entropy that remains when both the member and f are known."""

        def expected() -> Tensor:
            return torch.stack([w * law.expected_entropy() for w, law in zip(weights, laws)]).sum(0)

        return cls(log_mix([law.log_probs for law in laws], weights), expected)

    def take(self, index: Tensor) -> ClassLaw:
        """Return the law of some items of the batch, chosen by a tensor of their numbers."""
        error = None if self.error is None else self.error[index]
        return ClassLaw(self.log_probs[index], lambda: self.expected_entropy()[index], error)

    def stored(self) -> ClassLaw:
        """Return the same law made of tensors alone, so that it can be pickled."""
        error = None if self.error is None else self.error.detach()
        return ClassLaw(self.log_probs.detach(), Known(self.expected_entropy().detach()), error)


Law = Callable[[FunctionDistribution, Likelihood, int | None, torch.Generator | None], ClassLaw | Marginal]
"""From f, p(y | f), a number of points (None: as many as it takes) and their generator (None: fixed points) to the law
of y: a `ClassLaw` for labels, a `Marginal` for numbers."""

When = Callable[[FunctionDistribution, Likelihood], bool]
"""Whether a link can serve this distribution of f under this likelihood."""

L = TypeVar("L", bound=Law)
LINKS: dict[str, tuple[Law, When]] = {}
KINDS: dict[str, Callable[..., Any]] = {}
"""Kinds of predictions ("classes", "labels" and "numbers"): the classes that enter themselves, as `Prediction` says."""


def register_link(name: str, when: When | None = None) -> Callable[[L], L]:
    """Make a link available as `predict(link=name)` and `tune(link=name)`.

    `when` says for which distributions of f and likelihoods it is meant; without it, for those likelihoods whose
    `links` list the name.

    Example:
        @register_link("plug-in", when=lambda function, likelihood: likelihood.softmax)
        def plug_in(function, likelihood, samples, generator):
            log_probs = function.mean.log_softmax(-1)
            return ClassLaw(log_probs, lambda: -(log_probs.exp() * log_probs).sum(-1))
    """

    def register(law: L) -> L:
        LINKS[name] = law, when or (lambda function, likelihood: name in likelihood.links)
        return law

    return register


def law_of(
    link: str, function: FunctionDistribution, likelihood: Likelihood, samples: int | None, seed: int | None
) -> Any:
    """Return the law of y by a link that `choose_link` allowed; the same at every call, also where it needs draws."""
    return LINKS[link][0](function, likelihood, samples, seeded(seed, function.mean.device))


def answering(likelihood: Likelihood, f: Tensor) -> Likelihood:
    """Return the likelihood of targets at outputs f, which may mean something else than those of the fit."""
    other = likelihood.by_outputs.get(f.shape[-1])
    return likelihood if other is None else other()


def kind_of(likelihood: Likelihood, f: Tensor) -> str:
    """Return what a target is at outputs f, as p(y | f) tells: "classes", "labels" or "numbers"."""
    if likelihood.softmax:
        return "classes"
    law = inner_law(likelihood, f)
    if isinstance(law, CategoricalLaw):
        return "classes"
    return "labels" if isinstance(law, BernoulliLaw) else "numbers"


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
) -> Any:
    """Return the `Prediction` that follows from a distribution of f: of classes, labels or numbers, as p(y | f) is.

    `link="auto"` takes what is exact or nearly so (closed form, quadrature in one dimension), else Monte Carlo in
    output space. `scalar`: the network returned (B,). `shifted`: position t predicts the label at t + 1.
    """
    likelihood = answering(likelihood, function.mean)
    leaf = KINDS[kind_of(likelihood, function.mean)]
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
    """Return the link asked for if it is possible; for "auto" the best that is."""
    own = [name for name in likelihood.links if _possible(name, function, likelihood)]
    if link == "auto":
        return "quadrature" if "quadrature" in own else own[0]
    if link in own:
        return link
    others = [name for name, (_, when) in LINKS.items() if name not in likelihood.links and when(function, likelihood)]
    if link not in others:
        width = function.mean.shape[-1]
        outputs = f"{width} output{'s' if width > 1 else ''}"
        outputs += "" if function.normal else ", whose law is not Gaussian"
        raise UnsupportedOperation(
            f'link="{link}" is not possible here, for {type(likelihood).__name__} with {outputs}: '
            f"use 'auto', {', '.join(repr(name) for name in (*own, *others))}"
            f"{nearest(link, ('auto', *own, *others)) or '.'}"
        )
    return link


def _possible(name: str, function: FunctionDistribution, likelihood: Likelihood) -> bool:
    """Whether f has what a link needs: quadrature and closed forms a Gaussian, pairs of outputs their covariance."""
    if name not in ("exact", "quadrature"):
        return True
    if not function.normal:
        return False
    law = None if likelihood.softmax else inner_law(likelihood, function.mean)
    if name == "exact" or isinstance(law, BernoulliLaw | PoissonLaw):
        return True
    classes = likelihood.softmax or isinstance(law, CategoricalLaw)
    pairs = not classes or function.mean.shape[-1] == 2
    return pairs and function.has_covariance


def entropy(log_probs: Tensor) -> Tensor:
    """Return −Σ p log p over the last dimension, with 0 log 0 = 0."""
    p = log_probs.exp()
    return -torch.where(p == 0, 0.0, p * log_probs).sum(-1)


def log_class_probs(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Return log p(y | f) for every class, (..., C); for binary labels (..., K, 2), the label 1 last."""
    law = inner_law(likelihood, f)
    logits: Tensor = law.logits  # type: ignore[attr-defined]
    return torch.stack([logsigmoid(-logits), logsigmoid(logits)], -1) if isinstance(law, BernoulliLaw) else logits


def inner_law(likelihood: Likelihood, f: Tensor) -> Distribution:
    """Return p(y | f) without the wrapper that declares its outputs independent."""
    law = likelihood.law(f)
    while isinstance(law, Independent):
        law = law.base_dist
    return law


@register_link("mc")
def monte_carlo(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """Average p(y | f_s) over points of f: right for any covariance and any distribution of f.

    The softmax of a Gaussian goes through `expected_softmax`.
    """
    spread = spread_of(function) if likelihood.softmax and function.mean.shape[-1] > 2 else None
    if spread is not None:
        return _softmax(function.mean, spread, samples, generator)
    log_sum: Tensor | None = None
    expected: Tensor | float = 0.0
    squares: Tensor | float = 0.0
    count = 0
    for f in function.blocks(function.usual if samples is None else samples, generator):
        log_p = log_class_probs(likelihood, f)
        part = log_p.logsumexp(0)
        log_sum = part if log_sum is None else torch.logaddexp(log_sum, part)
        expected = expected + entropy(log_p).sum(0)
        if function.mirrored:
            squares = squares + _pairs(log_p.detach().exp()).square().sum(0)
        count += len(f)
    assert log_sum is not None
    assert isinstance(expected, Tensor)
    log_probs, aleatoric = log_sum - math.log(count), expected / count
    error = _error(log_probs.detach().exp(), squares, count // 2) if isinstance(squares, Tensor) else None
    return ClassLaw(log_probs, lambda: aleatoric, error)


def _pairs(p: Tensor) -> Tensor:
    """Average draws with their mirror images."""
    half = len(p) // 2
    return (p[:half] + p[half : 2 * half]) / 2


def _error(p: Tensor, squares: Tensor, pairs: int) -> Tensor | None:
    """Estimate the total variation of an average of so many independent draws from the sum of their squares."""
    if pairs < 2:
        return None
    deviation = ((squares / pairs - p.square()).clamp(min=0) / (pairs - 1)).sqrt()
    return deviation.sum(-1) / math.sqrt(2 * math.pi)


def _softmax(mean: Tensor, spread: Spread, samples: int | None, generator: torch.Generator | None) -> ClassLaw:
    seed = None if generator is None else int(torch.randint(2**31, (), generator=generator, device=generator.device))
    found = expected_softmax(mean if mean.ndim == 2 else mean.reshape(-1, mean.shape[-1]), spread, samples, seed)
    probs, entropies, error, parts = found.probs, found.entropy, found.error, found.parts
    if mean.ndim != 2:
        shape, parts = mean.shape[:-1], None  # of one token or pixel, which are worked out again
        probs, entropies, error = probs.reshape(mean.shape), entropies.reshape(shape), error.reshape(shape)
    return ClassLaw(lambda: found.log_probs.reshape(mean.shape), lambda: entropies, error, probs, found.close, parts)


def binary_quadrature(mean: Tensor, variance: Tensor) -> ClassLaw:
    """Return E[sigmoid(z)] and its complement for z ~ N(mean, variance) by one-dimensional quadrature, nearly exact."""
    x, log_weights = normal_nodes(mean)
    shape = (-1,) + (1,) * mean.ndim
    z = mean + safe_sqrt(variance) * x.reshape(shape)  # (Q, ...)
    log_p = torch.stack([logsigmoid(-z), logsigmoid(z)], -1)
    log_weights = log_weights.reshape(shape)
    log_probs = (log_p + log_weights[..., None]).logsumexp(0)
    return ClassLaw(log_probs.log_softmax(-1), lambda: (log_weights.exp() * entropy(log_p)).sum(0))


@register_link("quadrature")
def quadrature(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """Integrate each label over its own logit, or two classes over f₁ − f₀ ~ N(m₁ − m₀, v₀₀ + v₁₁ − 2v₀₁)."""
    if isinstance(inner_law(likelihood, function.mean), BernoulliLaw):
        return binary_quadrature(function.mean, function.variance)
    covariance = function.item_covariance
    difference = function.mean[..., 1] - function.mean[..., 0]
    variance = covariance[..., 0, 0] + covariance[..., 1, 1] - covariance[..., 0, 1] - covariance[..., 1, 0]
    return binary_quadrature(difference, variance)


@register_link("probit")
def probit(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """Return softmax(m / √(1 + πv/8)), MacKay's approximation from variances alone (the sigmoid for binary labels).

    It is fast, but over-confident at 2 classes and badly under-confident at 1,000. The expected entropy treats the
    logits as independent too, and is cut at the entropy, which no expected entropy exceeds.
    """
    mean, variance = function.mean, function.variance
    log_probs = log_class_probs(likelihood, mean / (1 + math.pi / 8 * variance).sqrt())

    def expected() -> Tensor:
        base = base_points(function.usual if samples is None else samples, mean.shape[-1], mean)
        shape = (len(base), *(1,) * (mean.ndim - 1), mean.shape[-1])
        f = mean + safe_sqrt(variance) * base.reshape(shape)
        return torch.minimum(entropy(log_class_probs(likelihood, f)).mean(0), entropy(log_probs))

    return ClassLaw(log_probs, expected)


@register_link("bridge")
def bridge(
    function: FunctionDistribution,
    likelihood: Likelihood,
    samples: int | None,
    generator: torch.Generator | None,
    *,
    normalize: bool = False,
) -> ClassLaw:
    """Fit a Dirichlet to the probabilities by the Laplace bridge (Hobbhahn et al. 2022); all else is in closed form.

    f is first freed of its average, which the softmax does not see; then α_k = (1 − 2/K + e^{m_k} Σ_l e^{−m_l} / K²) /
    v_k. (Published code conditions on Σf = 0 instead, so that adding 1 to all logits changes the probabilities: the
    total variation from the truth was 0.25 there and 0.03 here for two classes, 0.27 and 0.13 for three.) This is the
    least accurate link; use it where a Dirichlet is wanted.
    """
    mean, variance = zero_sum(function.mean, function.item_covariance)
    classes = mean.shape[-1]
    if normalize:
        scale = variance.mean(-1, keepdim=True) / math.sqrt(classes / 2)
        mean, variance = mean / scale.sqrt(), variance / scale
    shape = (1 - 2 / classes) + (mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(classes)).exp()
    alpha = shape / variance.clamp(min=math.sqrt(torch.finfo(variance.dtype).tiny))
    total = alpha.sum(-1, keepdim=True)

    def expected() -> Tensor:
        return (torch.digamma(total[..., 0] + 1) - (alpha / total * torch.digamma(alpha + 1)).sum(-1)).clamp(min=0)

    return ClassLaw((alpha / total).log(), expected)


@register_link("bridge_norm")
def bridge_norm(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """Apply the bridge after scaling the variances to average √(K/2), and the mean with them.

    This is better than the plain bridge where variances are large, and over-confident where they are small.
    """
    return bridge(function, likelihood, samples, generator, normalize=True)


def zero_sum(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variances of f minus its average over the classes, which leaves the softmax as it is."""
    rows = covariance.mean(-1)
    variance = covariance.diagonal(dim1=-2, dim2=-1) - 2 * rows + rows.mean(-1, keepdim=True)
    return mean - mean.mean(-1, keepdim=True), variance.clamp(min=0)
