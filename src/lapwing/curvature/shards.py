"""Data in shards, one a process: sums over all of them, the same on each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, distributed


def sharded() -> bool:
    """Whether several processes fit together (under `torchrun`, after `init_process_group`)."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def add_up(tensors: Mapping[str, Tensor]) -> None:
    """Replace every tensor by its sum over the processes, all of which must call this."""
    for name in sorted(tensors):
        distributed.all_reduce(tensors[name])


def add_up_numbers(numbers: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """The same of plain numbers."""
    names = sorted(numbers)
    total = torch.tensor([float(numbers[name]) for name in names], dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))
