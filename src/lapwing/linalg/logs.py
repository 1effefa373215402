"""Sums of logarithms, of which a log-determinant has as many as there are weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOGETHER = 32  # numbers that share a logarithm
PIECE = 2**16  # numbers that are looked at at a time, and stay in the cache
FEW = 2**14  # not worth more than a call
EPS = torch.finfo(torch.float64).eps
RELATIVE = 1e-10  # of the sum, that rounding 1 + x may take


def sum_log1p(x: Tensor) -> Tensor:
    """Σ log(1 + x), a float64 scalar.

    A logarithm costs ten multiplications: so many numbers 1 + x are multiplied before one is taken. Where that could
    be seen (numbers that lose their digits beside 1, far below zero, products out of range) and where gradients are
    wanted, each has its own.
    """
    x, n = x.double(), x.numel()
    if n >= FEW and not x.requires_grad and float(x.amin()) > -0.5:
        near, many = (1 + x).flatten(), n // TOGETHER * TOGETHER
        total = near[:many].view(TOGETHER, -1).prod(0).log().sum()
        if many < n:
            total += near[many:].log().sum()
        if n * EPS <= RELATIVE * float(total) < math.inf:
            return total
    return x.log1p().sum()
