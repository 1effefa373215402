"""A posterior over the last layer: outputs and their covariance from one forward pass and a few small products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD, DenseRows, Jacobian, MatrixRows, Term
from lapwing.model import Network
from lapwing.model.calls import Inputs
from lapwing.model.features import Features, features_of
from lapwing.predictive.function import (
    CLOSED_FORM,
    ITEMS,
    DenseSpread,
    GaussianFunction,
    SharedSpread,
    Spread,
    from_root,
)
from lapwing.predictive.novelty import information_bound, information_gain
from lapwing.predictive.softmax import ONE, SOME

SHARE = 4
"""The part of the memory budget that the root of a dense covariance may take; those of differences take as much."""

SINGULAR = 1e6  # condition number of what follows the layer beyond which no inverse is used


@dataclass(frozen=True, eq=False)
class Root:
    """A root of the covariance of the outputs at each input: V Vᵀ with V (..., o, k), made when it is asked for.

    V = R diag(s) where one R (o, o) serves all inputs; then `parts` makes R, s (..., o) and R⁻¹.
    """

    dense: Callable[[], Tensor] | None = None
    parts: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None

    @cached_property
    def shared(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """R, s and R⁻¹, where there are such."""
        return None if self.parts is None else self.parts()

    @cached_property
    def white(self) -> Tensor:
        """V."""
        if self.shared is None:
            assert self.dense is not None
            return self.dense()
        return self.shared[0] * self.shared[1][..., None, :]

    def contrasts(self) -> Tensor:
        """V of the outputs minus their average."""
        if self.shared is None:
            return self.white - self.white.mean(-2, keepdim=True)
        return (self.shared[0] - self.shared[0].mean(0)) * self.shared[1][..., None, :]

    def covariance(self, contrast: bool = False) -> Tensor:
        """V Vᵀ, (..., o, o), or with `contrast` that of the outputs minus their average.

        Of many outputs V is as large as V Vᵀ; where one R serves all inputs, it is then formed a few items at a time.
        """
        many = self.shared is not None and len(self.shared[0]) > CLOSED_FORM
        if self.shared is not None and many and not (self.shared[1].requires_grad or torch.compiler.is_compiling()):
            left, spread, _ = self.shared
            found = from_root(left - left.mean(0) if contrast else left, spread.flatten(0, -2))
            return found.unflatten(0, spread.shape[:-1])
        white = self.contrasts() if contrast else self.white
        return white @ white.mT

    def variance(self) -> Tensor:
        """The diagonal of V Vᵀ, (..., o)."""
        if self.shared is None:
            return self.white.square().sum(-1)
        return self.shared[1].square() @ self.shared[0].square().mT


class SharedRoot(nn.Module):
    """The covariance R diag(s²) Rᵀ of the outputs W a, with one R for all inputs: diagonal and Kronecker posteriors.

    s² = E (Qᵀa)² for a basis Q of the inputs and the variances E (o, i) of the weights in the bases of both sides. A 1
    is appended to a where the layer has an uncertain `bias`.
    """

    left: Tensor
    inverse: Tensor | None
    squares: Tensor | None
    reach: Tensor | None
    centered: Tensor | None
    centered_squares: Tensor | None
    right: Tensor | None
    shift: Tensor | None
    variances: Tensor
    floor: Tensor

    def __init__(
        self, left: Tensor, right: Tensor | None, variances: Tensor, tail: Tensor | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        wide = left.detach().double() if tail is None else tail.double() @ left.detach().double()  # (c, o)
        inverse, failed = torch.linalg.inv_ex(wide) if len(wide) == wide.shape[1] else (None, torch.ones(()))
        found = inverse is not None and not bool(failed) and float(inverse.norm() * wide.norm()) < SINGULAR
        squares = (wide - wide[:, None]).square().flatten(1) if len(wide) < SOME else None
        self.bias = bias
        self.register_buffer("left", wide.to(left).contiguous())
        self.register_buffer("inverse", inverse.to(left).contiguous() if found and inverse is not None else None)
        self.register_buffer("squares", None if squares is None else squares.to(left))
        few = found and squares is not None and len(wide) <= ONE
        reach = squares.unflatten(1, wide.shape) @ variances.detach().double() if few and squares is not None else None
        self.register_buffer("reach", None if reach is None else reach.to(left), persistent=False)  # (p, k, i)
        centered = wide - wide.mean(0) if len(wide) >= SOME else None
        for name, each in ("centered", centered), ("centered_squares", None if centered is None else centered.square()):
            self.register_buffer(name, None if each is None else each.to(left), persistent=False)
        _keep(self, ("right", "shift"), None if right is None else right.detach().mT, bias)
        self.register_buffer("variances", variances.detach().clone(memory_format=torch.contiguous_format))
        floor = torch.finfo(variances.dtype).tiny ** 0.5  # of s², where its root has a derivative
        self.register_buffer("floor", torch.full_like(variances[:, 0], floor))

    chunk = ITEMS  # items with a spread of features to work on at a time: there is one

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def forward(self, a: Tensor, factor: float = 1.0) -> Root:
        inverse = self.inverse
        if inverse is None:  # fewer outputs than the layer has, or a combination of them is fixed
            return Root(lambda: self.left * self._deviations(a, factor)[..., None, :])
        return Root(parts=lambda: (self.left, self._deviations(a, factor), inverse))

    def _deviations(self, a: Tensor, factor: float) -> Tensor:
        """s."""
        found = linear(self._along(a).square(), self.variances, self.floor).sqrt()
        return found if factor == 1.0 else factor * found

    def _along(self, a: Tensor) -> Tensor:
        """Qᵀa."""
        if self.right is not None:
            return linear(a, self.right, self.shift)
        return pad(a, (0, 1), value=1.0) if self.bias else a

    def spread(self, a: Tensor, factor: float, root: Root) -> Spread | None:
        """The spread of classes, for items whose root is this one; None where covariances do as well."""
        if self.inverse is None:
            return None
        if self.reach is not None and a.ndim == 2 and not torch.compiler.is_compiling() and len(a) == 1:
            return FeatureSpread(a, self, factor)
        assert root.shared is not None
        return self._of(root.shared[1].flatten(0, -2) if a.ndim > 2 else root.shared[1])

    def whole(self, a: Tensor, factor: float) -> Spread:
        """The same at inputs (n, i) with all parts."""
        return self._of(self._deviations(a, factor))

    def _of(self, spread: Tensor) -> SharedSpread:
        one, other = self.centered, self.centered_squares
        kept = None if one is None or other is None else (one, other)
        return SharedSpread(self.left, spread, self.inverse, self.squares, kept)

    def apart(self, a: Tensor, pivot: Tensor) -> Tensor:
        """The variances of all outputs minus one, (n, o), for inputs a (n, i) and that one's number, (n, 1)."""
        return self.whole(a, 1.0).apart(pivot)

    def apart_from(self, a: Tensor, p: int) -> Tensor:
        """The same, (o,), for a single input a (1, i) and the number of one output."""
        assert self.reach is not None
        return linear(self._along(a).square(), self.reach[p])[0]

    def across(self, a: Tensor) -> Tensor:
        """V (..., o, o·i), linear in a, with V(a) V(a′)ᵀ the covariance of the outputs at a and a′."""
        along = self._along(a)
        spread = (self.variances.sqrt() * along[..., None, :]).flatten(-2)  # (..., o·i)
        return self.left.repeat_interleave(along.shape[-1], 1) * spread[..., None, :]


class DenseRoot(nn.Module):
    """The covariance V Vᵀ of the outputs W a, with V (o, P) linear in a: every other posterior of few weights.

    `white` is V as a function of the weights, (o, i, P), with the bias as the last input if there is one. For more than
    two classes there are roots of the variances of all differences of two outputs as well: these alone are most of what
    probabilities need, at a fraction of the work.
    """

    weight: Tensor
    shift: Tensor | None
    apart_weight: Tensor | None
    apart_shift: Tensor | None

    def __init__(self, white: Tensor, bias: bool = False, classes: bool = False) -> None:
        super().__init__()
        self.outputs = white.shape[0]
        _keep(self, ("weight", "shift"), white.detach().mT.flatten(0, 1), bias)  # (o · P, i)
        between = None
        if classes and 2 < self.outputs < SOME:
            between = torch.stack([torch.linalg.qr((white - other).mT, mode="r").R.flatten(0, 1) for other in white])
        _keep(self, ("apart_weight", "apart_shift"), between, bias)  # (o, o · i, i)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def chunk(self) -> int:
        """How many items to work on at a time."""
        return max(1, ITEMS // self.weight.shape[0])

    def forward(self, a: Tensor, factor: float = 1.0) -> Root:
        return Root(lambda: self.across(a) if factor == 1.0 else factor * self.across(a))

    def spread(self, a: Tensor, factor: float, root: Root) -> Spread | None:
        """The spread of classes, for items whose root is this one; None where covariances do as well."""
        if self.apart_weight is None:
            return None
        return FeatureSpread(a if a.ndim == 2 else a.flatten(0, -2), self, factor)

    def whole(self, a: Tensor, factor: float) -> Spread:
        """The same at inputs (n, i) with all parts: the covariance of f minus its average.

        It follows from the variances of all differences.
        """
        half = -0.5 * factor**2 * self.between(a)
        half = half - half.mean(-1, keepdim=True)
        return DenseSpread(half - half.mean(-2, keepdim=True))

    def across(self, a: Tensor) -> Tensor:
        """V (..., o, P), linear in a, with V(a) V(a′)ᵀ the covariance of the outputs at a and a′."""
        return linear(a, self.weight, self.shift).unflatten(-1, (self.outputs, -1))

    def apart(self, a: Tensor, pivot: Tensor) -> Tensor:
        """The variances of all outputs minus one, (n, o), for inputs a (n, i) and that one's number, (n, 1)."""
        assert self.apart_weight is not None
        if torch.compiler.is_compiling():  # no choice may depend on numbers
            return self.between(a).gather(1, pivot.unsqueeze(-1).expand(-1, 1, self.outputs)).squeeze(1)
        weights = self.apart_weight.unbind()
        shifts = [None] * self.outputs if self.apart_shift is None else self.apart_shift.unbind()
        order = pivot[:, 0].argsort()  # items with the same pivot share a product
        parts = a[order].split(pivot[:, 0].bincount(minlength=self.outputs).tolist())
        taken = [k for k, part in enumerate(parts) if len(part) or not len(a)]
        along = [linear(parts[k], weights[k], shifts[k]) for k in taken]
        return torch.cat(along)[order.argsort()].unflatten(-1, (self.outputs, -1)).square().sum(-1)

    def apart_from(self, a: Tensor, p: int) -> Tensor:
        """The same, (o,), for a single input a (1, i) and the number of one output."""
        assert self.apart_weight is not None
        found = linear(a, self.apart_weight[p], None if self.apart_shift is None else self.apart_shift[p])
        return found.view(self.outputs, -1).square().sum(-1)

    def between(self, a: Tensor) -> Tensor:
        """The variances of the differences of any two outputs, (n, o, o), for inputs a (n, i)."""
        assert self.apart_weight is not None
        shift = None if self.apart_shift is None else self.apart_shift.flatten()
        found = linear(a, self.apart_weight.flatten(0, 1), shift)
        return found.unflatten(-1, (self.outputs, self.outputs, -1)).square().sum(-1)


@dataclass(frozen=True, eq=False)
class FeatureSpread(Spread):
    """The spread of classes from the inputs a (n, i) of a last layer: covariances only of the items that need them."""

    a: Tensor
    layer: SharedRoot | DenseRoot
    factor: float = 1.0

    @cached_property
    def _whole(self) -> Spread:
        return self.layer.whole(self.a, self.factor)

    def apart(self, pivot: Tensor) -> Tensor:
        found = self.layer.apart(self.a, pivot)
        return found if self.factor == 1.0 else self.factor**2 * found

    def apart_from(self, p: int) -> Tensor:
        return self.factor**2 * self.layer.apart_from(self.a, p)

    def take(self, items: Tensor) -> Spread:
        if "_whole" in self.__dict__:
            return self._whole.take(items)
        return FeatureSpread(self.a[items], self.layer, self.factor)

    @property
    def conditional(self) -> Tensor:
        return self._whole.conditional

    @property
    def variance(self) -> Tensor:
        return self._whole.variance

    def times(self, v: Tensor) -> Tensor:
        return self._whole.times(v)

    def root(self, pivot: Tensor) -> Tensor:
        return self._whole.root(pivot)

    def steps(self, z: Tensor) -> Tensor:
        return self._whole.steps(z)

    def own(self, z: Tensor) -> Tensor:
        return self._whole.own(z)

    @property
    def chunk(self) -> int:
        return self.layer.chunk


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

    @property
    def width(self) -> int:
        """The number of outputs."""
        tail = self._features.tail
        return self._features.shape[0] if tail is None else len(tail)

    def under(self, precision: PSD, memory: int) -> LastLayer:
        """Return the layer under another precision, without the network: for `function` and `information` only."""
        root = root_of(precision, self._features, memory)
        if root is None:
            raise UnsupportedOperation("the covariance of the outputs under this precision has no short form")
        return LastLayer(self._features, root, nn.Identity())

    def read(self, inputs: Inputs, differentiable: bool = False) -> tuple[Tensor, Tensor] | None:
        """f (B, *event, C), and the inputs of the last layer.

        None where the network takes another way from its last layer to its outputs than it took at the fit.
        """
        found = self._features.read(inputs, differentiable)
        if found is None:
            return None
        return found[0], found[1].to(self.root.dtype)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return f and the inputs of the last layer at the network's arguments; refuse inputs on another path."""
        f, a = self._features.run(*args, **kwargs)
        return f, a.to(self.root.dtype)

    def rows(self, f: Tensor, a: Tensor, plan_layout: Any, contrast: bool) -> Jacobian:
        """Rows of ∂f/∂θ for every output, or with `contrast` for the outputs minus their average; f is (B, C)."""
        directions = torch.eye(f.shape[-1], dtype=a.dtype, device=a.device)
        directions = directions - directions.mean(-1, keepdim=True) if contrast else directions
        left = self._features.back(directions)[None, :, None, None, :].expand(len(f), -1, -1, -1, -1)
        a = self._features.with_ones(a, a.dtype)
        return Jacobian((MatrixRows((Term(left, a[:, None, None, None, :]),)),), plan_layout)

    def function(self, f: Tensor, a: Tensor, shift_invariant: bool = False, scale: float = 1.0) -> GaussianFunction:
        """The Gaussian over the outputs f at these inputs a of the last layer, both multiplied by `scale`."""
        found = self.root(a, scale)
        f = f if scale == 1.0 else scale * f
        return GaussianFunction(
            f,
            lambda: found.covariance().to(f),
            variance=lambda: found.variance().to(f),
            contrasts=(lambda: found.covariance(contrast=True).to(f)) if shift_invariant and f.shape[-1] > 2 else False,
            root=None if found.parts is None else lambda: found.shared,
            closed=True,
            spread=(lambda: self.root.spread(a, scale, found)) if shift_invariant and a.dtype == f.dtype else None,
        )

    def information(self, f: Tensor, a: Tensor, likelihood: Likelihood) -> Tensor:
        """The score of novel inputs; the root is that of a precision without a prior (`novelty_precision`)."""
        found = self.root(a)
        if f.shape[-1] > CLOSED_FORM:
            return information_bound(f, found.variance().to(f), likelihood)
        return information_gain(f, found.covariance(likelihood.shift_invariant).to(f), likelihood)


def last_layer_of(
    network: Network, precision: PSD, memory: int, example: Inputs, classes: bool = False
) -> LastLayer | None:
    """The short path for a posterior over one linear layer that produces the outputs; None where there is none.

    `example` are inputs of the network, for a look at what follows the layer. `classes`: outputs are logits of a
    softmax.
    """
    features = features_of(network, example)
    root = None if features is None else root_of(precision, features, memory, classes)
    return None if features is None or root is None else LastLayer(features, root).eval()


def root_of(precision: PSD, features: Features, memory: int, classes: bool = False) -> SharedRoot | DenseRoot | None:
    """The root of the outputs' covariance under a precision of the weights (o, i) and the bias of a layer.

    `classes`: outputs are logits of a softmax.
    """
    (o, i), bias, tail = features.shape, features.bias, features.tail
    factors = precision.output_factors(o, i + bias, bias)
    if factors is not None:
        return SharedRoot(*factors, tail, bias)
    size = precision.size
    if precision.iterative or size * size * precision.dtype.itemsize > memory // SHARE:
        return None
    eye = torch.eye(size, dtype=precision.dtype, device=precision.device)
    white = precision.whiten(DenseRows(eye[None]))[0]  # (P, k)
    by_input = white[: o * i].reshape(o, i, -1)
    if bias:
        by_input = torch.cat([by_input, white[o * i :].reshape(o, 1, -1)], 1)
    by_input = by_input if tail is None else torch.einsum("co,oik->cik", tail.to(by_input), by_input)
    return DenseRoot(by_input, bias, classes)


def _keep(module: nn.Module, names: tuple[str, str], matrix: Tensor | None, bias: bool) -> None:
    """Keep a matrix (..., i) to multiply inputs of a layer with, and its last column apart where that is the bias."""
    parts = (matrix, None) if matrix is None or not bias else (matrix[..., :-1], matrix[..., -1])
    for name, part in zip(names, parts):
        module.register_buffer(name, None if part is None else part.clone(memory_format=torch.contiguous_format))
