"""A posterior over the last layer: outputs and their covariance from one forward pass and a few small products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD, DenseRows, Jacobian, MatrixRows, Term
from lapwing.model import Network
from lapwing.model.calls import Inputs
from lapwing.model.features import Features, features_of
from lapwing.predictive.function import GaussianFunction
from lapwing.predictive.linearized import CLOSED_FORM, output_spread
from lapwing.predictive.novelty import information_bound, information_gain

SHARE = 4
"""The part of the memory budget that the root of a dense covariance may take."""

SINGULAR = 1e6  # condition number of what follows the layer beyond which no inverse is used


@dataclass(frozen=True, eq=False)
class Root:
    """A root of the covariance of the outputs at each input: V Vᵀ with V (..., o, k).

    V = R diag(s) where one R (o, o) serves all inputs; then `shared` holds R, s (..., o) and R⁻¹, and V is written out
    only when it is asked for.
    """

    dense: Tensor | None = None
    shared: tuple[Tensor, Tensor, Tensor] | None = None

    def scaled(self, factor: float) -> Root:
        """The root for outputs that are multiplied by a factor."""
        if self.shared is None:
            assert self.dense is not None
            return Root(factor * self.dense)
        left, spread, inverse = self.shared
        return Root(shared=(left, factor * spread, inverse))

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
    inverse: Tensor | None
    right: Tensor | None
    variances: Tensor

    def __init__(self, left: Tensor, right: Tensor | None, variances: Tensor, tail: Tensor | None = None) -> None:
        super().__init__()
        wide = left.detach().double() if tail is None else tail.double() @ left.detach().double()  # (c, o)
        inverse, failed = torch.linalg.inv_ex(wide) if len(wide) == wide.shape[1] else (None, torch.ones(()))
        found = inverse is not None and not bool(failed) and float(inverse.norm() * wide.norm()) < SINGULAR
        self.register_buffer("left", wide.to(left).contiguous())
        self.register_buffer("inverse", inverse.to(left).contiguous() if found and inverse is not None else None)
        self.register_buffer(
            "right", None if right is None else right.detach().clone(memory_format=torch.contiguous_format)
        )
        self.register_buffer("variances", variances.detach().clone(memory_format=torch.contiguous_format))

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def forward(self, a: Tensor) -> Root:
        spread = output_spread(self.right, self.variances, a)
        if self.inverse is None:  # fewer outputs than the layer has, or a combination of them is fixed
            return Root(self.left * spread[..., None, :])
        return Root(shared=(self.left, spread, self.inverse))

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

    It runs the private copy of the network that `Features` holds, which is never written to, so that any number of
    threads may run it.

    Example: `f, a = layer.read(x)`; `layer.function(f, a).covariance`.
    """

    def __init__(self, features: Features, root: SharedRoot | DenseRoot, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.root = features.body if body is None else body, root
        self._features = features

    def under(self, precision: PSD, memory: int) -> LastLayer:
        """The same under another precision, without the network: for `function` and `information` alone."""
        root = root_of(precision, self._features, memory)
        if root is None:
            raise UnsupportedOperation("the covariance of the outputs under this precision has no short form")
        return LastLayer(self._features, root, nn.Identity())

    def read(self, inputs: Inputs, differentiable: bool = False) -> tuple[Tensor, Tensor] | None:
        """f (B, *event, C), and the inputs of the last layer with a 1 appended where it has an uncertain bias.

        None where the network takes another way from its last layer to its outputs than it took at the fit.
        """
        found = self._features.read(inputs, differentiable)
        if found is None:
            return None
        with torch.set_grad_enabled(differentiable):
            return found[0], self._features.with_ones(found[1], self.root.dtype)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The same at the arguments that the network takes; those that take another way are refused."""
        f, a = self._features.run(*args, **kwargs)
        return f, self._features.with_ones(a, self.root.dtype)

    def rows(self, f: Tensor, a: Tensor, plan_layout: Any, contrast: bool) -> Jacobian:
        """Rows of ∂f/∂θ for every output, or with `contrast` for the outputs minus their average; f is (B, C)."""
        directions = torch.eye(f.shape[-1], dtype=a.dtype, device=a.device)
        directions = directions - directions.mean(-1, keepdim=True) if contrast else directions
        left = self._features.back(directions)[None, :, None, None, :].expand(len(f), -1, -1, -1, -1)
        return Jacobian((MatrixRows((Term(left, a[:, None, None, None, :]),)),), plan_layout)

    def function(self, f: Tensor, a: Tensor, shift_invariant: bool = False, scale: float = 1.0) -> GaussianFunction:
        """The Gaussian over the outputs f at these inputs a of the last layer, both multiplied by `scale`."""
        found = self.root(a) if scale == 1.0 else self.root(a).scaled(scale)
        f = f if scale == 1.0 else scale * f
        return GaussianFunction(
            f,
            lambda: gram(found.white()).to(f),
            variance=lambda: found.variance().to(f),
            contrasts=(lambda: gram(found.contrasts()).to(f)) if shift_invariant and f.shape[-1] > 2 else False,
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


def last_layer_of(network: Network, precision: PSD, memory: int, example: Inputs) -> LastLayer | None:
    """The short path for a posterior over one linear layer that produces the outputs; None where there is none.

    `example` are inputs of the network, for a look at what follows the layer.
    """
    features = features_of(network, example)
    root = None if features is None else root_of(precision, features, memory)
    return None if features is None or root is None else LastLayer(features, root).eval()


def root_of(precision: PSD, features: Features, memory: int) -> SharedRoot | DenseRoot | None:
    """The root of the outputs' covariance under a precision of the weights (o, i) and the bias of a layer."""
    (o, i), bias, tail = features.shape, features.bias, features.tail
    factors = precision.output_factors(o, i + bias, bias)
    if factors is not None:
        return SharedRoot(*factors, tail)
    size = precision.size
    if precision.iterative or size * size * precision.dtype.itemsize > memory // SHARE:
        return None
    eye = torch.eye(size, dtype=precision.dtype, device=precision.device)
    white = precision.whiten(DenseRows(eye[None]))[0]  # (P, k)
    by_input = white[: o * i].reshape(o, i, -1)
    if bias:
        by_input = torch.cat([by_input, white[o * i :].reshape(o, 1, -1)], 1)
    return DenseRoot(by_input if tail is None else torch.einsum("co,oik->cik", tail.to(by_input), by_input))


def gram(root: Tensor) -> Tensor:
    """V Vᵀ."""
    return root @ root.mT
