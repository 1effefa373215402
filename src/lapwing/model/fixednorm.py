"""Batch norms with fixed statistics as one multiplication and one addition a channel.

PyTorch computes the same numbers by the same formula, but its way back through them on a CPU is several times
as slow as a multiplication, and a fit goes it once a direction. For a batch of one it is also wrong (PyTorch 2.13)
where the gradient or the input has the memory layout of tokens, which differs from channels-last in the stride of the
batch alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class FixedNorms(TorchFunctionMode):
    """Batch norms by `fixed_batch_norm` in passes that no tape records."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = fixed_batch_norm(*args, **(kwargs or {})) if func is F.batch_norm else None
        return func(*args, **(kwargs or {})) if out is None else out


def fixed_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """`functional.batch_norm`, or None where it is not that simple or PyTorch's own is as fast."""
    if training or running_mean is None or running_var is None or input.ndim < 2 or _hooked():
        return None
    if running_mean.requires_grad or running_var.requires_grad:
        return None  # for PyTorch to refuse
    input = input.contiguous() if len(input) == 1 else input
    if not input.is_contiguous():
        return None  # PyTorch's results have the input's memory layout
    tensors = [t for t in (input, running_mean, running_var, weight, bias) if t is not None]
    kinds = {(t.dtype, t.device.type) for t in tensors}
    if kinds not in ({(torch.float32, "cpu")}, {(torch.float64, "cpu")}):
        return None
    if any(t.shape != input.shape[1:2] for t in tensors[1:]):
        return None  # for PyTorch to refuse
    slope = (running_var + eps).rsqrt()
    slope = slope if weight is None else slope * weight
    level = -running_mean * slope
    level = level if bias is None else level + bias
    channels = (-1, *(1,) * (input.ndim - 2))
    # not addcmul, which takes one number at a time where the others repeat
    return (input * slope.reshape(channels)).add_(level.reshape(channels))


def _hooked() -> bool:
    """Whether what a forward pass keeps is watched, or may be: PyTorch before 2.8 does not tell. That of a checkpoint
    is, which runs part of the network again, outside the tape, and wants the same tensors to be kept."""
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    except (AttributeError, TypeError):
        return True
