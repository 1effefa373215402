"""E[softmax(f)] for Gaussian f by many points of all logits but one, which is integrated in closed form.

Given the other logits, f_k is Gaussian, and its softmax is a sigmoid of f_k minus the log-sum of the others. So each
point gives every class the expectation of a sigmoid in place of its value. Where logits are wide and independent, a
point would else give all its weight to one class, and 65 classes would need 100,000 points for what 1,000 do here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

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
NODES, SHIFTS = 10, 4  # of the trapezoidal rule for the logit that is integrated, a standard deviation apart
LOWEST, FAR = -80.0, 1e6  # a logit that adds nothing, and one of which no exponential is slow; a distance beyond all
NARROW = 0.1  # conditional variance up to which the value of a sigmoid is as good as its expectation

Points = Callable[[int, int, int], Tensor]
"""(level, points per sequence, sequences) → standard normal points (sequences, points per sequence, K)."""
Estimate = tuple[Tensor, Tensor, Tensor]
"""Probabilities (n, K), expected entropy of softmax(f) and estimated total variation from the truth, each (n,)."""


class Drawn(Protocol):
    """Logits at standard normal points: the part of a `Spread` that this way asks for."""

    @property
    def conditional(self) -> Tensor:
        """Var(f_k | all differences between other logits), (n, K)."""

    def steps(self, z: Tensor) -> Tensor:
        """f − m at standard normal points (S, K), (K, n, S); what all logits share is left out."""

    def own(self, z: Tensor) -> Tensor:
        """f_k − E[f_k | all differences between other logits] at the same points, (K, n, S)."""

    def take(self, items: Tensor) -> Any:
        """Return the logits of some items."""


def by_levels(mean: Tensor, spread: Drawn, points: Points, samples: int | None) -> Estimate:
    """Average over points, with new levels of them for the items whose error is too large still."""
    classes = mean.shape[-1]
    steps = enumerate(levels_of(samples, classes))
    _, (size, sequences) = next(steps)
    probs, entropy, error = _level(mean, spread, points(0, size, sequences))
    done = size * sequences
    open_ = _open(error, done, classes).nonzero()[:, 0]
    for level, (size, sequences) in steps:
        if not len(open_):
            break
        whole = len(open_) == len(mean)
        kept, drawn = (mean, spread) if whole else (mean[open_], spread.take(open_))
        p, h, e = _level(kept, drawn, points(level, size, sequences))
        now = size * sequences
        new = now / (done + now)  # earlier points count as well
        probs[open_] = torch.lerp(probs[open_], p, new)
        entropy[open_] = torch.lerp(entropy[open_], h, new)
        error[open_] = e * math.sqrt(new)
        done += now
        open_ = open_[_open(error[open_], done, classes)]
    return probs, entropy, error


def by_traced_levels(mean: Tensor, spread: Drawn, points: Points, samples: int | None) -> Estimate:
    """Do the same without branches, for export.

    All items take the points of every level up to `TRACED` of them, and each keeps the average of those that
    `by_levels` would take.
    """
    probs, entropy = torch.zeros_like(mean), torch.zeros_like(mean[:, 0])
    error, done = torch.full_like(entropy, torch.inf), 0
    wide = (spread.conditional.amax(-1) > NARROW)[:, None]
    for level, (size, sequences) in enumerate(traced_levels(samples, mean.shape[-1])):
        now, taken = size * sequences, points(level, size, sequences)
        integrated, h = _average(mean, spread, taken, True, whole=True)
        plain, _ = _average(mean, spread, taken, False, whole=True)
        found = torch.where(wide, integrated, plain)
        found = found / found.sum(-1, keepdim=True)
        new = now / (done + now)
        still = _open(error, done, mean.shape[-1])
        probs = torch.where(still[:, None], torch.lerp(probs, found.mean(0), new), probs)
        entropy = torch.where(still, torch.lerp(entropy, h, new), entropy)
        error = torch.where(still, _error_of(found) * math.sqrt(new), error)
        done += now
    return probs, entropy, error


def _open(error: Tensor, done: int, classes: int) -> Tensor:
    """Tell which items need more points after so many."""
    few = done * max(classes, FEW) < CHEAP * FEW
    return error.detach() > (AMPLE if few else ENOUGH)


def _level(mean: Tensor, spread: Drawn, points: Tensor) -> Estimate:
    """Return probabilities, expected entropy and error from so many sequences of points."""
    wide = spread.conditional.amax(-1) > NARROW
    count = int(wide.sum())
    if count in (0, len(mean)):
        probs, entropy = _average(mean, spread, points, integrated=count > 0)
    else:
        probs, entropy = mean.new_zeros(len(points), *mean.shape), mean.new_zeros(len(mean))
        for which, integrated in ((wide, True), (~wide, False)):
            some = which.nonzero()[:, 0]
            probs[:, some], entropy[some] = _average(mean[some], spread.take(some), points, integrated)
    probs = probs / probs.sum(-1, keepdim=True)
    return probs.mean(0), entropy, _error_of(probs)


def _error_of(probs: Tensor) -> Tensor:
    """Estimate the total variation of the average of several sequences (r, n, K) from the exact value, (n,)."""
    sequences = probs.shape[0]
    deviation = probs.detach().std(0) if sequences > 1 else torch.full_like(probs[0], torch.inf)
    return deviation.sum(-1) * math.sqrt(2 / math.pi / sequences) / 2


def traced_levels(samples: int | None, classes: int) -> list[tuple[int, int]]:
    """Return the levels of which all items take the points where no choice may depend on them."""
    levels: list[tuple[int, int]] = []
    total = 0
    for size, sequences in levels_of(samples, classes):
        total += size * sequences
        if levels and total > TRACED:
            break
        levels.append((size, sequences))
    return levels


def levels_of(samples: int | None, classes: int) -> list[tuple[int, int]]:
    """Return the points per sequence and the number of sequences of each level."""
    if samples is not None:
        sequences = min(REPLICATES, samples)
        return [(SHIFTS * -(-samples // (sequences * SHIFTS)), sequences)]
    sizes = [FIRST * 2**level for level in range(LEVELS) if FIRST * 2**level * classes >= LEAST]
    return [(size, REPLICATES) for size in sizes if REPLICATES * size <= CHEAP or REPLICATES * size * classes <= MOST]


def points_at_once(mean: Tensor) -> int:
    """Return how many points of all items are under way at a time."""
    return max(1, BLOCK // max(1, mean.numel()))


def _average(
    mean: Tensor, spread: Drawn, points: Tensor, integrated: bool, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """Average the softmax over each sequence of points (r, S, K), giving (r, n, K), and its entropy over all, (n,).

    `integrated`: each probability is integrated over its own logit instead of taken at the point. `whole`: all points
    are taken at once. Classes are the first dimension here, so that sums over them go along whole vectors of points.
    """
    sequences, size, _ = points.shape
    total, entropy = mean.new_zeros(*mean.mT.shape, sequences), mean.new_zeros(mean.shape[0])
    groups = points.unflatten(1, (-1, SHIFTS)).transpose(1, 2)  # (r, SHIFTS, S / SHIFTS, K)
    for part in groups.split(size if whole else max(1, points_at_once(mean) // (sequences * SHIFTS)), 2):
        z = part.flatten(0, 2)
        f = mean.mT.unsqueeze(-1) + spread.steps(z)
        f = f - f.amax(0)
        below = f.sign().neg()  # 0 for the highest and 1 for the others
        e = f.clamp(min=LOWEST).exp()
        own = (e * below).sum(0) + (len(f) - 1 - below.sum(0))  # Σ e − 1 without rounding
        p = e / (own + 1)
        entropy = entropy + ((own + 1).log() - (p * f).sum(0)).sum(-1)
        shape = part.shape[:3]
        if not integrated:
            total = total + p.unflatten(-1, shape).sum((-2, -1))
            continue
        second = (f + (below - 1) * FAR).amax(0)  # stands for the log-sum of all but the highest, where that underflows
        highest = torch.where(own > len(f) * math.exp(LOWEST / 2), own.log(), second)
        rest = (own + 1 - e).clamp(min=math.exp(LOWEST)).log()
        odds = f - torch.lerp(highest, rest, below) - spread.own(z)
        total = total + _expected_sigmoid(odds.unflatten(-1, shape), spread.conditional.mT)
    return total.permute(2, 1, 0) / size, entropy / (sequences * size)


def _expected_sigmoid(x: Tensor, variance: Tensor) -> Tensor:
    """Return Σ_s E[sigmoid(x_s + √v t)], t ~ N(0, 1), for x (K, n, r, SHIFTS, S) and v (K, n), as (K, n, r).

    This uses the trapezoidal rule. The points of every one of the `SHIFTS` groups have their own nodes, between those
    of the others, so that together they are as good as a finer rule.
    """
    shifts = torch.arange(SHIFTS, dtype=torch.float64)[:, None] / SHIFTS
    nodes = torch.arange(NODES, dtype=torch.float64) - NODES / 2 + shifts  # (SHIFTS, NODES)
    weights = (-nodes.square() / 2).softmax(-1).to(x)
    moves = variance.sqrt()[..., None, None, None, None] * nodes.to(x).unsqueeze(1)  # (K, n, 1, SHIFTS, 1, NODES)
    total = x.new_zeros(x.shape[:3])
    for move, weight in zip(moves.unbind(-1), weights.unbind(-1), strict=True):
        total = total + (x + move).clamp_(LOWEST, -LOWEST).sigmoid_().sum(-1) @ weight
    return total
