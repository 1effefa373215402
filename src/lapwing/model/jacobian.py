"""Jacobian rows of a batch from the tape: one backward pass a direction, then (a, g) layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.linalg import DenseRows, Jacobian, Layout
from lapwing.model.backward import pull, pull_all
from lapwing.model.batches import batch_size, call, take
from lapwing.model.gradients import Gradients
from lapwing.model.lazyrows import LazyRows, TapeJacobian, small_rows
from lapwing.model.module import output_tensor
from lapwing.model.plan import PlanChanged
from lapwing.model.reading import Digest, Reading

BATCHED_ELEMENTS = 2**22  # sharing a backward pass pays for small networks and costs memory for large ones


@dataclass(frozen=True, eq=False)
class Backward:
    """What one backward pass of r directions brings to each record, or what was made of it at once."""

    r: int
    found: tuple[Tensor | None, ...]
    rows: dict[int, list[Tensor]] = field(default_factory=dict)  # by record, (n, r, *shape) for each live tensor
    digests: dict[int, Tensor] = field(default_factory=dict)  # by record, (n, r, q, o) or (q, o, o)


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
        return self._from(self._lazy([self._turned(one, digest) for one in self._passes(directions)], looped))

    def jacobian_at(self, k: int, directions: Tensor) -> Jacobian:
        """The same with gradients at one record alone, by passes that end there; zero at the others."""
        records, r = self.finished.records, directions.shape[0]
        found: list[tuple[Tensor, ...]] = [(torch.zeros(()).expand(r, *record.out.shape),) for record in records]
        if r and self.f.requires_grad:
            passes = [Backward(1, self._pull([records[k].edge], v)) for v in directions]
            found[k] = _shaped(passes, 0, records[k].out)
        return self._from(LazyRows(self, Gradients(tuple(found)), {}, r))

    @property
    def joined(self) -> bool:
        """Whether `jacobian_and_vjp` may be used."""
        return self.plan.joined and self.f.requires_grad

    def jacobian_and_vjp(
        self, directions: Tensor, v: Tensor, scale: Tensor, digest: Digest | None = None
    ) -> tuple[Jacobian, dict[str, Tensor | None]]:
        """Rows for directions of which the first is `scale` (n,) times v; and Σ vᵀ ∂f/∂θ from its backward pass."""
        first, weights = self._joint(v)
        passes = [self._turned(first, digest, scale)]
        del first  # what it brings is not kept while the others run
        passes.extend(self._turned(one, digest) for one in self._passes(directions[1:]))
        return self._from(self._lazy(passes, {}, scale)), weights

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

    def _turned(self, one: Backward, digest: Digest | None = None, scale: Tensor | None = None) -> Backward:
        """With rows in place of gradients where those are `early`, and with digests. What `scale` (n,) is still to
        multiply is multiplied in digests."""
        self._require_reaching(one)
        rows: dict[int, list[Tensor]] = {}
        digests: dict[int, Tensor] = {}
        with torch.no_grad():
            for k, (rule, call_) in self.early.items():
                record, out = self.finished.records[k], self.plan.steps[k].out
                assert out is not None
                rows[k] = small_rows(rule, call_, record, _shaped([one], k, record.out)[0], out, self.n)
            for k in self.digested(digest):
                assert digest is not None
                digests[k] = self._digest(k, digest, one, scale)
        gone = rows.keys() | digests.keys()
        return Backward(one.r, tuple(None if k in gone else g for k, g in enumerate(one.found)), rows, digests)

    def _digest(self, k: int, digest: Digest, one: Backward, scale: Tensor | None) -> Tensor:
        (rule, call_), record, out = self._matrix(k), self.finished.records[k], self.plan.steps[k].out
        assert out is not None
        g = _shaped([one], k, record.out)[0]
        if digest.kind == "sums":
            summed = rule.left_sum(call_, g, out, self.n)
            return summed if scale is None else summed * scale.to(summed)[:, None, None, None]
        g = g if scale is None else g * out.spread(scale, record.out, self.n)
        return rule.left_gram(call_, g.to(self.params.dtype), out, self.n)

    def _require_reaching(self, one: Backward) -> None:
        for g, reaches in zip(one.found, self.plan.reaching, strict=False):
            if g is None and reaches:  # the graph of this batch lost a record that the self-check saw
                raise PlanChanged

    def _lazy(self, passes: list[Backward], looped: dict[str, Tensor], scale: Tensor | None = None) -> LazyRows:
        """Rows of these passes, the first of them to be multiplied with one number a sample (but for digests)."""
        early: dict[int, list[list[Tensor]]] = {}
        for k in passes[0].rows:
            early[k] = [one.rows[k] for one in passes]
            if scale is not None:
                early[k][0] = [row * scale.to(row).reshape(-1, *(1,) * (row.ndim - 1)) for row in early[k][0]]
        digests = {k: [one.digests[k] for one in passes] for k in passes[0].digests}
        return LazyRows(self, self._gradients(passes, scale), looped, sum(one.r for one in passes), early, digests)

    def _pull(self, edges: list, v: Tensor) -> tuple[Tensor | None, ...]:
        return pull(self.f, edges, v, create_graph=self.create_graph)

    def _gradients(self, passes: list[Backward], scale: Tensor | None = None) -> Gradients:
        """What they found at every record, the first of them to be multiplied with one number a sample."""
        records, n, gone = self.finished.records, self.n, passes[0].rows.keys() | passes[0].digests.keys()
        if not gone:
            self._require_reaching(passes[0])
        found = tuple(() if k in gone else _shaped(passes, k, record.out) for k, record in enumerate(records))
        if scale is None:
            return Gradients(found)
        layouts = [None if k in gone else step.out for k, step in enumerate(self.plan.steps)]
        scales = (
            None if samples is None else samples.spread(scale, record.out, n)
            for record, samples in zip(records, layouts, strict=True)
        )
        return Gradients(found, tuple(scales))

    def _loop(self, directions: Tensor) -> dict[str, Tensor]:
        """Rows of the parameters that the tape cannot read: every sample alone, {name: (n, r, size)}."""
        wanted = [self.leaves[name] for name in self.plan.looped]
        size = batch_size(self.inputs)
        rows: list[list[Tensor]] = [[] for _ in wanted]
        with torch.enable_grad():
            for k in range(self.n):
                alone = take(self.inputs, slice(k, k + 1), size)
                f = self.outputs(output_tensor(call(self.module, alone, self.leaves)))
                for v in directions[:, k : k + 1]:
                    grads = pull(f, wanted, v, create_graph=self.create_graph)
                    for row, g, p in zip(rows, grads, wanted, strict=True):
                        row.append(torch.zeros_like(p).flatten() if g is None else g.to_dense().flatten())
        shape = (self.n, directions.shape[0], -1)
        return {name: torch.stack(row).reshape(shape) for name, row in zip(self.plan.looped, rows, strict=True)}


def _shaped(passes: list[Backward], k: int, out: Tensor) -> tuple[Tensor, ...]:
    """(r, *out.shape) of each pass at record k; zeros where they do not reach it."""
    return tuple(
        out.new_zeros(()).expand(one.r, *out.shape) if (g := one.found[k]) is None else g.reshape(one.r, *out.shape)
        for one in passes
    )
