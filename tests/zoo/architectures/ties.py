"""One tensor, several uses."""

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Net, architecture, floats, ints, several, weight


@architecture(floats(3))
def module_called_twice():
    return Net(lambda s, x: s.head(torch.tanh(s.fc(torch.tanh(s.fc(x))))), fc=nn.Linear(3, 3), head=nn.Linear(3, 2))


@architecture(floats(3))
def same_module_in_sequential():
    fc = nn.Linear(3, 3)
    return nn.Sequential(fc, nn.Tanh(), fc, nn.Tanh(), nn.Linear(3, 2))


@architecture(floats(3))
def tensor_in_two_modules():
    """Same weight, different biases."""
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    return Net(lambda s, x: s.head(torch.tanh(s.b(torch.tanh(s.a(x))))), a=a, b=b, head=nn.Linear(3, 2))


@architecture(floats(3))
def tensor_with_and_without_bias():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    b.weight = a.weight
    return Net(lambda s, x: s.head(torch.tanh(s.b(torch.tanh(s.a(x))))), a=a, b=b, head=nn.Linear(3, 2))


@architecture(floats(3))
def bias_in_two_modules():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.bias = a.bias
    return Net(lambda s, x: s.head(torch.tanh(s.b(torch.tanh(s.a(x))))), a=a, b=b, head=nn.Linear(3, 2))


@architecture(floats(3))
def transposed_linear():
    """PEERS: a weight reused through F.linear(h, W.T)."""
    return Net(lambda s, x: F.linear(torch.tanh(s.enc(x)), s.enc.weight.T), enc=nn.Linear(3, 2))


@architecture(floats(3))
def autoencoder_transposed_tie():
    def call(s, x):
        h = torch.tanh(s.enc(x))
        z = torch.tanh(s.mid(h))
        return F.linear(torch.tanh(F.linear(z, s.mid.weight.t(), s.b1)), s.enc.weight.t(), s.b2)

    return Net(call, enc=nn.Linear(3, 4), mid=nn.Linear(4, 2), b1=weight(4), b2=weight(3))


@architecture(floats(3))
def tied_symmetric_product():
    """x W Wᵀ, both sides the same raw matrix."""
    return Net(lambda s, x: s.head(torch.tanh(x @ s.w @ s.w.mT)), w=weight(3, 2), head=nn.Linear(3, 2))


@architecture(floats(2, 5))
def conv_tied_transpose():
    """A convolution's weight decodes with conv_transpose; the same kernel also at another dilation."""

    def call(s, x):
        h = torch.tanh(s.conv(x))
        h = torch.tanh(F.conv_transpose1d(h, s.conv.weight, s.b))
        h = F.conv1d(h, s.conv.weight, padding=2, dilation=2)
        return s.head(h.mean(-1))

    return Net(call, conv=nn.Conv1d(2, 3, 3), b=weight(2), head=nn.Linear(3, 2))


@architecture(floats(2, 4, 4))
def conv_called_at_two_scales():
    """One head over a feature pyramid: the same convolution at different sizes."""

    def call(s, x):
        a = s.conv(x).mean((2, 3))
        b = s.conv(F.avg_pool2d(x, 2)).amax((2, 3))
        return s.head(torch.tanh(a) * b)

    return Net(call, conv=nn.Conv2d(2, 3, 2), head=nn.Linear(3, 2))


@architecture(several(floats(3), floats(3)))
def siamese():
    return Net(
        lambda s, x, z: s.head((torch.tanh(s.fc(x)) - torch.tanh(s.fc(z))).abs()),
        fc=nn.Linear(3, 4),
        head=nn.Linear(4, 2),
    )


@architecture(several(floats(3), floats(3)))
def siamese_stacked():
    """Both inputs concatenated along the batch axis: a sample has two rows, far apart."""

    def call(s, x, z):
        a, b = torch.tanh(s.fc(torch.cat([x, z], 0))).chunk(2, 0)
        return s.head(torch.cat([a * b, a - b], -1))

    return Net(call, fc=nn.Linear(3, 2), head=nn.Linear(4, 2))


@architecture(floats(3))
def weight_as_linear_and_scale():
    """The same tensor as a matrix, as a scale and as a table of numbers."""
    return Net(lambda s, x: F.linear(torch.tanh(x @ s.w) * s.w[0] + s.w.sum(0), s.w[:2]), w=weight(3, 3))


@architecture(ints(4, 3))
def embedding_used_three_ways():
    """Lookup, matrix product and row statistics of one table."""

    def call(s, i):
        h = torch.tanh(s.embed(i).mean(1))
        return F.linear(h, s.embed.weight) + s.embed.weight.square().mean(1)

    return Net(call, embed=nn.Embedding(4, 3))


@architecture(floats(3))
def universal_depth():
    """ALBERT/DEQ-like: one residual block with its own norm, applied three times."""

    def call(s, x):
        for _ in range(3):
            x = x + 0.5 * s.b(F.gelu(s.a(s.norm(x))))
        return s.head(x)

    return Net(call, norm=nn.LayerNorm(3), a=nn.Linear(3, 3), b=nn.Linear(3, 3), head=nn.Linear(3, 2))
