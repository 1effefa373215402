"""Solves and log-determinants of matrices that depend on parameters, with gradients by further solves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapwing.linalg.krylov.results import Matvec
from lapwing.linalg.tangent import tangent


class _Inverse(torch.autograd.Function):
    """r ↦ A⁻¹ r for an r that is zero in value: nothing to solve forward, one solve backward."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.solve = solve
        return torch.zeros_like(residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            return ctx.solve(grads[0]), None


def differentiable_solve(matvec: Matvec, rhs: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
    """A(θ)⁻¹ b with gradients in b and in whatever `matvec` depends on: x = A⁻¹(b − (A(θ) − A) x).

    `solve` computes A⁻¹ b without gradients. Costs one differentiable product forward and one solve backward.
    """
    with torch.no_grad():
        x = solve(rhs.detach())
    if not torch.is_grad_enabled():
        return x
    image = matvec(x)
    if not (image.requires_grad or rhs.requires_grad):
        return x
    correction: Tensor = _Inverse.apply(tangent(rhs) - tangent(image), solve)
    return x + correction


def differentiable_logdet(matvec: Matvec, value: Tensor, probes: Tensor, solved: Tensor) -> Tensor:
    """log |A(θ)| with the gradient E[(A⁻¹z)ᵀ ∂A z] of tr(A⁻¹ ∂A), from probes z (k, P) and A⁻¹ z.

    The same probes as the value's make the gradient that of the estimate; it is unbiased for any.
    """
    surrogate = (solved.detach().double() * matvec(probes.detach()).double()).sum(-1).mean()
    return value.detach() + tangent(surrogate)
