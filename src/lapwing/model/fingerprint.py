"""Whether a module is still the one that a posterior was fitted on."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer, also those that are not saved: what the forward pass can read."""
    return [*module.named_parameters(), *module.named_buffers()]


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of names, types, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in _state(module):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


def checksum(module: nn.Module) -> tuple[tuple[str, float, float], ...]:
    """Sum and sum of squares of every tensor: cheap enough to compare before each prediction."""
    sums = []
    for name, tensor in _state(module):
        values = tensor.detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        values = values.double()
        sums.append((name, float(values.sum()), float(values.square().sum())))
    return tuple(sums)
