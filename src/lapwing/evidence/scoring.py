"""log p(y) of held-out targets from the mean and covariance of f, as prediction computes it."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lapwing.errors import UnsupportedOperation, positive
from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.marginal import normal_nodes
from lapwing.predictive import GaussianFunction, predict_targets
from lapwing.predictive.function import base_points

Score = Callable[[Tensor, Tensor, Tensor, Likelihood], Tensor]
"""(mean (N, C), covariance (N, C, C), canonical targets, likelihood) -> log p(y) of each item, (N,); differentiable."""

SCALING, REFITTED = "temperature scaling", "MAP, noise fitted"
OVERFLOW = 80.0  # of an exponent, in float32 with room for a sum
NODE, WIDEST = 10, 5.2  # every tenth node of the rule for one logit is taken, up to so many standard deviations
JITTER = 1e-6  # of the mean variance: the covariance of f may be singular


def linked(link: str = "auto", samples: int = 256) -> Score:
    """The score under the link that prediction will use; classes by Monte Carlo go through a faster way to it."""

    def score(mean: Tensor, covariance: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
        several = mean.shape[-1] > 2 and y.ndim == mean.ndim - 1
        if likelihood.softmax and several and link in ("auto", "mc"):
            return class_log_prob(mean, covariance, y, likelihood, samples)
        function = GaussianFunction(mean, covariance)
        return predict_targets(function, likelihood, link=link, samples=samples).log_prob(y)

    return score


def class_log_prob(mean: Tensor, covariance: Tensor, y: Tensor, likelihood: Likelihood, samples: int) -> Tensor:
    """log E[softmax(f)_y] over fixed points of the other logits, given which f_y is Gaussian and its softmax the
    sigmoid of f_y minus their log-sum: a one-dimensional integral, as in `expected_softmax`.

    Classes come first so that the sums run over whole vectors, and logarithms only where exponentials would overflow.
    """
    base = base_points(samples, mean.shape[-1] - 1, mean)  # (S, C − 1)
    mask = likelihood.mask(mean, y)
    own = (y if mask is None else y.masked_fill(~mask, 0)).long()[:, None]
    order = torch.arange(mean.shape[-1], device=mean.device).expand(len(mean), -1)
    order = order.scatter(1, own, mean.shape[-1] - 1).scatter(1, order[:, -1:], own)  # the own class last
    root, center = contrast_root(covariance, order), mean.gather(1, order)
    ahead = root[:, :-1, :-1] - root[:, -1:, :-1]
    spread = (ahead.transpose(0, 1).reshape(-1, base.shape[1]) @ base.T).unflatten(0, (-1, len(mean)))
    spread = spread.add_((center[:, :-1] - center[:, -1:]).T[:, :, None])  # (C − 1, N, S): f_c − E[f_y | others]
    nodes, log_weights = own_nodes(mean)
    steps = root[:, -1, -1][:, None, None] * nodes  # (N, 1, Q): f_y − E[f_y | others]
    if spread.detach().amax() > OVERFLOW:
        inner = logsigmoid(steps - spread.logsumexp(0)[..., None]) + log_weights
        value = inner.flatten(1).logsumexp(1) - math.log(samples)
    else:
        inner = (spread.exp_().sum(0)[..., None] * (-steps).exp()).add_(1).reciprocal_()
        value = (inner.mean(1) @ log_weights.exp()).log()
    return value if mask is None else torch.where(mask, value, 0.0)


def own_nodes(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes (Q,) and log weights for N(0, 1), as coarse as they may be where the integrand itself is spread out."""
    nodes, log_weights = normal_nodes(like)
    likely = nodes.abs() < WIDEST
    return nodes[likely][::NODE], log_weights[likely][::NODE].log_softmax(0)


def contrast_root(covariance: Tensor, order: Tensor) -> Tensor:
    """The Cholesky factor L (N, C, C) of the covariance of f minus its average over the classes, which the softmax does
    not see, with the classes in an order (N, C); that average is given back at a level that hides no difference.

    No data determine that average: under a wide prior its variance is so much larger than all others that rounding
    alone may leave the whole matrix indefinite. In float64, with a ridge at the level of that rounding, raised where it
    was more.
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


def check_logit_temperature(value: float, likelihood: Likelihood) -> float:
    """A positive number, for likelihoods whose outputs are logits."""
    if not likelihood.has_logits:
        raise UnsupportedOperation(
            f"a logit temperature divides logits, and {type(likelihood).__name__} has none: it is for Categorical, "
            "Bernoulli and BradleyTerry"
        )
    return positive("logit_temperature", value)


def baselines(f: Tensor, y: Tensor, likelihood: Likelihood, *, noise: bool) -> dict[str, Tensor]:
    """−log p of each item by the network without a posterior, and by its usual repair on the same data.

    Logits: temperature scaling. A Gaussian whose noise may change: the noise that fits the residuals.
    """
    rivals = {"MAP": (f, likelihood)}
    if likelihood.has_logits:
        rivals[SCALING] = (f / best_logit_temperature(f, y, likelihood), likelihood)
    elif likelihood.dispersion_name and noise:
        rivals[REFITTED] = (f, likelihood.with_dispersion(likelihood.best_dispersion(f, y)))
    return {name: counted(f, y, law, -law.log_prob(g, y).double().reshape(-1)) for name, (g, law) in rivals.items()}


def counted(f: Tensor, y: Tensor, likelihood: Likelihood, losses: Tensor) -> Tensor:
    """Those of the items' losses whose targets count."""
    mask = likelihood.mask(f, y)
    return losses if mask is None else losses[mask.reshape(-1)]


def best_logit_temperature(
    f: Tensor, y: Tensor, likelihood: Likelihood, limit: float = 100.0, near: float | None = None
) -> float:
    """1/s with the smallest Σ −log p(y | s·f), s between 1/limit and limit.

    Convex in s, so Newton with bisection as its guard. `near` holds it weakly near another logit temperature, with a
    quarter of `held_near`: otherwise a few items that are all classified right ask for infinite logits.
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
    """½ (log s − log near)²/½², in nats for all items together: holds s near that of temperature scaling.

    Few items like a wide posterior with logits so large that draws vote instead of giving probabilities, which fails on
    other items. Many items outweigh this.
    """
    return 2.0 * (logit_temperature.log() - math.log(near)).square()


def describe(scores: Mapping[str, float]) -> str:
    """Names and values in a line, as in: MAP 0.3, temperature scaling 0.2."""
    return ", ".join(f"{name} {value:.5g}" for name, value in scores.items())
