"""Whether a module is still the one that a posterior was fitted on."""

from __future__ import annotations

import hashlib
import zlib

import torch
from torch import Tensor, nn

WHOLE = 2**28  # bytes of a module up to which a checksum reads every one of them
PROBES = 4096  # values of a tensor that it reads beyond that


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter, buffer and plain tensor attribute: what the forward pass can read."""
    plain = [
        (f"{where}.{name}", value)
        for where, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    ]
    return [*module.named_parameters(), *module.named_buffers(), *plain]


def _description(module: nn.Module) -> str:
    """The modules as they print themselves, and their plain numbers and strings."""
    plain = [
        f"{where}.{name}={value!r}"
        for where, part in module.named_modules()
        for name, value in sorted(vars(part).items())
        if name != "training" and not name.startswith("_") and isinstance(value, bool | int | float | str)
    ]
    return "\n".join([repr(module), *plain])


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of names, types, shapes and bytes of all parameters and buffers, and of the modules' description."""
    digest = hashlib.sha256(_description(module).encode())
    for name, tensor in _state(module):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def checksum(module: nn.Module) -> tuple[str, ...]:
    """A cheap version of `fingerprint`, compared before each prediction: CRC-32, of probes where tensors are large."""
    state = _state(module)
    whole = sum(t.numel() * t.element_size() for _, t in state) <= WHOLE
    sums = [f"{zlib.crc32(_description(module).encode()):x}"]
    for name, tensor in state:
        flat = tensor.detach().reshape(-1)
        probed = flat if whole or flat.numel() <= PROBES else flat[:: flat.numel() // PROBES]
        sums.append(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{zlib.crc32(_bytes(probed)):x}")
    return tuple(sums)
