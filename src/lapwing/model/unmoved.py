"""Whether nothing in a module has moved: the look that comes before each prediction.

Nearly always nothing has been touched since the last look, and identity tells so: the attributes of every submodule
and the entries of its tables are the very same objects, tensors lie where they lay, and the memory of the weights
equals a copy of it, byte by byte (`unmoved`). Where something has moved, a description of everything that a forward
pass may read tells whether it means the same (`glance`); `fingerprint.py` says whether a change matters.
"""

from __future__ import annotations

import functools
import types
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lapwing.model.copies import ATOMIC, written_by_forward

WHOLE = 2**28  # bytes of a module up to which a look before each prediction reads all of them
DEPTH = 6  # how deep a description follows objects into each other
SPREAD = 4096  # values per tensor that it reads of larger modules
DICTS = (dict, OrderedDict)
LISTS = (list, set, tuple)
TABLES = ("_parameters", "_buffers", "_modules")

Check = Callable[[], bool]
Entries = list[tuple[Any, list]]
"""Collections with what they held: the values of a list; keys and values, in turns, of a dict."""


def unmoved(module: nn.Module, state: Sequence[Tensor]) -> Callable[[nn.Module], bool] | None:
    """Remember a module and its state, and return a function that says whether everything is as it was.

    True means that it is; False that something has moved, perhaps without effect. `state` are the tensors whose values
    are compared; a write through `.data` leaves no other trace. The result is None for modules that only the longer
    look can read: scripted ones, and state of an unusual kind or on another device than the CPU.

        still = unmoved(model, [*model.parameters(), *model.buffers()])
        still is not None and still(model)
    """
    parts = list(module.modules())
    if not all(map(_has_tables, parts)) or not all(map(_is_plain, state)):
        return None
    writing = {id(part) for part in parts if written_by_forward(part)}
    quiet = [(own, _entries(own)) for own in (vars(part) for part in parts if id(part) not in writing)]
    busy = [(part, _entries(own_attributes(part))) for part in parts if id(part) in writing]
    collections, tensors, others = _sorted_out(value for _, entries in (*quiet, *busy) for value in entries[1::2])
    if not {id(t) for t in state} <= {id(t) for t in tensors}:  # another thread has just replaced one
        return None
    whole = sum(t.nbytes for t in state) <= WHOLE
    read = {id(t) for t in state} if whole else set()
    checks = (
        _same_parts(parts),
        _same_dicts([*quiet, *(pair for pair in collections if type(pair[0]) in DICTS)], busy),
        _same_order([part._modules for part in parts if len(part._modules) > 1]),
        _same_lists([pair for pair in collections if type(pair[0]) in LISTS]),
        _same_places(tensors, [t for t in tensors if id(t) not in read]),
        _same_descriptions(others),
        _same_values(state, whole),  # the last: tensors that have moved may have left their memory
    )

    def still(asked: nn.Module) -> bool:
        try:
            return asked is module and all(check() for check in checks)
        except Exception:  # another thread is adding an attribute, or a new value cannot be compared with the old one
            return False

    return still


def _has_tables(part: nn.Module) -> bool:
    """Whether a submodule keeps parameters, buffers and children in ordinary tables; scripted modules do not."""
    return all(type(vars(part).get(table)) in DICTS for table in TABLES)


def _is_plain(t: Tensor) -> bool:
    """Whether a tensor is dense memory of the CPU with a version counter."""
    return (
        type(t) in (Tensor, nn.Parameter)
        and (t.device.type, t.layout) == ("cpu", torch.strided)
        and not (t.is_inference() or t.is_quantized or t.is_conj() or t.is_neg())
        and _in_order(t).is_contiguous()
    )


def _in_order(t: Tensor) -> Tensor:
    """Return the tensor with its dimensions in the order in which they lie in memory."""
    return t.detach().permute(sorted(range(t.ndim), key=t.stride, reverse=True))


def _sorted_out(values: Iterable[Any]) -> tuple[Entries, list[Tensor], list]:
    """Return the collections of plain values, tensors and modules, all tensors, and whatever is not so simple."""
    collections: Entries = []
    tensors: dict[int, Tensor] = {}
    others: list = []
    for value in values:
        many = type(value) in (*DICTS, *LISTS)
        entries = _entries(value) if many else [value]
        if not all(map(_is_fixed, entries)):
            others.append(value)
            continue
        tensors.update((id(t), t) for t in entries if isinstance(t, Tensor))
        if many and type(value) is not tuple:
            collections.append((value, entries))
    return collections, list(tensors.values()), others


def _is_fixed(x: Any) -> bool:
    """Whether a value cannot change, or is a tensor or a module, which have checks of their own."""
    return type(x) in ATOMIC or isinstance(x, nn.Module) or (isinstance(x, Tensor) and _is_plain(x))


def _entries(collection: Any) -> list:
    return [x for item in list(collection.items()) for x in item] if type(collection) in DICTS else list(collection)


def _same_parts(parts: list[nn.Module]) -> Check:
    """Check that every submodule has its class and its dict of attributes."""
    kinds, homes = list(map(type, parts)), list(map(vars, parts))
    return lambda: list(map(type, parts)) == kinds and all(map(is_, map(vars, parts), homes))


def _same_dicts(dicts: Entries, busy: list[tuple[nn.Module, list]]) -> Check:
    """Check the entries of dicts, and the attributes of submodules except those that their forward pass writes.

    `dict ==` looks at identity before it asks values whether they are equal, and needs half the time of a loop.
    """
    empty, full = ([d for d, entries in dicts if bool(entries) is filled] for filled in (False, True))
    writing = [part for part, _ in busy]
    before = [dict(zip(each[::2], each[1::2])) for _, each in (*dicts, *busy) if each]
    return lambda: not any(empty) and all(map(eq, (*full, *map(own_attributes, writing)), before))


def _same_order(tables: list[dict]) -> Check:
    """Check the order of the children of submodules, which decides what a sequence computes."""
    names = list(chain.from_iterable(tables))
    return lambda: list(chain.from_iterable(tables)) == names


def _same_lists(lists: Entries) -> Check:
    """Check the values of lists and sets."""
    now = [each for each, _ in lists]
    before = list(map(copy, now))
    return lambda: now == before


def _same_places(tensors: list[Tensor], unread: list[Tensor]) -> Check:
    """Check that tensors have their memory and layout, and those whose values are not all read their version."""
    version = attrgetter("_version")
    pointers, strides, shapes = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.stride, tensors)), _shapes(tensors)
    versions = list(map(version, unread))
    return lambda: (
        list(map(Tensor.data_ptr, tensors)) == pointers
        and list(map(Tensor.stride, tensors)) == strides
        and _shapes(tensors) == shapes
        and list(map(version, unread)) == versions
    )


def _shapes(tensors: list[Tensor]) -> list[torch.Size]:
    return list(map(Tensor.size, tensors))


def _same_descriptions(values: list) -> Check:
    """Check whatever is not simple, such as hooks, functions and configurations, by its description."""
    before = described(values)
    return lambda: described(values) == before


def _same_values(state: Sequence[Tensor], whole: bool) -> Check:
    """Check the bytes of tensors against a copy: all of them, or some of each tensor of a large module."""
    state = [t for t in state if t.numel()]
    views = [_bytes_of(t, 1 if whole else max(1, t.numel() // SPREAD)) for t in state]
    copies = list(map(bytearray, views))  # which compare by memcmp
    if whole:
        now = [view.data for view in views]
        return lambda: all(map(eq, copies, now))
    return lambda: all(map(eq, copies, map(np.ascontiguousarray, views)))


def _bytes_of(t: Tensor, step: int) -> np.ndarray:
    """Return a view of the memory of every `step`-th value."""
    flat: np.ndarray = _in_order(t).view(-1).view(torch.uint8).numpy()
    return flat if step == 1 else flat.reshape(-1, t.element_size())[::step]


class _Itself:
    """Stands for an object of unknown kind, which equals only itself."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value


def glance(module: nn.Module) -> list:
    """Describe everything that the forward pass may read, for comparison with an earlier description.

    Values are compared where that is cheap, tensors by their address and version.
    """
    seen: set[int] = set()
    return [
        (where, type(part), [(name, _describe(value, DEPTH, seen)) for name, value in own_attributes(part).items()])
        for where, part in list(module.named_modules())
    ]


def own_attributes(part: nn.Module) -> dict[str, Any]:
    """Return the attributes of a submodule, except its mode and those that its forward pass was seen to write."""
    skip = {"training", *written_by_forward(part)}
    return {name: value for name, value in dict(vars(part)).items() if name not in skip}


def described(values: list) -> list:
    """Describe values in the way of `glance`."""
    seen: set[int] = set()
    return [_describe(value, DEPTH, seen) for value in values]


def _describe(x: Any, depth: int, seen: set[int]) -> Any:
    kind = type(x)
    if kind in ATOMIC:
        return x if x == x else "nan"
    if isinstance(x, Tensor):
        version = None if x.is_inference() else x._version
        place = x.data_ptr() if x.layout == torch.strided else id(x)
        return (tuple(x.shape), x.dtype, place, version)
    if isinstance(x, nn.Module):  # its attributes are described in their own turn, if it is registered
        return _Itself(x)
    if depth == 0 or id(x) in seen:
        return kind
    deeper = functools.partial(_describe, depth=depth - 1, seen=seen)
    if isinstance(x, dict):
        items = list(x.items())
        if ATOMIC.issuperset(type(v) for item in items for v in item):  # a vocabulary, say
            return (kind, items)
        return (kind, [(_plain(k), deeper(v)) for k, v in items])
    if isinstance(x, (list, tuple)):
        values = list(x)
        return (kind, values if ATOMIC.issuperset(map(type, values)) else [deeper(v) for v in values])
    if isinstance(x, (set, frozenset)):
        return (kind, len(x), {v for v in list(x) if type(v) in ATOMIC})
    if isinstance(x, np.ndarray):
        return (x.shape, str(x.dtype), zlib.crc32(x.tobytes()) if x.dtype != object else 0)
    if isinstance(x, types.MethodType):
        return (x.__func__, _Itself(x.__self__))
    if isinstance(x, functools.partial):
        return (deeper(x.func), deeper(x.args), deeper(x.keywords))
    seen.add(id(x))
    if isinstance(x, types.FunctionType):
        return (x, [_cell(cell, deeper) for cell in x.__closure__ or ()], deeper(x.__defaults__))
    if hasattr(x, "__dict__") and not isinstance(x, type | types.ModuleType | types.BuiltinFunctionType):
        return (kind, [(name, deeper(value)) for name, value in dict(vars(x)).items()])
    return _Itself(x)


def _plain(key: Any) -> Any:
    return key if type(key) in ATOMIC else _Itself(key)


def _cell(cell: Any, deeper: Any) -> Any:
    try:
        return deeper(cell.cell_contents)
    except ValueError:  # a cell without a value
        return None
