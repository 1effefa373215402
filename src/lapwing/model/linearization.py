"""A network at a batch: its outputs, and backward passes from them to rows of its Jacobian or to sums over samples.

Rows are per sample and per block of parameters, and are formed from gradients when they are asked for.

`torch.autograd.grad(f, inputs, v)` imports sympy to compare two shapes: half a second and 44 MB in the first fit of a
process. `pull` and `pull_all` differentiate the number vᵀf instead, which gives the same gradients without that import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapwing.linalg import DeferredRows, DenseRows, Extent, FactoredRows, Jacobian, Layout, MatrixRows, Rows, Term
from lapwing.linalg.rows import added
from lapwing.model.calls import Inputs, batch_size, call, output_tensor, take, warnings_here, weighted
from lapwing.model.explicitrows import explicit_rows, small_rows
from lapwing.model.params import Params
from lapwing.model.rules import Call, MatrixRule, RowsRule, Samples
from lapwing.model.rules.rule import gram_by_group
from lapwing.model.tape import Block, FixedNorms, Plan, PlanChanged, RecordedPass

BATCHED_ELEMENTS = 2**22  # sharing a backward pass pays for small networks and costs memory for large ones
SMALLER = 4  # how many times smaller than its gradients a result must be to be formed as soon as they arrive
RECENT = 3  # input sums that stay in memory in case another layer reads the same tensor
Outputs = Callable[[Tensor], Tensor]  # raw outputs -> (n, *event, c)
Use = tuple[int, MatrixRule, Call, Samples]

# What `autograd.grad(is_grads_batched=True)` maps with; `torch.vmap` has a wrong derivative of `cdist`.
_vmap = getattr(getattr(torch, "_vmap_internals", None), "_vmap", None)


def pull(f: Tensor, inputs: Sequence[Any], v: Tensor, *, create_graph: bool = False) -> tuple[Tensor | None, ...]:
    """Return vᵀ ∂f/∂input for tensors or edges of f's graph, which is kept; None where f is independent of one."""
    v = v.to(f.dtype)
    if create_graph or v.requires_grad:  # v counts as a constant even where it depends on f
        return torch.autograd.grad(f, inputs, v, retain_graph=True, create_graph=create_graph, allow_unused=True)
    if v.shape != f.shape:  # a product would broadcast
        raise RuntimeError(f"cotangents of shape {tuple(v.shape)} for outputs of shape {tuple(f.shape)}")
    with torch.enable_grad():
        total = (f * v).sum()
    return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)


def pull_all(f: Tensor, inputs: Sequence[Any], v: Tensor) -> tuple[Tensor | None, ...]:
    """Return `pull` for each of the cotangents (r, *f.shape) from one pass, (r, *input.shape) each.

    Raises where vmap has no rule for an operation.
    """
    v = v.to(f.dtype)
    if v.shape[1:] != f.shape:
        raise RuntimeError(f"cotangents of shape {tuple(v.shape)} for outputs of shape {tuple(f.shape)}")
    with warnings_here("ignore", UserWarning, "There is a performance drop"):
        if _vmap is None:
            return torch.autograd.grad(f, inputs, v, retain_graph=True, allow_unused=True, is_grads_batched=True)
        cotangents: list[Tensor] = []
        with torch.enable_grad():
            total = _Seed.apply(f, cotangents)

        def one(direction: Tensor) -> tuple[Tensor | None, ...]:
            cotangents[:] = [direction]
            return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)

        return _vmap(one, 0, 0, allow_none_pass_through=True)(v)


class _Seed(torch.autograd.Function):
    """A number whose derivative with respect to f is the tensor in the list when the backward pass begins.

    In this way r directions enter a batched pass without being handed to `autograd.grad`, which would import sympy.
    """

    @staticmethod
    def forward(ctx: Any, f: Tensor, cotangents: list[Tensor]) -> Tensor:
        ctx.cotangents = cotangents
        return f.new_zeros((), dtype=torch.float32)  # real, even if f is complex

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.cotangents[0], None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.new_zeros((), dtype=torch.float32)


@dataclass(frozen=True)
class Digest:
    """Summaries of gradients that replace them in memory, for some matrix blocks.

    "sums" are sums over the positions of each sample, "grams" the sum of all outer products. They are made as soon as a
    backward pass ends.
    """

    kind: Literal["sums", "grams"]
    blocks: frozenset[int]


@dataclass(frozen=True, eq=False)
class Linearization:
    """A network at a batch: outputs f (n, *event, c) and the rows vᵀJ for any output directions v.

    with network.borrow():
        at = network.linearize(plan, x)
        rows = at.jacobian(directions)  # directions (r, n, *event, c) -> one row per sample and direction
    """

    module: nn.Module
    inputs: Inputs
    outputs: Outputs
    f: Tensor
    recorded: RecordedPass

    @property
    def n(self) -> int:
        return self.recorded.n

    @property
    def plan(self) -> Plan:
        return self.recorded.plan

    @property
    def params(self) -> Params:
        return self.recorded.params

    def shared(self, directions: int) -> int:
        """Return how many directions share one backward pass, out of the number that is wanted."""
        if not self.plan.batched or self.recorded.create_graph:  # torch's batched double backward has gaps
            return 1
        return directions if directions * self._elements <= BATCHED_ELEMENTS else 1

    def jacobian(self, directions: Tensor, digest: Digest | None = None) -> Jacobian:
        """Return rows vᵀ ∂f/∂θ for directions (r, n, *event, c): one row per sample and direction.

        With a digest, its blocks have no rows, only what `BlockRows.gradient_gram` needs.
        """
        looped = self._loop(directions) if self.plan.looped else {}
        if not self._reached(directions):
            return self._from(BlockRows(self.recorded, self._nothing(len(directions)), len(directions), looped))
        arriving = _Arriving(self, len(directions), digest)
        self._bring_in(directions, arriving)
        return self._from(BlockRows(self.recorded, arriving.gradients(), len(directions), looped))

    def jacobian_at(self, k: int, directions: Tensor) -> Jacobian:
        """Return the Jacobian with gradients at record k alone, by passes that end there; other records get zeros."""
        record, r = self.recorded.records[k], directions.shape[0]
        found = [*self._nothing(r).found]
        if r and self.f.requires_grad:
            found[k] = tuple(_shaped(self._pull([record.edge], v)[0], 1, record.out) for v in directions)
        return self._from(BlockRows(self.recorded, Gradients(tuple(found)), r))

    @property
    def joined(self) -> bool:
        """Whether `jacobian_and_vjp` may be used."""
        return self.plan.joined and self.f.requires_grad

    def jacobian_and_vjp(
        self, directions: Tensor, v: Tensor, scale: Tensor, digest: Digest | None = None
    ) -> tuple[Jacobian, dict[str, Tensor | None]]:
        """Return rows for directions, the first of which is `scale` (n,) times v, and Σ vᵀ ∂f/∂θ from the same pass."""
        arriving = _Arriving(self, len(directions), digest)
        first, weights = self._joint(v)
        arriving.take(first, 1, scale)
        del first
        self._bring_in(directions[1:], arriving)
        return self._from(BlockRows(self.recorded, arriving.gradients(scale), len(directions))), weights

    def gradients_and_vjp(self, v: Tensor) -> tuple[Gradients, dict[str, Tensor | None]]:
        """Return ∂(v·f)/∂out of every record, (1, *out.shape), and Σ vᵀ ∂f/∂θ from the same backward pass."""
        first, weights = self._joint(v)
        arriving = _Arriving(self, 1, whole=True)
        arriving.take(first, 1)
        return arriving.gradients(), weights

    def _joint(self, v: Tensor) -> tuple[tuple[Tensor | None, ...], dict[str, Tensor | None]]:
        edges, leaves = self._edges, self.recorded.leaves
        found = self._pull([*edges, *leaves.values()], v)
        return found[: len(edges)], dict(zip(leaves, found[len(edges) :], strict=True))

    def vjp(self, v: Tensor) -> dict[str, Tensor | None]:
        """Return Σ vᵀ ∂f/∂θ by parameter, None where f does not depend on it."""
        leaves = self.recorded.leaves
        if not self.f.requires_grad:
            return dict.fromkeys(leaves)
        return dict(zip(leaves, self._pull([*leaves.values()], v), strict=True))

    def gradients(self, directions: Tensor) -> Gradients:
        """Return ∂(v·f)/∂out of every record, (r, *out.shape)."""
        if not self._reached(directions):
            return self._nothing(len(directions))
        arriving = _Arriving(self, len(directions), whole=True)
        self._bring_in(directions, arriving)
        return arriving.gradients()

    def _from(self, rows: BlockRows) -> Jacobian:
        return Jacobian(rows, self.plan.layout) if self.params.index is None else self._subnetwork(rows)

    def _subnetwork(self, rows: BlockRows) -> Jacobian:
        index = self.params.index
        assert index is not None
        sorter = index.argsort()
        columns, places = [], []
        for block, at in zip(self.plan.blocks, range(len(rows)), strict=True):
            own = block.places.index.to(index.device)
            keep = torch.isin(own, index).nonzero().flatten()
            if keep.numel():
                columns.append(rows[at].dense()[..., keep])
                places.append(sorter[torch.searchsorted(index, own[keep], sorter=sorter)])
        order = torch.cat(places).argsort()
        values = torch.cat(columns, -1)[..., order]
        return Jacobian((DenseRows(values),), Layout.contiguous([index.numel()]))

    @property
    def _edges(self) -> list:
        return [record.edge for record in self.recorded.records]

    def _nothing(self, r: int) -> Gradients:
        return Gradients(tuple((torch.zeros(()).expand(r, *record.out.shape),) for record in self.recorded.records))

    def _reached(self, directions: Tensor) -> bool:
        """Whether a backward pass has directions to start from and records to reach."""
        return bool(self.recorded.records) and bool(len(directions)) and self.f.requires_grad

    def _bring_in(self, directions: Tensor, arriving: _Arriving) -> None:
        """Run one backward pass per direction, or one for all where they share it."""
        edges, r = self._edges, directions.shape[0]
        if 1 < r <= self.shared(r):
            arriving.take(pull_all(self.f, edges, directions), r)
            return
        for v in directions:
            found = self._pull(edges, v)
            arriving.take(found, 1)
            del found  # before the next pass takes as much

    def _pull(self, edges: list, v: Tensor) -> tuple[Tensor | None, ...]:
        return pull(self.f, edges, v, create_graph=self.recorded.create_graph)

    def _loop(self, directions: Tensor) -> dict[str, Tensor]:
        """Return rows of the parameters that the tape cannot read, from every sample alone, {name: (n, r, size)}."""
        wanted = [self.recorded.leaves[name] for name in self.plan.looped]
        if not len(directions):
            return {name: p.new_zeros(self.n, 0, p.numel()) for name, p in zip(self.plan.looped, wanted, strict=True)}
        size, create_graph = batch_size(self.inputs), self.recorded.create_graph
        rows: list[list[Tensor]] = [[] for _ in wanted]
        with torch.enable_grad(), FixedNorms():
            for k in range(self.n):
                alone = take(self.inputs, slice(k, k + 1), size)
                f = self.outputs(output_tensor(call(self.module, alone, self.recorded.leaves)))
                for v in directions[:, k : k + 1]:
                    grads = pull(f, wanted, v, create_graph=create_graph)
                    for row, g, p in zip(rows, grads, wanted, strict=True):
                        row.append(torch.zeros_like(p).flatten() if g is None else g.to_dense().flatten())
        shape = (self.n, directions.shape[0], -1)
        return {name: torch.stack(row).reshape(shape) for name, row in zip(self.plan.looped, rows, strict=True)}

    @cached_property
    def early(self) -> dict[int, tuple[RowsRule, Call]]:
        """Records whose rows are much smaller than their gradients, such as norm layers of images or tokens.

        Their rows are formed as soon as a pass ends, and the gradients are dropped.
        """
        if self.recorded.create_graph:
            return {}
        return {
            k: (rule, call_)
            for k, (rule, call_) in self.recorded.bound.items()
            if isinstance(rule, RowsRule) and SMALLER * self._row(k) * self.n <= self._size(k)
        }

    def digested(self, digest: Digest | None) -> dict[int, int]:
        """Return the records that are digested, each with the size of its digest for one direction of all samples.

        All weights of such a record are in the digest's blocks, and its digest is much smaller than its gradients. (For
        "grams", all directions share one sum.)
        """
        if digest is None or self.recorded.create_graph:
            return {}
        names: dict[int, set[str]] = {}
        for j in digest.blocks:
            for k, _ in self.plan.blocks[j].uses:
                names.setdefault(k, set()).update(self.plan.blocks[j].names)
        sizes = {k: self._digest_size(k, digest) for k, own in names.items() if self.plan.steps[k].names <= own}
        return {k: size for k, size in sizes.items() if SMALLER * size <= self._size(k)}

    def _digest_size(self, k: int, digest: Digest) -> int:
        rule, call_ = self.recorded.matrix(k)
        assert call_.weight is not None
        q, o, _ = rule.view(call_, call_.weight).shape
        return q * o * (self.n if digest.kind == "sums" else o)

    def _row(self, k: int) -> int:
        """Return the size of one row of all weights of a record."""
        record = self.recorded.records[k]
        return sum(record.tensors[j].numel() for j in record.live)

    def _size(self, k: int) -> int:
        return self.recorded.records[k].out.numel()

    @property
    def _elements(self) -> int:
        return sum(record.out.numel() for record in self.recorded.records)

    @property
    def width(self) -> int:
        """Gradient entries per sample and direction, over all records."""
        return self._elements // max(self.n, 1)

    @property
    def kept(self) -> int:
        """Numbers per sample and direction that stay in memory after a pass: gradients, plus rows already formed."""
        gone = sum(self._size(k) for k in self.early) // max(self.n, 1)
        return self.width - gone + sum(self._row(k) for k in self.early)

    def kept_with(self, digest: Digest) -> int:
        """Return `kept` where gradients are digested."""
        sizes = self.digested(digest)
        gone = sum(self._size(k) for k in sizes)
        return self.kept + (sum(sizes.values()) - gone) // max(self.n, 1)


class _Arriving:
    """Collects the gradients of r directions, one backward pass after the other.

    Rows of norms are written at once into arrays for all directions. With a digest everything else is too: small
    tensors of one pass between the large ones of the next would fragment the memory. Without a digest, gradients of
    matrices stay as they are. With `whole`, nothing is formed early.
    """

    def __init__(self, at: Linearization, r: int, digest: Digest | None = None, whole: bool = False) -> None:
        self.at, self.r, self.digest, self.taken = at, r, digest, 0
        self.early = {} if whole else at.early
        self.digested = at.digested(digest).keys()
        self.passes: list[tuple[int, tuple[Tensor | None, ...]]] = []
        self.rows: dict[int, list[Tensor]] = {}  # by record, (n, r, *shape) for each live tensor
        self.sums: dict[int, Tensor] = {}  # by record, (n, r, q, o) or (q, o, o)
        self.written: dict[int, Tensor] = {}  # by record, (r, *out.shape)

    @property
    def gone(self) -> Set[int]:
        """Records whose gradients are not kept."""
        return self.rows.keys() | self.sums.keys()

    def take(self, found: tuple[Tensor | None, ...], r: int, scale: Tensor | None = None) -> None:
        """Take the gradients of a pass of r directions, one per record; `scale` (n,) is a factor per sample."""
        # a batch whose graph lost a record that the self-check saw; a plan that was not checked saw none
        if any(g is None and reaches for g, reaches in zip(found, self.at.plan.reaching, strict=False)):
            raise PlanChanged
        with torch.no_grad():
            for k in self.early:
                self._write_rows(k, found[k], r, scale)
            for k in self.digested:
                self._write_sums(k, found[k], r, scale)
            gone = self.gone
            if self.digest is not None:
                for k, g in enumerate(found):
                    if k not in gone:
                        self._write_gradient(k, g, r, scale)
        if self.digest is None:
            self.passes.append((r, tuple(None if k in gone else g for k, g in enumerate(found))))
        self.taken += r

    def gradients(self, scale: Tensor | None = None) -> Gradients:
        """Return the gradients of all passes; `scale` is the factor per sample of the first pass."""
        records = self.at.recorded.records
        if self.digest is not None:
            written = tuple((self.written[k],) if k in self.written else () for k in range(len(records)))
            return Gradients(written, rows=self.rows, sums=self.sums)
        gone = self.gone
        found = tuple(
            () if k in gone else tuple(_shaped(one[k], r, record.out) for r, one in self.passes)
            for k, record in enumerate(records)
        )
        scales = () if scale is None else tuple(self._scale(k, scale) for k in range(len(records)))
        return Gradients(found, scales, self.rows, self.sums)

    def _scale(self, k: int, scale: Tensor) -> Tensor | None:
        out = None if k in self.gone else self.at.plan.steps[k].out
        return None if out is None else out.spread(scale, self.at.recorded.records[k].out, self.at.n)

    def _write_rows(self, k: int, g: Tensor | None, r: int, scale: Tensor | None) -> None:
        at, (rule, call_) = self.at.recorded, self.early[k]
        record = at.records[k]
        found = small_rows(rule, call_, record, _shaped(g, r, record.out), at.samples(k), at.n)
        if k not in self.rows:
            self.rows[k] = [rows.new_empty(at.n, self.r, *rows.shape[2:]) for rows in found]
        for whole, rows in zip(self.rows[k], found, strict=True):
            self._place(whole, 1, weighted(rows, scale))

    def _write_sums(self, k: int, found: Tensor | None, r: int, scale: Tensor | None) -> None:
        at, (rule, call_) = self.at.recorded, self.at.recorded.matrix(k)
        record, out = at.records[k], at.samples(k)
        assert self.digest is not None
        g = _shaped(found, r, record.out)
        if self.digest.kind == "sums":
            summed = rule.left_sum(call_, g, out, at.n).to(at.params.dtype)
            if k not in self.sums:
                self.sums[k] = summed.new_empty(at.n, self.r, *summed.shape[2:])
            self._place(self.sums[k], 1, weighted(summed, scale))
            return
        g = g if scale is None else g * out.spread(scale, record.out, at.n)
        gram = rule.left_gram(call_, g.to(at.params.dtype), out, at.n)
        if k in self.sums:
            self.sums[k] += gram
        else:
            self.sums[k] = gram

    def _write_gradient(self, k: int, found: Tensor | None, r: int, scale: Tensor | None) -> None:
        record = self.at.recorded.records[k]
        g = _shaped(found, r, record.out)
        if k not in self.written:
            self.written[k] = g.new_empty(self.r, *record.out.shape)
        if scale is not None:
            g = g * self.at.recorded.samples(k).spread(scale, record.out, self.at.n)
        self._place(self.written[k], 0, g)

    def _place(self, whole: Tensor, axis: int, part: Tensor) -> None:
        whole.narrow(axis, self.taken, part.shape[axis]).copy_(part)


def _shaped(g: Tensor | None, r: int, out: Tensor) -> Tensor:
    """Return a record's gradient as (r, *out.shape); zeros where the pass did not reach it."""
    return out.new_zeros(()).expand(r, *out.shape) if g is None else g.reshape(r, *out.shape)


@dataclass(frozen=True, eq=False)
class Gradients(Sequence[Tensor]):
    """The gradients ∂(v·f)/∂out, (r, *out.shape), at every record, from backward passes of r directions.

    If finished rows or sums are much smaller than a record's gradients, `rows` or `sums` holds them and `found` is
    empty for that record. The passes of a record are joined when the record is asked for, one record at a time: all
    joined gradients together would double the memory.
    """

    found: tuple[tuple[Tensor, ...], ...]  # per record, (r', *out.shape) for each pass
    scales: tuple[Tensor | None, ...] = ()  # per record, a factor that its first pass still has to be multiplied with
    rows: Mapping[int, list[Tensor]] = field(default_factory=dict)  # by record, finished rows per live tensor
    sums: Mapping[int, Tensor] = field(default_factory=dict)  # by record, (n, r, q, o) or (q, o, o): see `Digest`

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, k: Any) -> Any:
        return _joined(list(self.passes(k)))

    def passes(self, k: int) -> Iterator[Tensor]:
        """Yield the gradients of one record pass by pass, (r', *out.shape) each."""
        first, *rest = self.found[k]
        scale = self.scales[k] if self.scales else None
        yield first if scale is None else first * scale
        yield from rest

    def narrow(self, k: int, start: int, length: int) -> Tensor:
        """Return one record's gradients of samples start … start + length − 1, where samples are its first axis."""
        scales = (None if s is None else s.narrow(0, start, length) for s in self.scales[k : k + 1])
        return Gradients((tuple(g.narrow(1, start, length) for g in self.found[k]),), tuple(scales))[0]

    def finite(self, k: int) -> bool:
        """Whether everything that reached a record is finite."""
        if k in self.sums:
            parts = [self.sums[k]]
        else:
            parts = self.rows[k] if k in self.rows else [*self.passes(k)]
        if not parts or bool(torch.stack([part.sum() for part in parts]).isfinite().all()):
            return True
        return all(bool(part.isfinite().all()) for part in parts)


def _joined(passes: list[Tensor]) -> Tensor:
    """Join passes along their directions, so that the directions of a sample are neighbors in memory."""
    if len(passes) == 1:
        return passes[0]
    if passes[0].ndim == 1:
        return torch.cat(passes)
    return torch.cat([g.transpose(0, 1) for g in passes], 1).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class BlockRows(Sequence[Rows]):
    """One `Rows` per block of the plan, formed on demand and not kept.

    So patches of a convolution are in memory only while they are used.
    """

    at: RecordedPass
    gradients: Gradients
    r: int
    looped: Mapping[str, Tensor] = field(default_factory=dict)  # rows from a loop over samples, (n, r, size) by name
    recent: dict[Any, tuple[Tensor, int]] = field(default_factory=dict)  # the last results of `input_gram`

    def __len__(self) -> int:
        return len(self.at.plan.blocks)

    @property
    def n(self) -> int:
        return self.at.n

    @property
    def dtype(self) -> torch.dtype:
        return self.at.params.dtype

    @property
    def device(self) -> torch.device:
        return self.at.params.device

    def __iter__(self) -> Iterator[Rows]:
        # the default implementation would take an IndexError inside a rule for the end of the sequence
        return (self[k] for k in range(len(self)))

    def __getitem__(self, k: Any) -> Any:
        with torch.set_grad_enabled(self.at.create_graph):
            return self._rows(self.at.plan.blocks[k])

    def _rows(self, block: Block) -> Rows:
        n, dtype = self.n, self.dtype
        if block.kind == "unused":
            zero = torch.zeros((), dtype=dtype, device=self.device)
            return MatrixRows((Term(zero.expand(n, self.r, 1, 1, 1), zero.expand(n, 1, 1, 1, block.size)),))
        if block.kind == "matrix":
            return self._matrix(block)
        parts = {name: rows.to(dtype) for name, rows in self.looped.items() if name in block.names}
        taped = set(block.names) - set(parts)
        for k, step in enumerate(self.at.plan.steps):
            if step.method != "loop" and not step.names.isdisjoint(taped):
                for name, rows in explicit_rows(self.at, self.gradients, k).items():
                    if name in taped:
                        parts[name] = parts[name] + rows.to(dtype) if name in parts else rows.to(dtype)
        found = [parts[name] if name in parts else self._zeros(name) for name in block.names]
        return DenseRows(self._own(torch.cat(found, -1)))

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor if self.at.create_graph else tensor.detach()

    def _zeros(self, name: str) -> Tensor:
        params = self.at.params
        size = params.sizes[params.names.index(name)]
        return torch.zeros(self.n, self.r, size, dtype=self.dtype, device=self.device)

    def _matrix(self, block: Block) -> FactoredRows:
        """Return the rows of a matrix block as factors.

        They are formed for a few samples at a time if samples have several positions and the arguments of the recorded
        calls can be cut into samples.
        """
        assert not any(k in self.gradients.sums for k, _ in block.uses), "gradients were summed up: there are no rows"
        positions = [self._positions(k) for k, _ in block.uses]
        if self.at.create_graph or min(positions) < 2:
            return MatrixRows(self._terms(block, 0, self.n))
        extent = Extent(self.n, self.r, *block.shape, sum(positions))
        return DeferredRows(partial(self._terms, block), extent, self.dtype, self.device)

    def _positions(self, k: int) -> int:
        """Return the positions per sample of a record; 0 where samples are not the first axis of its arguments."""
        (rule, call_), record, out = self.at.matrix(k), self.at.records[k], self.at.samples(k)
        first = not out.axis and all(len(t) == self.n for t in (record.out, *call_.inputs))
        return rule.positions(call_, self.n) if first else 0

    def _terms(self, block: Block, start: int, length: int) -> tuple[Term, ...]:
        """Return the factors of a block; uses with the same orientation become positions of one term."""
        pairs: dict[bool, list[tuple[Tensor, Tensor]]] = {}
        for k, swapped in block.uses:
            left, right = self._factors(k, block.bias, start, length)
            pairs.setdefault(swapped, []).append((right, left) if swapped else (left, right))
        terms = []
        for found in pairs.values():
            lefts, rights = zip(*found, strict=True)
            left = lefts[0] if len(lefts) == 1 else torch.cat(lefts, 2)
            right = rights[0] if len(rights) == 1 else torch.cat(rights, 2)
            terms.append(Term(self._own(left.to(self.dtype)), self._own(right.to(self.dtype))))
        return tuple(terms)

    def _factors(self, k: int, with_ones: bool, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Return gradients (length, r, t, groups, out) and inputs (length, 1, t, groups, in) of some samples."""
        (rule, call_), out = self.at.matrix(k), self.at.samples(k)
        if length < self.n:
            call_ = replace(call_, inputs=tuple(t.narrow(0, start, length) for t in call_.inputs))
            g = self.gradients.narrow(k, start, length)
        else:
            g = self.gradients[k]
        return rule.left(call_, g, out, length), rule.right(call_, out, length, with_ones)

    def gradient_gram(self, block: Block, swapped: bool, reduce: bool) -> Tensor:
        """Return Σ g gᵀ of a matrix block in one orientation, (q, d, d).

        With `reduce`, g is a sample's gradient summed over its positions; otherwise every position counts by itself.
        """
        with torch.no_grad():
            found = [self._summed_up(*use, reduce) for use in self._uses(block, swapped)]
            return gram_by_group(added(found).flatten(0, 1).to(self.dtype)) if reduce else added(found)

    def _summed_up(self, k: int, rule: MatrixRule, call_: Call, out: Samples, reduce: bool) -> Tensor:
        """Return Σ_t g per sample and direction (n, r, q, o), or Σ g gᵀ over everything, (q, o, o)."""
        if k in self.gradients.sums:
            return self.gradients.sums[k]
        if reduce:
            return rule.left_sum(call_, self.gradients[k], out, self.n)
        return rule.left_gram(call_, self.gradients[k].to(self.dtype), out, self.n)

    def positions(self, block: Block, swapped: bool, reduce: bool) -> int:
        """Return how many gradients per sample and direction `gradient_gram` multiplies."""
        found = sum(rule.positions(call_, self.n) for _, rule, call_, _ in self._uses(block, swapped))
        return min(found, 1) if reduce else found

    def input_gram(self, block: Block, swapped: bool, reduce: bool, weights: Tensor | None) -> tuple[Tensor, int]:
        """Return Σ w a aᵀ of a matrix block in one orientation, (q, d, d), and the number of inputs a per sample.

        With `reduce`, a is the mean over a sample's positions; otherwise every position counts by itself. Layers that
        read the same tensor (query, key and value) share the result.
        """
        uses = list(self._uses(block, swapped))
        _, rule, call_, out = uses[0]
        if len(uses) > 1 or not rule.plain:
            return self._input_gram(block, uses, reduce, weights)
        data = call_.data
        key = (data.data_ptr(), data.shape, data.stride(), data.dtype, out, block.bias, reduce, id(weights))
        if key not in self.recent:
            if len(self.recent) == RECENT:
                del self.recent[next(iter(self.recent))]
            self.recent[key] = self._input_gram(block, uses, reduce, weights)
        return self.recent[key]

    def _input_gram(self, block: Block, uses: list[Use], reduce: bool, weights: Tensor | None) -> tuple[Tensor, int]:
        n, dtype = self.n, self.dtype
        with torch.no_grad():
            if not reduce:
                found = [rule.right_gram(c, out, n, block.bias, weights, dtype) for _, rule, c, out in uses]
                return added([matrix for matrix, _ in found]), sum(count for _, count in found)
            count = sum(rule.positions(c, n) for _, rule, c, _ in uses)
            mean = added([rule.right_sum(c, out, n, block.bias) for _, rule, c, out in uses]) / max(count, 1)
            mean = mean.to(dtype) if weights is None else mean.to(dtype) * weights.to(dtype).sqrt()[:, None, None]
            return gram_by_group(mean), min(count, 1)

    def _uses(self, block: Block, swapped: bool) -> Iterator[Use]:
        """Yield the records in which a matrix block has this orientation.

        The block is looked up by name, since it may come from the plan of another sequence length with other records.
        """
        for k in (k for k, s in self.at.plan.named[block.names].uses if s == swapped):
            yield k, *self.at.matrix(k), self.at.samples(k)
