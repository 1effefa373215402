"""Code the tape cannot read like a book: custom Functions, scripts, checkpoints, inner transforms, hooks."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .registry import Net, architecture, floats, ints, weight


class HandLinear(torch.autograd.Function):
    """x Wᵀ + b with its own backward."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w.T + b

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).T @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        p = torch.sigmoid(x)
        return g * (p + x * p * (1 - p))


@architecture(floats(3))
def custom_function_with_parameters():
    return Net(
        lambda s, x: s.head(torch.tanh(HandLinear.apply(x, s.w, s.b))),
        w=weight(4, 3),
        b=weight(4),
        head=nn.Linear(4, 2),
    )


@architecture(floats(3), once=True)
def custom_activation():
    return Net(lambda s, x: s.b(Swish.apply(s.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2))


@architecture(floats(3))
def scripted_submodule():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and people still have scripted models
        body = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    return Net(lambda s, x: s.head(s.body(x)), body=body, head=nn.Linear(4, 2))


@architecture(floats(3))
def checkpointed():
    def call(s, x):
        h = checkpoint(lambda z: torch.tanh(s.b(torch.tanh(s.a(z)))), x, use_reentrant=False)
        return s.head(h)

    return Net(call, a=nn.Linear(3, 3), b=nn.Linear(3, 3), head=nn.Linear(3, 2))


@architecture(floats(3))
def inner_vmap_over_weights():
    """A deep ensemble inside the model: vmap over stacked weights."""

    def call(s, x):
        h = torch.func.vmap(lambda w, b: torch.tanh(F.linear(x, w, b)))(s.w, s.b)  # (members, n, 2)
        return s.head(h.mean(0))

    return Net(call, w=weight(2, 2, 3), b=weight(2, 2), head=nn.Linear(2, 2))


@architecture(floats(3))
def inner_vmap_over_samples():
    return Net(
        lambda s, x: torch.func.vmap(lambda row: s.b(torch.tanh(s.a(row))))(x), a=nn.Linear(3, 4), b=nn.Linear(4, 2)
    )


@architecture(floats(3))
def inner_functional_call():
    def call(s, x):
        flipped = {k: -v for k, v in s.net.named_parameters()}
        return s.net(x) * torch.func.functional_call(s.net, flipped, (x,))

    return Net(call, net=nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))


@architecture(floats(3), refusal=True)
def inner_gradient():
    """An energy model: the output is the gradient of a potential with respect to the input."""

    def call(s, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_(True)
            energy = s.b(torch.tanh(s.a(z))).sum()
            return torch.autograd.grad(energy, z, create_graph=True)[0]

    return Net(call, a=nn.Linear(3, 4), b=nn.Linear(4, 1))


@architecture(floats(3))
def hooks_that_change_outputs():
    """The user's own hooks scale an output and shift an input."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net[0].register_forward_hook(double_output)
    net[2].register_forward_pre_hook(shift_input)
    return net


def double_output(module, args, out):
    return out * 2


def shift_input(module, args):
    return (args[0] + 0.5,)


@architecture(floats(3))
def tensor_hook_in_forward():
    """A hook on an activation scales its gradient: autograd is what counts."""

    def call(s, x):
        h = s.a(x)
        if h.requires_grad:
            h.register_hook(halve)
        return s.b(torch.tanh(h))

    return Net(call, a=nn.Linear(3, 4), b=nn.Linear(4, 2))


def halve(g):
    return g * 0.5


@architecture(floats(3))
def compiled_wrapper():
    """What torch.compile returns, never run through a compiler: the wrapper is taken off."""
    return torch.compile(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), backend="eager")


@architecture(ints(4, 3), refusal=True)
def embedding_scale_grad_by_freq():
    """Autograd itself divides by how often an index occurs, so its gradient is not the derivative."""
    return nn.Sequential(nn.Embedding(4, 3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(9, 2))


@architecture(ints(4, 3), refusal=True)
def embedding_max_norm():
    """The forward writes to the weights."""
    return nn.Sequential(nn.Embedding(4, 3, max_norm=0.5), nn.Flatten(), nn.Linear(9, 2))


@architecture(floats(3))
def view_of_flat_parameter():
    """All weights live in one flat vector (FSDP, evolution strategies)."""

    def call(s, x):
        w, b, v = s.flat.split([9, 3, 6])
        return F.linear(torch.tanh(F.linear(x, w.view(3, 3), b)), v.view(2, 3))

    return Net(call, flat=weight(18))
