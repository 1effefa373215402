"""Forward mode by hand for the operations that take the time: fewer passes over memory, and no value twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@dataclass(eq=False)
class Values:
    """Outputs of the heavy operations of one pass, in order: later passes of the same inputs take them from here."""

    kept: list[tuple[Any, Tensor, int, Tensor]] = field(default_factory=list)

    def keep(self, call: Any, out: Tensor) -> None:
        out = out.detach()
        self.kept.append((call, out, out._version, _sample(out)))

    def at(self, number: int, call: Any) -> tuple[Tensor, Tensor] | None:
        """Return the output of a call and entries that it had, or None if it was not kept or is known to have changed.

        Whether the entries are still the same is left to the caller, which asks once for all passes: every question
        waits for the device.
        """
        if number >= len(self.kept):
            return None
        kept, out, version, sample = self.kept[number]
        return (out, sample) if kept == call and out._version == version else None

    @property
    def attends(self) -> bool:
        return any(call[0] is F.scaled_dot_product_attention for call, *_ in self.kept)


def _sample(out: Tensor) -> Tensor:
    """A few entries, which show what `.data` overwrites without a new version."""
    flat = out.reshape(-1)
    return flat[:: max(1, flat.numel() // 16)].clone()


class Recording(TorchFunctionMode):
    """Keeps outputs of heavy operations while a pass runs, for `Tangents`."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in RULES:
            self.values.keep(_call(func, args), out)
        return out


class Tangents(TorchFunctionMode):
    """Heavy operations of dual tensors by the rules below; all others as PyTorch differentiates them."""

    def __init__(self, values: Values | None = None) -> None:
        super().__init__()
        self.values, self.number = values or Values(), 0
        self.taken: list[tuple[Tensor, Tensor]] = []  # entries of the values that were taken: as they are, as they were

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is None or torch.is_grad_enabled():  # a gradient inside the network needs the tangents of its graph
            return func(*args, **kwargs)
        kept, self.number = self.values.at(self.number, _call(func, args)), self.number + 1
        known = None
        if kept is not None:
            known, before = kept
            self.taken.append((_sample(known), before))
        found = rule(known, *args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _call(func: Any, args: tuple) -> tuple:
    """What must be the same for a value to be that of a call: function, shapes, and where its weights are in memory."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    places = () if func is F.scaled_dot_product_attention else tuple(map(_place, tensors[1:]))
    return func, places, *(tuple(t.shape) for t in tensors)


def _place(tensor: Tensor) -> int:
    try:
        return forward_ad.unpack_dual(tensor).primal.data_ptr()
    except RuntimeError:  # a tensor of torch.func
        return -1


def parts(*tensors: Tensor | None) -> tuple[list[Any], list[Any]]:
    """Primals and tangents; None where there is none."""
    pairs = [(None, None) if t is None else forward_ad.unpack_dual(t) for t in tensors]
    return [p for p, _ in pairs], [t for _, t in pairs]


def dual(out: Tensor, *terms: Tensor | None) -> Tensor:
    """`out` with the sum of the terms as its tangent."""
    total: Tensor | None = None
    for term in terms:
        if term is not None:
            total = term if total is None else total.add_(term)
    return out if total is None else forward_ad.make_dual(out, total)


def _convolution(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rule(
        known: Tensor | None, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kw: Any
    ) -> Tensor:
        (x, w, b), (dx, dw, db) = parts(input, weight, bias)
        out = func(x, w, b, *args, **kw) if known is None else known
        by_input = None if dx is None else func(dx, w, None, *args, **kw)
        by_weight = None if dw is None else func(x, dw, db, *args, **kw)
        if dw is None and db is not None:
            by_weight = db.reshape(-1, *(1,) * (w.ndim - 2)).expand_as(out).clone()
        return dual(out, by_input, by_weight)

    return rule


def _linear(known: Tensor | None, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    (x, w, b), (dx, dw, db) = parts(input, weight, bias)
    out = F.linear(x, w, b) if known is None else known
    total = None
    if dw is not None:
        total = F.linear(x, dw, db)
    elif db is not None:
        total = db.expand_as(out).clone()
    if dx is not None and total is not None and w.ndim == 2 and total.dtype == dx.dtype == w.dtype:
        flat = total.reshape(-1, total.shape[-1])
        return dual(out, flat.addmm_(dx.reshape(-1, dx.shape[-1]), w.T).reshape(out.shape))
    return dual(out, total, None if dx is None else F.linear(dx, w))


def _batch_norm(
    known: Tensor | None, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    """In eval mode an affine map of every channel."""
    (x, w, b), (dx, dw, db) = parts(input, weight, bias)
    mean, variance = running_mean, running_var
    if training or mean is None or variance is None:
        return None
    column = (1, -1, *(1,) * (x.ndim - 2))
    inverse = (variance + eps).rsqrt()
    out = F.batch_norm(x, mean, variance, w, b, False, momentum, eps) if known is None else known
    total: Tensor | None = None if db is None else db.reshape(column)
    if dw is not None:
        turn = inverse * dw
        shift = (-mean * turn).reshape(column)
        total = torch.addcmul(shift if total is None else total + shift, x, turn.reshape(column))
    if dx is not None:
        slope = (inverse if w is None else inverse * w).reshape(column)
        total = dx * slope if total is None else torch.addcmul(total, dx, slope)
    return dual(out, None if total is None else total.expand_as(out).contiguous())


def _silu(known: Tensor | None, input: Tensor, inplace: bool = False) -> Tensor | None:
    if inplace:
        return None
    (x,), (dx,) = parts(input)
    out = F.silu(x) if known is None else known
    return dual(out, None if dx is None else torch.ops.aten.silu_backward(dx, x))


def _attention(
    known: Tensor | None, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """P V with P = softmax(S): dP V + P dV, dP = P ∘ dS − P ∘ Σ(P ∘ dS)."""
    (q, k, v, m), (dq, dk, dv, dm) = parts(query, key, value, attn_mask)
    if dropout_p:
        return None
    if enable_gqa:
        k, v, dk, dv = (
            None if t is None else t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v, dk, dv)
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = _weights(q, k, m, is_causal, scale)
    out = weights @ v if known is None else known
    terms = [None if dv is None else weights @ dv]
    slope: Tensor | None = None
    for left, right in ((dq, k), (q, dk)):
        if left is not None and right is not None:
            part = (left * scale) @ right.mT
            slope = part if slope is None else slope.add_(part)
    if dm is not None:
        slope = dm if slope is None else slope + dm
    if slope is not None:
        moved = slope * weights
        moved = torch.addcmul(moved, weights, moved.sum(-1, keepdim=True), value=-1)
        terms.append(moved @ v)
    return dual(out, *terms)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """softmax(Q Kᵀ·scale + mask); rows without a key are zero."""
    scores = (q * scale) @ k.mT
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    empty = (mask == -torch.inf).all(-1, keepdim=True)
    weights = scores.add_(mask.clamp(min=torch.finfo(q.dtype).min)).softmax(-1)
    return weights.masked_fill(empty, 0.0) if bool(empty.any()) else weights


RULES: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv1d: _convolution(torch.conv1d),
    torch.conv2d: _convolution(torch.conv2d),
    torch.conv3d: _convolution(torch.conv3d),
    F.linear: _linear,
    F.batch_norm: _batch_norm,
    F.silu: _silu,
    F.scaled_dot_product_attention: _attention,
}
