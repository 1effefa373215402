"""E[softmax(f)] for Gaussian f: quasi-Monte Carlo over all logits but one, the integral over that one in closed form.

Given the other logits, f_k is Gaussian, and its softmax is a sigmoid of f_k minus the log-sum of the others. So each
point gives every class the expectation of a sigmoid in place of its value. Where logits are wide and independent, a
point would else give all its weight to one class, and 65 classes would need 100,000 points for what 1,000 do here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from lapwing.predictive.fixed import SEED, base_points

ENOUGH = 6e-3
"""Estimated total variation from the exact probabilities at which no more points are taken."""

CHEAP, AMPLE = 1024, 5e-4  # up to so many points of few classes, more are taken until the error is below this
FEW = 64  # classes up to which points are that cheap; of more classes fewer are

REPLICATES = 4  # independent sequences of points, whose spread tells the error
FIRST, LEVELS = 64, 9  # points of the first sequences, and how many times there are new ones, of twice as many
MOST = 2**23  # logits of an item, over all its points
BLOCK = 2**19  # logits under way at a time: what fits a cache
ITEMS = 2**23  # elements of covariances under way at a time
NODES, SHIFTS = 10, 4  # of the trapezoidal rule for the logit that is integrated, a standard deviation apart
ZERO = 1e6  # inverse variance of what stands for zero, in units of the largest that may
NARROW = 0.1  # conditional variance up to which the value of a sigmoid is as good as its expectation


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
        """Those of some items."""

    @property
    @abstractmethod
    def chunk(self) -> int:
        """How many items to work on at a time."""


@dataclass(frozen=True, eq=False)
class DenseSpread(Spread):
    """Of covariances (n, K, K) of f minus its average over the K logits."""

    covariance: Tensor

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """C^½, c · C^−½ and c = 1 / diag(C⁻¹), where the average of f, which C lacks, is free."""
        wide, k = self.covariance.double(), self.covariance.shape[-1]
        top = wide.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        top = top.clamp(min=torch.finfo(torch.float64).tiny ** 0.5)
        rounding = k * torch.finfo(self.covariance.dtype).eps
        root, back, inverse = _Powers.apply(wide + top / k, rounding)  # top on the average, taken away again
        conditional = 1 / (inverse.diagonal(dim1=-2, dim2=-1) - 1 / (k * top[..., 0]))
        back = conditional[..., None] * (back - top.rsqrt() / k)
        like = self.covariance.dtype
        return (root - top.sqrt() / k).to(like), back.to(like), conditional.to(like)

    @property
    def conditional(self) -> Tensor:
        return self._parts[2]

    def steps(self, z: Tensor) -> Tensor:
        return _product(z, self._parts[0])

    def own(self, z: Tensor) -> Tensor:
        return _product(z, self._parts[1])

    def take(self, items: Tensor) -> DenseSpread:
        part = DenseSpread(self.covariance[items])
        if "_parts" in self.__dict__:
            part.__dict__["_parts"] = tuple(each[items] for each in self._parts)
        return part

    @property
    def chunk(self) -> int:
        return max(1, ITEMS // self.covariance[0].numel())


class _Powers(torch.autograd.Function):
    """A ↦ A^½, A^−½, A⁻¹ for symmetric A (n, K, K) whose eigenvalues up to `rounding` of the largest stand for zero;
    A⁻¹ is very large there.

    Continuous in A, unlike its eigenvectors. Backward by divided differences (Daleckiĭ and Kreĭn), which are zero
    where the null space has no derivative.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rounding: float) -> tuple[Tensor, Tensor, Tensor]:
        values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
        floor = rounding * values[..., -1:]
        inside = values > floor
        roots = torch.where(inside, values, 0.0).sqrt()
        backs = torch.where(inside, values.clamp(min=torch.finfo(values.dtype).tiny).rsqrt(), 0.0)
        ctx.save_for_backward(roots, backs, vectors)
        ctx.set_materialize_grads(True)
        each = roots, backs, torch.where(inside, 1 / values.masked_fill(~inside, 1.0), ZERO / floor)
        root, back, inverse = ((vectors * power[..., None, :]) @ vectors.mT for power in each)
        return root, back, inverse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        roots, backs, vectors = ctx.saved_tensors
        total = roots[..., :, None] + roots[..., None, :]
        slope = torch.where(total > 0, 1 / total.masked_fill(total == 0, 1.0), 0.0)
        pairs = backs[..., :, None] * backs[..., None, :]
        inside = [vectors.mT @ gradient @ vectors for gradient in gradients]
        found = vectors @ (inside[0] * slope - inside[1] * slope * pairs - inside[2] * pairs.square()) @ vectors.mT
        return (found + found.mT) / 2, None


def _product(z: Tensor, matrices: Tensor) -> Tensor:
    """A_n z_s for points (S, K) and matrices (n, K, K), (S, n, K)."""
    n, k, _ = matrices.shape
    return (z @ matrices.reshape(n * k, k).mT).reshape(len(z), n, k)


@dataclass(frozen=True, eq=False)
class SharedSpread(Spread):
    """Of covariances R diag(s²) Rᵀ with one R (K, K) for all items and s (n, K): a last layer's."""

    root: Tensor
    spread: Tensor

    @cached_property
    def _dual(self) -> Tensor:
        """R^−T."""
        return torch.linalg.inv(self.root.double()).mT.to(self.root)

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

    def steps(self, z: Tensor) -> Tensor:
        return (z[:, None] * self.spread) @ (self.root - self.root.mean(0)).mT

    def own(self, z: Tensor) -> Tensor:
        along = self._precision[0].to(self.spread)
        back = (z[:, None] / self.spread) @ self._dual.mT
        return self.conditional * (back - along * (back.sum(-1, keepdim=True) / along.sum(-1, keepdim=True)))

    def take(self, items: Tensor) -> SharedSpread:
        part = SharedSpread(self.root, self.spread[items])
        part.__dict__["_dual"] = self._dual
        return part

    @property
    def chunk(self) -> int:
        return max(1, ITEMS // self.spread.shape[-1])


@dataclass(frozen=True, eq=False)
class Softmax:
    """Probabilities (n, K), the expected entropy of softmax(f) and the estimated error of the probabilities, (n,)."""

    log_probs: Tensor
    entropy: Tensor
    error: Tensor


def expected_softmax(mean: Tensor, spread: Spread, samples: int | None, seed: int | None = None) -> Softmax:
    """E[softmax(f)] for f = mean (n, K) plus what `spread` says.

    Without `samples`, each item gets as many points as bring its estimated error below `ENOUGH`, if `MOST` allows:
    what it gets does not depend on the other items.
    """
    parts = []
    for items in torch.arange(len(mean), device=mean.device).split(spread.chunk):
        parts.append(_Chunk(mean[items], spread.take(items), SEED if seed is None else seed).run(samples))
    return Softmax(*(torch.cat([getattr(part, name) for part in parts]) for name in ("log_probs", "entropy", "error")))


@dataclass(frozen=True, eq=False)
class _Chunk:
    mean: Tensor
    spread: Spread
    seed: int

    def run(self, samples: int | None) -> Softmax:
        n, k = self.mean.shape
        probs, entropy, error = torch.zeros_like(self.mean), self.mean.new_zeros(n), self.mean.new_zeros(n)
        done, open_ = 0, torch.arange(n, device=self.mean.device)
        for level, (size, sequences) in enumerate(_levels(samples, k)):
            p, h, e = self._level(open_, level, size, sequences)
            now = size * sequences
            new = now / (done + now)  # earlier points count as well
            probs[open_] = torch.lerp(probs[open_], p, new)
            entropy[open_] = torch.lerp(entropy[open_], h, new)
            error[open_] = e * math.sqrt(new)
            done += now
            open_ = open_[error[open_].detach() > (AMPLE if done * max(k, FEW) < CHEAP * FEW else ENOUGH)]
            if not len(open_):
                break
        return Softmax(self._logs(probs), entropy, error)

    def _level(self, items: Tensor, level: int, size: int, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities, expected entropy and error from so many sequences of points."""
        mean, spread = self.mean[items], self.spread.take(items)
        wide = spread.conditional.amax(-1) > NARROW
        probs, entropy = mean.new_zeros(sequences, *mean.shape), mean.new_zeros(len(mean))
        for which, integrated in ((wide, True), (~wide, False)):
            some = which.nonzero()[:, 0]
            if not len(some):
                continue
            seeds = range(self.seed + 97 * level, self.seed + 97 * level + sequences)
            points = torch.stack([_points(size, mean.shape[-1], seed, mean.dtype) for seed in seeds]).to(mean.device)
            found, entropy[some] = _average(mean[some], spread.take(some), points, integrated)
            probs[:, some] = found / found.sum(-1, keepdim=True)
        deviation = probs.detach().std(0) if sequences > 1 else torch.full_like(mean, torch.inf)
        return probs.mean(0), entropy, deviation.sum(-1) * math.sqrt(2 / math.pi / sequences) / 2

    def _logs(self, probs: Tensor) -> Tensor:
        """log p; where p is so small that sums of exponentials underflow, from sums of logarithms."""
        small = (probs < math.sqrt(torch.finfo(probs.dtype).tiny)).any(-1).nonzero()[:, 0]
        logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
        if len(small):
            points = _points(CHEAP // REPLICATES, probs.shape[-1], self.seed, probs.dtype).to(probs.device)
            spread, mean = self.spread.take(small), self.mean[small]
            each = [(mean + spread.steps(z)).log_softmax(-1).logsumexp(0) for z in points.split(_rows(mean))]
            far = torch.stack(each).logsumexp(0) - math.log(len(points))
            logs[small] = torch.where(probs[small] < math.sqrt(torch.finfo(probs.dtype).tiny), far, logs[small])
        return logs


def _levels(samples: int | None, classes: int) -> list[tuple[int, int]]:
    """Points of a sequence and number of sequences, level by level."""
    if samples is not None:
        sequences = min(REPLICATES, samples)
        return [(SHIFTS * -(-samples // (sequences * SHIFTS)), sequences)]
    sizes = [FIRST * 2**level for level in range(LEVELS)]
    return [(size, REPLICATES) for size in sizes if REPLICATES * size <= CHEAP or REPLICATES * size * classes <= MOST]


def _rows(mean: Tensor) -> int:
    return max(1, BLOCK // max(1, mean.numel()))


def _average(mean: Tensor, spread: Spread, points: Tensor, integrated: bool) -> tuple[Tensor, Tensor]:
    """Averages of the softmax over each sequence of points (r, S, K), (r, n, K), `integrated` over its own logit or as
    it is; and of its entropy over all, (n,)."""
    sequences, size, _ = points.shape
    total, entropy = mean.new_zeros(sequences, *mean.shape), mean.new_zeros(len(mean))
    for part in points.split(SHIFTS * max(1, _rows(mean) // (sequences * SHIFTS)), 1):
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
        rest = (own + 1 - e).scatter(-1, first, own).clamp(min=torch.finfo(f.dtype).tiny)
        odds = (f - rest.log() - spread.own(z)).unflatten(0, (sequences, -1, SHIFTS))
        total = total + _expected_sigmoid(odds, spread.conditional)
    return total / size, entropy / (sequences * size)


def _expected_sigmoid(x: Tensor, variance: Tensor) -> Tensor:
    """Σ_s E[sigmoid(x_s + √v t)], t ~ N(0, 1), for x (r, S, SHIFTS, n, K) and v (n, K), (r, n, K).

    By the trapezoidal rule. Of every few points each has nodes of its own, between those of the others: together they
    are as good as a finer rule.
    """
    far = -math.log(torch.finfo(x.dtype).tiny) - 8
    against = (-x).clamp(-far, far).exp_()
    shifts = torch.arange(SHIFTS, dtype=torch.float64)[:, None] / SHIFTS
    nodes = torch.arange(NODES, dtype=torch.float64) - NODES / 2 + shifts  # (SHIFTS, NODES)
    weights = (-nodes.square() / 2).softmax(-1).to(x)
    total, scale = x.new_zeros(len(x), *variance.shape), variance.sqrt()
    for node, weight in zip(nodes.to(x).T, weights.T, strict=True):
        away = (-node[:, None, None] * scale).exp()  # (SHIFTS, n, K)
        each = (against * away).add_(1).reciprocal_().sum(1)
        total = total + torch.einsum("h,rhnk->rnk", weight, each)
    return total


@lru_cache(maxsize=16)
def _kept(n: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    return base_points(n, dim, torch.empty(0, dtype=dtype), seed)


def _points(n: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    small = n * dim <= 2**18
    return _kept(n, dim, seed, dtype) if small else base_points(n, dim, torch.empty(0, dtype=dtype), seed)
