"""Whether products J v agree with reverse mode: u·(J v) = (Jᵀu)·v.

Forward mode and double backward follow other code than the backward pass that defines the rows: they ignore
`torch.no_grad()` inside a network, or stop at a custom function that is differentiable once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.model.linearization import pull
from lapwing.model.params import Params
from lapwing.model.samples import close

Push = Callable[[Tensor], tuple[Tensor, Tensor] | None]
"""Tangents (s, P) → f (n, *event, c) and J v (s, n, *event, c), or None where an operation has no such derivative."""

SMALLEST = 1e-3  # gradients of a parameter below this part of the largest count for less


def agrees(push: Push, f: Tensor, leaves: list[Tensor], params: Params, rtol: float) -> bool:
    """Compare two products with the gradients of recorded outputs f, which are the truth.

    One product goes along the gradient, each parameter with the same weight: what the product lacks shows. The other
    goes along all weights at random, and is compared in its own direction: what does not belong there shows.
    """
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(f.shape, generator=generator, dtype=torch.float64).to(f)
    across = torch.randn(params.size, generator=generator, dtype=torch.float64).to(f.device) / params.size**0.5
    gradient = _gradient(f, leaves, params, u)
    along = _picked(_balanced(gradient, params), params)
    try:
        found = push(torch.stack([along, across]).to(params.dtype))
    except (NotImplementedError, RuntimeError):
        return False
    if found is None or not close(found[0], f, rtol):
        return False
    first, second = found[1].detach().double()
    expected = _picked(gradient, params) @ along
    if not (expected.isfinite() and (u.double() * first).sum().sub(expected).abs() <= rtol * expected):
        return False
    size = second.norm()
    if size == 0:
        return True
    back = _picked(_gradient(f, leaves, params, (second / size).to(f)), params) @ across
    return bool((size - back).abs() <= rtol * size)


def _gradient(f: Tensor, leaves: list[Tensor], params: Params, u: Tensor) -> Tensor:
    """uᵀJ of all weights, (total,) float64."""
    found = pull(f, leaves, u) if f.requires_grad else (None,) * len(leaves)
    parts = [torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(found, leaves, strict=True)]
    return params.flatten(dict(zip(params.names, parts, strict=True))).double()


def _balanced(gradient: Tensor, params: Params) -> Tensor:
    """The gradient of every parameter divided by its square: each adds 1 to the product with the gradient."""
    parts = gradient.split(params.sizes)
    norms = torch.stack([part.norm() for part in parts])
    scales = norms.clamp(min=SMALLEST * float(norms.max())).square()
    return torch.cat([part / (scale if scale > 0 else 1.0) for part, scale in zip(parts, scales, strict=True)])


def _picked(whole: Tensor, params: Params) -> Tensor:
    return whole if params.index is None else whole[params.index]
