"""Matrices as named tensors and a JSON-able description, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import CorruptFile
from lapwing.linalg.blockdiagonal import BlockDiagonal
from lapwing.linalg.dense import Dense
from lapwing.linalg.eigenkronecker import EigenKronecker
from lapwing.linalg.kronecker import Kronecker, sharing_factors
from lapwing.linalg.layout import Layout
from lapwing.linalg.lowrank import LowRank
from lapwing.linalg.places import Places
from lapwing.linalg.psd import PSD, Diagonal

LEAVES: dict[str, type[PSD]] = {
    leaf.__name__: leaf for leaf in (BlockDiagonal, Dense, Diagonal, EigenKronecker, Kronecker, LowRank)
}


def pack(psd: PSD) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name and a JSON-able spec that `unpack` turns back into the matrix. Graphs are dropped."""
    tensors: dict[str, Tensor] = {}
    return tensors, _pack(psd, "", tensors)


def _pack(psd: PSD, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if type(psd).__name__ not in LEAVES:
        raise TypeError(f"expected one of {', '.join(sorted(LEAVES))} to store, got {type(psd).__name__}")
    spec: dict[str, Any] = {"type": type(psd).__name__}
    for item in fields(psd):  # type: ignore[arg-type]
        value = getattr(psd, item.name)
        if item.metadata.get("cache") or value is None:
            continue
        key = prefix + item.name
        if isinstance(value, Tensor):
            tensors[key] = value.detach()
            spec[item.name] = {"tensor": key}
        elif isinstance(value, Layout):
            spec[item.name] = pack_layout(value, key, tensors)
        elif item.name == "blocks":
            spec[item.name] = [_pack(block, f"{key}.{k}.", tensors) for k, block in enumerate(value)]
        else:
            spec[item.name] = list(value) if isinstance(value, tuple) else value
    return spec


def pack_layout(layout: Layout, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A JSON-able spec of a layout; indices that it cannot do without go to the tensors."""
    blocks: list[Any] = []
    for k, place in enumerate(layout.places):
        if place.explicit is not None:
            tensors[f"{prefix}.{k}"] = place.explicit
        blocks.append({"tensor": f"{prefix}.{k}"} if place.explicit is not None else place.spec())
    return {"size": layout.size, "blocks": blocks}


def unpack_sound(tensors: Mapping[str, Tensor], spec: Any, size: int, *, signed: bool = False) -> PSD:
    """The matrix of a file, of this size; `CorruptFile` where its numbers or shapes are impossible (`PSD.flaw`)."""
    layout = spec.get("layout", {"size": size}) if isinstance(spec, Mapping) else {}
    if not isinstance(layout, Mapping) or layout.get("size") != size:  # before anything of that size is made
        raise CorruptFile(f"the stored matrix is not one of {size:,} weights. Save it again.")
    matrix = unpack(tensors, spec)
    if matrix.size != size:
        raise CorruptFile(f"the stored matrix is of {matrix.size:,} weights, and there are {size:,}. Save it again.")
    if found := matrix.flaw(signed):
        raise CorruptFile(f"the stored {type(matrix).__name__} is impossible: {found}. Save it again.")
    return matrix


def unpack(tensors: Mapping[str, Tensor], spec: Mapping[str, Any]) -> PSD:
    """The matrix that `pack` described."""
    kind = spec.get("type")
    if kind not in LEAVES:
        raise CorruptFile(f"a stored matrix is one of {', '.join(sorted(LEAVES))}, got {kind!r}. Save it again.")
    try:
        return LEAVES[kind](**{name: _unpack(tensors, name, spec[name]) for name in spec if name != "type"})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise CorruptFile(f"the stored {kind} does not fit together ({error}). Save it again.") from error


def _unpack(tensors: Mapping[str, Tensor], name: str, value: Any) -> Any:
    if name == "layout":
        return unpack_layout(tensors, value)
    if name == "blocks":
        return sharing_factors(unpack(tensors, block) for block in value)
    if isinstance(value, Mapping):
        return _tensor(tensors, value["tensor"])
    return tuple(value) if isinstance(value, list) else value


def unpack_layout(tensors: Mapping[str, Tensor], spec: Mapping[str, Any]) -> Layout:
    """The layout that `pack_layout` described."""
    explicit = lambda item: isinstance(item, Mapping) and "tensor" in item  # noqa: E731
    places = [_tensor(tensors, item["tensor"]) if explicit(item) else Places.from_spec(item) for item in spec["blocks"]]
    return Layout(spec["size"], places)


def _tensor(tensors: Mapping[str, Tensor], key: str) -> Tensor:
    if key not in tensors:
        raise CorruptFile(f"the stored matrix lacks the tensor {key!r}. Save it again.")
    return tensors[key]


def move(psd: PSD, device: torch.device | str) -> PSD:
    """The same matrix on another device, without its graph and caches."""
    tensors, spec = pack(psd)
    tensors, aliases = once(tensors)
    moved = {key: value.to(device) for key, value in tensors.items()}
    return unpack(moved | {name: moved[own] for name, own in aliases.items()}, spec)


def once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Without those that are in the memory of another, and the name of that for each of these."""
    seen: dict[Any, str] = {}
    names = {k: seen.setdefault((v.data_ptr(), v.shape, v.stride(), v.dtype, v.device), k) for k, v in tensors.items()}
    return {k: v for k, v in tensors.items() if names[k] == k}, {k: own for k, own in names.items() if own != k}
