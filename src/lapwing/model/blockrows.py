"""Jacobian rows of one batch, per block of parameters and per sample, formed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lapwing.linalg import DeferredRows, DenseRows, Extent, FactoredRows, MatrixRows, Rows, Term
from lapwing.linalg.rows import added
from lapwing.model.calls import map_tensors
from lapwing.model.params import Params
from lapwing.model.rules import Call, MatrixRule, RowsRule, Rule, Samples
from lapwing.model.rules.rule import gram_by_group
from lapwing.model.tape import Block, Pass, Plan, Record, Source, Step, bind

Use = tuple[int, MatrixRule, Call, Samples]
RECENT = 3  # input sums that stay in memory in case another layer reads the same tensor


@dataclass(frozen=True, eq=False)
class RecordedPass:
    """A forward pass of n samples that the tape recorded, and the plan that says how each record is read."""

    finished: Pass
    plan: Plan
    params: Params
    leaves: dict[str, Tensor]  # the selected parameters as the forward pass saw them
    n: int
    create_graph: bool = False

    @cached_property
    def records(self) -> tuple[Record, ...]:
        return self.finished.records

    @cached_property
    def bound(self) -> dict[int, tuple[Rule, Call]]:
        """Rule and arguments of every record that is read by its rule."""
        read = (k for k, step in enumerate(self.plan.steps) if step.method == "rule")
        found = {k: bind(self.records[k]) for k in read}
        return {k: pair for k, pair in found.items() if pair is not None}

    def matrix(self, k: int) -> tuple[MatrixRule, Call]:
        """Return rule and arguments of a record that multiplies with a matrix."""
        rule, call_ = self.bound[k]
        assert isinstance(rule, MatrixRule)
        return rule, call_

    def samples(self, k: int) -> Samples:
        """Return where the samples are in the output of a record."""
        out = self.plan.steps[k].out
        assert out is not None  # there is none only where a loop over samples reads the record
        return out

    def right(self, k: int, with_ones: bool) -> Tensor:
        """Return the inputs of a record that multiplies with a matrix, (n, 1, t, groups, in)."""
        rule, call_ = self.matrix(k)
        return rule.right(call_, self.samples(k), self.n, with_ones)


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

    def _explicit(self, k: int, step: Step) -> dict[str, Tensor]:
        """Return the rows of one record for every parameter behind it, {name: (n, r, size)}."""
        record = self.at.records[k]
        by_tensor = self._by_rule(k, record) if step.method == "rule" else self._generic(k, record, step)
        rows: dict[str, Tensor] = {}
        for j, source, found in zip(record.live, step.sources, by_tensor, strict=True):
            for name, part in self._pull_back(record.tensors[j], step.args[j], source, found).items():
                rows[name] = rows[name] + part if name in rows else part
        return rows

    def _by_rule(self, k: int, record: Record) -> list[Tensor]:
        """Return (n, r, *shape) for each live tensor."""
        (rule, call_), out = self.at.bound[k], self.at.samples(k)
        if isinstance(rule, MatrixRule):
            return [self._matrix_rows(k, rule, call_, record.tensors[j], out) for j in record.live]
        assert isinstance(rule, RowsRule)
        if k in self.gradients.rows:
            return self.gradients.rows[k]
        each = [small_rows(rule, call_, record, g, out, self.n) for g in self.gradients.passes(k)]
        return each[0] if len(each) == 1 else [torch.cat(rows, 1) for rows in zip(*each, strict=True)]

    def _matrix_rows(self, k: int, rule: MatrixRule, call_: Call, tensor: Tensor, out: Samples) -> Tensor:
        """Write out the rows of a weight matrix or its bias."""
        n = self.n
        if tensor is call_.bias:
            return rule.bias_rows(call_, self.gradients[k], out, n)
        blocks = MatrixRows((Term(*self._factors(k, False, 0, n)),)).matrix().flatten(2)
        places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
        order = rule.view(call_, places).reshape(-1).argsort()
        return blocks[..., order].reshape(n, self.r, *tensor.shape)

    def _generic(self, k: int, record: Record, step: Step) -> list[Tensor]:
        """Replay the call for one sample after the other and take its vector–Jacobian products."""
        n, create_graph = self.n, self.at.create_graph
        g = self.at.samples(k).first(self.gradients[k], n, skip=1)  # (n, r, *out of one sample)
        found: list[list[Tensor]] = [[] for _ in record.live]
        with torch.enable_grad():
            for m in range(n):
                replay, leaves = _sample_call(record, step.args, m, n, create_graph)
                result = replay()
                parts = _vjps(result, leaves, g[m].reshape(self.r, *result.shape), create_graph)
                for rows, part in zip(found, parts, strict=True):
                    rows.append(part)
        return [torch.stack(rows) for rows in found]

    def _pull_back(self, tensor: Tensor, samples: Samples | None, source: Source, rows: Tensor) -> dict[str, Tensor]:
        """Turn rows with respect to a weight into rows with respect to the parameters that it is made from."""
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


def small_rows(rule: RowsRule, call_: Call, record: Record, g: Tensor, out: Samples, n: int) -> list[Tensor]:
    """Return explicit rows (n, r, *shape) of each live tensor."""
    if len(record.live) == 2:
        weight, bias = rule.rows(call_, g, out, n)
        return [bias if record.tensors[j] is call_.bias else weight for j in record.live]
    kinds = [rule.bias_rows if record.tensors[j] is call_.bias else rule.weight_rows for j in record.live]
    return [rows(call_, g, out, n) for rows in kinds]


def _vjps(tensor: Tensor, leaves: list[Tensor], cotangents: Tensor, create_graph: bool) -> list[Tensor]:
    """Return vᵀ ∂tensor/∂leaf for cotangents (k, *tensor.shape), (k, *leaf.shape) each, by a loop over cotangents."""
    each = []
    for v in cotangents:
        grads = torch.autograd.grad(
            tensor, leaves, v.to(tensor.dtype), retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        each.append([torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(grads, leaves, strict=True)])
    if not each:
        return [p.new_zeros(0, *p.shape) for p in leaves]
    return [torch.stack(rows) for rows in zip(*each, strict=True)]


def _sample_call(
    record: Record, layouts: tuple[Samples | None, ...], m: int, n: int, create_graph: bool
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return the recorded call with its arguments cut to sample m, and the fresh leaves that replace its weights."""
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
