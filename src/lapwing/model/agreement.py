"""Whether two ways to the same numbers agree, by the precision that a network really computes in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}  # others: 5e-2; relative to the largest entry


class Types(TorchFunctionMode):
    """Remembers the floating-point types of what operations return while a pass runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(result, Tensor) and result.is_floating_point():
                self.seen.add(result.dtype)
        return out


def tolerance(types: Iterable[torch.dtype]) -> float:
    """Return how far numbers of the least precise of some types may differ, relative to the largest entry."""
    narrowest = min(types, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float64)
    return TOLERANCES.get(narrowest, 5e-2)


def close(a: Tensor, b: Tensor, rtol: float) -> bool:
    """Whether two tensors are equal up to rtol of the largest entry; integers must be exactly equal."""
    if a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return bool(((a == b) | ((a - b).abs() <= rtol * scale)).all())
