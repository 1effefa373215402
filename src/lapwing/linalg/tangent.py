"""First derivatives in a tensor whose value a constant decomposition was made with."""

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
    """Mark a gradient as depending on x in an unknown way, so that a second derivative raises and is not zero."""

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
    """Return zeros that have the gradient of x, as x − x₀ has at x = x₀.

    A formula that is right to first order in them gives the right first derivatives. Second derivatives would be wrong,
    so asking for one raises.
    """
    result: Tensor = _Tangent.apply(x)
    return result
