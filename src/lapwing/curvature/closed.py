"""The curvature of a last layer in closed form: from its inputs a and the curvature Λ of the outputs, Σ Λ ⊗ a aᵀ.

One plain forward pass leaves everything a structure needs. No direction is back-propagated, and where the likelihood
knows sums and diagonals of Λ, no K × K matrix of a sample is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.curvature.factor import NOTICED, Factor
from lapwing.likelihoods import Likelihood
from lapwing.model import Batch, Network, PlanChanged
from lapwing.model.calls import weighted
from lapwing.model.features import Features

TOGETHER = 4096  # samples whose curvature is added at a time: smaller batches wait for each other
BYTES = 2**26  # of outputs, inputs and curvature of the samples that wait
DENSE = 2**23  # bytes of matrices Λ and products of inputs at a time
PANEL = 16  # inputs per product: the curvature is symmetric, and only one half is computed


class Posed(Protocol):
    """The part of a `Problem` that this file needs."""

    @property
    def network(self) -> Network: ...
    @property
    def likelihood(self) -> Likelihood: ...
    @property
    def generator(self) -> torch.Generator | None: ...
    def read(self, label: str) -> Iterator[Batch]: ...
    def naming(self, batch: Batch) -> AbstractContextManager[Any]: ...
    def prepare(self, batch: Batch, f: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Part:
    """Some samples after their forward pass: outputs (n, *event, c), targets, inputs (n, *event, i), weights (n,)."""

    f: Tensor
    y: Tensor
    a: Tensor
    weights: Tensor | None

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.f, self.y, self.a))

    def joins(self, other: Part) -> bool:
        """Whether both can become one part."""
        alike = all(getattr(self, k).shape[1:] == getattr(other, k).shape[1:] for k in ("f", "y", "a"))
        return alike and self.y.dtype == other.y.dtype and (self.weights is None) == (other.weights is None)


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads the features of a problem's data, and keeps them in memory if they are needed again."""

    features: Features
    keep: bool
    limit: int  # bytes that may be kept
    kept: list[Part] = field(default_factory=list)
    state: dict[str, bool] = field(default_factory=dict)  # "whole": all data are kept; "full": they are too many

    def parts(self, problem: Posed, label: str, together: int = TOGETHER) -> Iterator[Part]:
        """Yield all samples, a few batches at a time; from memory where they are kept."""
        if self.state.get("whole"):
            yield from self.kept
            return
        for part in _joined(self._batches(problem, label), together):
            if self.keep and not self.state.get("full"):
                self.kept.append(part)
                if sum(each.bytes for each in self.kept) > self.limit:
                    self.kept.clear()
                    self.state["full"] = True
            yield part
        if self.keep and not self.state.get("full"):
            self.state["whole"] = True

    def _batches(self, problem: Posed, label: str) -> Iterator[Part]:
        for batch in problem.read(label):
            with problem.naming(batch):
                found = self.features.read(batch.inputs)
                if found is None:
                    raise PlanChanged
                f, a = found
                problem.network.require_apart(batch.inputs, f)
                y = problem.prepare(batch, f)
            # parts wait for each other, and a loader may fill its tensors with the next batch
            inputs = self.features.with_ones(a, problem.network.params.dtype)
            weights = None if batch.weights is None else batch.weights.clone()
            yield Part(f, y.clone(), inputs if self.features.bias else inputs.clone(), weights)


def _joined(parts: Iterator[Part], together: int) -> Iterator[Part]:
    """Join parts until they have `together` samples or `BYTES` bytes."""
    waiting: list[Part] = []
    samples = size = 0
    for part in parts:
        if waiting and not waiting[0].joins(part):
            yield _one(waiting)
            waiting, samples, size = [], 0, 0
        waiting.append(part)
        samples, size = samples + len(part.f), size + part.bytes
        if samples >= together or size > BYTES:
            yield _one(waiting)
            waiting, samples, size = [], 0, 0
    if waiting:
        yield _one(waiting)


def _one(parts: list[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    weights = [part.weights for part in parts if part.weights is not None]
    f, y, a = (torch.cat([getattr(part, name) for part in parts]) for name in ("f", "y", "a"))
    return Part(f, y, a, torch.cat(weights) if weights else None)


@dataclass(frozen=True, eq=False)
class Head:
    """Samples at a last layer, and the curvature Λ of its outputs z: of the exact GGN, or of given directions.

    Positions of a sample (tokens) are rows of their own, so that there are m = n · positions rows.
    """

    part: Part
    features: Features
    likelihood: Likelihood
    directions: Tensor | None  # (r, n, c) of a factor that is not exact

    @property
    def a(self) -> Tensor:
        """The inputs of the layer, (m, i), with a 1 for the bias."""
        return self.part.a.reshape(-1, self.part.a.shape[-1])

    @property
    def positions(self) -> int:
        return len(self.a) // len(self.part.f)

    @cached_property
    def counts(self) -> Tensor:
        """The weight of each sample, 0 where it has no target, (n,)."""
        part = self.part
        ones = torch.ones(len(part.f), dtype=part.a.dtype, device=part.f.device)
        fresh = ones if part.weights is None else part.weights.to(ones)
        return fresh * self.likelihood.counted(part.f, part.y)

    @property
    def width(self) -> int:
        """How many directions span Λ."""
        if self.directions is not None:
            return len(self.directions)
        outputs = self.part.f.shape[-1]
        return outputs - 1 if self.likelihood.softmax else outputs

    def rows(self, values: Tensor) -> Tensor:
        """Repeat numbers per sample for each of its positions, (m,)."""
        return values.repeat_interleave(self.positions) if self.positions > 1 else values

    def total(self) -> Tensor:
        """Return Σ Λ, (o, o)."""
        part = self.part
        if self.directions is not None:
            rows = self.features.back(self.directions).reshape(-1, self.features.shape[0])
            return rows.mT @ rows
        found = self.likelihood.curvature_sum(part.f, part.y, part.weights)
        tail = self.features.tail
        return found if tail is None else tail.mT.to(found) @ found @ tail.to(found)

    def diagonal(self, basis: Tensor | None = None) -> Tensor:
        """Return the diagonal of UᵀΛU for every row, (m, k), with a basis U (o, k) or the identity."""
        part, tail = self.part, self.features.tail
        if self.directions is not None:
            g = self.features.back(self.directions)
            return (g if basis is None else g @ basis.to(g)).square().sum(0).to(part.a)
        if tail is not None:
            basis = tail if basis is None else tail.to(basis) @ basis
        found = self.likelihood.curvature_diagonal(part.f, part.y, basis)
        found = found.reshape(-1, found.shape[-1]).to(part.a)
        return found if part.weights is None else found * self.rows(part.weights.to(found))[:, None]

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield Λ (k, o, o) and a (k, i) of a few rows at a time, without those that no weight would notice."""
        roots, a = self._roots(), self.a
        sizes = (roots.square().sum((1, 2)) * a.square().amax(1)).double()  # bounds the curvature of every weight
        ascending, order = sizes.sort()
        lost = ascending.cumsum(0) <= min(NOTICED, torch.finfo(roots.dtype).eps * float(ascending.sum()))
        chosen = order[int(lost.sum()) :].sort().values
        o, i = roots.shape[1], a.shape[1]
        for few in chosen.split(max(1, DENSE // (a.element_size() * (o * o + PANEL * i)))):
            root = roots[few]
            yield root @ root.mT, a[few]

    def gram(self) -> Tensor:
        """Return Σ Λ_op a_i a_j for pairs o ≥ p, (pairs, i, i).

        Where the rows of Λ add up to zero (softmax), the pairs o = p follow from the others.
        """
        o, i = self.features.shape[0], self.part.a.shape[-1]
        zero_rows = self.directions is None and self.features.tail is None and self.likelihood.shift_invariant
        first, second = torch.tril_indices(o, o, -1 if zero_rows else 0, device=self.part.a.device)
        total = self.part.a.new_zeros(len(first), i, i)
        for curvature, a in self.blocks():
            pairs = curvature[:, first, second].mT.contiguous()  # (pairs, k)
            for start in range(0, i, PANEL):  # the upper half of each matrix is enough
                products = a[:, start : start + PANEL, None] * a[:, None, start:]  # (k, panel, rest)
                found = pairs @ products.flatten(1)
                total[:, start : start + PANEL, start:] += found.unflatten(1, products.shape[1:])
        total = total.triu() + total.triu(1).mT
        if not zero_rows:
            return total
        whole = total.new_zeros(o, o, i, i)
        whole[first, second] = total
        own = whole.sum(0) + whole.sum(1)
        whole[range(o), range(o)] = -own
        return whole[tuple(torch.tril_indices(o, o, device=total.device))]

    def _roots(self) -> Tensor:
        """Return S (m, o, r) with S Sᵀ = Λ."""
        part, tail = self.part, self.features.tail
        if self.directions is not None:
            return self.features.back(self.directions).movedim(0, -1).to(part.a)
        root = self.likelihood.factor(part.f, part.y)
        root = root.reshape(len(part.f), -1, *root.shape[-2:])
        if part.weights is not None:
            root = root * part.weights.to(root).sqrt()[:, None, None, None]
        root = root.flatten(0, 1).to(part.a)
        return root if tail is None else tail.mT.to(root) @ root

    def gradient(self) -> Tensor:
        """Return Σ φ·∇ log p by the weights of the layer, flat, (o · (i + 1),), with the bias as the last column."""
        part, likelihood = self.part, self.likelihood
        score = likelihood.score(part.f, part.y) * likelihood.common_factor.detach().to(part.f)
        g = self.features.back(weighted(score, part.weights))
        return (g.reshape(len(self.a), -1).to(self.a).mT @ self.a).double().reshape(-1)


Closed = Callable[[Head], None]
"""Adds some samples of a last layer to the sums of a structure."""


def heads(problem: Posed, reader: Reader, factor: Factor, label: str) -> Iterator[Head]:
    """Yield all samples of a problem at its last layer. Sampled directions are drawn batch by batch."""
    for part in reader.parts(problem, label, TOGETHER if factor.exact else 1):
        directions = None
        if not factor.exact:
            chosen = factor.choose(problem.likelihood, part.f, part.y, part.weights, problem.generator)
            directions = chosen.between(0, chosen.count)
        yield Head(part, reader.features, problem.likelihood, directions)


def unfolded(total: Tensor, outputs: int) -> Tensor:
    """Write out Σ Λ ⊗ a aᵀ (o·i, o·i) from its blocks of pairs o ≥ p, (pairs, i, i)."""
    first, second = torch.tril_indices(outputs, outputs, device=total.device)
    whole = total.new_empty(outputs, outputs, *total.shape[1:])
    whole[first, second] = total
    whole[second, first] = total
    return whole.transpose(1, 2).reshape(outputs * total.shape[1], -1)
