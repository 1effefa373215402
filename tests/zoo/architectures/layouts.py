"""Where the samples sit: flattening, folding, looping, routing; outputs with event dimensions."""

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Net, add, architecture, floats, lengths, named, several, weight

add("tokens_linear", lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), floats(3, 3), "tokens")
add(
    "tokens_conv1d",
    lambda: Net(
        lambda s, x: s.head(torch.tanh(s.conv(x.transpose(1, 2))).transpose(1, 2)),
        conv=nn.Conv1d(3, 3, 3, padding=1),
        head=nn.Linear(3, 2),
    ),
    floats(3, 3),
    "tokens",
)


@architecture(floats(3, 4))
def flatten_batch_major():
    """Batch and time become one axis, samples slow."""

    def call(s, x):
        n, t, d = x.shape
        return s.head(torch.tanh(s.fc(x.reshape(n * t, d))).view(n, t, 3).mean(1))

    return Net(call, fc=nn.Linear(4, 3), head=nn.Linear(3, 2))


@architecture(floats(3, 4))
def flatten_time_major():
    """Batch and time become one axis, samples fast."""

    def call(s, x):
        n, t, d = x.shape
        return s.head(torch.tanh(s.fc(x.transpose(0, 1).reshape(-1, d))).view(t, n, 3).mean(0))

    return Net(call, fc=nn.Linear(4, 3), head=nn.Linear(3, 2))


@architecture(floats(3, 4), "tokens")
def flatten_tokens_time_major():
    def call(s, x):
        n, t, d = x.shape
        h = s.norm(torch.tanh(s.fc(x.transpose(0, 1).reshape(-1, d))))
        return s.head(h).view(t, n, 2).transpose(0, 1)

    return Net(call, fc=nn.Linear(4, 3), norm=nn.LayerNorm(3), head=nn.Linear(3, 2))


@architecture(floats(2, 3, 4))
def samples_in_the_middle():
    """Frames × batch × tokens: neither the first nor the last axis is the sample."""

    def call(s, x):
        h = torch.tanh(s.fc(x.permute(2, 0, 1, 3)) + s.frame[:, None, None])
        return s.head(h.mean((0, 2)))

    return Net(call, fc=nn.Linear(4, 3), frame=weight(3, 3), head=nn.Linear(3, 2))


@architecture(floats(3, 3))
def samples_last():
    """Features first, samples last, as in old control code."""

    def call(s, x):
        h = torch.tanh(s.a @ x.flatten(1).T + s.b[:, None])
        return (s.c @ h).T

    return Net(call, a=weight(3, 9), b=weight(3), c=weight(2, 3))


@architecture(floats(2, 1, 4, 4))
def video_frames_in_batch():
    """Frames folded into the batch for convolution and batch norm, then pooled over time."""

    def call(s, x):
        n, t = x.shape[:2]
        h = torch.tanh(s.bn(s.conv(x.flatten(0, 1)))).mean((2, 3))
        return s.head(h.view(n, t, 3).amax(1))

    return Net(call, conv=nn.Conv2d(1, 3, 2), bn=nn.BatchNorm2d(3), head=nn.Linear(3, 2))


@architecture(floats(3))
def loop_over_samples():
    """The model itself loops: each operation sees one sample."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return Net(lambda s, x: torch.stack([s.net(row) for row in x]), net=net)


@architecture(floats(2, 4))
def loop_over_samples_conv():
    """Unbatched convolutions in a loop."""
    return Net(
        lambda s, x: torch.cat([s.head(torch.tanh(s.conv(row)).mean(-1))[None] for row in x]),
        conv=nn.Conv1d(2, 3, 2),
        head=nn.Linear(3, 2),
    )


@architecture(several(floats(3), floats(3)), refusal=True)
def symmetric_difference_cat_batch_reversed():
    """Two views concatenated along the batch axis, the second in reverse order."""

    def call(s, x, z):
        h = torch.tanh(s.fc(torch.cat([x, z.flip(0)], 0)))
        n = x.shape[0]
        return s.head(h[:n] * h[n:].flip(0))

    return Net(call, fc=nn.Linear(3, 3), head=nn.Linear(3, 2))


@architecture(floats(4, 3))
def ragged_rows():
    """Only rows with a positive first entry reach the layer: the number of rows is not a multiple of the batch."""

    def call(s, x):
        keep = x[..., 0] > 0
        h = x.new_zeros(*x.shape[:2], 3)
        h[keep] = torch.tanh(s.fc(x[keep]))
        return s.head(h.sum(1))

    return Net(call, fc=nn.Linear(3, 3), head=nn.Linear(3, 2))


@architecture(floats(3))
def mixture_of_experts_routed():
    """Top-1 routing by data: each expert sees some of the samples, in batches that may be empty."""

    def call(s, x):
        gate = torch.softmax(s.gate(x), -1)
        best = gate.argmax(-1)
        out = x.new_zeros(x.shape[0], 2)
        for e, expert in enumerate(s.experts):
            mask = best == e
            if mask.any():
                out[mask] = expert(x[mask]) * gate[mask, e, None]
        return out

    return Net(call, gate=nn.Linear(3, 3), experts=nn.ModuleList([nn.Linear(3, 2) for _ in range(3)]))


@architecture(floats(3))
def mixture_of_experts_index_add():
    """The Hugging Face way: nonzero, index_add_."""

    def call(s, x):
        gate, chosen = torch.softmax(s.gate(x), -1).topk(2, -1)
        out = torch.zeros(x.shape[0], 2, dtype=x.dtype)
        for e, expert in enumerate(s.experts):
            rows, slot = torch.where(chosen == e)
            out.index_add_(0, rows, expert(x[rows]) * gate[rows, slot, None])
        return out

    return Net(call, gate=nn.Linear(3, 3), experts=nn.ModuleList([nn.Linear(3, 2) for _ in range(3)]))


@architecture(floats(3))
def mixture_of_experts_soft():
    def call(s, x):
        h = torch.einsum("bi,eio->beo", x, s.w) + s.b
        return (torch.tanh(h) * torch.softmax(s.gate(x), -1)[..., None]).sum(1)

    return Net(call, w=weight(3, 3, 2), b=weight(3, 2), gate=nn.Linear(3, 3))


@architecture(named(image=floats(1, 3, 3), table=floats(2)))
def multimodal_dict():
    def call(s, image, table):
        return s.head(torch.cat([torch.tanh(s.conv(image)).amax((2, 3)), torch.tanh(s.fc(table))], 1))

    return Net(call, conv=nn.Conv2d(1, 2, 2), fc=nn.Linear(2, 2), head=nn.Linear(4, 2))


@architecture(several(floats(4, 3), lengths(1, 4)))
def deep_sets_masked():
    def call(s, x, n):
        mask = (torch.arange(4) < n[:, None]).unsqueeze(-1)
        h = torch.tanh(s.phi(x)).masked_fill(~mask, float("-inf")).amax(1)
        return s.rho(h)

    return Net(call, phi=nn.Linear(3, 3), rho=nn.Linear(3, 2))


@architecture(several(floats(4, 3), lambda n: (torch.rand(n, 4, 4) < 0.5).double()), "tokens")
def graph_convolution():
    """Dense adjacency a sample; node outputs."""

    def call(s, x, adjacency):
        a = adjacency + torch.eye(4, dtype=x.dtype)
        a = a / a.sum(-1, keepdim=True)
        return a @ s.b(F.relu(a @ s.a(x))) + s.skip(x)

    return Net(call, a=nn.Linear(3, 3), b=nn.Linear(3, 2, bias=False), skip=nn.Linear(3, 2))


@architecture(floats(4, 3))
def fixed_graph_left_product():
    """A fixed graph multiplies from the left; a learned mixing of nodes does too."""

    def call(s, x):
        h = torch.tanh(s.ring @ s.fc(x))
        return s.head((s.mix @ h).flatten(1))

    ring = torch.roll(torch.eye(4), 1, 0)
    return Net(call, fc=nn.Linear(3, 2), ring=ring, mix=weight(2, 4), head=nn.Linear(4, 2))


@architecture(floats(2, 3), "tokens")
def multi_output_tokens_different_heads():
    """Each token has its own head."""
    return Net(
        lambda s, x: torch.stack([h(torch.tanh(s.fc(x[:, t]))) for t, h in enumerate(s.heads)], 1),
        fc=nn.Linear(3, 3),
        heads=nn.ModuleList([nn.Linear(3, 2) for _ in range(2)]),
    )


@architecture(floats(3, 3), "tokens")
def square_everything():
    """Time, features and (with three samples) batch all have the same size."""
    return Net(
        lambda s, x: s.b(torch.tanh(s.a(x) @ s.m).transpose(1, 2)), a=nn.Linear(3, 3), m=weight(3, 3), b=nn.Linear(3, 3)
    )


@architecture(floats(3))
def square_matrix_left():
    """W @ xᵀ with as many samples as features: the sample axis cannot be guessed from sizes."""
    return Net(
        lambda s, x: (s.c @ torch.tanh(s.b @ torch.tanh(s.a @ x.T))).T, a=weight(3, 3), b=weight(3, 3), c=weight(3, 3)
    )


@architecture(floats(3, 3), "tokens")
def residual_inplace_tokens():
    """In-place additions on the views that linear and matmul return for tokens."""

    def call(s, x):
        h = s.a(x)
        h += x
        h = torch.tanh(h) @ s.m
        h.add_(x).relu_()
        return s.head(h)

    return Net(call, a=nn.Linear(3, 3), m=weight(3, 3), head=nn.Linear(3, 2))
