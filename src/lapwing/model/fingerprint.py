"""Whether a module is still the one that a posterior was fitted on."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.model.module import written_by_forward

WHOLE = 2**28  # bytes of a module up to which a checksum reads every one of them
PROBES = 4096  # values of a tensor that it reads beyond that


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer, also those that are not saved."""
    return [*module.named_parameters(), *module.named_buffers()]


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Plain attributes of all submodules that the forward pass may read, without those that it writes."""
    return [
        (f"{where}.{name}", value)
        for where, part in module.named_modules()
        for name, value in sorted(vars(part).items())
        if name != "training" and not name.startswith("_") and name not in written_by_forward(part)
    ]


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of names, types, shapes and bytes of all parameters and buffers, and of the modules as they print."""
    digest = hashlib.sha256(repr(module).encode())
    for name, tensor in _state(module):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def checksum(module: nn.Module) -> tuple[str, ...]:
    """A cheap check, made before each prediction: CRC-32, of probes where tensors are large, and plain attributes."""
    attributes = _attributes(module)
    state = [*_state(module), *((name, value) for name, value in attributes if isinstance(value, Tensor))]
    plain = [f"{name}={value!r}" for name, value in attributes if isinstance(value, bool | int | float | str)]
    whole = sum(t.numel() * t.element_size() for _, t in state) <= WHOLE
    sums = [f"{zlib.crc32(chr(10).join([repr(module), *plain]).encode()):x}"]
    for name, tensor in state:
        flat = tensor.detach().reshape(-1)
        probed = flat if whole or flat.numel() <= PROBES else flat[:: flat.numel() // PROBES]
        sums.append(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{zlib.crc32(_bytes(probed)):x}")
    return tuple(sums)
