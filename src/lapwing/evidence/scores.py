"""How well held-out items are predicted: −log p(y) for Gaussian outputs, and for the network without a posterior.

The usual remedies of the network alone are here too: temperature scaling, and the noise that fits its residuals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lapwing.errors import UnsupportedOperation, positive
from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.marginal import normal_nodes
from lapwing.predictive import GaussianFunction, Prediction, predict_targets
from lapwing.predictive.softmax import CLOSE, SEED, Pairs, apart_from, kept_points

Score = Callable[[Tensor, Tensor, Tensor, Likelihood], Tensor]
"""(mean (N, C), covariance (N, C, C), canonical targets, likelihood) -> log p(y) of each item, (N,); differentiable."""
SCALING = "temperature scaling"
OVERFLOW = 80.0  # exponents beyond this overflow in float32, with room for a sum
RELATIVE = 0.02  # the largest error, in parts of a probability, for which pairs of classes do
JITTER = 1e-6  # share of the mean variance added to the diagonal: the covariance of f may be singular


def own_nodes() -> tuple[Tensor, Tensor]:
    """Return coarse nodes (Q,) and log weights for N(0, 1); the integrand is smooth, so that few suffice.

    It takes every tenth node of `normal_nodes`. Below the lowest lie 5e-4 of the mass, where the probability, which
    grows with the logit, is smallest.
    """
    nodes, log_weights = normal_nodes(torch.empty(0, dtype=torch.float64))
    likely = (nodes > -3.3) & (nodes < 5.2)
    return nodes[likely][::10], log_weights[likely][::10].log_softmax(0)


OWN = own_nodes()
"""The rule for the logit of the class that is scored."""


def linked(link: str = "auto", samples: int = 256) -> Score:
    """Make the score under the link that prediction will use; class probabilities by Monte Carlo take a faster way."""

    def score(mean: Tensor, covariance: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
        several = mean.shape[-1] > 2 and y.ndim == mean.ndim - 1
        if likelihood.softmax and several and link in ("auto", "mc"):
            return class_log_prob(mean, covariance, y, likelihood, samples)
        function = GaussianFunction(mean, covariance)
        return predict_targets(function, likelihood, link=link, samples=samples).log_prob(y)

    return score


def class_log_prob(mean: Tensor, covariance: Tensor, y: Tensor, likelihood: Likelihood, samples: int) -> Tensor:
    """Compute log E[softmax(f)_y] for the class y of each item, (N,), by pairs of classes or by points.

    Pairs do where their error is bounded by a small part of the probability (`RELATIVE`).
    """
    mask = likelihood.mask(mean, y)
    own = (y if mask is None else y.masked_fill(~mask, 0)).long()
    value, error = Pairs.of(mean, partial(apart_from, covariance)).log_prob(own[:, None])
    least = value.detach().exp() * RELATIVE
    open_ = (~(error <= least.clamp(max=CLOSE))).nonzero()[:, 0]
    if len(open_):
        rest = _log_prob_by_points(mean[open_], covariance[open_], own[open_], samples)
        value = rest if len(open_) == len(mean) else value.index_put((open_,), rest)
    return value if mask is None else torch.where(mask, value, 0.0)


def _log_prob_by_points(mean: Tensor, covariance: Tensor, y: Tensor, samples: int) -> Tensor:
    """Compute log E[softmax(f)_y] from points.

    The other logits take fixed points. Given these, f_y is Gaussian and its softmax is the sigmoid of f_y minus their
    log-sum-exp, which leaves a one-dimensional integral, as in `expected_softmax`. Classes come first so that sums run
    over whole vectors; logarithms are used only where exponentials would overflow.
    """
    base = kept_points(samples, mean.shape[-1] - 1, SEED, mean.dtype).to(mean.device)  # (S, C − 1)
    own = y[:, None]
    order = torch.arange(mean.shape[-1], device=mean.device).expand(len(mean), -1)
    order = order.scatter(1, own, mean.shape[-1] - 1).scatter(1, order[:, -1:], own)  # the own class last
    root, center = contrast_root(covariance, order), mean.gather(1, order)
    ahead = root[:, :-1, :-1] - root[:, -1:, :-1]
    spread = (ahead.transpose(0, 1).reshape(-1, base.shape[1]) @ base.T).unflatten(0, (-1, len(mean)))
    spread = spread.add_((center[:, :-1] - center[:, -1:]).T[:, :, None])  # (C − 1, N, S): f_c − E[f_y | others]
    nodes, log_weights = (each.to(mean) for each in OWN)
    steps = root[:, -1, -1][:, None, None] * nodes  # (N, 1, Q): f_y − E[f_y | others]
    overflow = spread.detach().amax((0, 2)) > OVERFLOW
    if not bool(overflow.any()):
        return _by_exponentials(spread, steps, log_weights)
    far, near = overflow.nonzero()[:, 0], (~overflow).nonzero()[:, 0]
    inner = logsigmoid(steps[far] - spread[:, far].logsumexp(0)[..., None]) + log_weights
    value = mean.new_zeros(len(mean)).index_put((far,), inner.flatten(1).logsumexp(1) - math.log(samples))
    return value.index_put((near,), _by_exponentials(spread[:, near], steps[near], log_weights))


def _by_exponentials(spread: Tensor, steps: Tensor, log_weights: Tensor) -> Tensor:
    """Average the sigmoids of f_y − log Σ exp(f_c) over points and nodes; `spread` is overwritten."""
    inner = (spread.exp_().sum(0)[..., None] * (-steps).exp()).add_(1).reciprocal_()
    return (inner.mean(1) @ log_weights.exp()).log()


def contrast_root(covariance: Tensor, order: Tensor) -> Tensor:
    """Return the Cholesky factor (N, C, C) of the covariance of f minus its average over the classes.

    The softmax ignores that average, and no data determine it: under a wide prior its variance is so much larger than
    the others that rounding alone may leave the whole matrix indefinite. So it is replaced by a variance of the size of
    the others. `order` (N, C) permutes the classes. Computed in float64 with a ridge at the level of rounding, raised
    where the factorization fails.
    """
    wide = covariance.double()
    rows = wide.mean(-1, keepdim=True)
    inner = wide - rows - rows.mT + rows.mean(-2, keepdim=True)
    level = inner.detach().diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=0)
    noise = 0.5 * wide.shape[-1] * torch.finfo(covariance.dtype).eps
    rounding = noise * wide.detach().diagonal(dim1=-2, dim2=-1).amax(-1)
    ridge = JITTER * level + rounding + torch.finfo(covariance.dtype).tiny
    eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    inner = inner + level[:, None, None]
    inner = inner.gather(1, order[:, :, None].expand(inner.shape)).gather(2, order[:, None].expand(inner.shape))
    root, failed = torch.linalg.cholesky_ex(inner + ridge[:, None, None] * eye)
    for _ in range(3):
        if not bool(failed.any()):
            break
        ridge = torch.where(failed > 0, 10 * ridge, ridge)
        root, failed = torch.linalg.cholesky_ex(inner + ridge[:, None, None] * eye)
    return root.to(covariance.dtype)


def item_scores(prediction: Prediction, y: Tensor) -> list[Tensor]:
    """Return −log p(y), the entropy and, for labels, the share of right ones, of each item, (items,) float64."""
    entropy = prediction.entropy.double().reshape(len(y), -1).mean(-1)
    found = [-prediction.log_prob(y).double(), entropy]
    label = getattr(prediction, "label", None)
    if label is None:
        return found
    truth = y.argmax(-1) if y.ndim > label.ndim else y  # soft labels have one more dimension
    return [*found, (label == truth).double().reshape(len(y), -1).mean(-1)]


def check_logit_temperature(value: float, likelihood: Likelihood) -> float:
    """Return the value if it is positive and the outputs of the likelihood are logits; otherwise raise."""
    require_logits(likelihood)
    return positive("logit_temperature", value)


def require_logits(likelihood: Likelihood) -> None:
    """Refuse a likelihood whose outputs are not logits."""
    if not likelihood.has_logits:
        raise UnsupportedOperation(
            f"a logit temperature divides logits, and {type(likelihood).__name__} has none: it is for Categorical, "
            "Bernoulli and BradleyTerry"
        )


def baselines(f: Tensor, y: Tensor, likelihood: Likelihood, *, dispersion: bool) -> dict[str, Tensor]:
    """Return −log p of each item for the network without a posterior, and after its usual remedy on the same data.

    The remedy for logits is temperature scaling; for a dispersion that may change, the value that fits the residuals.
    """
    rivals = {"MAP": (f, likelihood)}
    if likelihood.has_logits:
        rivals[SCALING] = (f / best_logit_temperature(f, y, likelihood), likelihood)
    elif likelihood.dispersion_name and dispersion:
        best = likelihood.with_dispersion(likelihood.best_dispersion(f, y))
        rivals[f"MAP, {likelihood.dispersion_name} fitted"] = (f, best)
    return {name: counted(f, y, law, -law.log_prob(g, y).double().reshape(-1)) for name, (g, law) in rivals.items()}


def counted(f: Tensor, y: Tensor, likelihood: Likelihood, losses: Tensor) -> Tensor:
    """Drop the losses of items whose targets do not count."""
    mask = likelihood.mask(f, y)
    return losses if mask is None else losses[mask.reshape(-1)]


def best_logit_temperature(
    f: Tensor, y: Tensor, likelihood: Likelihood, limit: float = 100.0, near: float | None = None
) -> float:
    """Return 1/s for the s with the smallest Σ −log p(y | s·f), between 1/limit and limit.

    The sum is convex in s, so Newton's method with bisection as its guard finds it. `near` holds the result weakly near
    another logit temperature, with a quarter of `held_near`: otherwise a few items that are all classified correctly
    would ask for infinite logits.
    """
    f = f.double()
    low, high = 1 / limit, limit
    s = 1.0
    for _ in range(60):
        with torch.enable_grad():
            scale = torch.tensor(s, dtype=torch.float64, device=f.device, requires_grad=True)
            value = -likelihood.log_prob(scale * f, y).sum()
            value = value if near is None else value + held_near(1 / scale, near) / 4
            (slope,) = torch.autograd.grad(value, scale, create_graph=True)
            (curve,) = torch.autograd.grad(slope, scale)
        low, high = (low, s) if slope > 0 else (s, high)
        newton = s - (slope / curve).item() if curve > 0 else high
        new = newton if low < newton < high else math.sqrt(low * high)
        if abs(new - s) <= 1e-9 * s:
            break
        s = new
    return 1 / s


def held_near(logit_temperature: Tensor, near: float) -> Tensor:
    """½ (log s − log near)²/½², in nats for all items together: a penalty that holds s near temperature scaling's.

    A few items may favor a wide posterior with logits so large that draws vote instead of giving probabilities, which
    fails on other items. Many items outweigh the penalty.
    """
    return 2.0 * (logit_temperature.log() - math.log(near)).square()
