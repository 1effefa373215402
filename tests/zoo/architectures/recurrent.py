"""Recurrent networks: modules, cells, packed sequences, learned initial states."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .registry import Net, add, architecture, floats, lengths, several, weight


def last(rnn, width, batch_first=True):
    def call(s, x):
        h, _ = s.rnn(x if batch_first else x.transpose(0, 1))
        return s.head(h[:, -1] if batch_first else h[-1])

    return Net(call, rnn=rnn, head=nn.Linear(width, 2))


add("lstm", lambda: last(nn.LSTM(2, 3, batch_first=True), 3), floats(3, 2))
add("lstm_time_major", lambda: last(nn.LSTM(2, 3), 3, False), floats(3, 2))
add(
    "lstm_two_layers_bidirectional",
    lambda: last(nn.LSTM(2, 2, 2, bidirectional=True, batch_first=True, dropout=0.2), 4),
    floats(3, 2),
)
add("lstm_proj_size", lambda: last(nn.LSTM(2, 3, proj_size=2, batch_first=True), 2), floats(3, 2))
add("lstm_no_bias", lambda: last(nn.LSTM(2, 3, bias=False), 3, False), floats(3, 2))
add("gru", lambda: last(nn.GRU(2, 3, batch_first=True), 3), floats(3, 2))
add("gru_two_layers_bidirectional", lambda: last(nn.GRU(2, 2, 2, bidirectional=True), 4, False), floats(3, 2))
add("rnn_tanh", lambda: last(nn.RNN(2, 3, batch_first=True), 3), floats(3, 2))
add("rnn_relu_two_layers", lambda: last(nn.RNN(2, 3, 2, nonlinearity="relu"), 3, False), floats(3, 2))


@architecture(floats(3, 2))
def lstm_states():
    """All of what an LSTM returns is used: outputs, h and c."""

    def call(s, x):
        out, (h, c) = s.rnn(x)
        return s.head(torch.cat([out.mean(1), h[0], c[0]], -1))

    return Net(call, rnn=nn.LSTM(2, 2, batch_first=True), head=nn.Linear(6, 2))


@architecture(floats(3, 2), "tokens")
def gru_tokens():
    return Net(lambda s, x: s.head(s.rnn(x)[0]), rnn=nn.GRU(2, 3, batch_first=True), head=nn.Linear(3, 2))


@architecture(floats(3, 2))
def lstm_learned_state_expanded():
    def call(s, x):
        n = x.shape[0]
        out, _ = s.rnn(x, (s.h0.expand(-1, n, -1), s.c0.expand(-1, n, -1)))
        return s.head(out[:, -1])

    return Net(call, rnn=nn.LSTM(2, 2, batch_first=True), h0=weight(1, 1, 2), c0=weight(1, 1, 2), head=nn.Linear(2, 2))


@architecture(floats(3, 2))
def gru_learned_state_repeated():
    def call(s, x):
        _, h = s.rnn(x.transpose(0, 1), s.h0.repeat(1, x.shape[0], 1))
        return s.head(h[-1])

    return Net(call, rnn=nn.GRU(2, 2), h0=weight(1, 1, 2), head=nn.Linear(2, 2))


@architecture(floats(3, 2))
def lstm_cell_loop():
    def call(s, x):
        h = c = x.new_zeros(x.shape[0], 2)
        for t in range(x.shape[1]):
            h, c = s.cell(x[:, t], (h, c))
        return s.head(torch.cat([h, c], -1))

    return Net(call, cell=nn.LSTMCell(2, 2), head=nn.Linear(4, 2))


@architecture(floats(3, 2))
def gru_cell_loop_learned_state():
    def call(s, x):
        h = s.h0.expand(x.shape[0], -1)
        for step in x.unbind(1):
            h = s.cell(step, h)
        return s.head(h)

    return Net(call, cell=nn.GRUCell(2, 3), h0=weight(3), head=nn.Linear(3, 2))


@architecture(floats(3, 2), "tokens")
def rnn_cell_feedback():
    """The output is fed back: head and cell are used at every step."""

    def call(s, x):
        y, outs = x.new_zeros(x.shape[0], 2), []
        h = torch.tanh(s.init(x[:, 0]))
        for t in range(x.shape[1]):
            h = s.cell(x[:, t] + y, h)
            y = s.head(h)
            outs.append(y)
        return torch.stack(outs, 1)

    return Net(call, init=nn.Linear(2, 2), cell=nn.RNNCell(2, 2), head=nn.Linear(2, 2))


@architecture(several(floats(3, 2), lengths(1, 3)))
def lstm_packed():
    """Packed sequences: rows run over time, with fewer samples at each step."""

    def call(s, x, n):
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        out, _ = s.rnn(packed)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return s.head(out[torch.arange(x.shape[0]), n - 1])

    return Net(call, rnn=nn.LSTM(2, 2, batch_first=True), head=nn.Linear(2, 2))


@architecture(floats(3, 2))
def rnn_by_hand():
    """An Elman network from two linear layers, used at every step."""

    def call(s, x):
        h = x.new_zeros(x.shape[0], 3)
        for t in range(x.shape[1]):
            h = torch.tanh(s.i(x[:, t]) + s.h(h))
        return s.head(h)

    return Net(call, i=nn.Linear(2, 3), h=nn.Linear(3, 3, bias=False), head=nn.Linear(3, 2))


@architecture(floats(2, 4))
def conv_gru():
    """A GRU whose gates are convolutions."""

    def call(s, x):
        h = x.new_zeros(x.shape[0], 2, 4)
        for t in range(2):
            z, r = torch.sigmoid(s.gates(torch.cat([x[:, t : t + 1], h], 1))).chunk(2, 1)
            h = (1 - z) * h + z * torch.tanh(s.new(torch.cat([x[:, t : t + 1], r * h], 1)))
        return s.head(h.mean(-1))

    return Net(
        call,
        gates=nn.Conv1d(3, 4, 3, padding=1),
        new=nn.Conv1d(3, 2, 3, padding=1, padding_mode="circular"),
        head=nn.Linear(2, 2),
    )


@architecture(floats(2, 3))
def lstm_residual_inplace():
    """`+=` on what a linear layer returns, which is a view for some batch sizes and layouts and not for others."""

    def call(s, x):
        h, _ = s.rnn(x)
        r = s.fc(h)
        r += h
        return s.head(r).mean(1)

    return Net(call, rnn=nn.LSTM(3, 1, batch_first=True), fc=nn.Linear(1, 1), head=nn.Linear(1, 2, bias=False))
