"""A posterior over the last layer: outputs and their covariance from one forward pass and a few small products."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD, DenseRows
from lapwing.model import Network
from lapwing.model.copies import written_by_forward
from lapwing.model.inputs import Inputs
from lapwing.model.linearization import Outputs
from lapwing.model.module import call, output_tensor
from lapwing.predictive.function import GaussianFunction
from lapwing.predictive.linearized import CLOSED_FORM, output_spread
from lapwing.predictive.novelty import information_bound, information_gain

_BODIES: WeakKeyDictionary[Network, nn.Module | None] = WeakKeyDictionary()  # one copy for all priors of a network

SHARE = 4
"""The part of the memory budget that the root of a dense covariance may take."""


class Beside(nn.Module):
    """A linear layer that returns its outputs and, beside them, its inputs: (..., o) and (..., i) as (..., o + i)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.shift: Tensor | None = None  # (o + i,), while the network is looked at

    def forward(self, a: Tensor) -> Tensor:
        both = torch.cat([linear(a, self.weight, self.bias), a], -1)
        return both if self.shift is None else both + self.shift


@dataclass(frozen=True, eq=False)
class Root:
    """A root of the covariance of the outputs at each input: V Vᵀ with V (..., o, k).

    V = R diag(s) where one R (o, o) serves all inputs; then `shared` holds R, s (..., o) and R⁻¹, and V is written out
    only when it is asked for.
    """

    dense: Tensor | None = None
    shared: tuple[Tensor, Tensor, Tensor] | None = None

    def white(self) -> Tensor:
        """V."""
        if self.shared is None:
            assert self.dense is not None
            return self.dense
        return self.shared[0] * self.shared[1][..., None, :]

    def contrasts(self) -> Tensor:
        """V of the outputs minus their average."""
        if self.shared is None:
            return self.white() - self.white().mean(-2, keepdim=True)
        return (self.shared[0] - self.shared[0].mean(0)) * self.shared[1][..., None, :]

    def variance(self) -> Tensor:
        """The diagonal of V Vᵀ, (..., o)."""
        if self.shared is None:
            return self.white().square().sum(-1)
        return self.shared[1].square() @ self.shared[0].square().mT


class SharedRoot(nn.Module):
    """The covariance R diag(s²) Rᵀ of the outputs W a, with one R for all inputs: diagonal and Kronecker posteriors.

    s² = E (Qᵀa)² for a basis Q of the inputs and the variances E (o, i) of the weights in the bases of both sides.
    """

    left: Tensor
    inverse: Tensor
    right: Tensor | None
    variances: Tensor

    def __init__(self, left: Tensor, right: Tensor | None, variances: Tensor) -> None:
        super().__init__()
        self.register_buffer("left", left.detach().clone(memory_format=torch.contiguous_format))
        self.register_buffer("inverse", torch.linalg.inv(left.detach().double()).to(left).contiguous())
        self.register_buffer(
            "right", None if right is None else right.detach().clone(memory_format=torch.contiguous_format)
        )
        self.register_buffer("variances", variances.detach().clone(memory_format=torch.contiguous_format))

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def forward(self, a: Tensor) -> Root:
        return Root(shared=(self.left, output_spread(self.right, self.variances, a), self.inverse))

    def across(self, a: Tensor) -> Tensor:
        """V (..., o, o·i), linear in a, with V(a) V(a′)ᵀ the covariance of the outputs at a and a′."""
        along = a if self.right is None else a @ self.right
        spread = (self.variances.sqrt() * along[..., None, :]).flatten(-2)  # (..., o·i)
        return self.left.repeat_interleave(a.shape[-1], 1) * spread[..., None, :]


class DenseRoot(nn.Module):
    """The covariance V Vᵀ of the outputs W a, with V (o, P) linear in a: every other posterior of few weights."""

    white: Tensor

    def __init__(self, white: Tensor) -> None:
        super().__init__()
        self.outputs = white.shape[0]
        self.register_buffer("white", white.detach().transpose(0, 1).flatten(1).contiguous())  # (i, o · P)

    @property
    def dtype(self) -> torch.dtype:
        return self.white.dtype

    def forward(self, a: Tensor) -> Root:
        return Root(self.across(a))

    def across(self, a: Tensor) -> Tensor:
        """V (..., o, P), linear in a, with V(a) V(a′)ᵀ the covariance of the outputs at a and a′."""
        return (a @ self.white).unflatten(-1, (self.outputs, -1))


class LastLayer(nn.Module):
    """The network with the covariance of its outputs that a posterior over its last layer gives.

    Holds a copy of the network in which the last layer returns its inputs beside its outputs. The copy is never written
    to, so that any number of threads may run it.

    Example: `f, a = layer(x)`; `layer.function(f, a).covariance`.
    """

    def __init__(
        self, body: nn.Module, root: SharedRoot | DenseRoot, outputs: Outputs, shape: tuple[int, int], bias: bool
    ) -> None:
        super().__init__()
        self.body, self.root = body, root
        self._outputs, self._shape, self._bias = outputs, shape, bias

    def under(self, precision: PSD, memory: int) -> LastLayer:
        """The same under another precision, without the network: for `function` alone."""
        root = root_of(precision, self._shape, memory, self._bias)
        if root is None:
            raise UnsupportedOperation("the covariance of the outputs under this precision has no short form")
        return LastLayer(nn.Identity(), root, self._outputs, self._shape, self._bias)

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """f (B, *event, C), and the inputs of the last layer with a 1 appended where it has an uncertain bias."""
        return self._apart(output_tensor(call(self.body, inputs)))

    def run(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The same at the arguments that the network takes, without a look at what it makes of them."""
        return self._apart(output_tensor(self.body(*args, **kwargs)))

    def _apart(self, both: Tensor) -> tuple[Tensor, Tensor]:
        f, a = both[..., : self._shape[0]], both[..., self._shape[0] :].to(self.root.dtype)
        if self._bias:
            a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
        return self._outputs(f), a

    def function(self, f: Tensor, a: Tensor, shift_invariant: bool = False) -> GaussianFunction:
        """The Gaussian over the outputs f at these inputs a of the last layer."""
        found = self.root(a)
        return GaussianFunction(
            f,
            lambda: gram(found.white()).to(f),
            variance=lambda: found.variance().to(f),
            contrasts=(lambda: gram(found.contrasts()).to(f)) if shift_invariant and self._shape[0] > 2 else False,
            root=None if found.shared is None else lambda: found.shared,
            closed=True,
        )

    def information(self, f: Tensor, a: Tensor, likelihood: Likelihood) -> Tensor:
        """The score of novel inputs; the root is that of a precision without a prior (`novelty_precision`)."""
        found = self.root(a)
        if f.shape[-1] > CLOSED_FORM:
            return information_bound(f, found.variance().to(f), likelihood)
        white = found.contrasts() if likelihood.shift_invariant else found.white()
        return information_gain(f, gram(white).to(f), likelihood)


def last_layer_of(network: Network, precision: PSD, memory: int, example: Inputs | None) -> LastLayer | None:
    """The short path for a posterior over one linear layer that produces the outputs; None where there is none.

    `example` are inputs of the network: its outputs must be those of the layer as they are.
    """
    layer = _linear(network)
    if layer is None or example is None:
        return None
    shape, bias = (layer.out_features, layer.in_features), len(network.params.names) > 1
    root = root_of(precision, shape, memory, bias)
    if root is None:
        return None
    if network not in _BODIES:
        _BODIES[network] = _body(network, layer, example)
    body = _BODIES[network]
    return None if body is None else LastLayer(body, root, network.outputs, shape, bias).eval()


def _linear(network: Network) -> nn.Linear | None:
    """The linear layer whose weight, or weight and bias, are all that is selected."""
    names = network.params.names
    if network.params.index is not None or len(names) > 2 or not names[0].endswith("weight"):
        return None
    owner = names[0].rpartition(".")[0]
    layer = network.module.get_submodule(owner)
    own = [f"{owner}." * bool(owner) + name for name in ("weight", "bias")]
    plain = type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks)
    if not plain or list(names) != own[: len(names)]:
        return None
    uses = [id(p) for _, p in network.module.named_parameters(remove_duplicate=False)]
    return layer if all(uses.count(id(p)) == 1 for p in layer.parameters()) else None  # type: ignore[return-value]


def _body(network: Network, layer: nn.Linear, example: Inputs) -> nn.Module | None:
    """A copy of the network that shares its weights, with the last layer's inputs beside its outputs.

    None where the network cannot be copied, or where its outputs are not those of the layer as they are.
    """
    module = network.module
    if any(written_by_forward(each) for each in module.modules()):
        return None  # a forward pass that writes to its module is not for several threads
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()}
    beside = memo[id(layer)] = Beside(copy.deepcopy(layer, dict(memo)))
    try:
        body = copy.deepcopy(module, memo).eval()
        return body if _is_last(body, beside, network, layer, example) else None
    except Exception:  # what cannot be copied, or does not take the wider outputs, goes the general way
        return None


def _is_last(body: nn.Module, beside: Beside, network: Network, layer: nn.Linear, example: Inputs) -> bool:
    """Whether outputs and features leave the network as they leave the layer, whatever their values.

    They are shifted there by numbers of several sizes and signs, which must come out unchanged. So a scale, a slice, a
    sum of two calls or a clamp that the values of the example do not reach are noticed.
    """
    with torch.no_grad():
        both, own = output_tensor(call(body, example)), network.forward(example)
        o = layer.out_features
        if both.shape[-1] != o + layer.in_features:
            return False
        f = network.outputs(both[..., :o])
        direct = network.outputs(linear(both[..., o:].to(layer.weight.dtype), layer.weight, layer.bias))
        if f.shape != own.shape or f.dtype != own.dtype or not close(f, own) or not close(direct.to(own), own):
            return False
        for size in (1.0, -1.0, 100.0, -100.0):
            beside.shift = size * torch.linspace(0.5, 1.5, both.shape[-1]).to(both)
            try:
                found = output_tensor(call(body, example))
            finally:
                shift, beside.shift = beside.shift, None
            if found.shape != both.shape or not close(found, both + shift):
                return False
    return True


def close(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors agree to the precision of their type."""
    rtol = 1e-4 if x.dtype in (torch.float32, torch.float64) else 2e-2
    return torch.allclose(x, y, rtol, rtol * float(y.abs().max().clamp(min=1e-3)))


def root_of(precision: PSD, shape: tuple[int, int], memory: int, bias: bool) -> SharedRoot | DenseRoot | None:
    """The root of the outputs' covariance under a precision of the weights (o, i) and the bias of a layer."""
    o, i = shape
    factors = precision.output_factors(o, i + bias, bias)
    if factors is not None:
        return SharedRoot(*factors)
    size = precision.size
    if precision.iterative or size * size * precision.dtype.itemsize > memory // SHARE:
        return None
    eye = torch.eye(size, dtype=precision.dtype, device=precision.device)
    white = precision.whiten(DenseRows(eye[None]))[0]  # (P, k)
    by_input = white[: o * i].reshape(o, i, -1)
    if bias:
        by_input = torch.cat([by_input, white[o * i :].reshape(o, 1, -1)], 1)
    return DenseRoot(by_input)


def gram(root: Tensor) -> Tensor:
    """V Vᵀ."""
    return root @ root.mT
