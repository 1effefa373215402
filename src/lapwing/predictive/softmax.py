"""E[softmax(f)] for Gaussian f: quasi-Monte Carlo over all logits but one, which is integrated in closed form.

Given the other logits, f_k is Gaussian, and its softmax is a sigmoid of f_k minus the log-sum of the others. So each
point gives every class the expectation of a sigmoid in place of its value. Where logits are wide and independent, a
point would else give all its weight to one class, and 65 classes would need 100,000 points for what 1,000 do here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import embedding

from lapwing.predictive.function import SEED, FunctionDistribution, MatrixPowers, base_points
from lapwing.predictive.maximum import FINE, STEPS, by_maximum, prepare_maximum
from lapwing.predictive.pairs import TINY, Estimate, FewPairs, Pairs, matched_points, pairs_of_one, prepare_pairs

ENOUGH = 6e-3
"""Estimated total variation from the exact probabilities at which no more points are taken."""

CHEAP, AMPLE = 1024, 5e-4  # up to so many points of few classes, more are taken until the error is below this
FEW = 64  # classes up to which points are that cheap; of more classes fewer are

REPLICATES = 4  # independent sequences of points, whose spread tells the error
FIRST, LEVELS = 64, 9  # points of the first sequences, and how many times there are new ones, of twice as many
LEAST = 512  # logits of a sequence: points of few classes cost little, so that there are more of them at first
TRACED = 2048  # points per item, at most, where their number cannot depend on the item
MOST = 2**23  # logits of an item, over all its points
BLOCK = 2**19  # logits under way at a time: what fits a cache
ITEMS = 2**23  # elements of covariances under way at a time
NODES, SHIFTS = 10, 4  # of the trapezoidal rule for the logit that is integrated, a standard deviation apart
NARROW = 0.1  # conditional variance up to which the value of a sigmoid is as good as its expectation

CLOSE = 3e-4
"""The largest stated error for which pairs of classes, or a few points, do."""
SOME = 64  # classes below which a few points, with an exact covariance, are tried
ONE = 24  # classes up to which one item is cheaper in plain numbers
PLAIN = 2**12  # logits up to which NumPy is cheaper
STAGES = ((2, 3.0, CLOSE), (16, 1.5, 2e-3))
"""How many times as many points as the first ones, how many times the error that the difference of two sequences of
them suggests is stated (two small ones may agree by chance), and up to which error they do."""


class Spread(ABC):
    """A root of the covariance of K logits per item, and the law of each logit given the others."""

    @property
    @abstractmethod
    def conditional(self) -> Tensor:
        """Var(f_k | all differences between other logits), (n, K)."""

    @abstractmethod
    def steps(self, z: Tensor) -> Tensor:
        """f − m at standard normal points (S, K), (S, n, K); what all logits share is left out."""

    @abstractmethod
    def own(self, z: Tensor) -> Tensor:
        """f_k − E[f_k | all differences between other logits] at the same points, (S, n, K)."""

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
class DenseSpread(Spread):
    """The spread of logits whose covariance (n, K, K), that of f minus its average over the K logits, is given."""

    covariance: Tensor

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """C^½, c · C^−½ and c = 1 / diag(C⁻¹), where the average of f, which C lacks, is free."""
        wide, k = self.covariance.double(), self.covariance.shape[-1]
        top = wide.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        top = top.clamp(min=torch.finfo(torch.float64).tiny ** 0.5)
        rounding = k * torch.finfo(self.covariance.dtype).eps
        root, back, inverse = MatrixPowers.apply(wide + top / k, rounding, 3)  # top on the average, taken away again
        conditional = 1 / (inverse.diagonal(dim1=-2, dim2=-1) - 1 / (k * top[..., 0]))
        back = conditional[..., None] * (back - top.rsqrt() / k)
        like = self.covariance.dtype
        return (root - top.sqrt() / k).to(like), back.to(like), conditional.to(like)

    @property
    def conditional(self) -> Tensor:
        return self._parts[2]

    def root(self, pivot: Tensor) -> Tensor:
        """A Cholesky factor, cheaper than the symmetric root; the average, which C lacks, gets a variance too."""
        wide, k = self.covariance.double(), self.covariance.shape[-1]
        top = wide.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        level = top.clamp(min=torch.finfo(torch.float64).tiny ** 0.5)
        ridge = k * torch.finfo(self.covariance.dtype).eps * level
        eye = torch.eye(k, dtype=wide.dtype, device=wide.device)
        found, failed = torch.linalg.cholesky_ex(wide + level / k + ridge * eye)
        found = torch.where((failed > 0)[:, None, None], torch.inf, found)  # takes the other way then
        return (found - found.gather(1, pivot.unsqueeze(-1).expand(-1, 1, k))).to(self.covariance)

    def apart(self, pivot: Tensor) -> Tensor:
        own = self.covariance.diagonal(dim1=-2, dim2=-1)
        row = self.covariance.gather(1, pivot[:, :, None].expand(-1, 1, own.shape[-1]))[:, 0]
        return (own + own.gather(1, pivot) - 2 * row).clamp(min=0)

    def steps(self, z: Tensor) -> Tensor:
        return _product(z, self._parts[0])

    def own(self, z: Tensor) -> Tensor:
        return _product(z, self._parts[1])

    @property
    def variance(self) -> Tensor:
        return self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0)

    def times(self, v: Tensor) -> Tensor:
        return v @ self.covariance

    def take(self, items: Tensor) -> DenseSpread:
        part = DenseSpread(self.covariance[items])
        if "_parts" in self.__dict__:
            part.__dict__["_parts"] = tuple(each[items] for each in self._parts)
        return part

    @property
    def chunk(self) -> int:
        return max(1, ITEMS // self.covariance[0].numel())


def _product(z: Tensor, matrices: Tensor) -> Tensor:
    """Return A_n z_s for points (S, K) and matrices (n, K, K), (S, n, K)."""
    n, k, _ = matrices.shape
    return (z @ matrices.reshape(n * k, k).mT).reshape(z.shape[0], n, k)


@dataclass(frozen=True, eq=False)
class SharedSpread(Spread):
    """The spread of logits with covariances R diag(s²) Rᵀ, one R (K, K) for all items and s (n, K): a last layer."""

    left: Tensor
    spread: Tensor
    inverse: Tensor | None = None  # of the left side, where it is at hand
    squares: Tensor | None = None  # (R_kj − R_pj)² as (p, k·j), for few classes, where it is at hand
    centered: tuple[Tensor, Tensor] | None = None  # R minus its average over the logits, and its squares, likewise

    @cached_property
    def _dual(self) -> Tensor:
        """R^−T."""
        found = torch.linalg.inv(self.left.double()) if self.inverse is None else self.inverse
        return found.mT.to(self.left)

    @cached_property
    def _precision(self) -> tuple[Tensor, Tensor]:
        """V⁻¹1 and the diagonal of V⁻¹ − V⁻¹1 1ᵀV⁻¹ / 1ᵀV⁻¹1, each (n, K): the average of f is free."""
        dual, inverse = self._dual.double(), 1 / self.spread.double().square()
        along = (inverse * dual.sum(0)) @ dual.mT
        diagonal = inverse @ dual.square().mT - along.square() / along.sum(-1, keepdim=True)
        return along, diagonal

    @property
    def conditional(self) -> Tensor:
        return (1 / self._precision[1]).to(self.spread)

    def root(self, pivot: Tensor) -> Tensor:
        return (self.left - embedding(pivot, self.left)) * self.spread.unsqueeze(1)

    def apart(self, pivot: Tensor) -> Tensor:
        if self.squares is not None:
            each = embedding(pivot, self.squares).view(-1, *self.left.shape)
            return (each * self.spread.square().unsqueeze(1)).sum(-1)
        if self.spread.shape[-1] <= SOME:
            return self.root(pivot).square().sum(-1)
        own = (self._centered[pivot[:, 0]] * self.spread.square()) @ self._centered.mT  # covariances with the pivot
        found = self.variance + self.variance.gather(1, pivot) - 2 * own
        return found.scatter(1, pivot, 0.0).clamp(min=0)

    @cached_property
    def _centered(self) -> Tensor:
        """R minus its average over the logits."""
        return self.left - self.left.mean(0) if self.centered is None else self.centered[0]

    @cached_property
    def variance(self) -> Tensor:
        squares = self._centered.square() if self.centered is None else self.centered[1]
        return self.spread.square() @ squares.mT

    def times(self, v: Tensor) -> Tensor:
        return ((v @ self._centered) * self.spread.square().unsqueeze(1)) @ self._centered.mT

    def steps(self, z: Tensor) -> Tensor:
        return (z[:, None] * self.spread) @ self._centered.mT

    def own(self, z: Tensor) -> Tensor:
        along = self._precision[0].to(self.spread)
        back = (z[:, None] / self.spread) @ self._dual.mT
        return self.conditional * (back - along * (back.sum(-1, keepdim=True) / along.sum(-1, keepdim=True)))

    def take(self, items: Tensor) -> SharedSpread:
        part = replace(self, spread=self.spread[items])
        part.__dict__.update({name: self.__dict__[name] for name in ("_dual", "_centered") if name in self.__dict__})
        if "variance" in self.__dict__:
            part.__dict__["variance"] = self.variance[items]
        return part

    @property
    def chunk(self) -> int:
        classes = self.spread.shape[-1]
        return max(1, ITEMS // (classes * min(classes, SOME)))


def spread_of(function: FunctionDistribution) -> Spread | None:
    """Return the roots of the covariances of all items, (items, C, C); None where there are only draws."""
    found: Spread | None = function.spread
    if found is not None:
        return found
    shared = function.shared_root
    if shared is not None:
        root, spread, *inverse = (part.to(function.mean) for part in shared)
        return SharedSpread(root, spread.reshape(-1, spread.shape[-1]), next(iter(inverse), None))
    covariance = function.contrast_covariance
    return None if covariance is None else DenseSpread(covariance.reshape(-1, *covariance.shape[-2:]))


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

        In between come a few points for few classes, and the law of the maximum for many.
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
        rest = self._take(items)
        for way, size, enough in self._ways(pairs):
            for some in torch.arange(len(items), device=items.device).split(size):
                at = items[some]
                probs[at], entropy[at], error[at] = way(rest._take(some), at)
            open_ = (~(error[items] <= enough)).nonzero()[:, 0]
            items, rest = items[open_], rest._take(open_)
            if not len(items):
                return Softmax(probs, entropy, error, self._logs, close=True)
        return rest._last_resort((probs, entropy, error), items)

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
        places = torch.from_numpy(items)
        return self._take(places)._last_resort((first, second, third), places)

    def _last_resort(self, estimate: Sequence[Tensor], items: Tensor) -> Softmax:
        """Take levels of points for these items of an estimate, in place, where they are better."""
        probs, entropy, error = estimate
        found = self._by_levels(None)
        better = ~(error[items] <= found.error)
        some = items[better]
        probs[some], entropy[some], error[some] = found.probs[better], found.entropy[better], found.error[better]
        return Softmax(probs, entropy, error, self._logs)

    def _ways(self, pairs: Pairs) -> list[tuple[Callable[[_Chunk, Tensor], Estimate], int, float]]:
        """Return what to try on items before levels of points, on how many at a time, and up to which error it does.

        A way takes a chunk of the items, and their places among the pairs.
        """
        if not self._few_do:
            size = max(1, BLOCK // (STEPS * self.mean.shape[-1]))
            return [(lambda chunk, _: chunk._by_maximum(), size, ENOUGH)]

        def points(stage: int) -> Callable[[_Chunk, Tensor], Estimate]:
            return lambda chunk, items: chunk._some_points(pairs, stage, items)

        return [(points(stage), self._at_once(stage), enough) for stage, (*_, enough) in enumerate(STAGES)]

    def _by_maximum(self, steps: int = STEPS) -> Estimate:
        """Return what the law of the maximum gives, with finer steps for those items that need them."""
        found = by_maximum(self.mean, self.spread.variance, self.spread.times, steps)
        if torch.compiler.is_compiling() or steps == FINE:
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
        """Take new levels of points for the items whose error is too large still."""
        levels = enumerate(_levels(samples, self.mean.shape[-1]))
        _, (size, sequences) = next(levels)
        probs, entropy, error = self._level(0, size, sequences)
        done = size * sequences
        open_ = self._open(error, done).nonzero()[:, 0]
        for level, (size, sequences) in levels:
            if not len(open_):
                break
            p, h, e = self._take(open_)._level(level, size, sequences)
            now = size * sequences
            new = now / (done + now)  # earlier points count as well
            probs[open_] = torch.lerp(probs[open_], p, new)
            entropy[open_] = torch.lerp(entropy[open_], h, new)
            error[open_] = e * math.sqrt(new)
            done += now
            open_ = open_[self._open(error[open_], done)]
        return Softmax(probs, entropy, error, self._logs)

    def traced(self, samples: int | None) -> Softmax:
        """Do the same without branches, for export.

        All items take the points of every level up to `TRACED` of them, and each keeps the average of those that `run`
        would take.
        """
        probs, entropy = torch.zeros_like(self.mean), torch.zeros_like(self.mean[:, 0])
        error, done = torch.full_like(entropy, torch.inf), 0
        wide = (self.spread.conditional.amax(-1) > NARROW)[:, None]
        for level, (size, sequences) in enumerate(_traced_levels(samples, self.mean.shape[-1])):
            now = size * sequences
            points = self._sequences(level, size, sequences)
            integrated, h = _average(self.mean, self.spread, points, True, whole=True)
            plain, _ = _average(self.mean, self.spread, points, False, whole=True)
            found = torch.where(wide, integrated, plain)
            found = found / found.sum(-1, keepdim=True)
            new = now / (done + now)
            still = self._open(error, done)
            probs = torch.where(still[:, None], torch.lerp(probs, found.mean(0), new), probs)
            entropy = torch.where(still, torch.lerp(entropy, h, new), entropy)
            error = torch.where(still, _error_of(found) * math.sqrt(new), error)
            done += now
        pairs = Pairs.of(self.mean, self.spread.apart)
        stages = reversed(range(len(STAGES))) if self._few_do else ()
        ways = [(*self._some_points(pairs, stage), STAGES[stage][2]) for stage in stages]
        ways += [] if self._few_do else [(*self._by_maximum(), ENOUGH)]
        alone = *pairs.alone(), torch.minimum(pairs.least(), pairs.bound()), CLOSE
        for p, h, e, enough in [*ways, alone] if samples is None else ():
            near = e <= enough
            probs = torch.where(near[:, None], p, probs)
            entropy, error = torch.where(near, h, entropy), torch.where(near, e, error)
        return Softmax(probs, entropy, error, lambda p: p.clamp(min=torch.finfo(p.dtype).tiny).log())

    def _take(self, items: Tensor) -> _Chunk:
        whole = len(items) == len(self.mean)
        return self if whole else replace(self, mean=self.mean[items], spread=self.spread.take(items))

    def _open(self, error: Tensor, done: int) -> Tensor:
        """Tell which items need more points after so many."""
        few = done * max(self.mean.shape[-1], FEW) < CHEAP * FEW
        return error.detach() > (AMPLE if few else ENOUGH)

    def _sequences(self, level: int, size: int, sequences: int) -> Tensor:
        """Return the points (sequences, size, K) of a level."""
        mean = self.mean
        seeds = range(self.seed + 97 * level, self.seed + 97 * level + sequences)
        return torch.stack([_points(size, mean.shape[-1], seed, mean.dtype) for seed in seeds]).to(mean.device)

    def _level(self, level: int, size: int, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return probabilities, expected entropy and error from so many sequences of points."""
        mean, spread, points = self.mean, self.spread, self._sequences(level, size, sequences)
        wide = spread.conditional.amax(-1) > NARROW
        count = int(wide.sum())
        if count in (0, len(mean)):
            probs, entropy = _average(mean, spread, points, integrated=count > 0)
        else:
            probs, entropy = mean.new_zeros(sequences, *mean.shape), mean.new_zeros(len(mean))
            for which, integrated in ((wide, True), (~wide, False)):
                some = which.nonzero()[:, 0]
                probs[:, some], entropy[some] = _average(mean[some], spread.take(some), points, integrated)
        probs = probs / probs.sum(-1, keepdim=True)
        return probs.mean(0), entropy, _error_of(probs)

    def _logs(self, probs: Tensor) -> Tensor:
        """Return log p, from sums of logarithms where p is so small that sums of exponentials underflow."""
        small = (probs < math.sqrt(torch.finfo(probs.dtype).tiny)).any(-1).nonzero()[:, 0]
        logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
        if len(small):
            points = _points(CHEAP // REPLICATES, probs.shape[-1], self.seed, probs.dtype).to(probs.device)
            spread, mean = self.spread.take(small), self.mean[small]
            each = [(mean + spread.steps(z)).log_softmax(-1).logsumexp(0) for z in points.split(_rows(mean))]
            far = torch.stack(each).logsumexp(0) - math.log(len(points))
            logs[small] = torch.where(probs[small] < math.sqrt(torch.finfo(probs.dtype).tiny), far, logs[small])
        return logs


def _is_plain(t: Tensor) -> bool:
    """Whether NumPy can read a tensor with nothing lost: no gradient, transform or trace follows its numbers."""
    plain = type(t) is Tensor and t.dtype == torch.float32 and t.is_cpu and not t.requires_grad
    plain = plain and not torch._C._functorch.is_functorch_wrapped_tensor(t)
    followed = forward_ad._current_level >= 0 or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack()
    return plain and not followed


def prepare(classes: int, samples: int | None, dtype: torch.dtype) -> None:
    """Make the points that a traced form will hold: tracing itself can make none."""
    prepare_pairs(classes, [size for size, *_ in STAGES] if classes < SOME else (), SEED, dtype)
    if classes >= SOME:
        prepare_maximum(classes)
    for level, (size, sequences) in enumerate(_traced_levels(samples, classes)):
        for seed in range(SEED + 97 * level, SEED + 97 * level + sequences):
            kept_points(size, classes, seed, dtype)


def _error_of(probs: Tensor) -> Tensor:
    """Estimate the total variation of the average of several sequences (r, n, K) from the exact value, (n,)."""
    sequences = probs.shape[0]
    deviation = probs.detach().std(0) if sequences > 1 else torch.full_like(probs[0], torch.inf)
    return deviation.sum(-1) * math.sqrt(2 / math.pi / sequences) / 2


def _traced_levels(samples: int | None, classes: int) -> list[tuple[int, int]]:
    """Return the levels of which all items take the points where no choice may depend on them."""
    levels: list[tuple[int, int]] = []
    total = 0
    for size, sequences in _levels(samples, classes):
        total += size * sequences
        if levels and total > TRACED:
            break
        levels.append((size, sequences))
    return levels


def _levels(samples: int | None, classes: int) -> list[tuple[int, int]]:
    """Return the points per sequence and the number of sequences of each level."""
    if samples is not None:
        sequences = min(REPLICATES, samples)
        return [(SHIFTS * -(-samples // (sequences * SHIFTS)), sequences)]
    sizes = [FIRST * 2**level for level in range(LEVELS) if FIRST * 2**level * classes >= LEAST]
    return [(size, REPLICATES) for size in sizes if REPLICATES * size <= CHEAP or REPLICATES * size * classes <= MOST]


def _rows(mean: Tensor) -> int:
    return max(1, BLOCK // max(1, mean.numel()))


def _average(
    mean: Tensor, spread: Spread, points: Tensor, integrated: bool, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """Average the softmax over each sequence of points (r, S, K), giving (r, n, K), and its entropy over all, (n,).

    `integrated`: each probability is integrated over its own logit instead of taken at the point. `whole`: all points
    are taken at once.
    """
    sequences, size, _ = points.shape
    total, entropy = mean.new_zeros(sequences, *mean.shape), mean.new_zeros(mean.shape[0])
    for part in points.split(size if whole else SHIFTS * max(1, _rows(mean) // (sequences * SHIFTS)), 1):
        z = part.flatten(0, 1)
        f = mean + spread.steps(z)
        highest, first = f.max(-1, keepdim=True)
        f = f - highest
        e = f.exp()
        own = e.scatter(-1, first, 0.0).sum(-1, keepdim=True)  # the others of the highest, which would cancel
        p = e / (own + 1)
        entropy = entropy + ((own + 1).log()[..., 0] - (p * f).sum(-1)).sum(0)
        if not integrated:
            total = total + p.unflatten(0, part.shape[:2]).sum(1)
            continue
        others = f.scatter(-1, first, -torch.inf).logsumexp(-1, keepdim=True)  # `own` underflows where logits are wide
        rest = (own + 1 - e).clamp(min=torch.finfo(f.dtype).tiny).log().scatter(-1, first, others)
        odds = (f - rest - spread.own(z)).unflatten(0, (sequences, -1, SHIFTS))
        total = total + _expected_sigmoid(odds, spread.conditional)
    return total / size, entropy / (sequences * size)


def _expected_sigmoid(x: Tensor, variance: Tensor) -> Tensor:
    """Return Σ_s E[sigmoid(x_s + √v t)], t ~ N(0, 1), for x (r, S, SHIFTS, n, K) and v (n, K), as (r, n, K).

    This uses the trapezoidal rule. The points of every group of `SHIFTS` have their own nodes, between those of the
    others, so that together they are as good as a finer rule.
    """
    shifts = torch.arange(SHIFTS, dtype=torch.float64)[:, None] / SHIFTS
    nodes = torch.arange(NODES, dtype=torch.float64) - NODES / 2 + shifts  # (SHIFTS, NODES)
    weights = (-nodes.square() / 2).softmax(-1).to(x)
    total, scale = x.new_zeros(x.shape[0], *variance.shape), variance.sqrt()
    for node, weight in zip(nodes.to(x).T, weights.T, strict=True):
        each = (x + node[:, None, None] * scale).sigmoid_().sum(1)
        total = total + torch.einsum("h,rhnk->rnk", weight, each)
    return total


@lru_cache(maxsize=64)
def kept_points(n: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return `base_points` that are made once."""
    return base_points(n, dim, torch.empty(0, dtype=dtype), seed)


def _points(n: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    small = n * dim <= 2**18 or torch.compiler.is_compiling()
    return kept_points(n, dim, seed, dtype) if small else base_points(n, dim, torch.empty(0, dtype=dtype), seed)
