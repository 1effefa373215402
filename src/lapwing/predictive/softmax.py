"""E[softmax(f)] for Gaussian f, from pairs of classes wherever these suffice.

A pair is a class with the one of the highest mean logit, the pivot. Between two classes the softmax is a sigmoid of one
Gaussian number, whose expectation has a closed form. Where no third class matters, the pairs are all there is.
Elsewhere a few points say which part of its pair a class loses to others, if there are few classes. What remains is
left to the law of the maximum (`maximum.py`), and where its own error is too large to many points (`levels.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import linear
from torch.quasirandom import SobolEngine

from lapwing.model.calls import outside_inference
from lapwing.predictive.levels import (
    BLOCK,
    CHEAP,
    ENOUGH,
    REPLICATES,
    Estimate,
    by_levels,
    by_traced_levels,
    points_at_once,
    traced_levels,
)
from lapwing.predictive.maximum import FINE, STEPS, by_maximum, prepare_maximum

SEED = 2021
"""The seed of everything that is drawn without a generator."""

CLOSE = 3e-4
"""The largest stated error for which pairs of classes, or a few points, do."""
SOUND = 2e-3
"""The largest stated error for which the law of the maximum does for few classes; for many it is `ENOUGH`."""
SOME = 64  # classes below which a few points, with an exact covariance, are tried
ONE = 24  # classes up to which one item is cheaper in plain numbers
PLAIN = 2**12  # logits up to which NumPy is cheaper
STAGES = ((2, 3.0, CLOSE), (16, 1.5, 2e-3))
"""How many times as many points as the first ones, how many times the error that the difference of two sequences of
them suggests is stated (two small ones may agree by chance), and up to which error they do."""

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
BELOW = -80.0  # a logit that adds nothing to any sum, and whose exponential does not underflow
RARE = -7.0  # logit below which a class is rarely chosen, also in the tail of its law
TINY = float(torch.finfo(torch.float32).tiny)
WIDEST = 36.0  # variance of a difference of logits beyond which a few points say nothing

Array = NDArray[Any]
Way = Callable[["_Chunk", Tensor], Estimate]
"""What finds an estimate for a chunk of items, given their places."""


class Spread(ABC):
    """A root of the covariance of K logits per item, and the law of each logit given the others."""

    @property
    @abstractmethod
    def conditional(self) -> Tensor:
        """Var(f_k | all differences between other logits), (n, K)."""

    @abstractmethod
    def steps(self, z: Tensor) -> Tensor:
        """f − m at standard normal points (S, K), (K, n, S); what all logits share is left out."""

    @abstractmethod
    def own(self, z: Tensor) -> Tensor:
        """f_k − E[f_k | all differences between other logits] at the same points, (K, n, S)."""

    @abstractmethod
    def take(self, items: Tensor) -> Spread:
        """Return the spread of some items."""

    @abstractmethod
    def root(self, pivot: Tensor) -> Tensor:
        """Some root V of the covariances of f minus the logit of one class (n, 1) per item, (n, K, k)."""

    @abstractmethod
    def apart(self, pivot: Tensor) -> Tensor:
        """Var(f_k − f_p) for one class p (n, 1) per item, (n, K)."""

    def apart_from(self, p: int) -> Tensor:
        """Var(f_k − f_p) of a single item, (K,)."""
        return self.apart(torch.tensor([[p]]))[0]

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """Var(f_k − the average of f), (n, K)."""

    @abstractmethod
    def times(self, v: Tensor) -> Tensor:
        """The covariance of f − its average, times vectors (n, T, K)."""

    @property
    @abstractmethod
    def chunk(self) -> int:
        """How many items to work on at a time."""


@dataclass(frozen=True, eq=False)
class Softmax:
    """Probabilities (n, K), the expected entropy of softmax(f) and the estimated error of the probabilities, (n,).

    `logs` computes the logarithms of the probabilities, also of those that underflow. `close`: no error is above
    `ENOUGH`. `parts` are the entropy of the probabilities and the mutual information, where they are at hand.
    """

    probs: Tensor
    entropy: Tensor
    error: Tensor
    logs: Callable[[Tensor], Tensor]
    close: bool = False
    parts: tuple[Tensor, Tensor] | None = None

    @property
    def log_probs(self) -> Tensor:
        return self.logs(self.probs)


def expected_softmax(mean: Tensor, spread: Spread, samples: int | None, seed: int | None = None) -> Softmax:
    """Compute E[softmax(f)] for Gaussian f with this mean (n, K) and spread.

    Without `samples`, each item gets as many points as bring its estimated error below `ENOUGH`, as far as `MOST`
    allows. The number does not depend on the other items.
    """
    whole = _Chunk(mean, spread, SEED if seed is None else seed)
    if torch.compiler.is_compiling():  # no choice may depend on numbers, and items are as many as come
        return whole.traced(samples)
    if len(mean) <= spread.chunk:
        return whole.run(samples)
    parts = [whole._take(items).run(samples) for items in torch.arange(len(mean)).to(mean.device).split(spread.chunk)]
    probs, entropy, error = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("probs", "entropy", "error")
    )
    return Softmax(probs, entropy, error, lambda _: torch.cat([part.log_probs for part in parts]))


@dataclass(frozen=True, eq=False)
class _Chunk:
    mean: Tensor
    spread: Spread
    seed: int

    def run(self, samples: int | None) -> Softmax:
        """Compute probabilities from pairs of classes where these suffice, and from more and more points elsewhere.

        In between come a few points for few classes, and the law of the maximum.
        """
        if samples is not None:
            return self._by_levels(samples)
        if self._is_plain:
            found = (self._one() if len(self.mean) == 1 else None) or self._few()
            if found is not None:
                return found
        pairs = Pairs.of(self.mean, self.spread.apart)
        probs, entropy, error = *pairs.alone(), pairs.least()
        if bool((error <= CLOSE).all()):
            return Softmax(probs, entropy, error, self._logs, close=True)
        error = torch.minimum(error, pairs.bound())
        items = (~(error <= CLOSE)).nonzero()[:, 0]
        if not len(items):
            return Softmax(probs, entropy, error, self._logs, close=True)
        for stage, (*_, enough) in enumerate(STAGES if self._few_do else ()):
            points = lambda chunk, at, stage=stage: chunk._some_points(pairs, stage, at)  # noqa: E731
            items = self._tried(points, (probs, entropy, error), items, self._at_once(stage), enough)
        close = self._without_pairs((probs, entropy, error), items)
        return Softmax(probs, entropy, error, self._logs, close)

    def _tried(self, way: Way, estimate: Sequence[Tensor], items: Tensor, size: int, enough: float) -> Tensor:
        """Write what a way finds for some items, so many at a time, and return the items whose error is too large.

        A way takes a chunk of the items, and their places in this one.
        """
        for at in items.split(size) if len(items) else ():
            for each, new in zip(estimate, way(self._take(at), at)):
                each[at] = new
        return items[~(estimate[2][items] <= enough)]

    def _without_pairs(self, estimate: Sequence[Tensor], items: Tensor) -> bool:
        """Write the law of the maximum for some items, or many points where its error is too large; False with points.

        The points are taken only where their own error is smaller.
        """
        size = max(1, BLOCK // (STEPS * self.mean.shape[-1]))
        enough = SOUND if self._few_do else ENOUGH
        items = self._tried(lambda chunk, _: chunk._by_maximum(), estimate, items, size, enough)
        if not len(items):
            return True
        found = self._take(items)._by_levels(None)
        better = ~(estimate[2][items] <= found.error)
        for each, new in zip(estimate, (found.probs, found.entropy, found.error)):
            each[items[better]] = new[better]
        return False

    @property
    def _is_plain(self) -> bool:
        """Whether these are few numbers for NumPy."""
        mean = self.mean
        return self._few_do and mean.numel() <= PLAIN and _is_plain(mean)

    def _one(self) -> Softmax | None:
        """Take pairs of classes for a single item in plain numbers; None where that is not close or not cheaper."""
        if self.mean.shape[-1] > ONE:
            return None
        mean = self.mean.tolist()[0]
        pivot = mean.index(max(mean))
        apart = self.spread.apart_from(pivot)
        if apart.requires_grad:
            return None
        probs, entropy, error = pairs_of_one(mean, pivot, apart.tolist())
        if not error <= CLOSE:
            return None
        total = -sum(p * math.log(p) for p in probs if p > 0)
        numbers = array("f", (*probs, entropy, error, total, max(0.0, total - entropy)))
        each, *others = torch.frombuffer(numbers, dtype=torch.float32).split((len(probs), 1, 1, 1, 1))
        return Softmax(each.unsqueeze(0), others[0], others[1], self._logs, True, (others[2], others[3]))

    def _few(self) -> Softmax | None:
        """Do the same for few items in NumPy; None where a gradient follows their variances.

        The calls of PyTorch would cost several times what is computed in them.
        """
        mean = self.mean.numpy()
        pivot = mean.argmax(-1)
        column = torch.from_numpy(pivot)[:, None]
        apart = self.spread.apart(column)
        if not _is_plain(apart):
            return None
        with np.errstate(all="ignore"):  # what overflows is replaced, or has an infinite error
            pairs = FewPairs.of(mean, pivot, apart.numpy())
            probs, entropy, error = pairs.alone
            items = np.flatnonzero(~(error <= CLOSE))
            if len(items):
                places = torch.from_numpy(items)
                root = self.spread.take(places).root(column[places]).numpy()
            for stage, (_, caution, enough) in enumerate(STAGES):
                if not len(items):
                    break
                points, size = self._few_points(stage).numpy(), self._at_once(stage)
                for part in (slice(start, start + size) for start in range(0, len(items), size)):
                    some = items[part]
                    probs[some], entropy[some], error[some] = pairs.with_points(some, root[part], points, caution)
                open_ = ~(error[items] <= enough)
                items, root = items[open_], root[open_]
            total = -(probs * np.log(np.maximum(probs, TINY))).sum(-1)
            parts = total, np.maximum(total - entropy, 0)
        first, second, third, total, mutual = (torch.from_numpy(each) for each in (probs, entropy, error, *parts))
        if not len(items):
            return Softmax(first, second, third, self._logs, True, (total, mutual))
        close = self._without_pairs((first, second, third), torch.from_numpy(items))
        return Softmax(first, second, third, self._logs, close)

    def _by_maximum(self, steps: int = STEPS) -> Estimate:
        """Return what the law of the maximum gives, with finer steps for those items of many classes that need them."""
        found = by_maximum(self.mean, self.spread.variance, self.spread.times, steps)
        if torch.compiler.is_compiling() or steps == FINE or self._few_do:
            return found
        for one in found[2].isinf().nonzero():  # few, and each has many nodes
            for each, new in zip(found, self._take(one)._by_maximum(FINE)):
                each[one] = new
        return found

    def _some_points(self, pairs: Pairs, stage: int, items: Tensor | None = None) -> Estimate:
        """Return what the points of a stage find; `items` are the places of this chunk among the pairs."""
        pivot = pairs.pivot if items is None else pairs.pivot[items]
        return pairs.with_points(self.spread.root(pivot), self._few_points(stage), STAGES[stage][1], items)

    @property
    def _few_do(self) -> bool:
        """Whether there are few enough classes for points with an exact covariance."""
        return self.mean.shape[-1] < SOME

    def _at_once(self, stage: int) -> int:
        """Return how many items take the points of a stage at a time."""
        return max(1, BLOCK // (self.mean.shape[-1] * len(self._few_points(stage))))

    def _few_points(self, stage: int) -> Tensor:
        points = matched_points(self.mean.shape[-1], STAGES[stage][0], self.seed + 2 * stage, self.mean.dtype)
        return points.to(self.mean.device)

    def _by_levels(self, samples: int | None) -> Softmax:
        return Softmax(*by_levels(self.mean, self.spread, self._sequences, samples), self._logs)

    def traced(self, samples: int | None) -> Softmax:
        """Do the same without branches, for export: every way is taken, and each item keeps what `run` would."""
        probs, entropy, error = by_traced_levels(self.mean, self.spread, self._sequences, samples)
        pairs = Pairs.of(self.mean, self.spread.apart)
        stages = reversed(range(len(STAGES))) if self._few_do else ()
        ways = [(*self._by_maximum(), SOUND if self._few_do else ENOUGH)]
        ways += [(*self._some_points(pairs, stage), STAGES[stage][2]) for stage in stages]
        alone = *pairs.alone(), torch.minimum(pairs.least(), pairs.bound()), CLOSE
        for p, h, e, enough in [*ways, alone] if samples is None else ():
            near = e <= enough
            probs = torch.where(near[:, None], p, probs)
            entropy, error = torch.where(near, h, entropy), torch.where(near, e, error)
        return Softmax(probs, entropy, error, lambda p: p.clamp(min=torch.finfo(p.dtype).tiny).log())

    def _take(self, items: Tensor) -> _Chunk:
        whole = len(items) == len(self.mean)
        return self if whole else replace(self, mean=self.mean[items], spread=self.spread.take(items))

    def _sequences(self, level: int, size: int, sequences: int) -> Tensor:
        """Return the points (sequences, size, K) of a level."""
        mean = self.mean
        seeds = range(self.seed + 97 * level, self.seed + 97 * level + sequences)
        return torch.stack([fixed_points(size, mean.shape[-1], seed, mean.dtype) for seed in seeds]).to(mean.device)

    def _logs(self, probs: Tensor) -> Tensor:
        """Return log p, from sums of logarithms where p is so small that sums of exponentials underflow."""
        small = (probs < math.sqrt(torch.finfo(probs.dtype).tiny)).any(-1).nonzero()[:, 0]
        logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
        if len(small):
            points = fixed_points(CHEAP // REPLICATES, probs.shape[-1], self.seed, probs.dtype).to(probs.device)
            spread, mean = self.spread.take(small), self.mean[small]
            parts = [mean.mT.unsqueeze(-1) + spread.steps(z) for z in points.split(points_at_once(mean))]
            each = [f.log_softmax(0).logsumexp(-1) for f in parts]
            far = torch.stack(each).logsumexp(0).mT - math.log(len(points))
            logs[small] = torch.where(probs[small] < math.sqrt(torch.finfo(probs.dtype).tiny), far, logs[small])
        return logs


def _is_plain(t: Tensor) -> bool:
    """Whether NumPy can read a tensor with nothing lost: no gradient, transform or trace follows its numbers."""
    plain = type(t) is Tensor and t.dtype == torch.float32 and t.is_cpu and not t.requires_grad
    plain = plain and not torch._C._functorch.is_functorch_wrapped_tensor(t)
    followed = forward_ad._current_level >= 0 or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack()
    return plain and not followed


def narrowness(variance: Tensor) -> Tensor:
    """Return 1/√(2(s² + variance)) for each term of the mixture, (..., 8)."""
    return torch.add(_mixture(variance.dtype, variance.device)[0], variance.unsqueeze(-1), alpha=2).rsqrt()


def expected_sigmoid(mean: Tensor, variance: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[sigmoid(x)] for x ~ N(mean, variance) as c and a, with c · exp(a) its value; `narrow` is `narrowness`.

    From sigmoid(x) = Σ w Φ(x/s) follows E[sigmoid(x)] = Σ w Φ(mean/u) with u² = s² + variance. Very small expectations
    keep their relative accuracy, and their logarithms, by E[sigmoid(x)] = exp(mean + variance/2) E[sigmoid(−x −
    variance)].
    """
    squares, weights, _ = _mixture(mean.dtype, mean.device)
    half = torch.add(mean, variance, alpha=0.5)
    at = torch.maximum(mean, torch.sub(mean, half, alpha=2))  # −mean − variance where half < 0
    core = (at.unsqueeze(-1) * narrow).erf() @ weights + 0.5
    if mean.dtype == torch.float64:  # exact without variance, where the 4e-9 of the mixture can be seen
        core = core + at.sigmoid() - (at.unsqueeze(-1) * squares.rsqrt()).erf() @ weights - 0.5
    return core.clamp(min=torch.finfo(core.dtype).tiny), half.clamp(max=0)  # rounding may leave less than nothing


def expected_entropy(mean: Tensor, narrow: Tensor) -> Tensor:
    """Return E[h(x)] for the entropy h(x) of a choice with probability sigmoid(x), x ~ N(mean, variance).

    h has the derivative −x · sigmoid′(x), so that h(x) = Σ w s² φ(x/s)/s for the same mixture.
    """
    squares, _, heights = _mixture(mean.dtype, mean.device)
    found = ((mean.unsqueeze(-1) * narrow).square().neg().exp() * narrow) @ heights
    if mean.dtype == torch.float64:  # as for the expected sigmoid
        known = ((mean.unsqueeze(-1) * squares.rsqrt()).square().neg().exp() * squares.rsqrt()) @ heights
        below = -mean.abs()  # h is even, and its terms do not overflow here
        found = found + below.exp().log1p() - below * below.sigmoid() - known
    return found


@lru_cache(maxsize=16)
@outside_inference
def _mixture(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return 2s², w/2 and w s²/√π, as the error function takes them."""
    weights, scales = (torch.tensor(each, dtype=torch.float64) for each in (_WEIGHTS, _SCALES))
    weights = weights / weights.sum()
    found = 2 * scales.square(), weights / 2, weights * scales.square() / math.sqrt(math.pi)
    squares, halves, heights = (each.to(device, dtype) for each in found)
    return squares, halves, heights


@lru_cache(maxsize=1)
def _terms() -> tuple[tuple[float, ...], ...]:
    """Return the same numbers term by term."""
    return tuple(zip(*(each.tolist() for each in _mixture(torch.float64, torch.device("cpu")))))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Logits (n, K) by their pairs with the pivot (n, 1): the sigmoid s_k of each, in expectation.

    `center` and `apart` are mean and variance of f_k − f_pivot, and E[s_k] is `core` · exp(`tail`), each (n, K). The
    pivot itself is so far below in `center` that it adds nothing to any sum: its E[s_k] is 0.
    """

    pivot: Tensor
    center: Tensor
    apart: Tensor
    narrow: Tensor
    core: Tensor
    tail: Tensor

    @classmethod
    def of(cls, mean: Tensor, apart: Callable[[Tensor], Tensor]) -> Pairs:
        """Return the pairs of logits with this mean, and Var(f_k − f_pivot) for any pivot."""
        highest, pivot = mean.max(-1, keepdim=True)
        center, variance = (mean - highest).scatter(1, pivot, BELOW), apart(pivot)
        narrow = narrowness(variance)
        return cls(pivot, center, variance, narrow, *expected_sigmoid(center, variance, narrow))

    @cached_property
    def own(self) -> Tensor:
        """E[s_k]; 0 for the pivot."""
        return self.core * self.tail.exp()

    @cached_property
    def entropy(self) -> Tensor:
        """The sum of the expected entropies of the pairs, (n,)."""
        return expected_entropy(self.center, self.narrow).sum(-1)

    def log_prob(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p of one class (n, 1) per item as `alone` has it, and the bound on its error, (n,)."""
        e = self.center.exp()
        share = (e + 1) / (e.sum(-1, keepdim=True) + 1)
        rest = (self.own * share).sum(-1, keepdim=True)
        others = (self.core.log() + self.tail + share.log()).gather(1, y)
        value = torch.where(y == self.pivot, (-rest).log1p(), others).squeeze(-1)
        return value, torch.minimum(self.least(), self.bound())

    def alone(self) -> tuple[Tensor, Tensor]:
        """Return probabilities and entropy with what third classes take from each pair as it is at the mean.

        They are exact without variance. Class k loses s_k Σ_j p_j to the others j, where p_j ≤ s_j; `least` and `bound`
        say how much that can be.
        """
        e = self.center.exp()
        grown, rest = e + 1, e.sum(-1, keepdim=True)
        total, size = rest + 1, e * self.center
        probs = _with_pivot(self.own * (grown / total), self.pivot)
        pairs = torch.addcdiv(grown.log(), size, grown, value=-1).sum(-1)  # their entropies at the mean
        whole = torch.addcdiv(rest.log1p(), size.sum(-1, keepdim=True), total, value=-1).squeeze(-1)
        return probs, whole + (self.entropy - pairs)

    def least(self) -> Tensor:
        """Return a bound on the error of `alone`: twice the sum of all E[s_j] but the largest, (n,).

        What class k loses to others, summed over k, is at most that, and so is its value at the mean, since s_j there
        is at most E[s_j].
        """
        own = self.own.detach()
        return 2 * (own.sum(-1) - own.amax(-1))

    def bound(self) -> Tensor:
        """Return another bound on the error of `alone`, (n,), which is the smaller one where variances are small.

        It is Σ_{j≠k} E[s_j s_k]. Since s ≤ 1 and s ≤ exp(f − f_pivot), E[s_j s_k] ≤ b_j b_k with the smaller of 1 and
        exp(center + apart) as b.
        """
        b = (self.center + self.apart).detach().clamp(max=0).exp()
        return b.sum(-1).square() - b.square().sum(-1)

    def with_points(self, root: Tensor, points: Tensor, caution: float, items: Tensor | None = None) -> Estimate:
        """Return the estimate with what third classes take from each pair averaged over two sequences of points.

        `items` are the numbers of those n items that are wanted, all without it. `root` V (n, K, k) is one of the
        covariances of f − f_pivot; `points` are (2P, k), one sequence after the other.
        Each probability is E[s_k] times the ratio of the averages of p_k and s_k, and the entropies of the pairs are
        replaced by their expectations where there are few rivals to the pivot. The error is `caution` times what the
        difference of the sequences suggests, and infinite where variances are beyond `WIDEST`.
        """
        every = self.pivot, self.center, self.apart.amax(-1), self.own, self.entropy
        pivot, center, widest, own, entropy = every if items is None else (each[items] for each in every)
        f = linear(root, points) + center.unsqueeze(-1)  # (n, K, 2P)
        e = f.exp()
        grown, rest = e + 1, e.sum(1, keepdim=True)
        p, s = e / (rest + 1), e / grown
        averages = _averages(len(points), f.dtype, f.device)  # of either sequence, and of both
        share = (p @ averages) / (s @ averages).clamp(min=torch.finfo(f.dtype).tiny)  # (n, K, 3): left of each pair
        one, other, both = (own.unsqueeze(-1) * share).unbind(-1)
        probs = _with_pivot(both, pivot)
        few = torch.rsub(own.sum(-1), 2, alpha=2).clamp(0, 1)  # with many rivals, pairs say little
        pairs = torch.addcmul(grown.log(), s, f, value=-1).sum((1, 2)) / len(points)  # their entropy at the points
        whole = (rest.log1p().sum((1, 2)) - (p * f).sum((1, 2))) / len(points)
        with torch.no_grad():
            apart = one - other
            error = caution / 4 * (apart.abs().sum(-1) + apart.sum(-1).abs())
            fine = (widest <= WIDEST) & (probs.amin(-1) >= 0)
            error = torch.where(fine, error, torch.inf)
        return probs, whole + few * (entropy - pairs), error


def apart_from(covariance: Tensor, pivot: Tensor) -> Tensor:
    """Return Var(f_k − f_p) for covariances (n, K, K) and one class p per item (n, 1), (n, K)."""
    own = covariance.diagonal(dim1=-2, dim2=-1)
    row = covariance.gather(1, pivot[:, :, None].expand(-1, 1, own.shape[-1]))[:, 0]
    return (own + own.gather(1, pivot) - 2 * row).clamp(min=0)


def pairs_of_one(mean: list[float], pivot: int, apart: list[float]) -> tuple[list[float], float, float]:
    """Return what `Pairs.alone` does, and the bound on its error, for one item in plain numbers.

    One call of PyTorch costs as much as a dozen terms of these sums, and a request of one item needs sixty calls.
    """
    center = [m - mean[pivot] for m in mean]
    grown = [1 + math.exp(d) for d in center]
    total = sum(grown) - len(grown)
    own, entropy, first, second = [0.0] * len(mean), math.log(total), 0.0, 0.0
    for k, (d, v, g) in enumerate(zip(center, apart, grown)):
        if k == pivot:
            continue
        b = math.exp(min(d + v, 0.0))
        first, second = first + b, second + b * b
        if d + 2 * v < RARE:  # two terms of the series in exp(x) do, whose expectations are simple
            one, two = math.exp(d + v / 2), math.exp(2 * (d + v))
            own[k], h = one - two, one * (1 - d - v) - two * (0.5 - d - 2 * v)
        else:
            at, s, h = max(d, -d - v), 0.5, 0.0
            for square, weight, height in _terms():
                narrow = 1 / math.sqrt(square + 2 * v)
                s += weight * math.erf(at * narrow)
                h += height * narrow * math.exp(-((d * narrow) ** 2))
            own[k] = max(s, 0.0) * math.exp(min(d + v / 2, 0.0))
        entropy += h - math.log(g) + d * (g - 1) * (1 / g - 1 / total)
    probs = [s * g / total for s, g in zip(own, grown)]
    probs[pivot] = 1 - sum(probs)
    return probs, entropy, min(2 * (sum(own) - max(own)), first**2 - second)


@dataclass(frozen=True, eq=False)
class FewPairs:
    """`Pairs` of a few items in NumPy, whose calls cost a third of those of PyTorch; it answers as they do.

    `alone` is what `Pairs.alone` returns with the smaller bound on its error, and `entropy` is that of the pairs.
    """

    pivot: Array
    center: Array
    apart: Array
    own: Array
    entropy: Array
    alone: tuple[Array, Array, Array]

    @classmethod
    def of(cls, mean: Array, pivot: Array, apart: Array) -> FewPairs:
        """Return the pairs of logits with this mean and Var(f_k − f_pivot), all (n, K), for pivots (n,)."""
        at = np.arange(len(mean)), pivot
        center = mean - mean[at][:, None]
        center[at] = BELOW
        e, least = np.exp(center), np.exp(np.minimum(center + apart, 0))
        own, entropies = _expected(center, apart)
        grown, rest, size = e + 1, e.sum(-1), e * center
        probs = own * (grown / (rest[:, None] + 1))
        _give_pivot(probs, at)
        entropy = entropies.sum(-1)
        whole = np.log1p(rest) - size.sum(-1) / (rest + 1) + (entropy - (np.log(grown) - size / grown).sum(-1))
        first = 2 * (own.sum(-1) - own.max(-1))
        error = np.minimum(first, np.square(least.sum(-1)) - np.square(least).sum(-1))
        return cls(pivot, center, apart, own, entropy, (probs, whole, error))

    def with_points(self, items: Array, root: Array, points: Array, caution: float) -> tuple[Array, Array, Array]:
        """Return what `Pairs.with_points` does for these items."""
        center, own, (n, classes, _) = self.center[items], self.own[items], root.shape
        f = (root.reshape(n * classes, -1) @ points.T).reshape(n, classes, -1) + center[:, :, None]
        e = np.exp(f)
        grown, rest = e + 1, e.sum(1)
        p, s = e / (rest[:, None] + 1), e / grown
        averages = _averages(len(points), torch.float32, torch.device("cpu")).numpy()
        share = (p @ averages) / np.maximum(s @ averages, TINY)  # (n, K, 3)
        one, other, probs = (own[:, :, None] * share).transpose(2, 0, 1)
        apart = one - other
        error = caution / 4 * (np.abs(apart).sum(-1) + np.abs(apart.sum(-1)))
        _give_pivot(probs, (np.arange(n), self.pivot[items]))
        few = np.minimum(np.maximum(2 - 2 * own.sum(-1), 0), 1)
        pairs = (np.log(grown) - s * f).sum((1, 2)) / len(points)
        whole = (np.log1p(rest).sum(1) - (p * f).sum((1, 2))) / len(points)
        fine = (self.apart[items].max(-1) <= WIDEST) & (probs.min(-1) >= 0)
        return probs, whole + few * (self.entropy[items] - pairs), np.where(fine, error, np.inf)


def _expected(center: Array, apart: Array) -> tuple[Array, Array]:
    """Return E[s] and the expected entropy of a pair, as `expected_sigmoid` and `expected_entropy` have them.

    Of rare classes, two terms of the series in exp(x) do, whose expectations are simple.
    """
    one, two = np.exp(center + apart / 2), np.exp(2 * (center + apart))
    own, entropy = one - two, one * (1 - center - apart) - two * (0.5 - center - 2 * apart)
    some = np.flatnonzero(center + 2 * apart >= RARE)
    if len(some):
        squares, weights, heights = (each.numpy() for each in _mixture(torch.float32, torch.device("cpu")))
        mean, variance = center.take(some), apart.take(some)
        narrow = 1 / np.sqrt(squares + 2 * variance[:, None])
        at = np.maximum(mean, -mean - variance)[:, None] * narrow
        core = torch.from_numpy(at).erf_().numpy() @ weights + np.float32(0.5)
        own.put(some, np.maximum(core, TINY) * np.exp(np.minimum(mean + variance / 2, 0)))
        entropy.put(some, (np.exp(-np.square(mean[:, None] * narrow)) * narrow) @ heights)
    return own, entropy


def _give_pivot(probs: Array, at: tuple[Array, Array]) -> None:
    """Give the pivot of each item what its other probabilities leave of 1, in place."""
    probs[at] = 0
    probs[at] = 1 - probs.sum(-1)


def _with_pivot(probs: Tensor, pivot: Tensor) -> Tensor:
    """Give the pivot what the other probabilities (n, K) leave of 1."""
    return probs.scatter(1, pivot, 1 - probs.sum(1, keepdim=True))


@lru_cache(maxsize=64)
@outside_inference
def _averages(points: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix (points, 3) that averages the first half, the second half and all."""
    first = (torch.arange(points) < points // 2).double()
    return (torch.stack([2 * first, 2 - 2 * first, torch.ones(points).double()], 1) / points).to(device, dtype)


def base_points(n: int, dim: int, like: Tensor, seed: int = SEED) -> Tensor:
    """Return fixed points (n, dim) that stand for N(0, I): a scrambled Sobol sequence through the normal quantile.

    For softmax probabilities from 1,024 points the error is about 1/20 of that of independent draws at 3 classes, 1/5
    at 10 and 1/2 at 100 (antithetic draws reach 1/2).
    """
    if dim > SobolEngine.MAXDIM:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, dim, generator=generator, dtype=torch.float64).to(like)
    uniform = SobolEngine(dim, scramble=True, seed=seed).draw(n, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(2**-53, 1 - 2**-53)).to(like)


@lru_cache(maxsize=64)
@outside_inference
def kept_points(n: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return `base_points` that are made once."""
    return base_points(n, dim, torch.empty(0, dtype=dtype), seed)


def fixed_points(n: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return `base_points`, made once if they are few; tracing takes those that were made before."""
    small = n * dim <= 2**18 or torch.compiler.is_compiling()
    return kept_points(n, dim, seed, dtype) if small else base_points(n, dim, torch.empty(0, dtype=dtype), seed)


@lru_cache(maxsize=64)
@outside_inference
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


def prepare(classes: int, samples: int | None, dtype: torch.dtype) -> None:
    """Make the points that a traced form will hold: tracing itself can make none."""
    prepare_pairs(classes, [size for size, *_ in STAGES] if classes < SOME else (), SEED, dtype)
    prepare_maximum(classes)
    for level, (size, sequences) in enumerate(traced_levels(samples, classes)):
        for seed in range(SEED + 97 * level, SEED + 97 * level + sequences):
            kept_points(size, classes, seed, dtype)


def prepare_pairs(classes: int, times: Sequence[int], seed: int, dtype: torch.dtype) -> None:
    """Make the tensors that a traced form will hold, with these sets of points: tracing itself can make none."""
    _mixture(dtype, torch.device("cpu"))
    for stage, each in enumerate(times):
        _averages(len(matched_points(classes, each, seed + 2 * stage, dtype)), dtype, torch.device("cpu"))
