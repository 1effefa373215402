"""First-order dependence on something that a constant decomposition has been made with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Tangent(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def tangent(x: Tensor) -> Tensor:
    """x − x₀ at x = x₀: zero, with the gradient of x. A formula that is right to first order in it gives right first
    derivatives; a second derivative would be wrong, so asking for one raises."""
    result: Tensor = _Tangent.apply(x)
    return result
