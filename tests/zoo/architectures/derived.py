"""Weights that are computed from parameters before they are used."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from .registry import Net, add, architecture, floats, weight


def tail(first):
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2))


add("weight_norm_linear", lambda: tail(parametrizations.weight_norm(nn.Linear(3, 4))), floats(3))
add("spectral_norm_linear", lambda: tail(parametrizations.spectral_norm(nn.Linear(3, 4))), floats(3))
add("orthogonal_linear", lambda: tail(parametrizations.orthogonal(nn.Linear(3, 4))), floats(3))


@architecture(floats(2, 4))
def weight_norm_conv():
    conv = parametrizations.weight_norm(nn.Conv1d(2, 4, 2), dim=0)
    return Net(lambda s, x: s.head(torch.tanh(s.conv(x)).mean(-1)), conv=conv, head=nn.Linear(4, 2))


@architecture(floats(3))
def pruned_linear():
    """torch.nn.utils.prune: weight_orig * mask, written to the module by a forward hook."""
    first = nn.Linear(3, 4)
    prune.random_unstructured(first, "weight", amount=0.4)
    return tail(first)


@architecture(floats(3))
def masked_weight():
    mask = torch.tensor([[1.0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]])
    return Net(
        lambda s, x: s.head(torch.tanh(F.linear(x, s.w * s.mask, s.b))),
        w=weight(4, 3),
        mask=mask,
        b=weight(4),
        head=nn.Linear(4, 2),
    )


@architecture(floats(3))
def lora_merged():
    """W₀ frozen, W₀ + B A used as one weight."""

    def call(s, x):
        return s.head(torch.tanh(F.linear(x, s.w0 + 0.5 * s.b @ s.a)))

    return Net(call, w0=weight(4, 3, requires_grad=False), a=weight(2, 3), b=weight(4, 2), head=nn.Linear(4, 2))


@architecture(floats(3), once=True)
def lora_branches():
    def call(s, x):
        return s.head(torch.tanh(s.base(x) + s.up(s.down(x))))

    base = nn.Linear(3, 4).requires_grad_(False)
    return Net(call, base=base, down=nn.Linear(3, 2, bias=False), up=nn.Linear(2, 4, bias=False), head=nn.Linear(4, 2))


@architecture(floats(3))
def positive_weight():
    return Net(
        lambda s, x: F.linear(torch.tanh(F.linear(x, F.softplus(s.a), s.b)), s.c.exp()),
        a=weight(4, 3),
        b=weight(4),
        c=weight(2, 4),
    )


@architecture(floats(2, 4, 4))
def weight_standardization():
    def call(s, x):
        var, mean = torch.var_mean(s.w, dim=(1, 2, 3), keepdim=True, correction=0)
        h = F.conv2d(x, (s.w - mean) / (var + 1e-3).sqrt() * s.gain, s.b)
        return s.head(torch.tanh(s.norm(h)).mean((2, 3)))

    return Net(
        call, w=weight(4, 2, 2, 2), gain=weight(4, 1, 1, 1), b=weight(4), norm=nn.GroupNorm(2, 4), head=nn.Linear(4, 2)
    )


@architecture(floats(3))
def hypernetwork_from_code():
    """A network of parameters alone makes the weights of the network of data."""

    def call(s, x):
        w = s.hyper(torch.tanh(s.code))
        return F.linear(torch.tanh(F.linear(x, w[:9].view(3, 3), w[9:12])), s.out)

    return Net(call, code=weight(2), hyper=nn.Linear(2, 12), out=weight(2, 3))


@architecture(floats(3))
def hypernetwork_from_data():
    """Fast weights: the data make the weights of a per-sample linear map."""

    def call(s, x):
        w = s.hyper(x).view(-1, 2, 3)
        return torch.bmm(w, torch.tanh(s.fc(x)).unsqueeze(-1)).squeeze(-1) + s.b

    return Net(call, hyper=nn.Linear(3, 6), fc=nn.Linear(3, 3), b=weight(2))


@architecture(floats(3))
def concatenated_weights():
    """Two parameters joined into one matrix; one bias stacked from scalars."""

    def call(s, x):
        w = torch.cat([s.a, s.b], 0)
        return s.head(torch.tanh(F.linear(x, w, torch.stack([s.c, s.c * 2, s.d, s.d.sin()]))))

    return Net(call, a=weight(1, 3), b=weight(3, 3), c=weight(), d=weight(), head=nn.Linear(4, 2))


@architecture(floats(3))
def cayley_solve():
    """A matrix inverse of parameters."""

    def call(s, x):
        k = s.w - s.w.mT
        eye = torch.eye(3, dtype=x.dtype)
        return s.head(torch.tanh(x @ torch.linalg.solve(eye + k, eye - k)))

    return Net(call, w=weight(3, 3), head=nn.Linear(3, 2))


@architecture(floats(3))
def low_rank_and_kronecker_weight():
    return Net(
        lambda s, x: s.head(torch.tanh(F.linear(F.pad(x, (0, 1)), torch.kron(s.a, s.b) + torch.outer(s.u, s.v)))),
        a=weight(2, 2),
        b=weight(2, 2),
        u=weight(4),
        v=weight(4),
        head=nn.Linear(4, 2),
    )


@architecture(floats(3))
def quantized_weight():
    """Straight-through rounding of a weight."""

    def call(s, x):
        w = s.w + (torch.round(s.w * 4) / 4 - s.w).detach()
        return s.head(torch.tanh(F.linear(x, w)))

    return Net(call, w=weight(4, 3), head=nn.Linear(4, 2))


@architecture(floats(3))
def fake_dropout_mask_from_parameters():
    """A soft gate per unit: sigmoid(α) scales units of two layers."""

    def call(s, x):
        gate = torch.sigmoid(s.alpha)
        h = torch.tanh(s.a(x)) * gate
        return s.b(torch.tanh(s.m(h)) * gate.flip(0))

    return Net(call, a=nn.Linear(3, 4), alpha=weight(4), m=nn.Linear(4, 4), b=nn.Linear(4, 2))
