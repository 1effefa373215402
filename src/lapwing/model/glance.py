"""What a forward pass may read, described so that two descriptions can be compared."""

from __future__ import annotations

import functools
import types
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lapwing.model.copies import ATOMIC, written_by_forward

DEPTH = 6  # how deep a description follows objects into each other


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
