"""E[softmax(f)] for Gaussian f of many classes, as the law of a maximum: one integral over a line, no points.

softmax(f)_k is the probability that f_k + G_k is the largest of all f_j + G_j, where the G_j are independent Gumbel
numbers. So E[softmax(f)_k] is the probability that x_k = f_k + G_k is the maximum M. With F(t) = P(M ≤ t) as a function
of the means μ, it is −∫ ∂F/∂μ_k dt. For independent logits F is the product of the distribution functions H_j of the
x_j. For correlated ones, with C the covariance without its diagonal and r_j = (log H_j)′,

    log F = Σ_j log H_j + ½ rᵀ C r + …,

an expansion in powers of C, of which the next terms give the error. The softmax does not see a number that is added to
all logits, which leaves C + c1ᵀ + 1cᵀ free; c is chosen such that little is left of C. The expected entropy of
softmax(f) is the derivative of E[M] − E[G] with respect to the scale of the Gumbel numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from lapwing.model.calls import outside_inference
from lapwing.predictive.levels import Estimate

STEPS, FINE = 20, 120  # nodes of the integral over t, and those for items with a few very wide logits
APART = 0.75  # how far apart they may lie, in standard deviations of the narrowest logit with its Gumbel number
QUANTILES = 12.0, math.log(2), 2e-5  # −log F at the first node, at the median and at the last node
EXCESS, CHERNOFF = 10.0, 13.0  # how far the last one lies beyond where a normal law, or a sum of exponentials, puts it
EULER = 0.5772156649015329  # the mean of a Gumbel number
TOGETHER = 2**12  # numbers of an item that are under way at once
ROUNDING = 1e-4  # of the mixtures and of the integral, which is added to the stated error
NARROW = 0.5  # standard deviation of a logit below which the integral over it is that of Gauss and Hermite

_HERMITE = (
    (0.0025557844020562465, 0.0886157460419145, 0.4088284695560293, 0.4088284695560293, 0.0886157460419145,
     0.0025557844020562465),
    (-3.324257433552119, -1.8891758777537109, -0.6167065901925942, 0.6167065901925942, 1.8891758777537109,
     3.324257433552119),
)  # fmt: skip
"""Weights and nodes for the standard normal law."""

_MIXTURES = (
    (2.0, (
        (0.311647689, 0.488462759, 0.174473155, 0.024116716, 0.001299681),
        (-0.506492833, 0.595295597, 2.001241071, 3.649825429, 5.460598698),
        (0.278180952, 0.569733381, 1.285255282, 2.856198363, 6.249069102),
    )),
    (NARROW, (
        (0.048539829, 0.232801821, 0.332935662, 0.236692558, 0.106188306, 0.034183589, 0.007763463, 0.000894772),
        (-1.100374385, -0.440495182, 0.297355632, 1.135101407, 2.077709925, 3.120965195, 4.278606292, 5.540417939),
        (0.14019425, 0.234577446, 0.396463819, 0.679545989, 1.166267396, 1.98834454, 3.445845902, 6.586579874),
    )),
)  # fmt: skip
"""Weights, means and variances of mixtures of normal laws that, with so large a standard deviation or a larger one
added, stand for the Gumbel law up to 2e-5 in the distribution function."""

Times = Callable[[Tensor], Tensor]
"""The product of the covariance of each item with vectors (n, T, K)."""


def by_maximum(mean: Tensor, variance: Tensor, times: Times, steps: int = STEPS) -> Estimate:
    """Return probabilities, expected entropy and the estimated error for logits with this mean and variance (n, K).

    The error is infinite where so many steps are too few for the narrowest logit: then the expected entropy may be
    wrong by more than the probabilities are.

    What C changes is a small part, for which every other node does. The terms of log F in C² are
    T = ½ Σ_j r_j′ (C r)_j² and L = ¼ Σ_ij C_ij² r_i′ r_j′. Signs at random estimate the sums over C_ij²: well for a sum
    over all classes, such as the entropy, but not for a single one. T is smaller by far and only adds to the error.
    """
    variance = variance.clamp(min=torch.finfo(mean.dtype).tiny ** 0.5)
    first, middle, last = _range(mean, variance)
    shift = _shift(mean, variance, middle, times)
    variance = variance + 2 * shift
    step = (last - first) / steps  # (n, 1)
    coarse = step.square() > APART**2 * (variance.detach().amin(-1, keepdim=True) + math.pi**2 / 6)
    t = first + step * (torch.arange(steps, dtype=mean.dtype, device=mean.device) + 0.5)  # (n, T)
    height, density, heat, slope, warming = _gumbel_sums(t.unsqueeze(-1) - mean.unsqueeze(1), variance.unsqueeze(1))
    height = height.clamp(min=torch.finfo(height.dtype).tiny)  # far below a narrow logit
    below = height.log().sum(-1)  # log F(t) for independent logits
    rate, cooling = density / height, heat / height  # (n, T, K)
    weight = below.exp() * step
    probs, entropy = _weighted(weight, rate), _weighted(weight, cooling).sum(-1)
    below, height, r, q = (each[:, ::2] for each in (below, height, rate, cooling))
    b, c = slope / height - r.square(), warming / height - q * r  # the derivatives of r and q
    bend = b.clamp(max=0)
    vectors = torch.cat([r, (-bend).sqrt() * _signs(r.shape[1], r.shape[2]).to(r)], 1)
    along = (shift.unsqueeze(1) * vectors).sum(-1, keepdim=True)
    crossed = times(vectors) - variance.unsqueeze(1) * vectors  # times C
    move, wide = (crossed + shift.unsqueeze(1) * vectors.sum(-1, keepdim=True) + along).split(r.shape[1], 1)
    before, weight = 2 * step * below.exp(), 2 * step * (below + (r * move).sum(-1) / 2).exp()
    moved, heated = torch.addcmul(r, b, move), torch.addcmul(q, c, move)
    square = wide.square()  # its mean over signs is Σ_j C_kj² (−r_j′)
    term = weight * (bend * square).sum(-1) / -4
    probs = probs + _weighted(weight, moved) - _weighted(before, r)
    entropy = entropy + (_weighted(weight + term, heated) - _weighted(before, q)).sum(-1)
    entropy = entropy - _weighted(weight, _slope(c, step) * square / 2).sum(-1)
    total = probs.sum(-1, keepdim=True)
    with torch.no_grad():
        more = _weighted(term, moved) - _weighted(weight, _slope(b, step) * square / 2)
        tree = (weight * r.sum(-1) * (bend * move.square()).sum(-1) / -2).sum(-1)
        error = (more.abs().sum(-1) + tree) / 2 + (total.squeeze(-1) - 1).abs() - probs.clamp(max=0).sum(-1) + ROUNDING
    probs, entropy = (probs / total).clamp(min=0), (entropy / total.squeeze(-1) - EULER).clamp(min=0)
    return probs, entropy, torch.where(error.isfinite() & ~coarse.squeeze(-1), error, torch.inf)


def _weighted(weight: Tensor, values: Tensor) -> Tensor:
    """Return Σ_t w_t v_t for weights (n, T) and values (n, T, K)."""
    return (weight.unsqueeze(1) @ values).squeeze(1)


def _slope(values: Tensor, step: Tensor) -> Tensor:
    """Return the derivative of values (n, T, K) at every other node, zero at the ends."""
    inner = (values[:, 2:] - values[:, :-2]) / (4 * step.unsqueeze(-1))
    return torch.nn.functional.pad(inner, (0, 0, 1, 1))


@lru_cache(maxsize=64)
@outside_inference
def _signs(count: int, classes: int) -> Tensor:
    """Return fixed signs without a pattern, (count, K)."""
    k = torch.arange(1, count * classes + 1, dtype=torch.float64).reshape(count, classes)
    return torch.where((k.square() * math.sqrt(2)) % 1 < 0.5, 1.0, -1.0)


def prepare_maximum(classes: int) -> None:
    """Make the tensors that a traced form will hold: tracing itself can make none."""
    _signs(-(-STEPS // 2), classes)


def _shift(mean: Tensor, variance: Tensor, middle: Tensor, times: Times) -> Tensor:
    """Return c (n, K), for which Σ_{i≠j} w_i w_j (C_ij + c_i + c_j)² is least.

    The weights are −r′ at the median of the maximum, for which the terms in C² are least too. Those of one or two
    dominating classes are cut, and variances stay positive.
    """
    with torch.no_grad():
        weight = _normal_rates(middle, mean, variance)[1]
        weight = (weight / weight.sum(-1, keepdim=True)).clamp(max=0.2) + 1 / mean.shape[-1]
    rest = weight.sum(-1, keepdim=True) - 2 * weight
    along = times(weight.unsqueeze(1)).squeeze(1) - variance * weight
    share = weight / rest
    level = -(share * along).sum(-1, keepdim=True) / (1 + share.sum(-1, keepdim=True))
    return torch.maximum(-(along + level) / rest, -0.45 * variance)


def _range(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the maximum begins, its median and where it ends, each (n, 1), for independent logits.

    Newton's method on log(−log F), which is concave, from the right, where it does not overshoot.
    """
    with torch.no_grad():
        t = (mean + 5.6 * (variance + math.pi**2 / 6).sqrt()).amax(-1, keepdim=True).unsqueeze(-1) + EULER
        aim = torch.tensor(QUANTILES, dtype=mean.dtype, device=mean.device).reshape(3, 1)
        for _ in range(5):
            rate, _, deficit = _normal_rates(t, mean.unsqueeze(1), variance.unsqueeze(1))
            rate, deficit = rate.sum(-1, keepdim=True), deficit.sum(-1, keepdim=True)
            t = t + ((deficit / aim).log() * deficit / rate).clamp(max=0)  # (n, 3, 1)
        first, middle, last = t.unbind(1)
        far = torch.maximum((mean + variance / 2).logsumexp(-1, keepdim=True) + CHERNOFF, first + 3)
        return first, middle, torch.minimum(last + EXCESS, far)


def _normal_rates(t: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return r, −r′ and −log H at t with a normal law in place of the Gumbel law, within a few percent."""
    inverse = (variance + math.pi**2 / 6).rsqrt()
    u = (t - mean - EULER) * inverse
    density = (u.square() / -2).exp() / math.sqrt(2 * math.pi)
    tail = 4 * density / (3 * u + (u.square() + 8).sqrt())  # Sampford (1953); 1 − erf would be all rounding there
    above = torch.where(u > 1, tail, 0.5 - 0.5 * (u * math.sqrt(0.5)).erf())
    height = (1 - above).clamp(min=torch.finfo(u.dtype).tiny)
    rate = density * inverse / height
    deficit = above * (1 + above / 2 + above.square() / 3)  # −log(1 − above) without log1p, which ONNX has not
    return rate, rate * (u * inverse + rate), torch.where(u > 1, deficit, -height.log())


def _gumbel_sums(x: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    """Return H, H′ and −∂H/∂τ at x = t − μ (n, T, K), for N(0, variance) + τ · Gumbel at τ = 1.

    Then come H″ and the derivative of −∂H/∂τ at every other node, (n, T/2, K).

    The smallest variance of an item says which mixture serves it, so that what it gets does not depend on others.
    """
    (wide, few), (_, many) = _MIXTURES
    low = variance.detach().amin(-1, keepdim=True)  # (n, 1, 1)
    ways = [
        (torch.ones_like(low) > 0, lambda: _by_mixture(x, variance, few)),
        (low < wide**2, lambda: _by_mixture(x, variance.clamp(min=NARROW**2), many)),
        (variance < NARROW**2, lambda: _by_hermite(x, variance.clamp(max=NARROW**2))),
    ]
    found: tuple[Tensor, ...] = ()
    for number, (where, way) in enumerate(ways):
        if not torch.compiler.is_compiling():  # a way that no item takes, or whose values are replaced, is left out
            if not bool(where.any()) or any(bool(later.all()) for later, _ in ways[number + 1 :]):
                continue
        part = way()
        found = tuple(torch.where(where, new, old) for new, old in zip(part, found)) if found else part
    return found


def _by_mixture(x: Tensor, variance: Tensor, table: tuple[tuple[float, ...], ...]) -> tuple[Tensor, ...]:
    """Use Gumbel = Σ w N(m, v), which makes H = Σ w Φ(u) with u = (x − m) / √(v + variance)."""
    height, density, heat, slope, warming = (x.new_zeros(()) for _ in range(5))
    x, variance = x.unsqueeze(-1), variance.unsqueeze(-1)
    for w, m, v in _terms(table, x):
        inverse = (2 * (variance + v)).rsqrt()
        u = torch.addcmul(-m * inverse, x, inverse)  # over √2
        own = torch.addcmul((inverse * (w / math.sqrt(math.pi))).log(), u, u, value=-1).exp()  # w φ / √(v + variance)
        tilt, part = own * u, 2 * v * inverse
        height = height + _added(u.erf() * (w / 2))
        density = density + _added(own)
        heat = heat + _added(torch.addcmul(own * m, tilt, part))
        own, tilt, u = own[:, ::2], tilt[:, ::2], u[:, ::2]
        slope = slope - 2 * _added(tilt * inverse)
        turned = torch.addcmul(own, tilt, u, value=-2) * part - 2 * m * tilt
        warming = warming + _added(turned * inverse)
    return height + 0.5, density, heat, slope, warming


def _by_hermite(x: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    """Use H = E[exp(−e^{−y})] with y = x − s ε over the nodes ε of the rule of Gauss and Hermite."""
    deviation = variance.sqrt().unsqueeze(-1)
    height, density, heat, slope, warming = (x.new_zeros(()) for _ in range(5))
    x = x.unsqueeze(-1)
    for w, node in _terms(_HERMITE, x):
        y = x - node * deviation
        e = (-y).clamp(max=30).exp()
        own = w * (-e).exp()
        height, own = height + _added(own), own * e
        density, heat = density + _added(own), heat + _added(y * own)
        own, y = own[:, ::2], y[:, ::2]
        tilt = own * (e[:, ::2] - 1)
        slope, warming = slope + _added(tilt), warming + _added(torch.addcmul(own, y, tilt))
    return height, density, heat, slope, warming


def _terms(table: tuple[tuple[float, ...], ...], x: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the columns of a table with the terms of a sum: of few classes all at once, of many one by one.

    At once they are fewer operations, one by one they stay in the cache.
    """
    columns = torch.tensor(table, dtype=x.dtype, device=x.device)
    yield from zip(*(column.split(max(1, TOGETHER // x[0].numel())) for column in columns))


def _added(terms: Tensor) -> Tensor:
    return terms.squeeze(-1) if terms.shape[-1] == 1 else terms.sum(-1)
