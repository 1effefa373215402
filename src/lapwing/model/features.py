"""The last layer of a network: its inputs are caught in a plain forward pass, and what follows it is one fixed matrix.

Where a linear layer produces the outputs, f = M z + c with z = W a + b, all that a posterior over W and b needs of a
network is in a: no tape, no backward pass. M is the identity for most networks; a scale, a slice, a temperature or a
reshape after the layer give another.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from lapwing.errors import UnsupportedOperation
from lapwing.model.calls import Inputs, arguments, as_called, batch_size, call, close, output_tensor, take, tolerance
from lapwing.model.copies import written_by_forward
from lapwing.model.linearization import Outputs, pull
from lapwing.model.network import Network
from lapwing.model.params import Params
from lapwing.model.rules import Samples
from lapwing.model.tape import Pass, Plan, Record, Source, Step, make_plan, parameters_behind

PROBED = 4  # samples on which the way from the layer to the outputs is looked at
SIZES = (1.0, -1.0, 100.0, -100.0)  # sizes of shifts of the layer's outputs, which must arrive multiplied by M
MOST = 2**22  # largest number of entries of M
WORK = 2**30  # largest number of entries of the directions that are pulled back to find M
_FOUND: WeakKeyDictionary[Network, Features | None] = WeakKeyDictionary()
_HERE = threading.local()


@dataclass(eq=False)
class Sink:
    """Collects inputs a and outputs z of the calls of a last layer. `change`, if given, replaces z for the network."""

    change: Callable[[Tensor], Tensor] | None = None
    caught: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class catching:
    """Collect the inputs and outputs of the last layers that this thread runs in a sink."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def __enter__(self) -> Sink:
        self.before = getattr(_HERE, "sink", None)
        _HERE.sink = self.sink
        return self.sink

    def __exit__(self, *_: object) -> None:
        _HERE.sink = self.before


class Caught(nn.Linear):
    """A linear layer whose inputs and outputs are caught where somebody asks for them (`catching`)."""

    @classmethod
    def of(cls, layer: nn.Linear, memo: dict[int, Any]) -> Caught:
        """Return a copy of a layer, with every attribute that the network may read, and without hooks on gradients."""
        found = copy.deepcopy(layer, memo)
        found._backward_hooks, found._backward_pre_hooks = OrderedDict(), OrderedDict()
        found.__class__ = cls
        return cast(Caught, found)

    def forward(self, a: Tensor) -> Tensor:
        z = linear(a, self.weight, self.bias)
        sink = getattr(_HERE, "sink", None)
        if sink is None:
            return z
        sink.caught.append((a, z))
        return z if sink.change is None else sink.change(z)


@dataclass(frozen=True, eq=False)
class Features:
    """A private copy of a network that catches the inputs of its last layer.

    The copy shares the network's weights and is never written to, so that any number of threads may run it.

    Example: `f, a = features.read(x)`, with f (n, *event, c) and a (n, *event, i).
    """

    body: nn.Module
    outputs: Outputs
    shape: tuple[int, int]  # outputs and inputs of the layer
    bias: bool  # whether its bias has a posterior too
    tail: Tensor | None  # M (c, o); None: f = z
    constant: Tensor | None  # c (c,)
    plan: Plan
    event: tuple[int, ...]  # shape of the outputs of a sample when the network was looked at

    def read(self, inputs: Inputs, differentiable: bool = False) -> tuple[Tensor, Tensor] | None:
        """Return the outputs f and the inputs a of the layer; None where f = M z + c does not hold for any c.

        `differentiable`: both keep their graph to the inputs.
        """
        args, kwargs = arguments(inputs)
        with torch.set_grad_enabled(differentiable):
            return self._read(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return f and a as `read` does, from the network's own arguments; refuse inputs for which M is another one."""
        found = self._read(*args, **kwargs)
        if found is None:
            raise UnsupportedOperation(
                "these inputs take another way from the last layer to the outputs of the network than those of the fit "
                "did, so that the covariance of the outputs is another one; la.predict(x) follows every way"
            )
        return found

    def _read(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor] | None:
        """Return f and a if M is that of the fit.

        Another constant than c does no harm (a residual connection has one per input). A second pass with shifted z
        shows whether only the constant differs. A compiled or exported form cannot look at numbers and checks nothing.
        """
        f, caught = self._run(Sink(), *args, **kwargs)
        if torch.compiler.is_compiling():
            return f, caught[0][0]
        if len(caught) != 1:
            return None
        a, z = caught[0]
        if self._follows(f, z):
            return f, a
        shift = _shift(z, 1.0)
        with torch.no_grad():
            moved, _ = self._run(Sink(lambda z: z + shift), *args, **kwargs)
        return (f, a) if _arrives(moved, f, shift, self.tail) else None

    def _run(self, sink: Sink, *args: Any, **kwargs: Any) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        with catching(sink), as_called():
            out = output_tensor(self.body(*args, **kwargs))
        return self.outputs(out), sink.caught

    def _follows(self, f: Tensor, z: Tensor) -> bool:
        """Whether f = M z + c for these outputs f and outputs z of the layer."""
        if self.tail is None:
            return _same(f, z)
        assert self.constant is not None
        if f.shape != (*z.shape[:-1], len(self.tail)):
            return False
        expected = z.to(self.tail) @ self.tail.mT + self.constant
        sizes = z.to(self.tail).abs() @ self.tail.abs().mT + self.constant.abs()
        return _near(f, expected.to(f), sizes.to(f), tolerance([f.dtype, z.dtype]))

    def with_ones(self, a: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the inputs of the layer with a 1 appended where its bias has a posterior."""
        a = a.to(dtype)
        return pad(a, (0, 1), value=1.0) if self.bias else a

    def back(self, v: Tensor) -> Tensor:
        """Return vᵀM for directions v (..., c) in output space."""
        return v if self.tail is None else v @ self.tail.to(v)

    def alone(self) -> Features:
        """Return a copy with weights of its own, which later training of the network does not change."""
        return replace(self, body=copy.deepcopy(self.body))


def features_of(network: Network, example: Inputs) -> Features | None:
    """Return the features of a network, found by a look at example inputs; None where they cannot be caught."""
    if network not in _FOUND:
        _FOUND[network] = _look(network, example)
    return _FOUND[network]


def _look(network: Network, example: Inputs) -> Features | None:
    """Copy the network and look at the operations after its last layer; None for a network that cannot be copied."""
    layer, module = network.last_linear, network.module
    if layer is None or any(written_by_forward(each) for each in module.modules()):
        return None  # a forward pass that writes to its module is not for several threads
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()}
    caught = memo[id(layer)] = Caught.of(layer, dict(memo))
    try:
        body = copy.deepcopy(module, memo).eval()
        few = take(example, slice(0, PROBED), batch_size(example))
        with network.copied():  # one copy for all passes
            own = network.forward(few)
            found = _tail(body, caught, network, few, own)
    except Exception:  # no copy can be made, or the network does not take such inputs
        return None
    if found is None:
        return None
    shape, bias = (layer.out_features, layer.in_features), len(network.params.names) > 1
    plan = plan_of_head(network.params, layer, bias)
    return Features(body, network.outputs, shape, bias, *found, plan, tuple(own.shape[1:]))


def _tail(
    body: nn.Module, caught: Caught, network: Network, few: Inputs, own: Tensor
) -> tuple[Tensor | None, Tensor | None] | None:
    """Return M and c with f = M z + c, or None where f is not of this form for every z; `own` are the network's f.

    M is the derivative of f by z at the example, the same for each sample. Then z is shifted by numbers of several
    sizes and signs, which must come out multiplied by M. So a clamp that the values of the example do not reach, a sum
    of two calls and another use of the weights are noticed.
    """
    n, leaves = batch_size(few), list[Tensor]()
    if not close(network.forward(take(few, slice(n - 1, n), n)), own[-1:], tolerance([own.dtype])):
        return None  # samples depend on each other: the self-check of the tape says where

    def leaf(z: Tensor) -> Tensor:
        leaves.append(z.detach().requires_grad_())
        return leaves[-1]

    caught.requires_grad_(True)
    try:
        with torch.enable_grad(), catching(Sink(leaf)):
            f = network.outputs(output_tensor(call(body, few)))
        if len(leaves) != 1 or not close(f, own, tolerance([f.dtype])):
            return None
        if any(found is p for found in parameters_behind(f.grad_fn) for p in caught.parameters()):
            return None  # the weights reach the outputs on another way too
        z = leaves[0]
        tail = None if _same(f, z) else _derivative(f, z)
    finally:
        caught.requires_grad_(False)
    f, z = f.detach(), z.detach()
    if tail is None and f.shape != z.shape:
        return None
    constant = None if tail is None else f.flatten(0, -2)[0].to(tail) - tail @ z.flatten(0, -2)[0].to(tail)
    return (tail, constant) if _shifts_arrive(body, network, few, f, z, tail) else None


def _same(f: Tensor, z: Tensor) -> bool:
    if f.dtype == z.dtype and f.is_set_to(z):  # the very same memory: the usual case, checked quickly
        return True
    return f.shape == z.shape and torch.equal(f, z.to(f.dtype))


def _derivative(f: Tensor, z: Tensor) -> Tensor | None:
    """Return ∂f/∂z (c, o) where it is the same at each position and no sample depends on another; else None.

    Whether positions (tokens) depend on each other is left to `_shifts_arrive`.
    """
    size = f.shape[-1]
    if z.ndim < 2 or f.shape[:-1] != z.shape[:-1] or size * z.shape[-1] > MOST or size * f.numel() > WORK:
        return None
    rows = []
    for k in range(size):
        v = torch.zeros_like(f)
        v[..., k] = 1
        (g,) = pull(f, [z], v)
        rows.append(torch.zeros_like(z) if g is None else g)
    each = torch.stack(rows, -2).flatten(0, -3)  # (positions, c, o), where samples do not mix
    last = torch.zeros_like(f)
    last[-1] = 1
    (alone,) = pull(f, [z], last)
    mixed = alone is not None and bool((alone[:-1] != 0).any())
    return None if mixed or not close(each, each[:1].expand_as(each), 1e-6) else each[0].detach()


def _shifts_arrive(body: nn.Module, network: Network, few: Inputs, f: Tensor, z: Tensor, tail: Tensor | None) -> bool:
    """Whether shifts of the layer's outputs, different for each sample, come out multiplied by M."""
    for size in SIZES:
        shift = _shift(z, size)
        with torch.no_grad(), catching(Sink(lambda z: z + shift)):  # noqa: B023
            found = network.outputs(output_tensor(call(body, few)))
        if not _arrives(found, f, shift, tail):
            return False
    return True


def _shift(z: Tensor, size: float) -> Tensor:
    """Return numbers of this size, another one for each entry of z."""
    return size * torch.linspace(0.5, 1.5, z.numel(), device=z.device).reshape(z.shape).to(z)


def _arrives(found: Tensor, f: Tensor, shift: Tensor, tail: Tensor | None) -> bool:
    """Whether a shift of the layer's outputs changed f by M times the shift; `found` are the new outputs."""
    if found.shape != f.shape or (tail is None and shift.shape != f.shape):
        return False
    moved = shift if tail is None else shift.to(tail) @ tail.mT
    sizes = shift.abs() if tail is None else shift.to(tail).abs() @ tail.abs().mT
    return _near(found, f + moved.to(f), f.abs() + sizes.to(f), tolerance([f.dtype, shift.dtype]))


def _near(found: Tensor, expected: Tensor, sizes: Tensor, rtol: float) -> bool:
    """Whether each entry is equal up to rtol of the size of the terms that were summed for it.

    Entries count one by one: a very large one, such as the −10⁹ of a masked class, must not hide the others.
    """
    return bool(((found == expected) | ((found - expected).abs() <= rtol * sizes)).all())


def plan_of_head(params: Params, layer: nn.Linear, bias: bool) -> Plan:
    """Return the plan of a network whose selected parameters are those of one linear layer, called once."""
    weight, a = layer.weight.detach(), torch.zeros(1, layer.in_features)
    own = layer.bias.detach() if bias and layer.bias is not None else None
    tensors = (a, weight) if own is None else (a, weight, own)
    live = tuple(range(1, len(tensors)))
    out = torch.zeros(1, layer.out_features)
    record = Record(linear, tensors, {}, tensors, live, (0,) * len(tensors), (), out, None)  # type: ignore[arg-type]
    args: tuple = (Samples(0), *(None for _ in live))
    sources = tuple(Source((name,), direct=True) for name in params.names)
    step = Step(linear, "rule", Samples(0), args, sources)
    if layer.bias is not None and not bias:  # a frozen bias is an argument of the call as well
        step = replace(step, args=(*args, None))
    plan = make_plan(Pass(out, (record,)), (step,), params, set(), (), False)
    size = layer.out_features
    return replace(plan, distinct=1 << 30, width=size, kept=size, graph=4 * (layer.in_features + size))
