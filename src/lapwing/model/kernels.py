"""Kernels replaced by others that give the same numbers, chosen per thread: no global switch of PyTorch is touched.

PyTorch's own switches (the fast path of encoders, mkldnn, cudnn, the attention backends) are global to the process, so
another thread would compute with other kernels too, and two threads could leave a switch off for good. A
`TorchFunctionMode` belongs to the thread that enters it.

There are three kinds of replacement. Recurrent kernels are written out as linear maps and elementwise steps, for which
the tape has rules. Such a function takes the kernel's own arguments and returns its result, or None where it declines
(packed sequences): then the kernel is called as it is, and its parameters get rows from a loop over samples.
Attention is written out as two products and a softmax, which can be differentiated forwards and twice. Batch norms with
fixed statistics become one multiplication and one addition per channel: PyTorch computes the same numbers, but its
backward pass on a CPU is several times as slow, and for a batch of one it is wrong (PyTorch 2.13) where the gradient or
the input has the memory layout of tokens, which differs from channels-last in the stride of the batch alone.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


class _Written(TorchFunctionMode):
    """Runs the functions of a table in place of the kernels that are its keys; a kernel itself if they return None."""

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
    """Return a mode that runs attention as two products and a softmax, which differentiate forwards and twice."""
    return _Written(ATTENTION)


def differentiable_kernels() -> TorchFunctionMode:
    """Return a mode whose kernels can all be differentiated forwards and twice: also recurrent layers, step by step."""
    return _Written({**DECOMPOSED, **ATTENTION})


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
    """Return `scaled_dot_product_attention` of the arguments, as products and a softmax; None if there is dropout."""
    if dropout_p:
        return None
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return attention_weights(query, key, attn_mask, is_causal, scale) @ value


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """Return softmax(Q Kᵀ·scale + mask), with zeros in rows without a key; `scale` is 1/√d by default."""
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype != torch.bool:
        scores, mask = scores + mask, mask > -torch.inf
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    empty = ~mask.any(-1, keepdim=True)
    return weights.masked_fill(empty, 0.0) if bool(empty.any()) else weights


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
    """Return `functional.batch_norm` of the arguments; None if it is not that simple or PyTorch is as fast."""
    if training or running_mean is None or running_var is None or input.ndim < 2 or _hooked():
        return None
    if running_mean.requires_grad or running_var.requires_grad:
        return None  # PyTorch refuses these
    input = input.contiguous() if len(input) == 1 else input
    if not input.is_contiguous():
        return None  # PyTorch's results have the input's memory layout
    tensors = [t for t in (input, running_mean, running_var, weight, bias) if t is not None]
    kinds = {(t.dtype, t.device.type) for t in tensors}
    if kinds not in ({(torch.float32, "cpu")}, {(torch.float64, "cpu")}):
        return None
    if any(t.shape != input.shape[1:2] for t in tensors[1:]):
        return None  # PyTorch refuses these
    slope = (running_var + eps).rsqrt()
    slope = slope if weight is None else slope * weight
    level = -running_mean * slope
    level = level if bias is None else level + bias
    channels = (-1, *(1,) * (input.ndim - 2))
    # not addcmul, which is slow with broadcast arguments
    return (input * slope.reshape(channels)).add_(level.reshape(channels))


def _hooked() -> bool:
    """Whether hooks see the tensors that a forward pass saves, or may see them: PyTorch before 2.8 does not say.

    Checkpointing sets such hooks: it runs part of the network again, outside the tape, and expects the same tensors.
    """
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    except (AttributeError, TypeError):
        return True


def _as_data(state: Tensor, step: Tensor) -> Tensor:
    """Make the initial state depend on the data, so that the tape records its product with a weight."""
    return state + 0 * step.sum(-1, keepdim=True)


def _lstm_step(
    gates: Tensor, state: Sequence[Tensor], w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None
) -> tuple[Tensor, ...]:
    h, c = state
    i, f, g, o = (gates + linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if w_hr is None else linear(h, w_hr)), c


def _gru_step(gates: Tensor, state: Sequence[Tensor], w_hh: Tensor, b_hh: Tensor | None, _: None) -> tuple[Tensor, ...]:
    (h,) = state
    r_in, z_in, n_in = gates.chunk(3, -1)
    r_h, z_h, n_h = linear(h, w_hh, b_hh).chunk(3, -1)
    r, z = (r_in + r_h).sigmoid(), (z_in + z_h).sigmoid()
    n = (n_in + r * n_h).tanh()
    return (n + z * (h - n),)


def _rnn_step(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda gates, state, w_hh, b_hh, _: (activation(gates + linear(state[0], w_hh, b_hh)),)


def _layers(params: Any, has_biases: bool, projected: bool, num_layers: int, directions: int) -> list[list[tuple]]:
    """Return (w_ih, w_hh, b_ih, b_hh, w_hr) of each direction of each layer."""
    per = 2 + 2 * has_biases + projected
    flat = list(params)
    cut = [flat[k * per : (k + 1) * per] for k in range(num_layers * directions)]
    named = [
        (p[0], p[1], p[2] if has_biases else None, p[3] if has_biases else None, p[-1] if projected else None)
        for p in cut
    ]
    return [named[k * directions : (k + 1) * directions] for k in range(num_layers)]


def _recurrent(step: Callable[..., tuple[Tensor, ...]]) -> Callable:
    """Write out a recurrent kernel: run `step` over time for every layer and direction.

    A state has one part, h, or is a pair (h, c).
    """

    def kernel(inputs: Tensor, hx: Any, params: Any, has_biases: Any, *rest: Any) -> Any:
        if not isinstance(has_biases, bool):  # packed sequences have other arguments
            return None
        num_layers, _, train, bidirectional, batch_first = rest
        if train:
            return None
        parts = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        layers = _layers(params, has_biases, parts[0].shape[-1] != parts[-1].shape[-1], num_layers, 1 + bidirectional)
        starts = list(zip(*parts, strict=True))  # per layer and direction
        x = inputs.transpose(0, 1) if batch_first else inputs  # (t, b, i)
        finals = []
        for depth, layer in enumerate(layers):
            outputs = []
            for way, (w_ih, w_hh, b_ih, b_hh, w_hr) in enumerate(layer):
                gates = linear(x, w_ih, b_ih)
                state = tuple(_as_data(part, x[0]) for part in starts[depth * len(layer) + way])
                order = range(x.shape[0]) if way == 0 else reversed(range(x.shape[0]))
                hidden: list[Any] = [None] * x.shape[0]
                for t in order:
                    state = step(gates[t], state, w_hh, b_hh, w_hr)
                    hidden[t] = state[0]
                finals.append(state)
                outputs.append(torch.stack(hidden))
            x = torch.cat(outputs, -1)
        return (x.transpose(0, 1) if batch_first else x), *map(torch.stack, zip(*finals, strict=True))

    return kernel


def _cell(step: Callable[..., tuple[Tensor, ...]]) -> Callable:
    """Write out one step of a recurrent layer."""

    def kernel(
        x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        state = (hx,) if isinstance(hx, Tensor) else hx
        after = step(linear(x, w_ih, b_ih), [_as_data(part, x) for part in state], w_hh, b_hh, None)
        return after[0] if isinstance(hx, Tensor) else after

    return kernel


DECOMPOSED: dict[Callable, Callable] = {
    torch.lstm: _recurrent(_lstm_step),
    torch.gru: _recurrent(_gru_step),
    torch.rnn_tanh: _recurrent(_rnn_step(torch.tanh)),
    torch.rnn_relu: _recurrent(_rnn_step(torch.relu)),
    torch.lstm_cell: _cell(_lstm_step),
    torch.gru_cell: _cell(_gru_step),
    torch.rnn_tanh_cell: _cell(_rnn_step(torch.tanh)),
    torch.rnn_relu_cell: _cell(_rnn_step(torch.relu)),
}


def _opened(function: Any) -> Callable:
    """Copy a Python-level torch function so that it runs its body instead of handing itself back to the mode.

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
