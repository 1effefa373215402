"""Whether a module is still the one that a posterior was fitted on."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.model.skeleton import written_by_forward

WHOLE = 2**28  # bytes of a module up to which a checksum reads every one of them
PROBES = 4096  # values of a tensor that it reads beyond that


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer, also those that are not saved."""
    return [*module.named_parameters(), *module.named_buffers()]


def written(module: nn.Module) -> list[str]:
    """Plain attributes that forward passes were seen to write: caches, counters, features. They do not count."""
    return sorted(f"{where}.{name}" for where, part in module.named_modules() for name in written_by_forward(part))


def _attributes(module: nn.Module, skip: Iterable[str]) -> list[tuple[str, Any]]:
    """Plain tensors, numbers and strings of all submodules, which the forward pass may read."""
    left_out = set(skip)
    return [
        (f"{where}.{name}", value)
        for where, part in module.named_modules()
        for name, value in sorted(vars(part).items())
        if name != "training" and not name.startswith("_") and f"{where}.{name}" not in left_out
    ]


def _contents(module: nn.Module, skip: Iterable[str]) -> tuple[str, list[tuple[str, Tensor]]]:
    """The module as it prints with its plain numbers and strings, and every tensor it has."""
    attributes = _attributes(module, skip)
    plain = [f"{name}={value!r}" for name, value in attributes if isinstance(value, bool | int | float | str)]
    tensors = [(name, value) for name, value in attributes if isinstance(value, Tensor)]
    return "\n".join([repr(module), *plain]), [*_state(module), *tensors]


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def fingerprint(module: nn.Module, skip: Iterable[str] = ()) -> str:
    """SHA-256 of everything the forward pass can read: parameters, buffers, plain attributes but those in `skip`."""
    text, state = _contents(module, skip)
    digest = hashlib.sha256(text.encode())
    for name, tensor in state:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def checksum(module: nn.Module) -> tuple[str, ...]:
    """A cheap version of it, made before each prediction: CRC-32, of probes where tensors are large."""
    text, state = _contents(module, written(module))
    whole = sum(t.numel() * t.element_size() for _, t in state) <= WHOLE
    sums = [f"{zlib.crc32(text.encode()):x}"]
    for name, tensor in state:
        flat = tensor.detach().reshape(-1)
        probed = flat if whole or flat.numel() <= PROBES else flat[:: flat.numel() // PROBES]
        sums.append(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{zlib.crc32(_bytes(probed)):x}")
    return tuple(sums)
