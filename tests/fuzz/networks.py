"""Random small networks: each draw is a list of layers with the shapes worked out, so that a failure prints itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

ACTIVATIONS = {
    "tanh": torch.tanh,
    "relu_": lambda x: F.relu(x, inplace=True),
    "gelu": F.gelu,
    "silu_": lambda x: F.silu(x, inplace=True),
    "softplus": F.softplus,
    "narrow": lambda x: torch.tanh(x.float()).to(x.dtype),  # in another precision than the rest
}
HOOKS = ("none", "none", "forward", "after accumulation", "watching backward")
FINISHES = {
    "plain": lambda f: f,
    "5·": lambda f: 5 * f,
    "tanh": torch.tanh,
    "log_softmax": lambda f: torch.log_softmax(f, -1),
    "cumsum": lambda f: f.cumsum(-1),
}


@dataclass(frozen=True)
class Layer:
    """One step: what it is, its options, and the shape of a sample after it."""

    kind: str
    options: tuple
    shape: tuple[int, ...]

    def __repr__(self) -> str:
        return f"{self.kind}{self.options} -> {self.shape}"


@dataclass(frozen=True)
class Network:
    start: tuple[int, ...]
    layers: tuple[Layer, ...]
    finish: str
    scaled: bool  # a learned scale on the outputs
    hook: str
    seed: int

    @property
    def rtol(self) -> float:
        """By the precision of its operations."""
        return 1e-5 if any(layer.options == ("narrow",) for layer in self.layers) else 1e-9

    @property
    def any_length(self) -> bool:
        """Whether it takes sequences of any length."""
        return len(self.start) == 2 and not self.image and all(layer.kind != "mix_tokens" for layer in self.layers)

    @property
    def image(self) -> bool:
        return any(layer.kind in ("pool", "to_tokens") for layer in self.layers)

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            module = Drawn(self).double().eval()
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(0.2 * torch.randn_like(p))
                for name, b in module.named_buffers():
                    if name.endswith("running_var"):
                        b.copy_(0.5 + torch.rand_like(b))
        self._hook(module)
        return module

    def _hook(self, module: nn.Module) -> None:
        last = module.steps[-1]
        if self.hook == "forward":
            last.register_forward_hook(lambda module, args, out: 1.5 * out)
        elif self.hook == "after accumulation":
            last.weight.register_post_accumulate_grad_hook(lambda p: None)
        elif self.hook == "watching backward":
            last.register_full_backward_hook(lambda module, grad_in, grad_out: None)

    def batches(self, sizes: tuple[int, ...], lengths: tuple[int, ...]) -> list[torch.Tensor]:
        """Inputs of batches of these sizes; sequences of these lengths where the network takes any."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        starts = [(t, self.start[1]) if self.any_length else self.start for t in lengths]
        return [
            torch.randn(n, *start, dtype=torch.float64, generator=generator)
            for n, start in zip(sizes, starts, strict=True)
        ]


class Drawn(nn.Module):
    """Parameters of the drawn layers and their forward pass."""

    def __init__(self, network: Network):
        super().__init__()
        self.network = network
        self.steps = nn.ModuleList()
        shape = network.start
        for layer in network.layers:
            self.steps.append(MAKERS[layer.kind](shape, layer.shape, *layer.options))
            shape = layer.shape
        self.scale = nn.Parameter(torch.ones(shape[-1])) if network.scaled else None

    def forward(self, x):
        x = x * 1.0  # the input itself is never written to
        for layer, step in zip(self.network.layers, self.steps, strict=True):
            x = APPLY[layer.kind](self, step, x, *layer.options)
        x = FINISHES[self.network.finish](x)
        return x if self.scale is None else x * self.scale


def no_module(shape, out, *options):
    return nn.Identity()


def channels_norm(shape, out, name):
    spatial = len(shape) - 1
    batch = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[spatial]
    if name == "batch":
        return batch(shape[0])
    if name == "group":
        return nn.GroupNorm(2 if shape[0] % 2 == 0 and torch.Size(shape).numel() > 2 else 1, shape[0])
    return {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d}[spatial](shape[0], affine=True)


def convolution(shape, out, kernel, stride, padding, dilation, groups, mode, bias):
    cls = {2: nn.Conv1d, 3: nn.Conv2d}[len(shape)]
    return cls(shape[0], out[0], kernel, stride, padding, dilation, groups, bias, padding_mode=mode)


def transposed(shape, out, kernel, stride, padding, extra, groups, bias):
    cls = {2: nn.ConvTranspose1d, 3: nn.ConvTranspose2d}[len(shape)]
    return cls(shape[0], out[0], kernel, stride, padding, extra, groups, bias)


def recurrent(shape, out, name):
    return {"lstm": nn.LSTM, "gru": nn.GRU}[name](shape[-1], out[-1], batch_first=True)


def apply_residual(net, step, x, inplace):
    h = step(x)
    if inplace:
        h += x
        return h
    return x + h


def apply_flattened(net, step, x, order):
    """A linear layer on batch × time as one axis."""
    n, t, d = x.shape
    if order == "batch-major":
        return step(x.reshape(n * t, d)).view(n, t, -1)
    return step(x.transpose(0, 1).reshape(t * n, d)).view(t, n, -1).transpose(0, 1)


def apply_reuse(net, step, x, index, how):
    """The linear layer drawn as number `index`, once more, or its transpose."""
    other = net.steps[index]
    return other(x) if how == "again" else F.linear(x, other.weight.T)


MAKERS = {
    "linear": lambda shape, out, bias: nn.Linear(shape[-1], out[-1], bias=bias),
    "matmul": lambda shape, out: nn.ParameterList([0.5 * torch.randn(shape[-1], out[-1])]),
    "residual": lambda shape, out, inplace: nn.Linear(shape[-1], out[-1]),
    "reuse": no_module,
    "activation": no_module,
    "prelu": lambda shape, out, many: nn.PReLU(shape[0] if many else 1),
    "scale": lambda shape, out: nn.ParameterList([torch.ones(shape[-1]), torch.zeros(1)]),
    "gate": lambda shape, out: nn.ParameterList([torch.tensor(0.3)]),
    "layer_norm": lambda shape, out, bias: nn.LayerNorm(shape[-1], bias=bias),
    "rms_norm": lambda shape, out: nn.RMSNorm(shape[-1], eps=1e-5),
    "channels_norm": channels_norm,
    "conv": convolution,
    "conv_transpose": transposed,
    "max_pool": no_module,
    "attention": lambda shape, out, heads: nn.MultiheadAttention(shape[-1], heads, batch_first=True),
    "recurrent": recurrent,
    "flattened": lambda shape, out, order: nn.Linear(shape[-1], out[-1]),
    "mix_tokens": lambda shape, out: nn.Linear(shape[0], out[0]),
    "pool": no_module,
    "to_tokens": no_module,
}
APPLY = {
    "linear": lambda net, step, x, bias: step(x),
    "matmul": lambda net, step, x: x @ step[0],
    "residual": apply_residual,
    "reuse": apply_reuse,
    "activation": lambda net, step, x, name: ACTIVATIONS[name](x * 1.0 if name.endswith("_") else x),
    "prelu": lambda net, step, x, many: step(x),
    "scale": lambda net, step, x: x * step[0] + step[1],
    "gate": lambda net, step, x: x * step[0].exp(),
    "layer_norm": lambda net, step, x, bias: step(x),
    "rms_norm": lambda net, step, x: step(x),
    "channels_norm": lambda net, step, x, name: step(x),
    "conv": lambda net, step, x, *options: step(x),
    "conv_transpose": lambda net, step, x, *options: step(x),
    "max_pool": lambda net, step, x: (F.max_pool1d if x.dim() == 3 else F.max_pool2d)(x, 2),
    "attention": lambda net, step, x, heads: step(x, x, x)[0],
    "recurrent": lambda net, step, x, name: step(x)[0],
    "flattened": apply_flattened,
    "mix_tokens": lambda net, step, x: step(x.transpose(1, 2)).transpose(1, 2),
    "pool": lambda net, step, x, how: pool(x, how),
    "to_tokens": lambda net, step, x: x.flatten(2).transpose(1, 2),
}


def pool(x, how):
    if how == "flatten":
        return x.flatten(1)
    return x.flatten(2).mean(-1) if how == "mean" else x.flatten(2).amax(-1)


widths = st.sampled_from([3, 2, 4, 1])


@st.composite
def vector_layer(draw, start, shape, layers):
    """A layer for vectors (d,) or token sequences (t, d) that acts on the last axis."""
    d = shape[-1]
    choices = [
        "linear",
        "linear",
        "matmul",
        "residual",
        "activation",
        "scale",
        "layer_norm",
        "rms_norm",
        "prelu",
        "gate",
    ]
    reusable = []
    for k, layer in enumerate(layers):
        inner, outer = (layers[k - 1].shape if k else start)[-1], layer.shape[-1]
        if layer.kind == "linear" and inner == d:
            reusable.append((k, "again", outer))
        if layer.kind == "linear" and outer == d:
            reusable.append((k, "transpose", inner))
    choices += ["reuse"] * 8 * bool(reusable)
    if len(shape) == 1 and d > 1:
        choices.append("channels_norm")
    kind = draw(st.sampled_from(choices))
    if kind in ("linear", "matmul"):
        out = (*shape[:-1], draw(widths))
        return Layer(kind, (draw(st.booleans()),) if kind == "linear" else (), out)
    if kind == "reuse":
        k, how, out = draw(st.sampled_from(reusable))
        return Layer(kind, (k, how), (*shape[:-1], out))
    if kind == "residual":
        return Layer(kind, (draw(st.booleans()),), shape)
    if kind == "activation":
        return Layer(kind, (draw(st.sampled_from(sorted(ACTIVATIONS))),), shape)
    if kind == "layer_norm":
        return Layer(kind, (draw(st.booleans()),), shape)
    if kind == "prelu":
        return Layer(kind, (draw(st.booleans()),), shape)
    if kind == "channels_norm":
        return Layer(kind, (draw(st.sampled_from(["batch", "group"])),), shape)
    return Layer(kind, (), shape)


@st.composite
def image_layer(draw, shape):
    """A layer for (c, *space)."""
    c, space = shape[0], shape[1:]
    choices = ["conv", "conv", "conv", "conv_transpose", "activation", "channels_norm", "prelu", "gate"]
    if min(space) >= 2:
        choices.append("max_pool")
    kind = draw(st.sampled_from(choices))
    if kind == "activation":
        return Layer(kind, (draw(st.sampled_from(sorted(ACTIVATIONS))),), shape)
    if kind == "prelu":
        return Layer(kind, (draw(st.booleans()),), shape)
    if kind == "gate":
        return Layer(kind, (), shape)
    if kind == "channels_norm":
        names = ["batch", "batch"]
        if torch.Size(shape).numel() > 1:
            names.append("group")
        if torch.Size(space).numel() > 1:
            names.append("instance")
        return Layer(kind, (draw(st.sampled_from(names)),), shape)
    if kind == "max_pool":
        return Layer(kind, (), (c, *(s // 2 for s in space)))
    groups = draw(st.sampled_from([g for g in (1, 2, 3, 4) if c % g == 0]))
    out = groups * draw(st.integers(1, max(1, 4 // groups)))
    kernel = draw(st.integers(1, 3))
    stride = draw(st.integers(1, 2))
    bias = draw(st.booleans())
    if kind == "conv_transpose":
        padding = draw(st.integers(0, (kernel - 1) // 2))
        extra = draw(st.integers(0, stride - 1))
        sizes = tuple((s - 1) * stride - 2 * padding + kernel + extra for s in space)
        if min(sizes) < 1 or max(sizes) > 7:
            return Layer("activation", ("tanh",), shape)
        return Layer(kind, (kernel, stride, padding, extra, groups, bias), (out, *sizes))
    dilation = draw(st.integers(1, 2))
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    padding = draw(st.integers(0, 2))
    reach = dilation * (kernel - 1) + 1
    if mode in ("reflect", "circular"):
        padding = min(padding, min(space) - 1)
    sizes = tuple((s + 2 * padding - reach) // stride + 1 for s in space)
    if min(s + 2 * padding for s in space) < reach or max(sizes) > 7:
        return Layer("activation", ("tanh",), shape)
    return Layer(kind, (kernel, stride, padding, dilation, groups, mode, bias), (out, *sizes))


@st.composite
def token_layer(draw, start, shape, layers):
    """A layer for (t, d)."""
    t, d = shape
    kind = draw(st.sampled_from(["own", "own", "attention", "recurrent", "flattened", "mix_tokens"]))
    if kind == "own":
        return draw(
            vector_layer(start, shape, layers).filter(lambda layer: layer.kind != "prelu" or not layer.options[0])
        )
    if kind == "attention":
        return Layer(kind, (draw(st.sampled_from([h for h in (1, 2) if d % h == 0])),), shape)
    if kind == "recurrent":
        return Layer(kind, (draw(st.sampled_from(["lstm", "gru"])),), (t, draw(st.integers(1, 3))))
    if kind == "flattened":
        return Layer(kind, (draw(st.sampled_from(["batch-major", "time-major"])),), (t, draw(widths)))
    return Layer(kind, (), (draw(st.integers(1, 3)), d))


@st.composite
def networks(draw):
    """Images become tokens or vectors, tokens become vectors or stay, vectors end in a linear layer."""
    form = draw(st.sampled_from(["vector", "image1", "image2", "tokens"]))
    layers: list[Layer] = []
    if form == "vector":
        start = shape = (draw(widths),)
    elif form == "tokens":
        start = shape = (draw(st.integers(1, 3)), draw(widths))
    else:
        start = shape = (draw(st.integers(1, 3)), *(draw(st.integers(2, 5)) for _ in range(int(form[-1]))))
        for _ in range(draw(st.integers(1, 3))):
            layers.append(draw(image_layer(shape)))
            shape = layers[-1].shape
        to = draw(st.sampled_from(["flatten", "mean", "max", "tokens"]))
        positions = torch.Size(shape[1:]).numel()
        if to == "tokens" and positions <= 6:
            form, shape = "tokens", (positions, shape[0])
            layers.append(Layer("to_tokens", (), shape))
        else:
            to = "mean" if to == "tokens" else to
            shape = (shape[0] * positions,) if to == "flatten" else (shape[0],)
            layers.append(Layer("pool", (to,), shape))
    if form == "tokens":
        for _ in range(draw(st.integers(1, 3))):
            layers.append(draw(token_layer(start, shape, layers)))
            shape = layers[-1].shape
        if draw(st.booleans()) or shape[0] > 3:
            shape = (shape[1],)
            layers.append(Layer("pool_tokens", (), shape))
    if len(shape) == 1:
        for _ in range(draw(st.integers(0, 3))):
            layers.append(draw(vector_layer(start, shape, layers)))
            shape = layers[-1].shape
    layers.append(Layer("linear", (draw(st.booleans()),), (*shape[:-1], draw(st.integers(2, 3)))))
    finish, scaled, hook = draw(st.sampled_from(sorted(FINISHES))), draw(st.booleans()), draw(st.sampled_from(HOOKS))
    return Network(start, tuple(layers), finish, scaled, hook, draw(st.integers(0, 10**6)))


MAKERS["pool_tokens"] = no_module
APPLY["pool_tokens"] = lambda net, step, x: x.mean(1)
