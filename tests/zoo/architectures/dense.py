"""Multilayer perceptrons, raw parameters, and every way of writing a matrix product."""

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Net, add, architecture, floats, ints, several, weight


def mlp(activation, bias=True):
    return nn.Sequential(
        nn.Linear(3, 4, bias=bias), activation, nn.Linear(4, 3, bias=bias), activation, nn.Linear(3, 2)
    )


add("mlp_tanh", lambda: mlp(nn.Tanh()), floats(3), once=True)
add("mlp_relu_inplace", lambda: mlp(nn.ReLU(inplace=True)), floats(3), once=True)
add("mlp_gelu_dropout", lambda: nn.Sequential(mlp(nn.GELU()), nn.Dropout(0.5)), floats(3), once=True)
add("mlp_no_bias_silu_inplace", lambda: mlp(nn.SiLU(inplace=True), bias=False), floats(3), once=True)
add("linear", lambda: nn.Linear(3, 3), floats(3), once=True)
add("prelu_one", lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)), floats(3))
add("prelu_per_channel", lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)), floats(3))
add(
    "prelu_per_channel_conv",
    lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.PReLU(3), nn.Flatten(), nn.Linear(9, 2)),
    floats(2, 4),
)
add(
    "scalar_output",
    lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)),
    floats(3),
    "scalar",
)
add(
    "scalar_output_matvec",
    lambda: Net(lambda s, x: torch.tanh(s.fc(x)) @ s.w, fc=nn.Linear(3, 4), w=weight(4)),
    floats(3),
    "scalar",
)
add("one_logit", lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), floats(3), "vector", once=True)


@architecture(floats(3), once=True)
def residual_inplace():
    def call(s, x):
        h = s.inner(x)
        h += x
        h = F.relu_(h)
        out = s.outer(h)
        out.add_(h).tanh_()
        return s.head(out)

    return Net(call, inner=nn.Linear(3, 3), outer=nn.Linear(3, 3), head=nn.Linear(3, 2))


@architecture(floats(3), once=True)
def residual_activation_inplace_after_use():
    def call(s, x):
        h = s.a(x)
        skip = h * 2
        h = torch.sigmoid(h.clamp_(-1, 1)).mul(1.5).add_(0.1)
        return s.b(h + skip)

    return Net(call, a=nn.Linear(3, 4), b=nn.Linear(4, 2))


@architecture(floats(3))
def raw_scale_and_bias():
    return Net(
        lambda s, x: s.head(torch.tanh(s.fc(x) * s.scale + s.shift)),
        fc=nn.Linear(3, 4),
        scale=weight(4),
        shift=weight(4),
        head=nn.Linear(4, 2),
    )


@architecture(floats(3))
def raw_scalars():
    """0-dimensional parameters: a temperature, a power, a gate; reflected operators too."""

    def call(s, x):
        h = s.fc(x) / s.temperature.exp()
        h = (1 - s.gate.sigmoid()) * h + s.gate.sigmoid() * h.abs().add(0.5) ** s.power
        return s.head(2.0 - s.offset - h)

    parts = {
        k: nn.Parameter(torch.tensor(v))
        for k, v in {"temperature": 0.1, "gate": 0.3, "power": 1.5, "offset": 0.2}.items()
    }
    return Net(call, fc=nn.Linear(3, 3), head=nn.Linear(3, 2), **parts)


@architecture(floats(3))
def raw_inplace():
    def call(s, x):
        h = s.fc(x)
        h *= s.scale
        h += s.shift
        return s.head(h.tanh())

    return Net(call, fc=nn.Linear(3, 4), scale=weight(4), shift=weight(1), head=nn.Linear(4, 2))


@architecture(floats(3), once=True)
def raw_matrix_right():
    return Net(lambda s, x: torch.tanh(x @ s.a) @ s.b, a=weight(3, 4), b=weight(4, 2))


@architecture(floats(3))
def raw_matrix_left():
    """W @ xᵀ: samples are columns."""
    return Net(lambda s, x: (s.b @ torch.tanh(s.a @ x.T)).T, a=weight(4, 3), b=weight(2, 4))


@architecture(floats(3))
def raw_functions():
    """mm, addmm, inner, tensordot and matmul as functions and as methods, positional and by keyword."""

    def call(s, x):
        h = torch.tanh(torch.mm(x, s.a))
        h = torch.tanh(torch.addmm(s.bias, h, s.b, beta=0.5, alpha=2.0))
        h = torch.tanh(torch.inner(h, s.c))
        h = torch.tanh(torch.tensordot(h, s.d, dims=([1], [0])))
        return F.linear(input=h.matmul(s.e), weight=s.f, bias=s.bias2)

    shapes = {"a": (3, 3), "b": (3, 2), "bias": (2,), "c": (3, 2), "d": (3, 2), "e": (2, 2), "f": (2, 2), "bias2": (2,)}
    return Net(call, **{k: weight(*v) for k, v in shapes.items()})


@architecture(floats(3))
def raw_einsum():
    def call(s, x):
        h = torch.tanh(torch.einsum("bi,oi->bo", x, s.a))
        return torch.einsum("bo,po,p->bp", h, s.b, s.c)

    return Net(call, a=weight(4, 3), b=weight(2, 4), c=weight(2))


@architecture(floats(2, 3))
def raw_batched_products():
    """bmm and baddbmm with a weight expanded over the batch."""

    def call(s, x):
        n = x.shape[0]
        h = torch.tanh(torch.bmm(x, s.a.expand(n, -1, -1)))
        h = torch.baddbmm(s.bias.expand(n, 2, 2), h, s.b.unsqueeze(0).repeat(n, 1, 1))
        return h.sum(1)

    return Net(call, a=weight(3, 4), bias=weight(1, 2), b=weight(4, 2))


@architecture(floats(3))
def raw_ternary():
    """addcmul, lerp and where with parameters."""

    def call(s, x):
        h = torch.lerp(s.fc(x), x, s.w)
        h = torch.addcmul(s.shift, h, s.scale, value=0.5)
        h = torch.where(h > 0, h * s.up, h * s.down)
        return s.head(torch.where(x > 0, h, s.fill))

    return Net(
        call,
        fc=nn.Linear(3, 3),
        head=nn.Linear(3, 2),
        **{k: weight(3) for k in ("w", "shift", "scale", "up", "down", "fill")},
    )


@architecture(ints(4))
def raw_table():
    """A raw parameter read by indices: [], index_select, gather."""

    def call(s, i):
        h = s.table[i] + torch.index_select(s.other, 0, i)
        return s.head(torch.tanh(h)) + torch.gather(s.bias.expand(i.shape[0], -1), 1, torch.stack([i % 2, i % 3], 1))

    return Net(call, table=weight(4, 3), other=weight(4, 3), head=nn.Linear(3, 2), bias=weight(3))


@architecture(floats(3))
def raw_slices():
    """Parts of one parameter go to different places."""

    def call(s, x):
        a, b = s.w.split([4, 2])
        h = torch.tanh(F.linear(x, a[:, :3], a[:, 3]))
        return F.linear(h, b, s.w[0, :2])

    return Net(call, w=weight(6, 4))


@architecture(floats(3))
def parameter_containers():
    def call(s, x):
        for w in s.layers:
            x = torch.tanh(x @ w)
        return x @ s.heads["a"] + s.heads["b"]

    layers = nn.ParameterList([weight(3, 3) for _ in range(2)])
    return Net(call, layers=layers, heads=nn.ParameterDict({"a": weight(3, 2), "b": weight(2)}))


@architecture(several(floats(3), floats(2)))
def bilinear():
    return Net(lambda s, x, z: s.head(torch.tanh(s.mix(x, z))), mix=nn.Bilinear(3, 2, 3), head=nn.Linear(3, 2))


@architecture(floats(3))
def bilinear_functional():
    return Net(
        lambda s, x: F.bilinear(x, torch.tanh(s.fc(x)), s.w, s.b), fc=nn.Linear(3, 2), w=weight(2, 3, 2), b=weight(2)
    )


@architecture(floats(3))
def gated_linear_unit():
    return Net(
        lambda s, x: s.down(F.silu(s.gate(x)) * s.up(F.glu(s.wide(x)))),
        wide=nn.Linear(3, 6),
        gate=nn.Linear(3, 4),
        up=nn.Linear(3, 4),
        down=nn.Linear(4, 2),
    )


@architecture(floats(3))
def prototypes_cdist():
    return Net(lambda s, x: s.head(torch.exp(-0.5 * torch.cdist(x, s.p))), p=weight(4, 3), head=nn.Linear(4, 2))


@architecture(floats(3))
def prototypes_broadcast():
    """Squared distances by broadcasting; cosine similarity to learned keys."""

    def call(s, x):
        d = (x.unsqueeze(1) - s.p).square().sum(-1)
        c = F.cosine_similarity(x.unsqueeze(1), s.q.unsqueeze(0), dim=-1)
        return s.head(torch.cat([torch.exp(-d), c], 1))

    return Net(call, p=weight(2, 3), q=weight(3, 3), head=nn.Linear(5, 2))


@architecture(floats(4))
def fourier_layer():
    """A spectral convolution: a real parameter viewed as complex numbers."""

    def call(s, x):
        h = torch.fft.rfft(x) * torch.view_as_complex(s.w)
        return s.head(torch.tanh(torch.fft.irfft(h, n=4)))

    return Net(call, w=weight(3, 2), head=nn.Linear(4, 2))


@architecture(floats(3))
def scalar_mix():
    """A softmax of parameters weighs the layers (ELMo)."""

    def call(s, x):
        hs = [x]
        for layer in s.layers:
            hs.append(torch.tanh(layer(hs[-1])))
        return s.head((torch.stack(hs, -1) * torch.softmax(s.mix, 0)).sum(-1))

    return Net(call, layers=nn.ModuleList([nn.Linear(3, 3) for _ in range(2)]), mix=weight(3), head=nn.Linear(3, 2))


@architecture(floats(3))
def two_heads_summed():
    return Net(
        lambda s, x: s.a(torch.tanh(s.body(x))) + s.b(x), body=nn.Linear(3, 4), a=nn.Linear(4, 2), b=nn.Linear(3, 2)
    )


for _name, _after in {
    "times_five": lambda f: 5 * f,
    "log_softmax": lambda f: F.log_softmax(f, -1),
    "tanh": torch.tanh,
    "sorted_cumsum": lambda f: f.cumsum(-1).flip(-1),
    "normalized": lambda f: 3 * F.normalize(f, dim=-1),
}.items():
    add(
        f"after_last_linear_{_name}",
        lambda after=_after: Net(lambda s, x: after(s.b(torch.tanh(s.a(x)))), a=nn.Linear(3, 4), b=nn.Linear(4, 3)),
        floats(3),
        once=True,
    )


@architecture(floats(3))
def unused():
    """A layer and a parameter that the forward never touches, and one whose result is thrown away."""

    def call(s, x):
        s.ignored(x)
        return s.b(torch.tanh(s.a(x)))

    return Net(
        call, a=nn.Linear(3, 4), spare=nn.Linear(2, 2), extra=weight(3), ignored=nn.Linear(3, 2), b=nn.Linear(4, 2)
    )


@architecture(floats(3))
def stop_gradient():
    """detach and no_grad: uses that do not count, beside uses of the same layer that do."""

    def call(s, x):
        with torch.no_grad():
            anchor = s.a(x)
        h = s.a(x)
        rounded = h + (h.round() - h).detach()
        return s.b(torch.tanh(rounded)) + s.b(anchor).detach()

    return Net(call, a=nn.Linear(3, 3), b=nn.Linear(3, 2))


@architecture(floats(3))
def frozen_parts():
    """A frozen layer, and a frozen bias beside a free weight."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    for p in (net[0].weight, net[0].bias, net[2].bias, net[4].weight):
        p.requires_grad_(False)
    return net


@architecture(floats(4))
def written_into_zeros():
    """Outputs assigned into slices of a fresh tensor."""

    def call(s, x):
        y = x.new_zeros(x.shape[0], 3)
        y[:, :2] = s.a(x)
        y[:, 2:] = torch.tanh(s.b(x))
        y[:, 0] *= 2
        return y

    return Net(call, a=nn.Linear(4, 2), b=nn.Linear(4, 1))


@architecture(several(floats(3), floats(2)))
def two_inputs():
    return Net(
        lambda s, x, z: s.head(torch.tanh(torch.cat([s.a(x), s.b(z)], -1))),
        a=nn.Linear(3, 2),
        b=nn.Linear(2, 2),
        head=nn.Linear(4, 2),
    )
