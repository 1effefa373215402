"""The tape, a forward pass that writes down where selected parameters meet data, and the plan by which it is read.

A `TorchFunctionMode` sees operations, not modules, so functional code, raw parameters, tied weights and modules called
twice need nothing special. Nothing is attached to the user's module. The plan says how each record of the tape becomes
rows, and which parameters form a block; it is made once, from a few samples of the first batch together and one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lapwing.errors import UnsupportedModel
from lapwing.linalg import Layout, Places
from lapwing.model.calls import Inputs, call, close, output_tensor, tensors_in
from lapwing.model.kernels import WRITTEN_OUT, fixed_batch_norm
from lapwing.model.params import Params, orders, places_of
from lapwing.model.rules import RULES, Call, MatrixRule, Rule, Samples

SHUFFLING = ("nonzero", "argwhere", "where", "masked_select", "unique", "unique_consecutive", "_pack_padded_sequence")
READING = ("index_select", "gather", "take", "take_along_dim", "repeat_interleave")
WRITING = ("index_add", "index_add_", "index_copy", "index_copy_", "scatter", "scatter_", "scatter_add", "scatter_add_")
INPLACE_ADDITIONS = ("add_", "sub_", "__iadd__", "__isub__")
Method = Literal["rule", "generic", "loop"]
AMBIGUOUS = "samples and positions cannot be told apart by their values"


@dataclass(frozen=True, eq=False)
class Record:
    """One call in which weights (selected parameters, or tensors made from them alone) met data."""

    func: Callable
    args: tuple
    kwargs: dict
    tensors: tuple[Tensor, ...]  # every tensor argument, in order of appearance
    live: tuple[int, ...]  # which of them are weights
    versions: tuple[int, ...]  # of the tensors, before the call
    upstream: tuple[Any, ...]  # autograd nodes of the data arguments
    out: Tensor
    edge: GradientEdge
    shuffled: bool = False  # whether the data decide which rows it has

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", str(self.func))

    @property
    def inplace(self) -> bool:
        return self.name in INPLACE_ADDITIONS

    def touched(self) -> bool:
        """Whether an argument was overwritten after the call, so that it no longer has the values that the call saw."""
        return any(
            t._version != v
            for k, (t, v) in enumerate(zip(self.tensors, self.versions, strict=True))
            if not (k == 0 and self.inplace)
        )


@dataclass(frozen=True, eq=False)
class Pass:
    """A finished forward pass: raw outputs and the records, in order."""

    outputs: Tensor
    records: tuple[Record, ...]


def run(module: nn.Module, inputs: Inputs, selected: dict[str, Tensor], replaced: bool = False) -> Pass:
    """Run the module under the tape, inside `borrowed(module, selected)`; `replaced` uses these tensors as weights."""
    tape = Tape(selected.values(), tensors_in(inputs))
    with tape:
        outputs = output_tensor(call(module, inputs, selected if replaced else None))
    return Pass(outputs, tuple(tape.records))


class Tape(TorchFunctionMode):
    """Records calls in which two kinds of tensors meet: `derived` from parameters alone, and `data` from the inputs."""

    def __init__(self, parameters: Any, inputs: Any) -> None:
        super().__init__()
        self.derived: dict[int, Tensor] = {id(p): p for p in parameters}
        self.data: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for tensor in inputs:
            self.data[tensor] = True
        self.shuffled: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.records: list[Record] = []

    def __torch_function__(self, func: Callable, types_: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = tuple(tensors_in((args, kwargs)))
        live = tuple(k for k, t in enumerate(tensors) if id(t) in self.derived and t.requires_grad)
        if live and func in WRITTEN_OUT:
            with self:
                out = WRITTEN_OUT[func](*args, **kwargs)
            if out is not None:
                return out
        max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
        if live and func is nn.functional.embedding and max_norm is not None:
            raise UnsupportedModel(
                "an embedding with max_norm overwrites its own weights in the forward pass; renormalize them once and "
                "set max_norm=None, or freeze the embedding"
            )
        meets_data = any(t in self.data for t in tensors)
        if not live or not meets_data:
            out = _performed(func, args, kwargs)
            self._follow(out, tensors, meets_data, bool(live), meets_data and self._shuffles(func, args, tensors))
            return out
        versions = tuple(t._version for t in tensors)
        upstream = tuple(t.grad_fn for k, t in enumerate(tensors) if k not in live and t.grad_fn is not None)
        out = _performed(func, args, kwargs)
        shuffled = self._shuffles(func, args, tensors)
        inplace = any(out is t for t in tensors)
        # in-place operations other than sums overwrite what a rule would need; the walk over the graph finds these uses
        recordable = not inplace or getattr(func, "__name__", "") in INPLACE_ADDITIONS
        if isinstance(out, Tensor) and out.requires_grad and recordable:
            edge, out = _edge(out, keep=inplace)
            if edge is not None:
                record = Record(func, args, kwargs, tensors, live, versions, upstream, out, edge, shuffled)
                self.records.append(record)
        self._follow(out, tensors, True, False, shuffled)
        return out

    def _shuffles(self, func: Callable, args: tuple, tensors: tuple[Tensor, ...]) -> bool:
        """Whether data decide which rows a result has, so that the sample axis of one batch says nothing of another."""
        if any(t in self.shuffled for t in tensors):
            return True
        name = getattr(func, "__name__", "")
        if name in SHUFFLING:
            return name != "where" or len(args) == 1
        if name == "__getitem__" and isinstance(args[0], Tensor) and args[0] in self.data:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            first = next((i for i in index if i is not None), None)
            return isinstance(first, Tensor) and first in self.data
        if name in READING or name in WRITING:
            axis = next((a for a in args[1:2] if isinstance(a, int)), 0)
            return (
                axis == 0 and any(t in self.data for t in tensors[1:]) and (name in WRITING or tensors[0] in self.data)
            )
        return False

    def _follow(self, out: Any, tensors: tuple[Tensor, ...], meets_data: bool, live: bool, shuffled: bool) -> None:
        results = [out] if isinstance(out, Tensor) else list(tensors_in(out)) if isinstance(out, (tuple, list)) else []
        if not results and out is None and tensors:  # in-place by protocol: __setitem__
            results = [tensors[0]]
        for tensor in results:
            if meets_data:
                self.data[tensor] = True
                self.derived.pop(id(tensor), None)
                if shuffled:
                    self.shuffled[tensor] = True
            elif live and tensor.requires_grad:
                self.derived[id(tensor)] = tensor


class FixedNorms(TorchFunctionMode):
    """Runs batch norms as a tape does, in passes that no tape records."""

    def __torch_function__(self, func: Callable, types_: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _performed(func, args, kwargs or {})


def _performed(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Perform a call; a batch norm with fixed statistics in a form with cheaper derivatives."""
    out = fixed_batch_norm(*args, **kwargs) if func is nn.functional.batch_norm else None
    return func(*args, **kwargs) if out is None else out


def _edge(out: Tensor, keep: bool) -> tuple[GradientEdge | None, Tensor]:
    """Return the edge at which the gradient of a result is read, and the result to hand on.

    The gradient of a view is read at its base, since a later in-place change of the view would drop its node from the
    graph. If a view is more than a reshaped base, a copy is handed on. If this very tensor must be kept, the edge is
    None.
    """
    base = out._base
    if base is None:
        return get_gradient_edge(out), out
    if base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous() and base.requires_grad:
        return get_gradient_edge(base), out
    if keep:
        return None, out
    copy = out.clone()
    return get_gradient_edge(copy), copy


def parameters_behind(node: Any) -> Iterator[Tensor]:
    """Yield the leaves that an autograd node depends on."""
    seen, stack = set(), [node]
    while stack:
        at = stack.pop()
        if at is None or at in seen:
            continue
        seen.add(at)
        if hasattr(at, "variable"):
            yield at.variable
        stack.extend(child for child, _ in at.next_functions)


def first_reached(
    finished: Pass, through: Callable[[Record], bool] = lambda _: False, start: tuple[Any, ...] | None = None
) -> list[Record]:
    """Return the first records on the way back from the outputs, or from `start`. It may lead through other records."""
    met = _met(finished, through, (finished.outputs.grad_fn,) if start is None else start)
    return [record for _, record in met if record is not None]


def _met(
    finished: Pass, through: Callable[[Record], bool], start: tuple[Any, ...]
) -> Iterator[tuple[Any, Record | None]]:
    """Yield the autograd nodes on the way back from `start`, each with its record, if it has one.

    The way ends at a record, unless `through(record)` is true: then it goes on from the data that the record has read.
    """
    recorded = {record.edge.node: record for record in finished.records}
    seen, stack = set(), [*start]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        record = recorded.get(node)
        yield node, record
        if record is None:
            stack.extend(child for child, _ in node.next_functions)
        elif through(record):
            stack.extend(record.upstream)


@dataclass(frozen=True, eq=False)
class Source:
    """Where a weight in a record comes from: a parameter, its transpose, or a tensor computed from parameters."""

    names: tuple[str, ...]
    direct: bool
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class Step:
    """How one record is read: by its rule, by replaying its call per sample, or not at all (a loop over samples)."""

    func: Callable
    method: Method
    out: Samples | None
    args: tuple[Samples | None, ...]
    sources: tuple[Source, ...]  # one per live tensor
    reason: str = ""

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name for source in self.sources for name in source.names)


@dataclass(frozen=True, eq=False)
class Block:
    """Parameters that share one block of the curvature: a weight matrix with its bias, or a few small tensors.

    A "matrix" block has rows Σ_t left ⊗ right of shape (q, o, i), a "rows" block has rows that are written out, and the
    parameters of an "unused" block do not reach the outputs.
    """

    names: tuple[str, ...]
    kind: Literal["matrix", "rows", "unused"]
    places: Places  # positions in the whole flat vector, in the order of the block's own vector
    shape: tuple[int, int, int] = (0, 0, 0)  # (groups, out, in) of a "matrix" block, with the bias as an input
    bias: bool = False
    uses: tuple[tuple[int, bool], ...] = ()  # (record, whether left and right change places there)

    @property
    def size(self) -> int:
        return len(self.places)


class PlanChanged(Exception):
    """Raised when a later batch runs other operations, so that parameters would fall into other blocks."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How the tape of a network is read.

    A `dynamic` plan does without the tape, because the operations depend on the data (routing, early exits): every row
    comes from a loop over samples.
    """

    steps: tuple[Step, ...]
    blocks: tuple[Block, ...]
    looped: tuple[str, ...]  # parameters whose rows come from a loop over samples
    batched: bool = False  # whether several directions may share one backward pass
    distinct: int = 0  # different samples that the plan was made from: one does not show how a batch is laid out
    notes: tuple[str, ...] = ()
    dynamic: bool = False
    width: int = 0  # gradient entries per sample and direction, over all records
    kept: int = 0  # numbers per sample and direction that stay in memory after a pass
    graph: int = 0  # bytes per sample that a forward pass keeps for its backward pass
    reaching: tuple[bool, ...] = ()  # which records had a gradient in the self-check
    joined: bool = False  # whether a backward pass to the records may go on to the weights

    @cached_property
    def layout(self) -> Layout:
        return Layout(sum(b.size for b in self.blocks), [b.places for b in self.blocks])

    @cached_property
    def named(self) -> dict[tuple[str, ...], Block]:
        """The blocks by the names of their parameters."""
        return {block.names: block for block in self.blocks}

    def under_way(self, directions: int) -> int:
        """Return how many numbers per sample are in memory during the last of several passes whose results are kept."""
        return max(directions, 1) * self.kept + self.width - self.kept

    @property
    def signature(self) -> str:
        """A text that is equal for plans whose sums over data can be added."""
        return f"{self.dynamic}|" + "|".join(f"{b.kind} {b.shape} {' '.join(b.names)}" for b in self.blocks)

    def matches(self, records: tuple[Record, ...], n: int, names: dict[int, str]) -> bool:
        """Whether this plan can read a later pass of n samples: it has the same operations on the same weights."""
        return len(records) == len(self.steps) and all(
            record.func == step.func
            and len(record.tensors) == len(step.args)
            and _same_sources(record, step, names)
            and (step.method == "loop" or _fits(record, step, n))
            for record, step in zip(records, self.steps, strict=True)
        )

    def compatible(self, other: Plan) -> bool:
        """Whether both plans divide the parameters into the same blocks."""
        return len(self.blocks) == len(other.blocks) and all(
            a.names == b.names
            and (a.kind, a.shape, a.bias) == (b.kind, b.shape, b.bias)
            and {s for _, s in a.uses} == {s for _, s in b.uses}
            and a.places.same_as(b.places)
            for a, b in zip(self.blocks, other.blocks, strict=True)
        )


def _fits(record: Record, step: Step, n: int) -> bool:
    pairs = [(step.out, record.out), *zip(step.args, record.tensors, strict=True)]
    fits = step.out is not None and all(held is None or held.fits(t.shape, n) for held, t in pairs)
    return fits and not record.shuffled and not record.touched()


def _same_sources(record: Record, step: Step, names: dict[int, str]) -> bool:
    if len(record.live) != len(step.sources):
        return False
    for j, source in zip(record.live, step.sources, strict=True):
        found = source_of(record.tensors[j], names)
        # a parameter expanded over a batch of one looks like the parameter itself; the plan knows better
        if found.names != source.names or (
            source.direct and not (found.direct and found.transposed == source.transposed)
        ):
            return False
    return True


def dynamic_plan(params: Params, note: str) -> Plan:
    """Return a plan that reads every parameter by a loop over samples, with one block per module."""
    groups = _row_groups((), params, set(params.names), set())
    blocks = tuple(Block(group, "rows", places_of(params, group)) for group in groups)
    return Plan((), blocks, params.names, distinct=1 << 30, notes=(note,), dynamic=True)


def bind(record: Record) -> tuple[Rule, Call] | None:
    """Return the rule for a record and its arguments by role, or None where no rule applies."""
    rule = RULES.get(record.func)
    if rule is None:
        return None
    try:
        call = rule.bind(*record.args, **record.kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # not the signature, but something inside
        return None
    live = {id(record.tensors[k]) for k in record.live}
    if call is not None and id(call.data) in live and call.swapped is not None:
        call = call.swapped
    if call is None or any(id(t) in live for t in call.inputs) or call.weight is call.bias:
        return None
    roles = {id(t) for t in (call.weight, call.bias) if t is not None}
    return (rule, call) if live <= roles else None


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


def source_of(tensor: Tensor, names: dict[int, str]) -> Source:
    """Find out where a weight comes from. `names` maps id(parameter) to its name."""
    if id(tensor) in names:
        return Source((names[id(tensor)],), direct=True)
    base = tensor._base
    if base is not None and id(base) in names and tensor.storage_offset() == base.storage_offset():
        if tensor.shape == base.shape and tensor.stride() == base.stride():
            return Source((names[id(base)],), direct=True)
        if base.ndim == 2 and tensor.shape == base.T.shape and tensor.stride() == base.T.stride():
            return Source((names[id(base)],), direct=True, transposed=True)
    behind = {id(leaf) for leaf in parameters_behind(tensor.grad_fn)}
    return Source(tuple(names[k] for k in names if k in behind), direct=False)


def read_steps(whole: Pass, single: Pass, n: int, which: int, names: dict[int, str], rtol: float) -> tuple[Step, ...]:
    """Find the sample axis of every record, and choose how the record is read."""
    steps = []
    for record, alone in zip(whole.records, single.records, strict=True):
        sources = tuple(source_of(record.tensors[j], names) for j in record.live)
        steps.append(_read(record, alone, sources, n, which, rtol))
    return tuple(steps)


def aligned(whole: Pass, single: Pass) -> bool:
    """Whether the batch and one sample alone run the same operations."""
    return len(whole.records) == len(single.records) and all(
        a.func == b.func and len(a.tensors) == len(b.tensors) and a.live == b.live
        for a, b in zip(whole.records, single.records, strict=True)
    )


def _read(record: Record, alone: Record, sources: tuple[Source, ...], n: int, which: int, rtol: float) -> Step:
    none = (None,) * len(record.tensors)
    if record.shuffled:
        return Step(record.func, "loop", None, none, sources, "data decide which rows it sees")
    try:
        out = locate(record.out, alone.out, n, which, rtol)
        args = tuple(
            None if j == 0 and record.inplace else locate(a, b, n, which, rtol)
            for j, (a, b) in enumerate(zip(record.tensors, alone.tensors, strict=True))
        )
    except LookupError as error:
        return Step(record.func, "loop", None, none, sources, str(error))
    if out is None:
        return Step(record.func, "loop", None, none, sources, "its output has no sample axis")
    if record.touched():
        return Step(record.func, "loop", out, args, sources, "an argument is overwritten later")
    reason = ""
    try:
        if _ruled(record, out, args):
            return Step(record.func, "rule", out, args, sources)
    except Exception as error:
        reason = f"its rule {raised(error)}"
    if record.inplace:
        return Step(record.func, "loop", out, args, sources, "it works in place")
    return Step(record.func, "generic", out, args, sources, reason)


def _ruled(record: Record, out: Samples, args: tuple[Samples | None, ...]) -> bool:
    """Whether a rule reads a record: it takes the call, and every data tensor has samples where the output has them."""
    bound = bind(record)
    if bound is None:
        return False
    rule, call = bound
    if len(call.inputs) > 1:
        places = {id(t): held for t, held in zip(record.tensors, args, strict=True)}
        held = [places.get(id(t)) for t in call.inputs]
        if not all(h is not None and (h.axis, h.minor) == (out.axis, out.minor) for h in held):
            return False
    if isinstance(rule, MatrixRule) and call.weight is not None:
        rule.view(call, call.weight)
    return rule.accepts(call, out, record.out.ndim)


def raised(error: Exception) -> str:
    """Say that something raised an exception, with its type and message."""
    return f"raised {type(error).__name__}: {error}"


def locate(whole: Tensor, single: Tensor, n: int, which: int, rtol: float) -> Samples | None:
    """Find the sample axis of a tensor from a batch of n and from sample `which` alone; None if there is none.

    The sample axis is n times as long for the batch. Where samples and positions are flattened into one axis, values
    tell whether samples are the outer or the inner index. Raises `LookupError` if sizes fit but values do not.
    """
    if whole.ndim != single.ndim:
        raise LookupError("its number of dimensions depends on the batch")
    changed = [d for d in range(whole.ndim) if whole.shape[d] != single.shape[d]]
    if not changed:
        return None
    if len(changed) > 1 or whole.shape[changed[0]] != n * single.shape[changed[0]]:
        raise LookupError(f"its shape goes from {tuple(single.shape)} for one sample to {tuple(whole.shape)} for {n}")
    axis = changed[0]
    one = single.shape[axis] == 1
    layouts = [Samples(axis, told=False)] if one else [Samples(axis), Samples(axis, minor=True)]
    fitting = [layout for layout in layouts if close(layout.first(whole, n)[which], single, rtol)]
    if not fitting:
        raise LookupError("its value for a sample depends on the other samples of the batch")
    if len(fitting) > 1:
        raise LookupError(AMBIGUOUS)
    return fitting[0]


def make_plan(
    whole: Pass, steps: tuple[Step, ...], params: Params, looped: set[str], notes: tuple[str, ...], batched: bool
) -> Plan:
    """Group the selected parameters into blocks."""
    looped = looped.union(*(step.names for step in steps if step.method == "loop"))
    blocks = _matrix_blocks(whole, steps, params, looped)
    placed = {name for block in blocks for name in block.names}
    used = {name for step in steps for name in step.names}
    for group in _row_groups(steps, params, looped, placed):
        kind: Literal["rows", "unused"] = "rows" if any(name in used or name in looped for name in group) else "unused"
        blocks.append(Block(group, kind, places_of(params, group)))
    order = {name: k for k, name in enumerate(params.names)}
    blocks.sort(key=lambda b: min(order[name] for name in b.names))
    return Plan(steps, tuple(blocks), tuple(name for name in params.names if name in looped), batched, notes=notes)


def _matrix_blocks(whole: Pass, steps: tuple[Step, ...], params: Params, looped: set[str]) -> list[Block]:
    uses: dict[str, list[tuple[int, str, Source]]] = {name: [] for name in params.names}
    biases: dict[int, str] = {}  # record -> the selected parameter that is its bias
    for k, (record, step) in enumerate(zip(whole.records, steps, strict=True)):
        bound = bind(record) if step.method == "rule" else None
        for j, source in zip(record.live, step.sources, strict=True):
            role = "other"
            if bound is not None and source.direct and isinstance(bound[0], MatrixRule):
                role = "weight" if record.tensors[j] is bound[1].weight else "bias"
            if role == "bias":
                biases[k] = source.names[0]
            for name in source.names:
                uses[name].append((k, role, source))
    blocks = []
    for name, found in uses.items():
        if found and name not in looped and all(role == "weight" for _, role, _ in found):
            block = _matrix_block(name, found, uses, biases, whole, params, looped)
            if block is not None:
                blocks.append(block)
    return blocks


def _matrix_block(
    name: str, found: list, uses: dict, biases: dict[int, str], whole: Pass, params: Params, looped: set[str]
) -> Block | None:
    """Return the block of one weight matrix, with its bias if every operation that uses one uses both."""
    views = [_view(whole.records[k], source.transposed) for k, _, source in found]
    seen = orders(params, name, views)
    first = seen[0]
    swaps = []
    for order in seen:
        if order.same_as(first):
            swaps.append(False)
        elif first.shape[0] == 1 and order.swapped().same_as(first):
            swaps.append(True)
        else:
            return None
    records = {k for k, _, _ in found}
    mates = {biases.get(k) for k in records}
    bias = mates.pop() if len(mates) == 1 and not any(swaps) else None
    if bias is not None and (
        bias in looped or {k for k, _, _ in uses[bias]} != records or len(uses[bias]) != len(found)
    ):
        bias = None
    names: tuple[str, ...] = (name,)
    q, o, i = first.shape
    if bias is not None:
        i, names = i + 1, (name, bias)
    placed = tuple((k, swapped) for (k, _, _), swapped in zip(found, swaps, strict=True))
    return Block(names, "matrix", first.places(params, name, bias), (q, o, i), bias is not None, placed)


def _view(record: Record, transposed: bool) -> Callable[[Tensor], Tensor]:
    """Return the function by which a record's rule reshapes its weight."""
    rule, call = bind(record)  # type: ignore[misc]
    assert isinstance(rule, MatrixRule)
    return lambda weight: rule.view(call, weight.T if transposed else weight)


def _row_groups(steps: tuple[Step, ...], params: Params, looped: set[str], placed: set[str]) -> list[tuple[str, ...]]:
    """Group the parameters with explicit rows; parameters of one operation, or of one looped module, are a group."""
    rest = [name for name in params.names if name not in placed]
    leader = {name: name for name in rest}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    def join(group: list[str]) -> None:
        for other in group[1:]:
            leader[find(other)] = find(group[0])

    for step in steps:
        join([name for name in rest if name in step.names])
    for prefix in {name.rpartition(".")[0] for name in looped}:
        join([name for name in rest if name in looped and name.rpartition(".")[0] == prefix])
    groups: dict[str, list[str]] = {}
    for name in rest:
        groups.setdefault(find(name), []).append(name)
    return [tuple(group) for group in groups.values()]


def unseen_names(finished: Pass, names: dict[int, str]) -> set[str]:
    """Return the selected parameters that reach the outputs without a record on the way: uses that the tape missed."""
    met = _met(finished, lambda _: True, (finished.outputs.grad_fn,))
    leaves = (node.variable for node, record in met if record is None and hasattr(node, "variable"))
    return {names[id(leaf)] for leaf in leaves if id(leaf) in names}
