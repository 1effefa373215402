"""E[softmax(f)] for Gaussian f from its pairs: each class with the one of the highest mean logit, the pivot.

Between two classes the softmax is a sigmoid of one Gaussian number, whose expectation has a closed form. Where no third
class matters, the pairs are all there is. Elsewhere a few points say which part of its pair a class loses to others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from lapwing.predictive.function import base_points

_WEIGHTS = (
    0.00295114457971, 0.0478905920632, 0.18501179795, 0.30729394019,
    0.279249331366, 0.142827779694, 0.0329222362896, 0.00185317786782,
)  # fmt: skip
_SCALES = (
    0.728235434357, 0.936409308877, 1.19068486289, 1.51415981619,
    1.93163536704, 2.47289383185, 3.17765866379, 4.13540726651,
)  # fmt: skip
"""sigmoid(x) = Σ w Φ(x/s) up to 4e-9 everywhere: such mixtures are due to Monahan and Stefanski (1992)."""

PAIRS = 16  # pairs of points z, −z in each of two sequences, at least
WIDEST = 36.0  # variance of a difference of logits beyond which a few points say nothing


def expected_sigmoid(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[sigmoid(x)] for x ~ N(mean, variance) as c and a, with c · exp(a) its value.

    From sigmoid(x) = Σ w Φ(x/s) follows E[sigmoid(x)] = Σ w Φ(mean/u) with u² = s² + variance. Very small expectations
    keep their relative accuracy, and their logarithms, by E[sigmoid(x)] = exp(mean + variance/2) E[sigmoid(−x −
    variance)].
    """
    squares, weights, _ = _mixture(mean.dtype, mean.device)
    inverse = torch.add(squares, variance.unsqueeze(-1), alpha=2).rsqrt()
    half = torch.add(mean, variance, alpha=0.5)
    at = torch.maximum(mean, torch.sub(mean, half, alpha=2))  # −mean − variance where half < 0
    core = (at.unsqueeze(-1) * inverse).erf() @ weights + 0.5
    if mean.dtype == torch.float64:  # exact without variance, where the 4e-9 of the mixture can be seen
        core = core + at.sigmoid() - (at.unsqueeze(-1) * squares.rsqrt()).erf() @ weights - 0.5
    return core, half.clamp(max=0)


def expected_entropy(mean: Tensor, variance: Tensor) -> Tensor:
    """Return E[h(x)] for the entropy h(x) of a choice with probability sigmoid(x), x ~ N(mean, variance).

    h has the derivative −x · sigmoid′(x), so that h(x) = Σ w s² φ(x/s)/s for the same mixture.
    """
    squares, _, heights = _mixture(mean.dtype, mean.device)
    inverse = torch.add(squares, variance.unsqueeze(-1), alpha=2).rsqrt()
    found = ((mean.unsqueeze(-1) * inverse).square().neg().exp() * inverse) @ heights
    if mean.dtype == torch.float64:  # as for the expected sigmoid
        known = ((mean.unsqueeze(-1) * squares.rsqrt()).square().neg().exp() * squares.rsqrt()) @ heights
        below = -mean.abs()  # h is even, and its terms do not overflow here
        found = found + below.exp().log1p() - below * below.sigmoid() - known
    return found


@lru_cache(maxsize=16)
def _mixture(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return 2s², w/2 and w s²/√π, as the error function takes them."""
    weights, scales = (torch.tensor(each, dtype=torch.float64) for each in (_WEIGHTS, _SCALES))
    weights = weights / weights.sum()
    found = 2 * scales.square(), weights / 2, weights * scales.square() / math.sqrt(math.pi)
    squares, halves, heights = (each.to(device, dtype) for each in found)
    return squares, halves, heights


Estimate = tuple[Tensor, Tensor, Tensor]
"""Probabilities (n, K), expected entropy of softmax(f) and estimated total variation from the truth, each (n,)."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Logits (n, K) by their pairs with the pivot (n, 1): the sigmoid s_k of each, in expectation.

    `center` and `apart` are mean and variance of f_k − f_pivot, and E[s_k] is `core` · exp(`tail`), each (n, K); those
    of the pivot itself are 0, 0 and 1/2.
    """

    pivot: Tensor
    center: Tensor
    apart: Tensor
    core: Tensor
    tail: Tensor

    @classmethod
    def of(cls, mean: Tensor, apart: Callable[[Tensor], Tensor]) -> Pairs:
        """Return the pairs of logits with this mean, and Var(f_k − f_pivot) for any pivot."""
        highest, pivot = mean.max(-1, keepdim=True)
        center, variance = mean - highest, apart(pivot)
        return cls(pivot, center, variance, *expected_sigmoid(center, variance))

    @cached_property
    def own(self) -> Tensor:
        """E[s_k]."""
        return self.core * self.tail.exp()

    @cached_property
    def entropy(self) -> Tensor:
        """The expected entropy of each pair; log 2 for the pivot."""
        return expected_entropy(self.center, self.apart)

    def log_prob(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p of one class (n, 1) per item as `alone` has it, and the bound on its error, (n,)."""
        e = self.center.exp()
        share = (e + 1) / e.sum(-1, keepdim=True)
        rest = (self.own * share).scatter(1, self.pivot, 0.0).sum(-1, keepdim=True)
        others = (self.core.log() + self.tail + share.log()).gather(1, y)
        value = torch.where(y == self.pivot, (-rest).log1p(), others).squeeze(-1)
        return value, torch.minimum(self._least(), self.bound())

    def take(self, items: Tensor) -> Pairs:
        """Return the pairs of some items."""
        return Pairs(*(each[items] for each in (self.pivot, self.center, self.apart, self.core, self.tail)))

    def alone(self) -> Estimate:
        """Return the estimate with what third classes take from each pair as it is at the mean, exact without variance.

        Class k loses s_k Σ_j p_j to the others j, where p_j ≤ s_j. Summed over k, that is at most twice the sum of all
        E[s_j] but the largest, and so is its value at the mean, since s_j there is at most E[s_j]: this error is a
        bound.
        """
        e = self.center.exp()
        total = e.sum(-1, keepdim=True)
        own = (self.own * ((e + 1) / total)).scatter(1, self.pivot, 0.0)
        pairs = self.entropy - e.log1p() + self.center * self.center.sigmoid()  # expected, and at the mean
        entropy = (total.log() - (e * self.center).sum(-1, keepdim=True) / total).squeeze(-1) + pairs.sum(-1)
        return own.scatter(1, self.pivot, 1 - own.sum(-1, keepdim=True)), entropy, self._least()

    def _least(self) -> Tensor:
        """Return twice the sum of all E[s_j] but the largest, (n,)."""
        own = self.own.detach()
        return 2 * (own.sum(-1) - own.topk(2).values.sum(-1))

    def bound(self) -> Tensor:
        """Return another bound on the error of `alone`, (n,), which is the smaller one where variances are small.

        It is Σ_{j≠k} E[s_j s_k]. Since s ≤ 1 and s ≤ exp(f − f_pivot), E[s_j s_k] ≤ b_j b_k with the smaller of 1 and
        exp(center + apart) as b.
        """
        b = (self.center + self.apart).detach().clamp(max=0).exp().scatter(1, self.pivot, 0.0)
        return b.sum(-1).square() - b.square().sum(-1)

    def with_points(self, root: Tensor, points: Tensor, caution: float) -> Estimate:
        """Return the estimate with what third classes take from each pair averaged over two sequences of points.

        `root` V (n, K, k) is one of the covariances of f − f_pivot; `points` are (2P, k), one sequence after the other.
        Each probability is E[s_k] times the ratio of the averages of p_k and s_k, and the entropies of the pairs are
        replaced by their expectations where there are few rivals to the pivot. The error is `caution` times what the
        difference of the sequences suggests, and infinite where variances are beyond `WIDEST`.
        """
        f = root @ points.mT + self.center.unsqueeze(-1)  # (n, K, 2P)
        e, s = f.exp(), f.sigmoid()
        total = e.sum(1, keepdim=True)
        p = e / total
        averages = _averages(len(points), f.dtype, f.device)  # of either sequence, and of both
        few = (3 - 2 * self.own.sum(-1, keepdim=True)).clamp(0, 1)  # with many rivals, pairs say little
        each = total.log().squeeze(1) - (p * f).sum(1) - few * (e.log1p() - s * f).sum(1)  # (n, 2P)
        entropy = (each @ averages)[:, 2] + (few * self.entropy).sum(-1)
        share = (p @ averages) / (s @ averages).clamp(min=torch.finfo(f.dtype).tiny)  # (n, K, 3): left of each pair
        pivot = self.pivot.unsqueeze(-1).expand(-1, 1, 3)
        found = (self.own.unsqueeze(-1) * share).scatter(1, pivot, 0.0)
        found = found.scatter(1, pivot, 1 - found.sum(1, keepdim=True))
        one, other, probs = found.unbind(-1)
        with torch.no_grad():
            error = caution / 4 * (one - other).abs().sum(-1)
            fine = (self.apart.amax(-1) <= WIDEST) & (probs.amin(-1) >= 0)
            return probs, entropy, torch.where(fine, error, torch.inf)


@lru_cache(maxsize=64)
def _averages(points: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix (points, 3) that averages the first half, the second half and all."""
    first = (torch.arange(points) < points // 2).double()
    return (torch.stack([2 * first, 2 - 2 * first, torch.ones(points).double()], 1) / points).to(device, dtype)


@lru_cache(maxsize=64)
def matched_points(dim: int, times: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return two sequences of points and their mirror images, each with covariance I exactly, one after the other.

    These are `times` · `PAIRS` points each, more for fewer than seven dimensions, where they cost little, and more than
    there are dimensions: (4 · pairs, dim).
    """
    found, pairs = [], PAIRS * (4 if dim <= 3 else 2 if dim <= 6 else 1)
    while pairs <= dim:
        pairs *= 2
    pairs *= times
    for own in (seed, seed + 1):
        z = base_points(pairs, dim, torch.empty(0, dtype=torch.float64), own)
        z = torch.linalg.solve_triangular(torch.linalg.cholesky(z.mT @ z / pairs), z.mT, upper=False).mT
        found += [z, -z]
    return torch.cat(found).to(dtype)


def prepare_pairs(classes: int, times: Sequence[int], seed: int, dtype: torch.dtype) -> None:
    """Make the tensors that a traced form will hold, with these sets of points: tracing itself can make none."""
    _mixture(dtype, torch.device("cpu"))
    for stage, each in enumerate(times):
        _averages(len(matched_points(classes, each, seed + 2 * stage, dtype)), dtype, torch.device("cpu"))
