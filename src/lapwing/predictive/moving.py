"""Copies of results on another device: every tensor inside is moved, everything else is shared."""

from __future__ import annotations

import copy
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.likelihoods import Likelihood


def moved(value: Any, device: torch.device, seen: dict[int, Any] | None = None) -> Any:
    """Return `value` with all tensors inside it on `device`: in lists, dicts, and objects of this library or its users.

    An object that is met twice is copied once.
    """
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, Tensor):
        found: Any = value.to(device)
    elif isinstance(value, list | tuple):
        found = type(value)(moved(each, device, seen) for each in value)
    elif isinstance(value, dict):
        found = {key: moved(each, device, seen) for key, each in value.items()}
    elif _holds_tensors(value):
        found = seen[id(value)] = copy.copy(value)
        found.__dict__.update({name: moved(each, device, seen) for name, each in vars(value).items()})
    else:
        found = value
    seen[id(value)] = found
    return found


def _holds_tensors(value: Any) -> bool:
    ours = type(value).__module__.startswith(("lapwing.", "torch.distributions")) or isinstance(value, Likelihood)
    return hasattr(value, "__dict__") and not isinstance(value, type) and (ours or is_dataclass(value))
