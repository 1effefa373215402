"""Whether a module is still the one that a posterior was fitted on.

Every parameter, buffer and plain tensor must have its values, and plain numbers and strings theirs. Whatever else a
forward pass may read (private numbers, lists, dicts, configurations, hooks, functions) is looked at too; where any of
it has changed, the outputs of a few probe inputs decide whether the module still computes the same.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import UnsupportedModel, brief
from lapwing.model.calls import Inputs, batch_size, call, close, map_tensors, output_tensor, take, tensors_in
from lapwing.model.copies import borrowed, written_by_forward
from lapwing.model.params import WRAPPERS, Params, active_adapters, adapter_containers, adapter_names, without_wrappers
from lapwing.model.unmoved import SPREAD, WHOLE, glance, unmoved

PROBED = 2  # samples whose outputs are kept
STORED = 2**22  # bytes of probe inputs up to which a file holds them
SAME = {torch.float64: 1e-6, torch.float32: 1e-3}  # others: 5e-2; relative to the largest output


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """List every parameter and buffer, also those that are not saved; none of an adapter that is not active."""
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
    """List all submodules; in a model with adapters, only those that another, inactive adapter would not change."""
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
    """List plain attributes that forward passes were seen to write: caches, counters, features. They do not count."""
    return sorted(f"{where}.{name}" for where, part in module.named_modules() for name in written_by_forward(part))


def _attributes(module: nn.Module, skip: Iterable[str]) -> list[tuple[str, Any]]:
    """List the public attributes of all submodules, which the forward pass may read."""
    left_out = set(skip)
    ignored = {"training", "active_adapter"} if adapter_names(module) else {"training"}  # layers tell which is active
    return [
        (f"{where}.{name}", value)
        for where, part in _layers(module)
        for name, value in sorted(vars(part).items())
        if name not in ignored and not name.startswith("_") and f"{where}.{name}" not in left_out
    ]


def _contents(module: nn.Module, skip: Iterable[str]) -> tuple[str, list[tuple[str, Tensor]]]:
    """Return the module's text with its plain numbers and strings, and every tensor that it has."""
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


def fingerprint(module: nn.Module, skip: Iterable[str] = ()) -> str:
    """Return the SHA-256 of parameters, buffers, plain tensors, numbers and strings, except those in `skip`."""
    text, state = _contents(module, skip)
    digest = hashlib.sha256(text.encode())
    for name, tensor in state:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def checksum(module: nn.Module) -> tuple[str, ...]:
    """Return a cheap version of the fingerprint: CRC-32 of every tensor, and of the plain numbers and strings."""
    text, state = _contents(module, written(module))
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
    """Look at a module, quickly and at length.

    The quick look is remembered first: what another thread changes meanwhile is seen by the longer one, or by the next.
    """
    state = _state(module)
    return {"unmoved": unmoved(module, [t for _, t in state]), "look": glance(module), "state": _sums(_state(module))}
