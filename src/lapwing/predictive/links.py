"""From a distribution over logits to class probabilities, and to the expected entropy under it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliLaw
from torch.distributions import Distribution, Independent
from torch.nn.functional import logsigmoid

from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.marginal import normal_nodes, safe_sqrt
from lapwing.predictive.fixed import base_points
from lapwing.predictive.function import FunctionDistribution
from lapwing.predictive.softmax import expected_softmax


@dataclass(frozen=True, eq=False)
class ClassLaw:
    """log_probs (..., C) of the prediction, a function for E_f[entropy of p(y | f)], (...), and the estimated total
    variation between the probabilities and their exact values, (...), where that is known."""

    log_probs: Tensor
    expected_entropy: Callable[[], Tensor]
    error: Tensor | None = None


Link = Callable[[FunctionDistribution, Likelihood, int | None, torch.Generator | None], ClassLaw]
"""From f, p(y | f), a number of points (None: as many as it takes) and their generator (None: fixed points)."""


def entropy(log_probs: Tensor) -> Tensor:
    """−Σ p log p over the last dimension, with 0 log 0 = 0."""
    p = log_probs.exp()
    return -torch.where(p > 0, p * log_probs, 0.0).sum(-1)


def log_class_probs(likelihood: Likelihood, f: Tensor) -> Tensor:
    """log p(y | f) for every class: (..., C); for binary labels (..., K, 2), the label 1 last."""
    law = inner_law(likelihood, f)
    logits: Tensor = law.logits  # type: ignore[attr-defined]
    return torch.stack([logsigmoid(-logits), logsigmoid(logits)], -1) if isinstance(law, BernoulliLaw) else logits


def inner_law(likelihood: Likelihood, f: Tensor) -> Distribution:
    """p(y | f) without the wrapper that declares its outputs independent."""
    law = likelihood.law(f)
    while isinstance(law, Independent):
        law = law.base_dist
    return law


def monte_carlo(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """p = (1/S) Σ_s p(y | f_s): right for any covariance and any function distribution; for the softmax of a Gaussian
    by `expected_softmax`."""
    if likelihood.softmax and function.mean.shape[-1] > 2 and function.spread is not None:
        return _softmax(function, samples, generator)
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
    log_probs = log_sum - math.log(count)
    error = _error(log_probs.detach().exp(), squares, count // 2) if isinstance(squares, Tensor) else None
    return ClassLaw(log_probs, lambda: torch.as_tensor(expected / count), error)


def _pairs(p: Tensor) -> Tensor:
    """Averages of draws and their mirror images."""
    half = len(p) // 2
    return (p[:half] + p[half : 2 * half]) / 2


def _error(p: Tensor, squares: Tensor, pairs: int) -> Tensor | None:
    """The expected total variation of an average of so many independent draws, given the sum of their squares."""
    if pairs < 2:
        return None
    deviation = ((squares / pairs - p.square()).clamp(min=0) / (pairs - 1)).sqrt()
    return deviation.sum(-1) / math.sqrt(2 * math.pi)


def _softmax(function: FunctionDistribution, samples: int | None, generator: torch.Generator | None) -> ClassLaw:
    mean, spread = function.mean, function.spread
    assert spread is not None
    seed = None if generator is None else int(torch.randint(2**31, (), generator=generator, device=generator.device))
    found = expected_softmax(mean.reshape(-1, mean.shape[-1]), spread, samples, seed)
    entropies, error = (part.reshape(mean.shape[:-1]) for part in (found.entropy, found.error))
    return ClassLaw(found.log_probs.reshape(mean.shape), lambda: entropies, error)


def binary_quadrature(mean: Tensor, variance: Tensor) -> ClassLaw:
    """E[sigmoid(z)] and its complement for z ~ N(mean, variance) by one-dimensional quadrature, nearly exact."""
    x, log_weights = normal_nodes(mean)
    shape = (-1,) + (1,) * mean.ndim
    z = mean + safe_sqrt(variance) * x.reshape(shape)  # (Q, ...)
    log_p = torch.stack([logsigmoid(-z), logsigmoid(z)], -1)
    log_weights = log_weights.reshape(shape)
    log_probs = (log_p + log_weights[..., None]).logsumexp(0)
    return ClassLaw(log_probs.log_softmax(-1), lambda: (log_weights.exp() * entropy(log_p)).sum(0))


def quadrature(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """Labels, each from its own logit; or two classes, from f₁ − f₀ ~ N(m₁ − m₀, v₀₀ + v₁₁ − 2v₀₁)."""
    if isinstance(inner_law(likelihood, function.mean), BernoulliLaw):
        return binary_quadrature(function.mean, function.variance)
    covariance = function.item_covariance
    difference = function.mean[..., 1] - function.mean[..., 0]
    variance = covariance[..., 0, 0] + covariance[..., 1, 1] - covariance[..., 0, 1] - covariance[..., 1, 0]
    return binary_quadrature(difference, variance)


def probit(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """softmax(m / √(1 + πv/8)), MacKay's approximation, from the variances alone; the sigmoid for binary labels.

    Fast, but over-confident at 2 classes and badly under-confident at 1,000. Its expected entropy treats the logits
    as independent too, and is cut at the entropy, which no expected entropy exceeds.
    """
    mean, variance = function.mean, function.variance
    log_probs = log_class_probs(likelihood, mean / (1 + math.pi / 8 * variance).sqrt())

    def expected() -> Tensor:
        base = base_points(function.usual if samples is None else samples, mean.shape[-1], mean)
        shape = (len(base), *(1,) * (mean.ndim - 1), mean.shape[-1])
        f = mean + safe_sqrt(variance) * base.reshape(shape)
        return torch.minimum(entropy(log_class_probs(likelihood, f)).mean(0), entropy(log_probs))

    return ClassLaw(log_probs, expected)


def bridge(
    function: FunctionDistribution,
    likelihood: Likelihood,
    samples: int | None,
    generator: torch.Generator | None,
    *,
    normalize: bool = False,
) -> ClassLaw:
    """The Laplace bridge (Hobbhahn et al. 2022): a Dirichlet over the probabilities, from which all is closed form.

    f is first freed of its average, which the softmax does not see; then α_k = (1 − 2/K + e^{m_k} Σ_l e^{−m_l} / K²) /
    v_k. (Published code conditions on Σf = 0 instead, so that adding 1 to all logits changes the probabilities: the
    total variation from the truth was 0.25 there and 0.03 here for two classes, 0.27 and 0.13 for three.) Of all links
    the least accurate; use it where a Dirichlet is wanted.
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


def bridge_norm(
    function: FunctionDistribution, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> ClassLaw:
    """The bridge with variances scaled to average √(K/2), and the mean with them: better where variances are large,
    over-confident where they are small."""
    return bridge(function, likelihood, samples, generator, normalize=True)


def zero_sum(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variances of f minus its average over the classes: the same softmax."""
    rows = covariance.mean(-1)
    variance = covariance.diagonal(dim1=-2, dim2=-1) - 2 * rows + rows.mean(-1, keepdim=True)
    return mean - mean.mean(-1, keepdim=True), variance.clamp(min=0)


LINKS: dict[str, Link] = {
    "mc": monte_carlo,
    "quadrature": quadrature,
    "probit": probit,
    "bridge": bridge,
    "bridge_norm": bridge_norm,
}
