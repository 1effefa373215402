"""Whether a module is still the one that a posterior was fitted on. `Watch` looks before each prediction.

Three looks follow each other, from the cheapest to the most thorough, until one of them is sure:

1. `unmoved`: the attributes of every submodule and the entries of its tables are the very same objects, all tensors
   have the same memory, and the bytes of the weights equal a copy. Nearly always this is enough.
2. `glance`: a description of everything that a forward pass may read equals the earlier description.
3. `checksum` and `Probe`: every parameter, buffer, plain tensor, number and string has its old value, and the network
   gives the same outputs for a few inputs. Private numbers, lists, dicts, configurations, hooks and functions may have
   changed if these outputs have not.
"""

from __future__ import annotations

import functools
import types
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lapwing.errors import UnsupportedModel, brief
from lapwing.model.calls import Inputs, batch_size, call, close, map_tensors, output_tensor, take, tensors_in
from lapwing.model.copies import ATOMIC, borrowed, written_by_forward
from lapwing.model.params import WRAPPERS, Params, active_adapters, adapter_containers, adapter_names, without_wrappers

WHOLE = 2**28  # the look before each prediction reads all bytes of modules up to this size
DEPTH = 6  # how deep a description follows objects into each other
SPREAD = 4096  # values per tensor that the look reads of larger modules
DICTS = (dict, OrderedDict)
LISTS = (list, set, tuple)
TABLES = ("_parameters", "_buffers", "_modules")
PROBED = 2  # samples whose outputs are kept
STORED = 2**22  # bytes of probe inputs up to which a file holds them
SAME = {torch.float64: 1e-6, torch.float32: 1e-3}  # others: 5e-2; relative to the largest output

Check = Callable[[], bool]
Entries = list[tuple[Any, list]]
"""Collections with their entries: the values of a list, or the keys and values of a dict by turns."""


@dataclass(frozen=True, eq=False)
class Watch:
    """The state of a module at the fit, to be compared with its state now."""

    __repr__ = brief

    sums: tuple[str, ...]
    probe: Probe | None
    _looks: dict[str, Any] = field(default_factory=dict, repr=False)  # the module as it was last found unchanged

    def __reduce__(self) -> tuple:
        """Leave the last looks out of copies and pickles: they hold addresses and functions of the module."""
        return Watch, (self.sums, self.probe)

    @classmethod
    def on(cls, module: nn.Module, inputs: Inputs | None = None, probe: Probe | None = None) -> Watch:
        """Remember a module as it is now, with its outputs for a probe: a given one, or inputs like these."""
        probe = Probe.of(module, inputs) if probe is None and inputs is not None else probe
        looks = _looks(module)  # before the checksum, which then sees what another thread changes meanwhile
        return cls(checksum(module), probe, looks)

    def to(self, device: torch.device | str) -> Watch:
        """Return the watch for a module that was moved to another device."""
        probe = None if self.probe is None else self.probe.to(device)
        return Watch(self.sums, probe)

    def require_unchanged(self, module: nn.Module, params: Params) -> None:
        """Raise `UnsupportedModel` if the module has changed since the fit."""
        still = self._looks.get("unmoved")
        if still is not None and still(module):
            return
        looks = _looks(module)
        if all(looks[key] == self._looks.get(key) for key in ("look", "state")):
            self._looks.update(looks)
            return
        live = dict(module.named_parameters())
        for name, value in zip(params.names, params.values, strict=True):
            now = live.get(name)
            if now is not None and now.device != value.device:
                raise UnsupportedModel(
                    f"the module is on {str(now.device)!r} and this posterior on {str(value.device)!r}. Move the "
                    f"posterior, la.to({str(now.device)!r}), or move the module back."
                )
            if now is None or now.dtype != value.dtype or not torch.equal(now.detach(), value):
                raise UnsupportedModel(
                    f"parameter {name!r} of the module has changed since the fit; the posterior belongs to the old "
                    "weights. Fit again, or restore the weights."
                )
        if checksum(module) != self.sums:
            raise UnsupportedModel(
                "a frozen parameter, a buffer or a setting of the module has changed since the fit (for example batch "
                "norm statistics, by a forward pass in training mode). Fit again, or restore the module."
            )
        if self.probe is not None and not self.probe.agrees(module):
            raise UnsupportedModel(
                "the module has changed since the fit: it gives other outputs for the same inputs, although its "
                "weights are the same (a hook, another activation, a patched forward, a setting). Fit again, or "
                "restore the module."
            )
        self._looks.update(looks)


def _looks(module: nn.Module) -> dict[str, Any]:
    """Take the quick and the longer look at a module.

    The quick look comes first. So a change that another thread makes meanwhile is seen by the longer look, or by the
    next quick one.
    """
    state = _state(module)
    return {"unmoved": unmoved(module, [t for _, t in state]), "look": glance(module), "state": _sums(_state(module))}


def unmoved(module: nn.Module, state: Sequence[Tensor]) -> Callable[[nn.Module], bool] | None:
    """Remember a module and its state, and return a function that says whether nothing has changed.

    The function returns False where something has changed, perhaps without effect. The values of the tensors `state`
    are compared too, since a write through `.data` leaves no other trace. The result is None for modules that only the
    longer look can read: scripted modules, and state of an unusual kind or on another device than the CPU.

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
    """Sort values into collections (of plain values, tensors and modules), tensors, and everything else."""
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
    """Check that tensors have their old memory and layout. Tensors that are not read in full need their old version."""
    version = attrgetter("_version")
    places, versions = list(map(Tensor.detach, tensors)), list(map(version, unread))
    return lambda: all(map(Tensor.is_set_to, tensors, places)) and list(map(version, unread)) == versions


def _same_descriptions(values: list) -> Check:
    """Check hooks, functions, configurations and other objects by their descriptions."""
    before = described(values)
    return lambda: described(values) == before


def _same_values(state: Sequence[Tensor], whole: bool) -> Check:
    """Check the bytes of tensors against a copy: all bytes, or for a large module some of each tensor."""
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
    """Describe values as `glance` describes attributes."""
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


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """List every parameter and buffer, saved or not, without those of inactive adapters."""
    every = [*module.named_parameters(), *module.named_buffers()]
    if not adapter_names(module):
        return every
    idle = _idle(module)
    kept = [(without_wrappers(name), tensor) for name, tensor in every if not _inside(name, idle)]
    return sorted(kept, key=lambda pair: pair[0])


def _idle(module: nn.Module) -> set[str]:
    """Return the paths of adapters that are not active, such as `…q_proj.lora_A.other`."""
    idle = adapter_names(module) - active_adapters(module)
    return {f"{path}.{name}" for path in adapter_containers(module) for name in idle}


def _inside(name: str, paths: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:k]) in paths for k in range(1, len(parts) + 1)) if paths else False


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List all submodules; in a model with adapters, only submodules that look alike with or without other adapters."""
    every = list(module.named_modules())
    if not adapter_names(module):
        return every
    idle = _idle(module)
    return [
        (without_wrappers(path), part)
        for path, part in every
        if not (isinstance(part, nn.ModuleDict | nn.ParameterDict) or set(WRAPPERS) & set(part._modules))
        and not _inside(path, idle)
    ]


def written(module: nn.Module) -> list[str]:
    """List plain attributes that do not count: forward passes were seen to write them (caches, counters, features)."""
    return sorted(f"{where}.{name}" for where, part in module.named_modules() for name in written_by_forward(part))


def _attributes(module: nn.Module, skip: Iterable[str]) -> list[tuple[str, Any]]:
    """List the public attributes of all submodules, which the forward pass may read."""
    left_out = set(skip)
    ignored = (
        {"training", "active_adapter"} if adapter_names(module) else {"training"}
    )  # the layers say which is active
    return [
        (f"{where}.{name}", value)
        for where, part in _layers(module)
        for name, value in sorted(vars(part).items())
        if name not in ignored and not name.startswith("_") and f"{where}.{name}" not in left_out
    ]


def contents(module: nn.Module, skip: Iterable[str]) -> tuple[str, list[tuple[str, Tensor]]]:
    """Return a text with the module's structure, plain numbers and strings, and every tensor of the module."""
    attributes = _attributes(module, skip)
    plain = [f"{name}={value!r}" for name, value in attributes if isinstance(value, bool | int | float | str)]
    tensors = [(name, value) for name, value in attributes if isinstance(value, Tensor)]
    text = [repr(module)]
    if adapter_names(module):
        text = [f"{where}: {type(part).__name__}({part.extra_repr()})" for where, part in _layers(module)]
    return "\n".join([*text, *plain]), [*_state(module), *tensors]


def tensor_bytes(tensor: Tensor) -> Any:
    """Return the values of a tensor as bytes, on the CPU."""
    if tensor.is_meta:
        return b""
    if tensor.layout != torch.strided:
        return b"".join(bytes(tensor_bytes(part)) for part in _parts(tensor.detach()))
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that a sparse one consists of."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)


def checksum(module: nn.Module) -> tuple[str, ...]:
    """Return a cheap version of the fingerprint: CRC-32 of every tensor, and of the plain numbers and strings."""
    text, state = contents(module, written(module))
    return (f"{zlib.crc32(text.encode()):x}", *_sums(state))


def _sums(state: list[tuple[str, Tensor]]) -> tuple[str, ...]:
    whole = sum(t.numel() * t.element_size() for _, t in state) <= WHOLE
    read = [(name, t, t if whole or t.numel() <= SPREAD else _spread(t)) for name, t in state]
    return tuple(f"{name}|{t.dtype}|{tuple(t.shape)}|{zlib.crc32(tensor_bytes(part)):x}" for name, t, part in read)


def _spread(tensor: Tensor) -> Tensor:
    """Return some values of a large tensor, evenly spaced."""
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        return tensor
    return tensor.detach().view(-1)[:: tensor.numel() // SPREAD]


@dataclass(frozen=True, eq=False)
class Probe:
    """A few inputs and the module's outputs for them at the fit.

    Inputs are noise with the mean and spread of the data, and shuffled integers, so that a file holds no sample of the
    training data. If the module refuses such inputs, they are samples of the data and `made_up` is false.
    """

    inputs: Inputs
    outputs: Tensor
    made_up: bool

    @classmethod
    def of(cls, module: nn.Module, inputs: Inputs) -> Probe | None:
        """Run the module on made-up inputs of the same kind, or on the first samples themselves."""
        few = take(inputs, slice(0, PROBED), batch_size(inputs))
        generator = torch.Generator().manual_seed(0)
        for made_up, chosen in ((True, map_tensors(lambda t: _like(t, generator), few)), (False, few)):
            chosen = map_tensors(lambda t: t.detach().clone(), chosen)
            try:
                outputs = _run(module, chosen)
            except Exception:
                continue
            if bool(outputs.isfinite().all()):
                return cls(chosen, outputs, made_up)
        return None

    @property
    def storable(self) -> bool:
        """Whether the probe may be stored in a file."""
        size = sum(t.numel() * t.element_size() for t in tensors_in(self.inputs))
        return self.made_up and size <= STORED and _storable(self.inputs)

    def to(self, device: torch.device | str) -> Probe:
        """Move the probe to another device."""
        inputs = map_tensors(lambda t: t.to(device), self.inputs)
        return Probe(inputs, self.outputs.to(device), self.made_up)

    def agrees(self, module: nn.Module) -> bool:
        """Whether the module still gives these outputs."""
        try:
            now = _run(module, map_tensors(torch.clone, self.inputs))
        except Exception:
            return False
        same = now.dtype == self.outputs.dtype and now.device == self.outputs.device
        return same and close(now, self.outputs, SAME.get(now.dtype, 5e-2))


def _run(module: nn.Module, inputs: Inputs) -> Tensor:
    with borrowed(module) as own, torch.no_grad():
        return output_tensor(call(own, inputs)).detach().clone()


def _like(t: Tensor, generator: torch.Generator) -> Tensor:
    """Return noise with the mean and spread of a tensor, or its integers in another order."""
    if t.layout != torch.strided or t.is_complex() or not t.numel():
        return t
    if not t.is_floating_point():
        return t.reshape(-1)[torch.randperm(t.numel(), generator=generator).to(t.device)].reshape(t.shape)
    wide = t.detach().double()
    noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device)
    return (wide.mean() + noise * wide.std(correction=0)).to(t.dtype)


def _storable(tree: Any) -> bool:
    if isinstance(tree, dict):
        return all(isinstance(k, str) and _storable(v) for k, v in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree) in (list, tuple) and all(map(_storable, tree))
    return isinstance(tree, Tensor | str | int | float | bool | None)
