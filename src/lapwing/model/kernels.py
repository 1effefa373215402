"""Kernels written out as elementary operations, chosen per thread: nothing here touches a switch of PyTorch's.

PyTorch's own switches (the fast path of encoders, mkldnn, cudnn, the attention backends) are global to the process, so
that another thread would compute with other kernels too, and two threads could leave a switch off for good. A
`TorchFunctionMode` belongs to the thread that enters it. While any such mode is active, encoders do not take their fast
path either.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lapwing.model.decompose import DECOMPOSED


class _Written(TorchFunctionMode):
    """Runs a table's functions in place of the kernels that are its keys; where one returns None, the kernel itself."""

    def __init__(self, table: Mapping[Any, Callable]) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = self.table.get(func)
        if written is not None:
            with self:
                out = written(*args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)


def elementary_attention() -> TorchFunctionMode:
    """Attention as two products and a softmax, which differentiate forwards and twice; other kernels as they are."""
    return _Written(ATTENTION)


def differentiable_kernels() -> TorchFunctionMode:
    """Kernels that have forward-mode and second derivatives: elementary attention, recurrent layers step by step."""
    return _Written({**DECOMPOSED, **ATTENTION})


@contextmanager
def without_fast_path(module: nn.Module) -> Iterator[None]:
    """Keep encoders from their fast path, which is taken without a graph only and zeroes padded positions.

    Outputs and derivatives would be those of two networks.
    """
    fast = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
    with _Written({}) if any(isinstance(m, fast) for m in module.modules()) else nullcontext():
        yield


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """softmax(Q Kᵀ·scale + mask) V, as `scaled_dot_product_attention`; rows without a key give zero.

    None where there is dropout.
    """
    if dropout_p:
        return None
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        return scores.softmax(-1) @ value
    if attn_mask.dtype != torch.bool:
        scores, attn_mask = scores + attn_mask, attn_mask > -torch.inf
    weights = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min).softmax(-1)
    empty = ~attn_mask.any(-1, keepdim=True)
    return (weights.masked_fill(empty, 0.0) if bool(empty.any()) else weights) @ value


def _opened(function: Any) -> Callable:
    """A copy of a Python-level torch function that runs its body instead of handing itself back to the mode.

    Such functions begin with `if has_torch_function(...): return handle_torch_function(...)`, which would come back
    here for ever; in the copy's globals that test is false, so the operations inside are seen one by one.
    """

    def never(*_: Any) -> bool:
        return False

    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(names, never)}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


WRITTEN_OUT: dict[Callable, Callable] = {
    **DECOMPOSED,
    F.multi_head_attention_forward: _opened(F.multi_head_attention_forward),
}
ATTENTION: dict[Callable, Callable] = {
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: WRITTEN_OUT[F.multi_head_attention_forward],
}
