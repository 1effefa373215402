"""Inputs of a network: nested tuples, lists and mappings of tensors, and which of the tensors hold samples.

A tensor whose first dimension is the number of samples usually has one entry per sample. It may also be shared by all
samples by chance; `Roles` finds out, and tells whether the outputs of a sample depend on the others of its batch. For
that, outputs are compared within the precision that a network really computes in (`close`, `tolerance`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lapwing.errors import BadData, UnsupportedModel

Inputs = Any  # a tensor, a tuple of tensors (called as model(*x)) or a dict (called as model(**x))
Path = tuple[str | int, ...]
"""Where a tensor is in nested inputs: the keys and numbers that lead to it."""

PLAIN = (str, bytes, Number, type(None), Enum, slice, range, torch.dtype, torch.device)  # equal if their text is
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}  # others: 5e-2; relative to the largest entry
FEW = 4  # samples that are run without the others of their batch

APART = (
    "A posterior needs independent samples: use running statistics in normalization layers, and the first dimension "
    "for the batch. Where a batch is one graph (or one set) whose nodes depend on each other, make it one sample: give "
    "inputs and targets a first dimension of 1, (x[None], edges[None]) and y[None], and let a wrapper run one graph "
    "after the other: `def forward(self, x, edges): return torch.stack([net(*graph) for graph in zip(x, edges)])`."
)
NOT_DETERMINISTIC = (
    "the network gives other outputs for the same samples when they are run again. A posterior needs a deterministic "
    "network: switch off noise and sampling inside it."
)

Run = Callable[[Inputs], Tensor]
"""Outputs f (n, *event, c) of a network, without gradients."""

_SHARED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors that do not hold one entry per sample


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors_in(value)


def named_tensors(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield every tensor of `tensors_in` with its path."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, (*path, key))
    elif isinstance(tree, (tuple, list)):
        for number, value in enumerate(tree):
            yield from named_tensors(value, (*path, number))


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of nested tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def map_named(function: Callable[[Path, Tensor], Tensor], tree: Any) -> Any:
    """Apply a function of path and tensor to every tensor."""
    paths = (path for path, _ in named_tensors(tree))
    return map_tensors(lambda tensor: function(next(paths), tensor), tree)


def as_tensors(tree: Any) -> Any:
    """Turn every array and data frame in nested tuples, lists and mappings into a tensor of its dtype."""
    if isinstance(tree, Mapping):
        return {key: as_tensors(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(as_tensors, tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(as_tensors, tree))
    return _tensor_of(tree) if is_array(tree) else tree


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array, a pandas frame or series, or another object that NumPy reads as an array."""
    return hasattr(value, "__array__") and not isinstance(value, (Tensor, np.generic))


def _tensor_of(value: Any) -> Tensor:
    array = np.asarray(value)
    if array.dtype == object and all(isinstance(entry, Number | np.bool_) for entry in array.flat):
        array = array.astype(np.float64)  # a frame with columns of numbers and of truth values
    if array.dtype.byteorder not in "=|" and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy())
    except TypeError as error:
        raise BadData(
            f"a {type(value).__name__} of dtype {array.dtype} holds no plain numbers{_culprits(value)}. Turn its "
            "entries into numbers: names of classes by np.unique(y, return_inverse=True)[1], columns by pd.get_dummies"
        ) from error


def _culprits(value: Any) -> str:
    """Name the columns of a data frame that hold no numbers."""
    kinds: Any = getattr(value, "dtypes", None)
    if not hasattr(kinds, "items"):
        return ""
    names = [repr(name) for name, kind in kinds.items() if getattr(kind, "kind", "O") not in "biuf"]
    return f" (columns {', '.join(names[:5])}{' and others' if len(names) > 5 else ''})" if names else ""


def require_dense(tensor: Tensor) -> Tensor:
    """Refuse a sparse or nested tensor."""
    if tensor.is_nested:
        raise BadData("a tensor of the data is nested: pass padded tensors, or batches of equal length")
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise BadData(f"a tensor of the data, of shape {tuple(tensor.shape)}, is {kind}: pass tensor.to_dense()")
    return tensor


def described(tree: Any, tensor: Callable[[Tensor], Hashable]) -> tuple:
    """Return a key that two nested inputs share if they have the same structure and the same plain values.

    The structure is the type of every container and the names of a mapping in their order; `tensor` returns the part of
    a tensor that is compared. Raises `TypeError` for an object whose value cannot be compared.
    """
    if isinstance(tree, Tensor):
        return ("tensor", tensor(tree))
    if isinstance(tree, Mapping):
        return ("mapping", *((repr(key), described(value, tensor)) for key, value in tree.items()))
    if isinstance(tree, (tuple, list)):
        return (type(tree).__name__, *(described(value, tensor) for value in tree))
    if isinstance(tree, PLAIN):
        return (type(tree).__name__, repr(tree))
    raise TypeError(f"an object of type {type(tree).__name__}")


def batch_size(inputs: Inputs) -> int:
    """Return the number of samples: the first dimension of the first tensor that has one."""
    for tensor in tensors_in(inputs):
        if tensor.ndim:
            return tensor.shape[0]
    raise BadData(f"no tensor with a batch dimension in inputs of type {type(inputs).__name__}")


def share(tensor: Tensor) -> None:
    """Note that all samples share a tensor, whatever its first dimension."""
    _SHARED[tensor] = True


def per_sample(tensor: Tensor, size: int) -> bool:
    """Whether a tensor of a batch of `size` samples holds one entry per sample."""
    return tensor.ndim > 0 and tensor.shape[0] == size and tensor not in _SHARED


def take(inputs: Inputs, rows: Tensor | slice, size: int) -> Inputs:
    """Return the chosen samples of inputs; tensors that are not `per_sample` stay whole."""
    return map_tensors(lambda tensor: tensor[rows] if per_sample(tensor, size) else tensor, inputs)


def detached(inputs: Inputs) -> Inputs:
    """Return inputs without their graphs; shared tensors stay marked as shared."""

    def cut(tensor: Tensor) -> Tensor:
        own = tensor.detach()
        if tensor in _SHARED:
            share(own)
        return own

    return map_tensors(cut, inputs)


def concatenate(pieces: Sequence[Inputs]) -> Inputs:
    """Concatenate inputs with equal `described` keys, every tensor along its first dimension."""
    streams = [iter(list(tensors_in(piece))) for piece in pieces]
    return map_tensors(lambda _: torch.cat([next(stream) for stream in streams]), pieces[0])


def lists_values(tree: Any, n: int) -> bool:
    """Whether a list or tuple with as many entries as there are samples holds no tensor."""
    if isinstance(tree, Mapping):
        return any(lists_values(value, n) for value in tree.values())
    if not isinstance(tree, (tuple, list)):
        return False
    own = len(tree) == n and not any(True for _ in tensors_in(tree))
    return own or any(lists_values(value, n) for value in tree)


@dataclass(eq=False)
class Roles:
    """Which inputs of a network hold one entry per sample, and which all samples share.

    A tensor whose first dimension differs from the number of samples is shared by all of them. One whose first
    dimension equals it may be either: a few samples are run without the others, and their outputs decide.
    """

    shared: set[tuple[Path, int]] = field(default_factory=set)  # with their lengths
    own: set[Path] = field(default_factory=set)
    largest: int = FEW  # samples of the largest batch whose outputs were compared

    def settle(self, inputs: Inputs, run: Run) -> None:
        """Mark the tensors that all samples share, so that they are not cut like samples."""
        n = batch_size(inputs)
        found = {path: t for path, t in named_tensors(inputs) if t.ndim}
        whole = {path for path, t in found.items() if len(t) != n}
        self.shared |= {(path, len(found[path])) for path in whole}
        self.own -= whole
        equal = [path for path, t in found.items() if (path, len(t)) not in self.shared]
        doubtful = [path for path in equal[1:] if path not in self.own]
        if doubtful:
            self._find_out(inputs, run, doubtful)
        for path, t in found.items():
            if (path, len(t)) in self.shared:
                share(t)

    def _find_out(self, inputs: Inputs, run: Run, doubtful: list[Path]) -> None:
        """Run a few samples with every doubtful tensor cut, with one of them whole, with all of them whole."""
        n = batch_size(inputs)
        try:
            whole = run(inputs)
        except (RuntimeError, ValueError, IndexError):
            return  # the caller that runs the batch reports the error
        if len(whole) != n or lists_values(inputs, n) or not bool(whole.isfinite().all()):
            return
        rows, came = _spread(n, min(FEW, n - 1) or 2), "other values"  # of one sample, the same twice
        for kept in chain([()], ((path,) for path in doubtful), [tuple(doubtful)]):
            few = self._cut(inputs, rows, {*kept})
            try:
                if _same(whole[rows.to(whole.device)], few, run):
                    self.shared |= {(path, n) for path in kept}
                    self.own |= {*doubtful} - {*kept}
                    self.largest = max(self.largest, n)
                    return
            except (RuntimeError, ValueError, IndexError) as error:
                came = f"an error ({type(error).__name__}: {error})"
        names = ", ".join(repr(".".join(map(str, path))) for path in doubtful)
        raise UnsupportedModel(
            f"the outputs of a sample depend on the other samples of its batch: without the others, {len(rows)} of a "
            f"batch of {n} give {came}, whether the inputs {names}, which have {n} entries too, are cut into samples "
            f"or shared by all. {APART}"
        )

    def _cut(self, inputs: Inputs, rows: Tensor, kept: set[Path]) -> Inputs:
        """Return some samples; tensors that are shared, or assumed to be, stay whole."""
        n = batch_size(inputs)

        def cut(path: Path, t: Tensor) -> Tensor:
            whole = not t.ndim or len(t) != n or (path, n) in self.shared or path in kept
            return t if whole else t[rows.to(t.device)]

        return map_named(cut, inputs)

    def require_apart(self, inputs: Inputs, f: Tensor, run: Run) -> None:
        """Refuse outputs f of a batch, larger than any before, if a few of its samples alone have other outputs."""
        n = batch_size(inputs)
        if n <= self.largest or len(f) != n or lists_values(inputs, n) or not bool(f.isfinite().all()):
            return  # lists of plain values are not cut: a few samples cannot be run without the others
        rows = _spread(n, FEW).to(f.device)
        try:
            same = _same(f.detach()[rows], take(inputs, rows, n), run)
        except (RuntimeError, ValueError, IndexError) as error:
            raise refusal(n, FEW, error) from error
        if not same:
            raise UnsupportedModel(
                f"the outputs of a sample depend on the other samples of its batch: in a batch of {n} they differ from "
                f"those of the same sample in a batch of {FEW}. {APART}"
            )
        self.largest = n


def refusal(n: int, few: int, error: Exception) -> UnsupportedModel:
    """Return the error for a network that runs a batch, but not a few of its samples."""
    return UnsupportedModel(
        f"the network runs a batch of {n} samples but not {few} of them without the others "
        f"({type(error).__name__}: {error}). {APART}"
    )


def _same(f: Tensor, few: Inputs, run: Run) -> bool:
    """Whether a few samples alone have outputs f, within the precision that the network computes in."""
    alone = run(few)
    if close(f, alone, tolerance([f.dtype])):
        return True
    with Types() as inside:
        again = run(few)
    rtol = tolerance(inside.seen)
    if not close(again, alone, rtol):
        raise UnsupportedModel(NOT_DETERMINISTIC)
    return close(f, alone, rtol)


def _spread(n: int, count: int) -> Tensor:
    """Return indices of samples spread over the whole batch, with the last: where capacity is limited, it loses."""
    return torch.linspace(n - 1, 0, count).round().long().flip(0)


class Types(TorchFunctionMode):
    """Remembers the floating-point types of what operations return while a pass runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(result, Tensor) and result.is_floating_point():
                self.seen.add(result.dtype)
        return out


def finite(t: Tensor) -> bool:
    """Whether all values are finite. The sum of finite values hardly ever overflows, and costs a quarter."""
    return bool(t.detach().sum().isfinite()) or bool(t.detach().isfinite().all())


def tolerance(types: Iterable[torch.dtype]) -> float:
    """Return how far numbers of the least precise of some types may differ, relative to the largest entry."""
    narrowest = min(types, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float64)
    return TOLERANCES.get(narrowest, 5e-2)


def close(a: Tensor, b: Tensor, rtol: float) -> bool:
    """Whether two tensors are equal up to rtol of the largest entry; integers must be exactly equal."""
    if a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return bool(((a == b) | ((a - b).abs() <= rtol * scale)).all())
