"""Samples that need the same number of directions, brought together from several batches.

A backward pass costs the same for every sample of a batch, needed or not. Confident classifiers need nine directions
for a few samples and none for most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from lapwing.curvature.factor import GGN, Directions, Factor
from lapwing.model import batch_size, take, tensors_in
from lapwing.model.batches import Inputs, concatenate, described, lists_values, per_sample

WORTH = 0.6  # share of the directions of a batch that must be needed for running them all at once
WAITING = 2**27  # bytes of samples that wait
OVERHEAD = 8  # samples that a backward pass of its own costs


@dataclass(frozen=True, eq=False)
class Group:
    """Samples that are run together."""

    inputs: Inputs
    directions: Directions
    score: Tensor | None
    batches: tuple[int, ...] = ()  # where they come from, for messages

    def parts(self, size: int) -> Iterator[Group]:
        """In even parts of at most so many samples, at least one."""
        n = len(self.directions.needed)
        for rows in torch.arange(n, device=self.directions.needed.device).chunk(-(-n // max(1, size))):
            yield self if len(rows) == n else self.take(rows)

    def take(self, rows: Tensor) -> Group:
        """Some of its samples."""
        n, score = len(self.directions.needed), self.score
        part = None if score is None else score[rows]
        return Group(take(self.inputs, rows, n), self.directions.take(rows), part, self.batches)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*tensors_in(self.inputs), self.directions.columns))


@dataclass(eq=False)
class Regrouped:
    """Waiting samples, by the number of directions they need, whether these begin with the score, and the shapes,
    names and other arguments of their inputs."""

    size: int = 1  # samples that a group is run with: those of the largest batch so far
    waiting: dict[tuple, list[Group]] = field(default_factory=dict)
    taking: bool = False  # whether it took the last batch

    def admit(
        self, inputs: Inputs, directions: Directions, score: Tensor | None, factor: Factor, number: int = 0
    ) -> bool:
        """Take a batch, or decline it where running it as it is costs no more."""
        n, self.taking = batch_size(inputs), False
        self.size = max(self.size, n)
        build = _build(inputs, n) if isinstance(factor, GGN) else None
        if not isinstance(factor, GGN) or build is None:
            return False
        needed = self._with_scores(directions, score, factor)
        if float(needed.double().mean()) > WORTH * int(needed.max()):
            return False
        self.taking = True
        batch = Group(inputs, directions, score, (number,))
        alike = (directions.scale is None, build)
        for count in needed.unique().tolist():
            if count:
                rows = (needed == count).nonzero().flatten()
                self.waiting.setdefault((_rounded(count), alike), []).append(batch.take(rows))
        return True

    def _with_scores(self, directions: Directions, score: Tensor | None, factor: GGN) -> Tensor:
        """Directions needed, at least one where the sample matters to the gradient of the log-likelihood."""
        if score is None:
            return directions.needed
        sizes = score.flatten(1).double().norm(dim=1)
        ascending = sizes.sort().values
        tolerance = torch.finfo(score.dtype).eps if factor.tolerance is None else factor.tolerance
        most = int((ascending.cumsum(0) <= tolerance * sizes.sum()).sum())
        matters = sizes >= (ascending[most] if most < len(sizes) else torch.inf)
        return torch.maximum(directions.needed, matters.to(directions.needed))

    def full(self) -> Iterator[Group]:
        """Groups that have reached their size, and the largest of the others while they take too much memory."""
        for key in list(self.waiting):
            if _samples(self.waiting[key]) >= self.size:
                yield _joined(self.waiting.pop(key))
        while sum(part.bytes for parts in self.waiting.values() for part in parts) > WAITING:
            largest = max(self.waiting, key=lambda key: _samples(self.waiting[key]))
            yield _joined(self.waiting.pop(largest))

    def rest(self) -> Iterator[Group]:
        """Everything that still waits. A few samples join those that need more rather than run alone."""
        levels = sorted(self.waiting.items(), key=lambda item: item[0][0])
        self.waiting = {}
        for alike in {key[1] for key, _ in levels}:
            own = [(key[0], parts) for key, parts in levels if key[1] == alike and parts]
            for (count, parts), following in zip_longest(own, own[1:]):
                if following and _samples(parts) * (following[0] - count) < OVERHEAD * (count + 2):
                    following[1].extend(parts)
                else:
                    yield _joined(parts)


def _build(inputs: Inputs, n: int) -> tuple | None:
    """A key that batches share if their samples may run together; None where samples cannot be taken out of a batch.

    They cannot where a tensor belongs to the batch as a whole, where a list holds one plain value per sample, or where
    an argument is an object that cannot be compared.
    """
    if not all(per_sample(t, n) for t in tensors_in(inputs)) or lists_values(inputs, n):
        return None
    try:
        return described(inputs, lambda t: (t.shape[1:], t.dtype))
    except TypeError:
        return None


def _samples(parts: list[Group]) -> int:
    return sum(len(part.directions.needed) for part in parts)


def _rounded(count: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, …: a few wasted directions for larger groups."""
    power = 1 << max(0, count.bit_length() - 1)
    return next(level for level in (power, power + power // 2, 2 * power) if level >= count)


def _joined(parts: list[Group]) -> Group:
    if len(parts) == 1:
        return parts[0]
    inputs, first = concatenate([part.inputs for part in parts]), parts[0].directions
    columns = torch.cat([p.directions.columns for p in parts])
    needed = torch.cat([p.directions.needed for p in parts])
    order = torch.cat([p.directions.order for p in parts if p.directions.order is not None])
    scores = [p.score for p in parts if p.score is not None]
    batches = tuple(sorted({number for part in parts for number in part.batches}))
    scales = [p.directions.scale for p in parts if p.directions.scale is not None]
    joined = Directions(columns, needed, first.event, order, torch.cat(scales) if scales else None)
    return Group(inputs, joined, torch.cat(scores) if scores else None, batches)
