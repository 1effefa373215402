"""The tape: one forward pass that writes down every operation in which a selected parameter meets data.

A `TorchFunctionMode` sees operations, not modules, so functional code, raw parameters, tied weights and modules called
twice need nothing special. Nothing is attached to the user's module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lapwing.errors import UnsupportedModel
from lapwing.model.calls import Inputs, call, output_tensor, tensors_in
from lapwing.model.kernels import WRITTEN_OUT, fixed_batch_norm

SHUFFLING = ("nonzero", "argwhere", "where", "masked_select", "unique", "unique_consecutive", "_pack_padded_sequence")
READING = ("index_select", "gather", "take", "take_along_dim", "repeat_interleave")
WRITING = ("index_add", "index_add_", "index_copy", "index_copy_", "scatter", "scatter_", "scatter_add", "scatter_add_")
INPLACE_ADDITIONS = ("add_", "sub_", "__iadd__", "__isub__")


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
        if live and func is nn.functional.embedding and _renormalizes(*args, **kwargs):
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
        if isinstance(out, Tensor) and out.requires_grad and self._recordable(func, out, tensors):
            edge, out = _edge(out, keep=any(out is t for t in tensors))
            if edge is not None:
                record = Record(func, args, kwargs, tensors, live, versions, upstream, out, edge, shuffled)
                self.records.append(record)
        self._follow(out, tensors, True, False, shuffled)
        return out

    def _shuffles(self, func: Callable, args: tuple, tensors: tuple[Tensor, ...]) -> bool:
        """Whether data decide which rows a result has. Then one batch does not show where samples are in another."""
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

    @staticmethod
    def _recordable(func: Callable, out: Tensor, tensors: tuple[Tensor, ...]) -> bool:
        # in-place operations other than sums overwrite what a rule would need; the walk over the graph finds these uses
        return all(out is not t for t in tensors) or getattr(func, "__name__", "") in INPLACE_ADDITIONS

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


def _edge(out: Tensor, keep: bool) -> tuple[GradientEdge | None, Tensor]:
    """Return the edge at which the gradient of a result is read, and the result to hand on.

    A view is read at its base: if the view were changed in place later, its own node would drop out of the graph. If a
    view is more than a reshaped base, a copy is handed on; if the very tensor must be kept, there is no edge.
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


def _performed(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Perform a call, or one with the same result and cheaper derivatives."""
    out = CHEAPER[func](*args, **kwargs) if func in CHEAPER else None
    return func(*args, **kwargs) if out is None else out


def _renormalizes(*args: Any, **kwargs: Any) -> bool:
    return (args[3] if len(args) > 3 else kwargs.get("max_norm")) is not None


CHEAPER: dict[Callable, Callable] = {nn.functional.batch_norm: fixed_batch_norm}


def parameters_behind(node: Any, stops: frozenset[Any] = frozenset()) -> Iterator[Tensor]:
    """Yield the leaves that an autograd node depends on."""
    seen, stack = set(), [node]
    while stack:
        at = stack.pop()
        if at is None or at in seen or at in stops:
            continue
        seen.add(at)
        if hasattr(at, "variable"):
            yield at.variable
        stack.extend(child for child, _ in at.next_functions)


def unseen_parameters(finished: Pass) -> list[Tensor]:
    """Return the leaves that reach the outputs without a record on the way: uses that the tape did not see."""
    met = _met(finished, lambda _: True, (finished.outputs.grad_fn,))
    return [node.variable for node, record in met if record is None and hasattr(node, "variable")]


def first_reached(
    finished: Pass, through: Callable[[Record], bool] = lambda _: False, start: tuple[Any, ...] | None = None
) -> list[Record]:
    """Return the records met on the way back from the outputs (or from `start`), going through those of `through`."""
    met = _met(finished, through, (finished.outputs.grad_fn,) if start is None else start)
    return [record for _, record in met if record is not None]


def _met(
    finished: Pass, through: Callable[[Record], bool], start: tuple[Any, ...]
) -> Iterator[tuple[Any, Record | None]]:
    """Yield the autograd nodes on the way back from `start`, each with its record, if it has one.

    The way ends at a record, unless it is one of `through`: then it goes on from the data that the record has read.
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
