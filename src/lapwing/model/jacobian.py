"""Jacobian rows of a batch from the tape: one backward pass a direction, then (a, g) layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.linalg import DeferredRows, DenseRows, Extent, Jacobian, Layout, MatrixRows, Rows, Term
from lapwing.linalg.rows import added
from lapwing.model.backward import pull, pull_all
from lapwing.model.batches import Inputs, batch_size, call, map_tensors, take, tensors_in
from lapwing.model.gradients import Gradients
from lapwing.model.module import output_tensor
from lapwing.model.params import Params
from lapwing.model.plan import Block, Plan, PlanChanged, Source, Step, bind
from lapwing.model.rules import Call, MatrixRule, RowsRule, Rule
from lapwing.model.rules.rule import gram
from lapwing.model.samples import Samples
from lapwing.model.tape import Pass, Record

SMALLER = 4  # times, so that rows are made before they are asked for
BATCHED_ELEMENTS = 2**22  # sharing a backward pass pays for small networks and costs memory for large ones
Outputs = Callable[[Tensor], Tensor]  # raw outputs -> (n, *event, c)


@dataclass(frozen=True, eq=False)
class Backward:
    """What one backward pass of r directions brings to each record, or the rows that were made of it at once."""

    r: int
    found: tuple[Tensor | None, ...]
    rows: dict[int, list[Tensor]]  # by record, (n, r, *shape) for each live tensor


@dataclass(frozen=True, eq=False)
class Linearization:
    """A network at a batch: outputs f (n, *event, c) and the rows vᵀJ for any output directions v."""

    module: nn.Module
    params: Params
    plan: Plan
    inputs: Inputs
    finished: Pass
    outputs: Outputs
    f: Tensor
    leaves: dict[str, Tensor]  # the selected parameters as the forward pass saw them
    create_graph: bool = False

    @property
    def n(self) -> int:
        return self.f.shape[0]

    @cached_property
    def bound(self) -> dict[int, tuple[Rule, Call]]:
        """Rule and arguments of every record that is read by its rule; what rules compute of the inputs is kept."""
        read = (k for k, step in enumerate(self.plan.steps) if step.method == "rule")
        found = {k: bind(self.finished.records[k]) for k in read}
        return {k: pair for k, pair in found.items() if pair is not None}

    def right(self, k: int, with_ones: bool) -> Tensor:
        """The inputs of a record that multiplies with a matrix, (n, 1, t, groups, in)."""
        (rule, call_), out = self.bound[k], self.plan.steps[k].out
        assert isinstance(rule, MatrixRule)
        assert out is not None
        return rule.right(call_, out, self.n, with_ones)

    @cached_property
    def early(self) -> dict[int, tuple[RowsRule, Call]]:
        """Records whose rows are much smaller than the gradients they are made of (norm layers of images, of tokens):
        they are made as soon as a pass brings those, which need not be kept."""
        if self.create_graph:
            return {}
        records = self.finished.records
        size = {k: sum(records[k].tensors[j].numel() for j in records[k].live) for k in self.bound}
        return {
            k: (rule, call_)
            for k, (rule, call_) in self.bound.items()
            if isinstance(rule, RowsRule) and SMALLER * size[k] * self.n <= records[k].out.numel()
        }

    @property
    def width(self) -> int:
        """Gradients that are kept of one direction, a sample."""
        kept = (record.out.numel() for k, record in enumerate(self.finished.records) if k not in self.early)
        return sum(kept) // max(self.n, 1)

    def shared(self, directions: int) -> int:
        """How many of so many directions go into one backward pass."""
        if not self.plan.batched or self.create_graph:  # torch's batched double backward has gaps
            return 1
        elements = sum(record.out.numel() for record in self.finished.records)
        return directions if directions * elements <= BATCHED_ELEMENTS else 1

    def jacobian(self, directions: Tensor) -> Jacobian:
        """Rows vᵀ ∂f/∂θ for directions (r, n, *event, c): one row a sample and direction."""
        looped = self._loop(directions) if self.plan.looped else {}
        if not self._reached(directions):
            return self._from(LazyRows(self, self.gradients(directions), looped, directions.shape[0]))
        return self._from(self._lazy([self._turned(one) for one in self._passes(directions)], looped))

    def jacobian_at(self, k: int, directions: Tensor) -> Jacobian:
        """The same with gradients at one record alone, by passes that end there; zero at the others."""
        records, r = self.finished.records, directions.shape[0]
        found: list[tuple[Tensor, ...]] = [(torch.zeros(()).expand(r, *record.out.shape),) for record in records]
        if r and self.f.requires_grad:
            passes = [Backward(1, self._pull([records[k].edge], v), {}) for v in directions]
            found[k] = _shaped(passes, 0, records[k].out)
        return self._from(LazyRows(self, Gradients(tuple(found)), {}, r))

    @property
    def joined(self) -> bool:
        """Whether `jacobian_and_vjp` may be used."""
        return self.plan.joined and self.f.requires_grad

    def jacobian_and_vjp(
        self, directions: Tensor, v: Tensor, scale: Tensor
    ) -> tuple[Jacobian, dict[str, Tensor | None]]:
        """Rows for directions of which the first is `scale` (n,) times v; and Σ vᵀ ∂f/∂θ from its backward pass."""
        first, weights = self._joint(v)
        passes = [self._turned(first), *(self._turned(one) for one in self._passes(directions[1:]))]
        return self._from(self._lazy(passes, {}, scale)), weights

    def gradients_and_vjp(self, v: Tensor) -> tuple[Gradients, dict[str, Tensor | None]]:
        """∂(v·f)/∂out of every record, (1, *out.shape), and Σ vᵀ ∂f/∂θ from the same backward pass."""
        first, weights = self._joint(v)
        return self._gradients([first]), weights

    def _joint(self, v: Tensor) -> tuple[Backward, dict[str, Tensor | None]]:
        edges = [record.edge for record in self.finished.records]
        found = self._pull([*edges, *self.leaves.values()], v)
        weights = dict(zip(self.leaves, found[len(edges) :], strict=True))
        return Backward(1, found[: len(edges)], {}), weights

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
            keep = torch.isin(block.index, index).nonzero().flatten()
            if keep.numel():
                columns.append(rows[at].dense()[..., keep])
                places.append(torch.searchsorted(index, block.index[keep]))
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
            yield Backward(r, pull_all(self.f, edges, directions), {})
            return
        for v in directions:
            yield Backward(1, self._pull(edges, v), {})

    def _turned(self, one: Backward) -> Backward:
        """With rows in place of gradients where those are `early`."""
        self._require_reaching(one)
        rows: dict[int, list[Tensor]] = {}
        with torch.no_grad():
            for k, (rule, call_) in self.early.items():
                record, out, g = self.finished.records[k], self.plan.steps[k].out, one.found[k]
                assert out is not None
                if g is not None:
                    rows[k] = _small_rows(rule, call_, record, g.reshape(one.r, *record.out.shape), out, self.n)
        return Backward(one.r, tuple(None if k in rows else g for k, g in enumerate(one.found)), rows)

    def _require_reaching(self, one: Backward) -> None:
        for g, reaches in zip(one.found, self.plan.reaching, strict=False):
            if g is None and reaches:  # the graph of this batch lost a record that the self-check saw
                raise PlanChanged

    def _lazy(self, passes: list[Backward], looped: dict[str, Tensor], scale: Tensor | None = None) -> LazyRows:
        """Rows of these passes, the first of them to be multiplied with one number a sample."""
        early: dict[int, list[list[Tensor]]] = {}
        for k in passes[0].rows:
            early[k] = [one.rows[k] for one in passes]
            if scale is not None:
                early[k][0] = [row * scale.to(row).reshape(-1, *(1,) * (row.ndim - 1)) for row in early[k][0]]
        return LazyRows(self, self._gradients(passes, scale), looped, sum(one.r for one in passes), early)

    def _pull(self, edges: list, v: Tensor) -> tuple[Tensor | None, ...]:
        return pull(self.f, edges, v, create_graph=self.create_graph)

    def _gradients(self, passes: list[Backward], scale: Tensor | None = None) -> Gradients:
        """What they found at every record, the first of them to be multiplied with one number a sample."""
        records, n, gone = self.finished.records, self.n, passes[0].rows
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


@dataclass(frozen=True, eq=False)
class LazyRows(Sequence):
    """One `Rows` a block, computed when asked for and not kept: patches of a convolution live only while used."""

    at: Linearization
    gradients: Gradients
    looped: dict[str, Tensor]
    r: int
    early: dict[int, list[list[Tensor]]] = field(default_factory=dict)  # rows made by the passes: record, pass, tensor

    def __len__(self) -> int:
        return len(self.at.plan.blocks)

    def finite(self, k: int) -> bool:
        """Whether what reached a record is finite."""
        parts = [row for rows in self.early[k] for row in rows] if k in self.early else [*self.gradients.passes(k)]
        if all(bool(part.sum().isfinite()) for part in parts):
            return True
        return all(bool(part.isfinite().all()) for part in parts)

    def __iter__(self) -> Iterator[Rows]:
        # the default would take an IndexError inside a rule for the end
        return (self[k] for k in range(len(self)))

    def __getitem__(self, k: Any) -> Any:
        with torch.set_grad_enabled(self.at.create_graph):
            return self._rows(self.at.plan.blocks[k])

    def _rows(self, block: Block) -> Rows:
        dtype = self.at.params.dtype
        n = self.at.n
        if block.kind == "unused":
            zero = torch.zeros((), dtype=dtype, device=self.at.params.device)
            return MatrixRows((Term(zero.expand(n, self.r, 1, 1, 1), zero.expand(n, 1, 1, 1, block.size)),))
        if block.kind == "matrix":
            return self._matrix(block)
        parts = {name: rows.to(dtype) for name, rows in self.looped.items() if name in block.names}
        taped = set(block.names) - set(parts)
        for k, step in enumerate(self.at.plan.steps):
            if step.method != "loop" and not step.names.isdisjoint(taped):
                for name, rows in self._explicit(k, step).items():
                    if name in taped:
                        parts[name] = parts[name] + rows.to(dtype) if name in parts else rows.to(dtype)
        found = [parts[name] if name in parts else self._zeros(name) for name in block.names]
        return DenseRows(self._own(torch.cat(found, -1)))

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor if self.at.create_graph else tensor.detach()

    def _zeros(self, name: str) -> Tensor:
        params = self.at.params
        size = params.sizes[params.names.index(name)]
        return torch.zeros(self.at.n, self.r, size, dtype=params.dtype, device=params.device)

    def _matrix(self, block: Block) -> MatrixRows:
        """In pieces of a few samples where the arguments of its calls can be cut into samples with many positions."""
        n, params = self.at.n, self.at.params
        positions = [self._positions(k) for k, _ in block.uses]
        if self.at.create_graph or min(positions) < 2:
            return MatrixRows(self._terms(block, 0, n))
        assert block.shape is not None
        extent = Extent(n, self.r, *block.shape, sum(positions))
        return DeferredRows(partial(self._terms, block), extent, params.dtype, params.device)

    def _positions(self, k: int) -> int:
        """Positions a sample of a record; 0 where samples are not the first axis of its arguments."""
        (rule, call_), record, out = self.at.bound[k], self.at.finished.records[k], self.at.plan.steps[k].out
        assert isinstance(rule, MatrixRule)
        first = out is not None and not out.axis and record.out.shape[0] == call_.data.shape[0] == self.at.n
        return rule.positions(call_, self.at.n) if first else 0

    def _terms(self, block: Block, start: int, length: int) -> tuple[Term, ...]:
        """Uses with the same orientation are positions of one term."""
        pairs: dict[bool, list[tuple[Tensor, Tensor]]] = {}
        for k, swapped in block.uses:
            left, right = self._factors(k, block.bias, start, length)
            pairs.setdefault(swapped, []).append((right, left) if swapped else (left, right))
        dtype = self.at.params.dtype
        terms = []
        for found in pairs.values():
            lefts, rights = zip(*found, strict=True)
            left = lefts[0] if len(lefts) == 1 else torch.cat(lefts, 2)
            right = rights[0] if len(rights) == 1 else torch.cat(rights, 2)
            terms.append(Term(self._own(left.to(dtype)), self._own(right.to(dtype))))
        return tuple(terms)

    def _factors(self, k: int, with_ones: bool, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Gradients (length, r, t, groups, out) and inputs (length, 1, t, groups, in) of some samples."""
        (rule, call_), out = self.at.bound[k], self.at.plan.steps[k].out
        assert isinstance(rule, MatrixRule)
        assert out is not None
        if length < self.at.n:
            call_ = replace(call_, data=call_.data.narrow(0, start, length))
            g = self.gradients.narrow(k, start, length)
        else:
            g = self.gradients[k]
        return rule.left(call_, g, out, length), rule.right(call_, out, length, with_ones)

    def gradient_gram(self, block: Block, swapped: bool, reduce: bool) -> Tensor:
        """Σ g gᵀ of a matrix block in one orientation, (q, d, d): of gradients summed over positions, or of all."""
        dtype = self.at.params.dtype
        with torch.no_grad():
            uses = [(rule, call_, self.gradients[k], out) for k, rule, call_, out in self._uses(block, swapped)]
            if not reduce:
                return added([rule.left_gram(call_, g.to(dtype), out, self.at.n) for rule, call_, g, out in uses])
            summed = added([rule.left_sum(call_, g, out, self.at.n) for rule, call_, g, out in uses])
            return gram(summed.flatten(0, 1).to(dtype))

    def input_gram(self, block: Block, swapped: bool, reduce: bool, weights: Tensor | None) -> tuple[Tensor, int]:
        """Σ w a aᵀ of a matrix block in one orientation, (q, d, d): of means over positions, or of all; and how many
        of them a sample has."""
        n, dtype, uses = self.at.n, self.at.params.dtype, list(self._uses(block, swapped))
        with torch.no_grad():
            if not reduce:
                found = [rule.right_gram(c, out, n, block.bias, weights, dtype) for _, rule, c, out in uses]
                return added([matrix for matrix, _ in found]), sum(count for _, count in found)
            count = sum(rule.positions(c, n) for _, rule, c, _ in uses)
            mean = added([rule.right_sum(c, out, n, block.bias) for _, rule, c, out in uses]) / max(count, 1)
            mean = mean.to(dtype) if weights is None else mean.to(dtype) * weights.to(dtype).sqrt()[:, None, None]
            return gram(mean), min(count, 1)

    def _uses(self, block: Block, swapped: bool) -> Iterator[tuple[int, MatrixRule, Call, Samples]]:
        """Records in which a matrix block has this orientation."""
        for k in (k for k, s in block.uses if s == swapped):
            (rule, call_), out = self.at.bound[k], self.at.plan.steps[k].out
            assert isinstance(rule, MatrixRule)
            assert out is not None
            yield k, rule, call_, out

    def _explicit(self, k: int, step: Step) -> dict[str, Tensor]:
        """Rows of one record for every parameter behind it, {name: (n, r, size)}."""
        record = self.at.finished.records[k]
        assert step.out is not None
        by_tensor = self._by_rule(k, record, step) if step.method == "rule" else self._generic(k, record, step)
        rows: dict[str, Tensor] = {}
        for j, source, found in zip(record.live, step.sources, by_tensor, strict=True):
            for name, part in self._pull_back(record.tensors[j], step.args[j], source, found).items():
                rows[name] = rows[name] + part if name in rows else part
        return rows

    def _by_rule(self, k: int, record: Record, step: Step) -> list[Tensor]:
        """(n, r, *shape) for each live tensor."""
        rule, call_ = self.at.bound[k]
        n, out = self.at.n, step.out
        assert out is not None
        if isinstance(rule, MatrixRule):
            return [self._matrix_rows(k, rule, call_, record.tensors[j], out) for j in record.live]
        assert isinstance(rule, RowsRule)
        each = self.early.get(k) or [_small_rows(rule, call_, record, g, out, n) for g in self.gradients.passes(k)]
        return each[0] if len(each) == 1 else [torch.cat(rows, 1) for rows in zip(*each, strict=True)]

    def _matrix_rows(self, k: int, rule: MatrixRule, call_: Call, tensor: Tensor, out: Samples) -> Tensor:
        """Rows of a weight matrix or its bias, written out."""
        n = self.at.n
        if tensor is call_.bias:
            return rule.bias_rows(call_, self.gradients[k], out, n)
        blocks = MatrixRows((Term(*self._factors(k, False, 0, n)),)).matrix().flatten(2)
        places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
        order = rule.view(call_, places).reshape(-1).argsort()
        return blocks[..., order].reshape(n, self.r, *tensor.shape)

    def _generic(self, k: int, record: Record, step: Step) -> list[Tensor]:
        """Replay the call for one sample after the other and take its vector–Jacobian products."""
        n, out = self.at.n, step.out
        assert out is not None
        g = out.first(self.gradients[k], n, skip=1)  # (n, r, *out of one sample)
        found: list[list[Tensor]] = [[] for _ in record.live]
        with torch.enable_grad():
            for m in range(n):
                replay, leaves = _sample_call(record, step.args, m, n, self.at.create_graph)
                result = replay()
                for v in g[m]:
                    grads = torch.autograd.grad(
                        result,
                        leaves,
                        v.reshape(result.shape),
                        retain_graph=True,
                        create_graph=self.at.create_graph,
                        allow_unused=True,
                    )
                    for rows, grad, leaf in zip(found, grads, leaves, strict=True):
                        rows.append(torch.zeros_like(leaf) if grad is None else grad.to_dense())
        return [torch.stack(rows).reshape(n, self.r, *rows[0].shape) for rows in found]

    def _pull_back(self, tensor: Tensor, samples: Samples | None, source: Source, rows: Tensor) -> dict[str, Tensor]:
        """Rows with respect to a weight -> rows with respect to the parameters it is made from."""
        if source.direct:
            own = rows.transpose(-1, -2) if source.transposed else rows
            return {source.names[0]: own.reshape(*rows.shape[:2], -1)}
        leaves = [self.at.leaves[name] for name in source.names]
        n, r = rows.shape[:2]
        if samples is None:
            grads = _vjps(tensor, leaves, rows.flatten(0, 1), self.at.create_graph)
            return {name: g.reshape(n, r, -1) for name, g in zip(source.names, grads, strict=True)}
        per_sample: dict[str, list[Tensor]] = {name: [] for name in source.names}
        with torch.enable_grad():
            each = samples.first(tensor, n)
        for m in range(n):
            with torch.enable_grad():
                part = each[m]
            grads = _vjps(part, leaves, rows[m].reshape(r, *part.shape), self.at.create_graph)
            for name, g in zip(source.names, grads, strict=True):
                per_sample[name].append(g.reshape(r, -1))
        return {name: torch.stack(parts) for name, parts in per_sample.items()}


@dataclass(frozen=True, eq=False)
class TapeJacobian(Jacobian):
    """A Jacobian whose blocks are computed one at a time, when asked for."""

    rows: LazyRows  # type: ignore[assignment]

    def __post_init__(self) -> None:
        pass  # checking sizes would compute every block

    @property
    def n(self) -> int:
        return self.rows.at.n

    @property
    def r(self) -> int:
        return self.rows.r

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.at.params.dtype

    @property
    def device(self) -> torch.device:
        return self.rows.at.params.device


def _shaped(passes: list[Backward], k: int, out: Tensor) -> tuple[Tensor, ...]:
    """(r, *out.shape) of each pass at record k; zeros where they do not reach it."""
    return tuple(
        out.new_zeros(()).expand(one.r, *out.shape) if (g := one.found[k]) is None else g.reshape(one.r, *out.shape)
        for one in passes
    )


def _small_rows(rule: RowsRule, call_: Call, record: Record, g: Tensor, out: Samples, n: int) -> list[Tensor]:
    """Explicit rows (n, r, *shape) of each live tensor."""
    if len(record.live) == 2:
        weight, bias = rule.rows(call_, g, out, n)
        return [bias if record.tensors[j] is call_.bias else weight for j in record.live]
    kinds = [rule.bias_rows if record.tensors[j] is call_.bias else rule.weight_rows for j in record.live]
    return [rows(call_, g, out, n) for rows in kinds]


def _vjps(tensor: Tensor, leaves: list[Tensor], cotangents: Tensor, create_graph: bool) -> list[Tensor]:
    """vᵀ ∂tensor/∂leaf for cotangents (k, *tensor.shape) -> (k, *leaf.shape) each; a loop, because it always works."""
    each = []
    for v in cotangents:
        grads = torch.autograd.grad(
            tensor, leaves, v.to(tensor.dtype), retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        each.append([torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(grads, leaves, strict=True)])
    return [torch.stack(rows) for rows in zip(*each, strict=True)]


def _sample_call(
    record: Record, layouts: tuple[Samples | None, ...], m: int, n: int, create_graph: bool
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """The recorded call with its arguments cut to sample m, and fresh leaves in place of the weights."""
    pieces: dict[int, Tensor] = {}
    leaves: list[Tensor] = []
    for j, (tensor, layout) in enumerate(zip(record.tensors, layouts, strict=True)):
        piece = tensor if layout is None else layout.first(tensor, n)[m]
        if j in record.live:
            # with create_graph the rows may depend on the weight's value, but never on its path to the parameters
            piece = piece.detach().requires_grad_()
            leaves.append(piece)
        elif not create_graph:
            piece = piece.detach()
        pieces[id(tensor)] = piece

    def swap(tensor: Tensor) -> Tensor:
        return pieces.get(id(tensor), tensor)

    args, kwargs = map_tensors(swap, record.args), map_tensors(swap, record.kwargs)
    return (lambda: record.func(*args, **kwargs)), leaves


def inputs_finite(inputs: Inputs) -> bool:
    """Whether every floating-point input is finite."""
    return all(bool(t.isfinite().all()) for t in tensors_in(inputs) if t.is_floating_point())
