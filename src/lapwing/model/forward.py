"""Products J v by forward mode: with the fastest kernels that have such a derivative, and heavy operations by hand.

Heavy operations have tangent rules of their own, which pass over memory less often and compute no value twice. Whether
products may be trusted is found out by comparing them with reverse mode, u·(J v) = (Jᵀu)·v: forward mode and double
backward follow other code than the backward pass that defines the rows. They ignore `torch.no_grad()` inside a network,
or stop at a custom function that is differentiable once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lapwing.model.calls import close, warnings_here
from lapwing.model.kernels import attention_weights, differentiable_kernels, elementary_attention
from lapwing.model.linearization import pull
from lapwing.model.params import Params

_LEVEL: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # number of KERNELS that lack a derivative
_TURN = threading.RLock()  # PyTorch has one forward-mode level per process: threads take turns
if hasattr(os, "register_at_fork"):  # a forked process does not have the thread that may hold the lock
    os.register_at_fork(after_in_child=lambda: globals().update(_TURN=threading.RLock()))
NESTED = "Nested forward mode AD"
SMALLEST = 1e-3  # parameters whose gradient is below this part of the largest count less

Push = Callable[[Tensor], tuple[Tensor, Tensor] | None]
"""Tangents (s, P) → f (n, *event, c) and J v (s, n, *event, c), or None where an operation has no such derivative."""

KERNELS: tuple[Callable[[], Any], ...] = (nullcontext, elementary_attention, differentiable_kernels)


def lacks_derivative(error: Exception) -> bool:
    """Whether an error says that an operation has no derivative of this kind."""
    text = str(error).lower()
    return any(word in text for word in ("forward", "jvp", "derivative", "double backward", "batching rule"))


def push_forward(
    module: nn.Module,
    run: Callable[[dict[str, Tensor]], Tensor],
    values: dict[str, Tensor],
    tangents: list[dict[str, Tensor]],
    known: Values | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return f and J v of every tangent, or None where an operation has no forward-mode derivative with any kernels.

    Values that are `known` from a pass over the same inputs are not computed again.
    """
    for number in range(_LEVEL.get(module, 0), len(KERNELS)):
        try:
            with KERNELS[number](), torch.no_grad(), forward_mode():
                passes = [_dual_pass(run, values, tangent, known) for tangent in tangents]
                if _overwritten(passes):
                    passes = [_dual_pass(run, values, tangent, None) for tangent in tangents]
                f = passes[0][0] if passes else run(values)
            return f, torch.stack([moved for _, moved, _ in passes]) if passes else f.new_zeros(0, *f.shape)
        except (NotImplementedError, RuntimeError) as error:
            if NESTED in str(error):  # the user's own forward mode in another thread
                return None
            if not lacks_derivative(error):
                raise
            _LEVEL[module] = number + 1
    return None


def _dual_pass(
    run: Callable[[dict[str, Tensor]], Tensor],
    values: dict[str, Tensor],
    tangent: dict[str, Tensor],
    known: Values | None,
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Return f, J v, and entries of the known values that were used, as they are now and as they were recorded."""
    with forward_ad.dual_level(), Tangents(known) as heavy:
        out = run({name: forward_ad.make_dual(value, tangent[name]) for name, value in values.items()})
        f, moved = forward_ad.unpack_dual(out)
        found = f.clone(), torch.zeros_like(f) if moved is None else moved.clone(), heavy.taken
    if known is None or heavy.number == len(known.kept):
        return found
    return _dual_pass(run, values, tangent, None)  # other calls than in the pass that recorded the values


def _overwritten(passes: list[tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]]) -> bool:
    """Whether a network has changed values through `.data`, unseen by PyTorch, after they were recorded."""
    taken = [pair for _, _, pairs in passes for pair in pairs]
    if not taken:
        return False
    now, before = (torch.cat(entries) for entries in zip(*taken))
    return not torch.equal(now, before)


@contextmanager
def forward_mode() -> Iterator[None]:
    """Take this thread's turn with forward mode.

    PyTorch scripts its forward-mode formulas at first use, and warns that scripting is deprecated.
    """
    with _TURN, warnings_here("ignore", DeprecationWarning):
        yield


def agrees(push: Push, f: Tensor, leaves: list[Tensor], params: Params, rtol: float) -> bool:
    """Compare two products with the gradients of recorded outputs f, which are the truth.

    The first product is along the gradient, with equal weight for each parameter: it is too small if a parameter is
    missing. The second is along a random direction: it is too large if something does not belong to the derivative.
    """
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(f.shape, generator=generator, dtype=torch.float64).to(f)
    across = torch.randn(params.size, generator=generator, dtype=torch.float64).to(f.device) / params.size**0.5
    gradient = _gradient(f, leaves, params, u)
    along = params.pick(_balanced(gradient, params))
    try:
        found = push(torch.stack([along, across]).to(params.dtype))
    except (NotImplementedError, RuntimeError):
        return False
    if found is None or not close(found[0], f, rtol):
        return False
    first, second = found[1].detach().double()
    expected = params.pick(gradient) @ along
    if not (expected.isfinite() and (u.double() * first).sum().sub(expected).abs() <= rtol * expected):
        return False
    size = second.norm()
    if size == 0:
        return True
    back = params.pick(_gradient(f, leaves, params, (second / size).to(f))) @ across
    return bool((size - back).abs() <= rtol * size)


def _gradient(f: Tensor, leaves: list[Tensor], params: Params, u: Tensor) -> Tensor:
    """Return uᵀJ of all weights, (total,) float64."""
    return params.flatten(pull(f, leaves, u) if f.requires_grad else [None] * len(leaves)).double()


def _balanced(gradient: Tensor, params: Params) -> Tensor:
    """Divide the gradient of every parameter by its square: each adds 1 to the product with the gradient."""
    parts = gradient.split(params.sizes)
    norms = torch.stack([part.norm() for part in parts])
    scales = norms.clamp(min=SMALLEST * float(norms.max())).square()
    return torch.cat([part / (scale if scale > 0 else 1.0) for part, scale in zip(parts, scales, strict=True)])


@dataclass(eq=False)
class Values:
    """Outputs of the heavy operations of one pass, in order, for later passes over the same inputs."""

    kept: list[tuple[Any, Tensor, int, Tensor]] = field(default_factory=list)

    def keep(self, call: Any, out: Tensor) -> None:
        out = out.detach()
        self.kept.append((call, out, out._version, _sample(out)))

    def at(self, number: int, call: Any) -> tuple[Tensor, Tensor] | None:
        """Return the output of a call and entries that it had, or None if it was not kept or is known to have changed.

        The caller compares the entries, once for all passes, since every comparison waits for the device.
        """
        if number >= len(self.kept):
            return None
        kept, out, version, sample = self.kept[number]
        return (out, sample) if kept == call and out._version == version else None

    @property
    def attends(self) -> bool:
        return any(call[0] is F.scaled_dot_product_attention for call, *_ in self.kept)


def _sample(out: Tensor) -> Tensor:
    """Copy a few entries, which show what `.data` overwrites without a new version."""
    flat = out.reshape(-1)
    return flat[:: max(1, flat.numel() // 16)].clone()


class Recording(TorchFunctionMode):
    """Keeps outputs of heavy operations while a pass runs, for `Tangents`."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in TANGENTS:
            self.values.keep(_call(func, args), out)
        return out


class Tangents(TorchFunctionMode):
    """Runs heavy operations on dual tensors by the rules below, and all others as PyTorch differentiates them."""

    def __init__(self, values: Values | None = None) -> None:
        super().__init__()
        self.values, self.number = values or Values(), 0
        self.taken: list[tuple[Tensor, Tensor]] = []  # entries of the values that were taken: as they are, as they were

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = TANGENTS.get(func)
        if rule is None or torch.is_grad_enabled():  # a gradient inside the network needs the tangents of its graph
            return func(*args, **kwargs)
        kept, self.number = self.values.at(self.number, _call(func, args)), self.number + 1
        known = None
        if kept is not None:
            known, before = kept
            self.taken.append((_sample(known), before))
        found = rule(known, *args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _call(func: Any, args: tuple) -> tuple:
    """Return a key that calls with the same value share: function, shapes, and where weights are in memory."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    places = () if func is F.scaled_dot_product_attention else tuple(map(_place, tensors[1:]))
    return func, places, *(tuple(t.shape) for t in tensors)


def _place(tensor: Tensor) -> int:
    try:
        return forward_ad.unpack_dual(tensor).primal.data_ptr()
    except RuntimeError:  # a tensor of torch.func
        return -1


def parts(*tensors: Tensor | None) -> tuple[list[Any], list[Any]]:
    """Split dual tensors into primals and tangents; None where there is none."""
    pairs = [(None, None) if t is None else forward_ad.unpack_dual(t) for t in tensors]
    return [p for p, _ in pairs], [t for _, t in pairs]


def dual(out: Tensor, *terms: Tensor | None) -> Tensor:
    """Return `out` with the sum of the terms as its tangent."""
    total: Tensor | None = None
    for term in terms:
        if term is not None:
            total = term if total is None else total.add_(term)
    return out if total is None else forward_ad.make_dual(out, total)


def _convolution(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rule(
        known: Tensor | None, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kw: Any
    ) -> Tensor:
        (x, w, b), (dx, dw, db) = parts(input, weight, bias)
        out = func(x, w, b, *args, **kw) if known is None else known
        by_input = None if dx is None else func(dx, w, None, *args, **kw)
        by_weight = None if dw is None else func(x, dw, db, *args, **kw)
        if dw is None and db is not None:
            by_weight = db.reshape(-1, *(1,) * (w.ndim - 2)).expand_as(out).clone()
        return dual(out, by_input, by_weight)

    return rule


def _linear(known: Tensor | None, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    (x, w, b), (dx, dw, db) = parts(input, weight, bias)
    out = F.linear(x, w, b) if known is None else known
    total = None
    if dw is not None:
        total = F.linear(x, dw, db)
    elif db is not None:
        total = db.expand_as(out).clone()
    if dx is not None and total is not None and w.ndim == 2 and total.dtype == dx.dtype == w.dtype:
        flat = total.reshape(-1, total.shape[-1])
        return dual(out, flat.addmm_(dx.reshape(-1, dx.shape[-1]), w.T).reshape(out.shape))
    return dual(out, total, None if dx is None else F.linear(dx, w))


def _batch_norm(
    known: Tensor | None, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    """Differentiate batch norm in eval mode, an affine map of every channel."""
    (x, w, b), (dx, dw, db) = parts(input, weight, bias)
    mean, variance = running_mean, running_var
    if training or mean is None or variance is None:
        return None
    column = (1, -1, *(1,) * (x.ndim - 2))
    inverse = (variance + eps).rsqrt()
    out = F.batch_norm(x, mean, variance, w, b, False, momentum, eps) if known is None else known
    total: Tensor | None = None if db is None else db.reshape(column)
    if dw is not None:
        turn = inverse * dw
        shift = (-mean * turn).reshape(column)
        total = torch.addcmul(shift if total is None else total + shift, x, turn.reshape(column))
    if dx is not None:
        slope = (inverse if w is None else inverse * w).reshape(column)
        total = dx * slope if total is None else torch.addcmul(total, dx, slope)
    return dual(out, None if total is None else total.expand_as(out).contiguous())


def _silu(known: Tensor | None, input: Tensor, inplace: bool = False) -> Tensor | None:
    if inplace:
        return None
    (x,), (dx,) = parts(input)
    out = F.silu(x) if known is None else known
    return dual(out, None if dx is None else torch.ops.aten.silu_backward(dx, x))


def _attention(
    known: Tensor | None, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """Differentiate P V with P = softmax(S): dP V + P dV, dP = P ∘ dS − P ∘ Σ(P ∘ dS)."""
    (q, k, v, m), (dq, dk, dv, dm) = parts(query, key, value, attn_mask)
    if dropout_p:
        return None
    if enable_gqa:
        k, v, dk, dv = (
            None if t is None else t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v, dk, dv)
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = attention_weights(q, k, m, is_causal, scale)
    out = weights @ v if known is None else known
    terms = [None if dv is None else weights @ dv]
    slope: Tensor | None = None
    for left, right in ((dq, k), (q, dk)):
        if left is not None and right is not None:
            part = (left * scale) @ right.mT
            slope = part if slope is None else slope.add_(part)
    if dm is not None:
        slope = dm if slope is None else slope + dm
    if slope is not None:
        moved = slope * weights
        moved = torch.addcmul(moved, weights, moved.sum(-1, keepdim=True), value=-1)
        terms.append(moved @ v)
    return dual(out, *terms)


TANGENTS: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv1d: _convolution(torch.conv1d),
    torch.conv2d: _convolution(torch.conv2d),
    torch.conv3d: _convolution(torch.conv3d),
    F.linear: _linear,
    F.batch_norm: _batch_norm,
    F.silu: _silu,
    F.scaled_dot_product_attention: _attention,
}
