"""Batch norms with fixed statistics as one multiplication and one addition a channel.

PyTorch computes the same numbers by the same formula, but its way back through them on a CPU is several times
as slow as a multiplication, and a fit goes it once a direction.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    if running_mean.requires_grad or running_var.requires_grad or not input.is_contiguous():
        return None  # for PyTorch to refuse; whose results are contiguous
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
