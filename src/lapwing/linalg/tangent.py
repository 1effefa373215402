"""First-order dependence on something that a constant decomposition has been made with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Tangent(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _Last.apply(grads[0], x) if torch.is_grad_enabled() else grads[0]


class _Last(torch.autograd.Function):
    """A gradient that depends on x in a way that is not known: also where nothing else says that it does, so that a
    second derivative is not taken for zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, x: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "a prior with a graph for each weight has first derivatives only here. For second ones give it a number "
            "for each layer (a dict), or use structure='diag', 'blockdiag' or 'full'."
        )


def tangent(x: Tensor) -> Tensor:
    """x − x₀ at x = x₀: zero, with the gradient of x. A formula that is right to first order in it gives right first
    derivatives; a second derivative would be wrong, so asking for one raises."""
    result: Tensor = _Tangent.apply(x)
    return result
