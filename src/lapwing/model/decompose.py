"""Recurrent kernels written out as the linear maps and elementwise steps that the tape has rules for.

A function here takes the kernel's own arguments and returns its result, or None where it declines (packed sequences);
the kernel is then called as it is, and the parameters behind it get rows from a loop over samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


def _as_data(state: Tensor, step: Tensor) -> Tensor:
    """The initial state as something that depends on the data, so that its product with a weight is a use of it."""
    return state + 0 * step.sum(-1, keepdim=True)


def _lstm_step(
    gates_in: Tensor, state: tuple[Tensor, Tensor], w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None
) -> tuple[Tensor, Tensor]:
    h, c = state
    i, f, g, o = (gates_in + linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if w_hr is None else linear(h, w_hr)), c


def _gru_step(gates_in: Tensor, h: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> Tensor:
    r_in, z_in, n_in = gates_in.chunk(3, -1)
    r_h, z_h, n_h = linear(h, w_hh, b_hh).chunk(3, -1)
    r, z = (r_in + r_h).sigmoid(), (z_in + z_h).sigmoid()
    n = (n_in + r * n_h).tanh()
    return n + z * (h - n)


def _layers(params: Any, has_biases: bool, projected: bool, num_layers: int, directions: int) -> list[list[tuple]]:
    per = 2 + 2 * has_biases + projected
    flat = list(params)
    cut = [flat[k * per : (k + 1) * per] for k in range(num_layers * directions)]
    named = [
        (p[0], p[1], p[2] if has_biases else None, p[3] if has_biases else None, p[-1] if projected else None)
        for p in cut
    ]
    return [named[k * directions : (k + 1) * directions] for k in range(num_layers)]


def _recurrent(
    step: Callable, states: list[list[Tensor]], inputs: Tensor, layers: list[list[tuple]], batch_first: bool
) -> Any:
    """Run `step` over time for every layer and direction. states[k]: the parts (h,) or (h, c) of layer-direction k."""
    x = inputs.transpose(0, 1) if batch_first else inputs  # (t, b, i)
    finals = []
    for depth, layer in enumerate(layers):
        outputs = []
        for way, (w_ih, w_hh, b_ih, b_hh, w_hr) in enumerate(layer):
            gates = linear(x, w_ih, b_ih)
            state = [_as_data(part, x[0]) for part in states[depth * len(layer) + way]]
            order = range(x.shape[0]) if way == 0 else reversed(range(x.shape[0]))
            hidden: list[Any] = [None] * x.shape[0]
            for t in order:
                state = step(gates[t], state, w_hh, b_hh, w_hr)
                hidden[t] = state[0]
            finals.append(state)
            outputs.append(torch.stack(hidden))
        x = torch.cat(outputs, -1)
    return (x.transpose(0, 1) if batch_first else x), finals


def lstm(inputs: Tensor, hx: Any, params: Any, has_biases: Any, *rest: Any) -> Any:
    """torch.lstm(input, (h, c), params, has_biases, num_layers, dropout, train, bidirectional, batch_first)."""
    if isinstance(hx, Tensor):
        return None
    num_layers, _, train, bidirectional, batch_first = rest
    if train:
        return None
    h0, c0 = hx
    layers = _layers(params, has_biases, h0.shape[-1] != c0.shape[-1], num_layers, 1 + bidirectional)
    states = [[h, c] for h, c in zip(h0, c0, strict=True)]

    def step(
        gates: Tensor, state: list[Tensor], w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None
    ) -> list[Tensor]:
        return list(_lstm_step(gates, (state[0], state[1]), w_hh, b_hh, w_hr))

    out, finals = _recurrent(step, states, inputs, layers, batch_first)
    return out, torch.stack([s[0] for s in finals]), torch.stack([s[1] for s in finals])


def _simple(step: Callable) -> Callable:
    def kernel(inputs: Tensor, hx: Tensor, params: Any, has_biases: Any, *rest: Any) -> Any:
        if isinstance(params, Tensor):
            return None
        num_layers, _, train, bidirectional, batch_first = rest
        if train:
            return None
        layers = _layers(params, has_biases, False, num_layers, 1 + bidirectional)
        wrapped = lambda gates, state, w_hh, b_hh, _: [step(gates, state[0], w_hh, b_hh)]  # noqa: E731
        out, finals = _recurrent(wrapped, [[h] for h in hx], inputs, layers, batch_first)
        return out, torch.stack([s[0] for s in finals])

    return kernel


def _rnn_step(activation: Callable) -> Callable:
    def step(gates: Tensor, h: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> Tensor:
        return activation(gates + linear(h, w_hh, b_hh))

    return step


def _cell(step: Callable) -> Callable:
    def kernel(
        x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Tensor:
        return step(linear(x, w_ih, b_ih), _as_data(h, x), w_hh, b_hh)

    return kernel


def lstm_cell(
    x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Any:
    """torch.lstm_cell."""
    h, c = (_as_data(part, x) for part in hx)
    return _lstm_step(linear(x, w_ih, b_ih), (h, c), w_hh, b_hh, None)


DECOMPOSED: dict[Callable, Callable] = {
    torch.lstm: lstm,
    torch.gru: _simple(_gru_step),
    torch.rnn_tanh: _simple(_rnn_step(torch.tanh)),
    torch.rnn_relu: _simple(_rnn_step(torch.relu)),
    torch.lstm_cell: lstm_cell,
    torch.gru_cell: _cell(_gru_step),
    torch.rnn_tanh_cell: _cell(_rnn_step(torch.tanh)),
    torch.rnn_relu_cell: _cell(_rnn_step(torch.relu)),
}
