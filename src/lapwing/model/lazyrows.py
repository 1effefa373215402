"""Rows of the blocks of a plan, made of what the tape recorded and of the gradients that came back to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapwing.linalg import DeferredRows, DenseRows, Extent, Jacobian, MatrixRows, Rows, Term
from lapwing.linalg.rows import added
from lapwing.model.batches import map_tensors
from lapwing.model.gradients import Gradients
from lapwing.model.plan import Block, Source, Step
from lapwing.model.reading import Reading
from lapwing.model.rules import Call, MatrixRule, RowsRule
from lapwing.model.rules.rule import gram_by_group
from lapwing.model.samples import Samples
from lapwing.model.tape import Record

Use = tuple[int, MatrixRule, Call, Samples]
RECENT = 3  # sums over inputs that are kept in case another layer reads the same


@dataclass(frozen=True, eq=False)
class LazyRows(Sequence):
    """One `Rows` a block, computed when asked for and not kept: patches of a convolution live only while used."""

    at: Reading
    gradients: Gradients
    looped: dict[str, Tensor]
    r: int
    early: dict[int, list[Tensor]] = field(default_factory=dict)  # rows made while the passes ran: record, tensor
    digests: dict[int, Tensor] = field(default_factory=dict)  # by record, of gradients that are gone
    recent: dict[Any, tuple[Tensor, int]] = field(default_factory=dict)  # what `input_gram` found last

    def __len__(self) -> int:
        return len(self.at.plan.blocks)

    def finite(self, k: int) -> bool:
        """Whether what reached a record is finite."""
        if k in self.digests:
            parts = [self.digests[k]]
        else:
            parts = self.early[k] if k in self.early else [*self.gradients.passes(k)]
        if not parts or bool(torch.stack([part.sum() for part in parts]).isfinite().all()):
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
        assert not any(k in self.digests for k, _ in block.uses), "gradients were digested: there are no rows"
        positions = [self._positions(k) for k, _ in block.uses]
        if self.at.create_graph or min(positions) < 2:
            return MatrixRows(self._terms(block, 0, n))
        assert block.shape is not None
        extent = Extent(n, self.r, *block.shape, sum(positions))
        return DeferredRows(partial(self._terms, block), extent, params.dtype, params.device)

    def _positions(self, k: int) -> int:
        """Positions a sample of a record; 0 where samples are not the first axis of its arguments."""
        (rule, call_), record, out = self.at.matrix(k), self.at.finished.records[k], self.at.plan.steps[k].out
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
        (rule, call_), out = self.at.matrix(k), self.at.plan.steps[k].out
        assert out is not None
        if length < self.at.n:
            call_ = replace(call_, data=call_.data.narrow(0, start, length))
            g = self.gradients.narrow(k, start, length)
        else:
            g = self.gradients[k]
        return rule.left(call_, g, out, length), rule.right(call_, out, length, with_ones)

    def gradient_gram(self, block: Block, swapped: bool, reduce: bool) -> Tensor:
        """Σ g gᵀ of a matrix block in one orientation, (q, d, d): of gradients summed over positions, or of all."""
        with torch.no_grad():
            found = [self._summed_up(*use, reduce) for use in self._uses(block, swapped)]
            return gram_by_group(added(found).flatten(0, 1).to(self.at.params.dtype)) if reduce else added(found)

    def _summed_up(self, k: int, rule: MatrixRule, call_: Call, out: Samples, reduce: bool) -> Tensor:
        """Σ_t g of each sample and direction (n, r, q, o), or Σ g gᵀ of all, (q, o, o)."""
        if k in self.digests:
            return self.digests[k]
        if reduce:
            return rule.left_sum(call_, self.gradients[k], out, self.at.n)
        return rule.left_gram(call_, self.gradients[k].to(self.at.params.dtype), out, self.at.n)

    def positions(self, block: Block, swapped: bool, reduce: bool) -> int:
        """How many gradients of a sample and direction `gradient_gram` multiplies."""
        found = sum(rule.positions(call_, self.at.n) for _, rule, call_, _ in self._uses(block, swapped))
        return min(found, 1) if reduce else found

    def input_gram(self, block: Block, swapped: bool, reduce: bool, weights: Tensor | None) -> tuple[Tensor, int]:
        """Σ w a aᵀ of a matrix block in one orientation, (q, d, d): of means over positions, or of all; and how many
        of them a sample has. What layers that read the same tensor (query, key and value) share is computed once."""
        uses = list(self._uses(block, swapped))
        _, rule, call_, out = uses[0]
        if len(uses) > 1 or not rule.data_alone:
            return self._input_gram(block, uses, reduce, weights)
        data = call_.data
        key = (data.data_ptr(), data.shape, data.stride(), data.dtype, out, block.bias, reduce, id(weights))
        if key not in self.recent:
            if len(self.recent) == RECENT:
                del self.recent[next(iter(self.recent))]
            self.recent[key] = self._input_gram(block, uses, reduce, weights)
        return self.recent[key]

    def _input_gram(self, block: Block, uses: list[Use], reduce: bool, weights: Tensor | None) -> tuple[Tensor, int]:
        n, dtype = self.at.n, self.at.params.dtype
        with torch.no_grad():
            if not reduce:
                found = [rule.right_gram(c, out, n, block.bias, weights, dtype) for _, rule, c, out in uses]
                return added([matrix for matrix, _ in found]), sum(count for _, count in found)
            count = sum(rule.positions(c, n) for _, rule, c, _ in uses)
            mean = added([rule.right_sum(c, out, n, block.bias) for _, rule, c, out in uses]) / max(count, 1)
            mean = mean.to(dtype) if weights is None else mean.to(dtype) * weights.to(dtype).sqrt()[:, None, None]
            return gram_by_group(mean), min(count, 1)

    def _uses(self, block: Block, swapped: bool) -> Iterator[Use]:
        """Records in which a matrix block has this orientation; the block may be that of another length's plan, which
        has other records."""
        for k in (k for k, s in self.at.plan.named[block.names].uses if s == swapped):
            (rule, call_), out = self.at.matrix(k), self.at.plan.steps[k].out
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
        if k in self.early:
            return self.early[k]
        each = [small_rows(rule, call_, record, g, out, n) for g in self.gradients.passes(k)]
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


def small_rows(rule: RowsRule, call_: Call, record: Record, g: Tensor, out: Samples, n: int) -> list[Tensor]:
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
