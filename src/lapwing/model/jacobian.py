"""Jacobian rows of a batch from the tape: one backward pass a direction, then (a, g) layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg import DenseRows, Jacobian, Layout
from lapwing.model.backward import pull, pull_all
from lapwing.model.batches import batch_size, call, take
from lapwing.model.fixednorm import FixedNorms
from lapwing.model.gradients import Gradients
from lapwing.model.harvest import Backward, Harvest, gradients_of, require_reaching, shaped
from lapwing.model.lazyrows import LazyRows, TapeJacobian
from lapwing.model.module import output_tensor
from lapwing.model.reading import Digest, Reading

BATCHED_ELEMENTS = 2**22  # sharing a backward pass pays for small networks and costs memory for large ones


@dataclass(frozen=True, eq=False)
class Linearization(Reading):
    """A network at a batch: outputs f (n, *event, c) and the rows vᵀJ for any output directions v."""

    def shared(self, directions: int) -> int:
        """How many of so many directions go into one backward pass."""
        if not self.plan.batched or self.create_graph:  # torch's batched double backward has gaps
            return 1
        elements = sum(record.out.numel() for record in self.finished.records)
        return directions if directions * elements <= BATCHED_ELEMENTS else 1

    def jacobian(self, directions: Tensor, digest: Digest | None = None) -> Jacobian:
        """Rows vᵀ ∂f/∂θ for directions (r, n, *event, c): one row a sample and direction. With a digest there are no
        rows of its blocks, but what `LazyRows.gradient_gram` is made of."""
        looped = self._loop(directions) if self.plan.looped else {}
        if not self._reached(directions):
            return self._from(LazyRows(self, self.gradients(directions), looped, directions.shape[0]))
        harvest = Harvest(self, len(directions), digest)
        self._bring_in(directions, harvest)
        return self._from(harvest.lazy(looped))

    def jacobian_at(self, k: int, directions: Tensor) -> Jacobian:
        """The same with gradients at one record alone, by passes that end there; zero at the others."""
        records, r = self.finished.records, directions.shape[0]
        found: list[tuple[Tensor, ...]] = [(torch.zeros(()).expand(r, *record.out.shape),) for record in records]
        if r and self.f.requires_grad:
            passes = [Backward(1, self._pull([records[k].edge], v)) for v in directions]
            found[k] = tuple(shaped(one, 0, records[k].out) for one in passes)
        return self._from(LazyRows(self, Gradients(tuple(found)), {}, r))

    @property
    def joined(self) -> bool:
        """Whether `jacobian_and_vjp` may be used."""
        return self.plan.joined and self.f.requires_grad

    def jacobian_and_vjp(
        self, directions: Tensor, v: Tensor, scale: Tensor, digest: Digest | None = None
    ) -> tuple[Jacobian, dict[str, Tensor | None]]:
        """Rows for directions of which the first is `scale` (n,) times v; and Σ vᵀ ∂f/∂θ from its backward pass."""
        harvest = Harvest(self, len(directions), digest)
        first, weights = self._joint(v)
        harvest.take(first, scale)
        del first
        self._bring_in(directions[1:], harvest)
        return self._from(harvest.lazy({}, scale)), weights

    def gradients_and_vjp(self, v: Tensor) -> tuple[Gradients, dict[str, Tensor | None]]:
        """∂(v·f)/∂out of every record, (1, *out.shape), and Σ vᵀ ∂f/∂θ from the same backward pass."""
        first, weights = self._joint(v)
        return self._gradients([first]), weights

    def _joint(self, v: Tensor) -> tuple[Backward, dict[str, Tensor | None]]:
        edges = [record.edge for record in self.finished.records]
        found = self._pull([*edges, *self.leaves.values()], v)
        weights = dict(zip(self.leaves, found[len(edges) :], strict=True))
        return Backward(1, found[: len(edges)]), weights

    def vjp(self, v: Tensor) -> dict[str, Tensor | None]:
        """Σ vᵀ ∂f/∂θ by parameter, None where f does not depend on it."""
        if not self.f.requires_grad:
            return dict.fromkeys(self.leaves)
        return dict(zip(self.leaves, self._pull([*self.leaves.values()], v), strict=True))

    def _from(self, rows: LazyRows) -> Jacobian:
        return TapeJacobian(rows, self.plan.layout) if self.params.index is None else self._subnetwork(rows)

    def _subnetwork(self, rows: LazyRows) -> Jacobian:
        index = self.params.index
        assert index is not None
        columns, places = [], []
        for block, at in zip(self.plan.blocks, range(len(rows)), strict=True):
            own = block.places.index.to(index.device)
            keep = torch.isin(own, index).nonzero().flatten()
            if keep.numel():
                columns.append(rows[at].dense()[..., keep])
                places.append(torch.searchsorted(index, own[keep]))
        order = torch.cat(places).argsort()
        values = torch.cat(columns, -1)[..., order]
        return Jacobian((DenseRows(values),), Layout.contiguous([index.numel()]))

    def gradients(self, directions: Tensor) -> Gradients:
        """∂(v·f)/∂out of every record, (r, *out.shape)."""
        records, r = self.finished.records, directions.shape[0]
        if not self._reached(directions):
            return Gradients(tuple((torch.zeros(()).expand(r, *record.out.shape),) for record in records))
        return self._gradients([*self._passes(directions)])

    def _gradients(self, passes: list[Backward]) -> Gradients:
        require_reaching(self, passes[0])
        return gradients_of(self, passes)

    def _reached(self, directions: Tensor) -> bool:
        """Whether there is anything to go back from and to."""
        return bool(self.finished.records) and bool(len(directions)) and self.f.requires_grad

    def _passes(self, directions: Tensor) -> Iterator[Backward]:
        """As many backward passes as directions, or one where they share it."""
        edges, r = [record.edge for record in self.finished.records], directions.shape[0]
        if 1 < r <= self.shared(r):
            yield Backward(r, pull_all(self.f, edges, directions))
            return
        for v in directions:
            yield Backward(1, self._pull(edges, v))

    def _bring_in(self, directions: Tensor, harvest: Harvest) -> None:
        for one in self._passes(directions):
            harvest.take(one)
            del one  # before the next pass takes as much

    def _pull(self, edges: list, v: Tensor) -> tuple[Tensor | None, ...]:
        return pull(self.f, edges, v, create_graph=self.create_graph)

    def _loop(self, directions: Tensor) -> dict[str, Tensor]:
        """Rows of the parameters that the tape cannot read: every sample alone, {name: (n, r, size)}."""
        wanted = [self.leaves[name] for name in self.plan.looped]
        if not len(directions):  # samples that need none, whose inputs alone are wanted
            return {name: p.new_zeros(self.n, 0, p.numel()) for name, p in zip(self.plan.looped, wanted, strict=True)}
        size = batch_size(self.inputs)
        rows: list[list[Tensor]] = [[] for _ in wanted]
        with torch.enable_grad(), FixedNorms():
            for k in range(self.n):
                alone = take(self.inputs, slice(k, k + 1), size)
                f = self.outputs(output_tensor(call(self.module, alone, self.leaves)))
                for v in directions[:, k : k + 1]:
                    grads = pull(f, wanted, v, create_graph=self.create_graph)
                    for row, g, p in zip(rows, grads, wanted, strict=True):
                        row.append(torch.zeros_like(p).flatten() if g is None else g.to_dense().flatten())
        shape = (self.n, directions.shape[0], -1)
        return {name: torch.stack(row).reshape(shape) for name, row in zip(self.plan.looped, rows, strict=True)}
