"""Backward passes with given cotangents.

`torch.autograd.grad(f, inputs, v)` imports sympy to compare two shapes: half a second and 44 MB at the first fit of a
process. The gradients of the number vᵀf are the same, and need none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lapwing.model.module import warnings_here

# What `autograd.grad(is_grads_batched=True)` maps with; `torch.vmap` has a wrong derivative of `cdist`.
_vmap = getattr(getattr(torch, "_vmap_internals", None), "_vmap", None)


def pull(f: Tensor, inputs: Sequence[Any], v: Tensor, *, create_graph: bool = False) -> tuple[Tensor | None, ...]:
    """vᵀ ∂f/∂input for tensors or edges of f's graph, which is kept; None where f does not depend on an input."""
    v = v.to(f.dtype)
    if create_graph or v.requires_grad:  # v may depend on f, and is a constant all the same
        return torch.autograd.grad(f, inputs, v, retain_graph=True, create_graph=create_graph, allow_unused=True)
    if v.shape != f.shape:  # a product would broadcast
        raise RuntimeError(f"cotangents of shape {tuple(v.shape)} for outputs of shape {tuple(f.shape)}")
    with torch.enable_grad():
        total = (f * v).sum()
    return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)


def pull_all(f: Tensor, inputs: Sequence[Any], v: Tensor) -> tuple[Tensor | None, ...]:
    """The same for cotangents (r, *f.shape) in one pass, (r, *input.shape) each. Raises where vmap has no rule."""
    v = v.to(f.dtype)
    if v.shape[1:] != f.shape:
        raise RuntimeError(f"cotangents of shape {tuple(v.shape)} for outputs of shape {tuple(f.shape)}")
    with warnings_here("ignore", UserWarning, "There is a performance drop"):
        if _vmap is None:
            return torch.autograd.grad(f, inputs, v, retain_graph=True, allow_unused=True, is_grads_batched=True)
        cotangents: list[Tensor] = []
        with torch.enable_grad():
            total = _Seed.apply(f, cotangents)

        def one(direction: Tensor) -> tuple[Tensor | None, ...]:
            cotangents[:] = [direction]
            return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)

        return _vmap(one, 0, 0, allow_none_pass_through=True)(v)


class _Seed(torch.autograd.Function):
    """A number whose derivative by f is whatever the list holds when the backward pass begins: r directions at once,
    which `autograd.grad` would otherwise have to be handed, and would import sympy to look at."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, cotangents: list[Tensor]) -> Tensor:
        ctx.cotangents = cotangents
        return f.new_zeros((), dtype=torch.float32)  # real, whatever f is

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.cotangents[0], None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.new_zeros((), dtype=torch.float32)
