"""Forward-mode products with the fastest kernels that have a forward-mode derivative."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lapwing.model.module import differentiable_kernels
from lapwing.model.tangents import Tangents, Values

_LEVEL: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # into KERNELS: what a module was seen to need


class _ElementaryAttention(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not _drops(*args, **kwargs):
            return attention(*args, **kwargs)
        return func(*args, **kwargs)


def _drops(*args: Any, **kwargs: Any) -> bool:
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


@contextmanager
def elementary_attention() -> Iterator[None]:
    """Attention as two products and a softmax, which differentiate forwards and twice; other kernels as they are."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _ElementaryAttention(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


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
) -> Tensor:
    """softmax(Q Kᵀ·scale + mask) V, as `scaled_dot_product_attention` without dropout; rows without a key give zero."""
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


KERNELS: tuple[Callable[[], Any], ...] = (nullcontext, elementary_attention, differentiable_kernels)


def level(module: nn.Module) -> int:
    """The first of `KERNELS` not yet seen to lack a derivative for this module; len(KERNELS) if all do."""
    return _LEVEL.get(module, 0)


def lacks_derivative(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("forward", "jvp", "derivative", "double backward", "batching rule"))


def push_forward(
    module: nn.Module,
    run: Callable[[dict[str, Tensor]], Tensor],
    values: dict[str, Tensor],
    tangents: list[dict[str, Tensor]],
    known: Values | None = None,
) -> tuple[Tensor, Tensor] | None:
    """f and J v of every tangent, or None where an operation has no forward-mode derivative with any kernels.

    Values that are `known` from a pass over the same inputs, are not computed again.
    """
    for number in range(level(module), len(KERNELS)):
        try:
            with KERNELS[number](), torch.no_grad(), quiet():
                pairs = [_dual_pass(run, values, tangent, known) for tangent in tangents]
                f = pairs[0][0] if pairs else run(values)
            return f, torch.stack([out for _, out in pairs]) if pairs else f.new_zeros(0, *f.shape)
        except (NotImplementedError, RuntimeError) as error:
            if not lacks_derivative(error):
                raise
            _LEVEL[module] = number + 1
    return None


def _dual_pass(
    run: Callable[[dict[str, Tensor]], Tensor],
    values: dict[str, Tensor],
    tangent: dict[str, Tensor],
    known: Values | None,
) -> tuple[Tensor, Tensor]:
    with forward_ad.dual_level(), Tangents(known) as heavy:
        out = run({name: forward_ad.make_dual(value, tangent[name]) for name, value in values.items()})
        f, moved = forward_ad.unpack_dual(out)
        found = f.clone(), torch.zeros_like(f) if moved is None else moved.clone()
    if known is None or heavy.number == len(known.kept):
        return found
    return _dual_pass(run, values, tangent, None)  # other calls than those of the pass that left the values


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch scripts its forward-mode formulas at first use, and warns that scripting is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
