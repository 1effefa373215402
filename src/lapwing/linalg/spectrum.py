"""Eigen-decompositions that are computed once, in float64, and what is made of them: sums of logarithms, and first
derivatives in a tensor whose decomposition is constant (`tangent`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import BadData

SPARE = 8  # columns that a sketch has beyond the rank
NOTHING = 64  # multiples of the rounding of M, in norm, that may lie outside the range that a sketch found
PAYS = 0.4  # largest rank, as a share of the size, at which a sketch is worth its time


@dataclass(frozen=True, eq=False)
class Spectrum:
    """M = U diag(e) Uᵀ for symmetric M (*b, p, p), computed on first use.

    Eigenvalues are float64, ascending, and zero where they are negative by no more than the rounding of `dtype`, the
    type the entries of M came in; vectors are in that type. Both are constants without a graph. (A float32 `eigh` of a
    rank-60 400 × 400 matrix gave 169 negative eigenvalues, hence float64. With float32 vectors, whose
    eigenvalues were mended to float64, solves with a shift of 1e-4 of the largest were still 1e-3 wrong.)

    `rank` is an upper bound of the rank of M, where one is known (a sum of that many outer products). If it is small, M
    is decomposed within its range, which is several times faster; where the bound turns out to be wrong, as a whole.
    """

    matrix: Tensor
    dtype: torch.dtype
    rank: int | None = None

    @cached_property
    @torch.inference_mode(False)  # cached, also for callers that want gradients
    def values(self) -> Tensor:
        """e, (*b, p) float64."""
        if not bool(torch.isfinite(self.matrix).all()):
            raise BadData(
                "the curvature holds NaN or Inf, so it has no eigenvalues. Look for overflow in the network's outputs "
                "or for bad inputs."
            )
        values, vectors = self._decompose()
        self.__dict__["vectors"] = vectors.to(self.dtype)  # of the same decomposition
        rounding = (values < 0) & (values >= -self._tolerance(values))
        return values.masked_fill(rounding, 0.0)

    @cached_property
    def vectors(self) -> Tensor:
        """U, (*b, p, p): eigenvectors are columns."""
        assert self.values is not None  # decomposes, and stores the vectors
        vectors: Tensor = self.__dict__["vectors"]
        return vectors

    def _decompose(self) -> tuple[Tensor, Tensor]:
        if self.rank is not None and self.rank + SPARE <= PAYS * self.matrix.shape[-1]:
            found = within_span(self._symmetric, self.rank + SPARE, NOTHING * torch.finfo(self.dtype).eps)
            if found is not None:
                return found
        return eigh_in_place(self._symmetric)

    @property
    def _symmetric(self) -> Tensor:
        """The symmetric part of M in float64, in memory of its own."""
        matrix = self.matrix.detach()
        return matrix.to(torch.float64, copy=True).add_(matrix.mT).div_(2)

    def _tolerance(self, values: Tensor) -> Tensor:
        return self.matrix.shape[-1] * torch.finfo(self.dtype).eps * values.abs().amax(-1, keepdim=True)

    @property
    def known(self) -> bool:
        """Whether the decomposition has been computed."""
        return "values" in self.__dict__

    @property
    def significant(self) -> Tensor:
        """e, with zeros where the rounding of M cannot tell it from zero."""
        return self.values.masked_fill(self.values.abs() <= self._tolerance(self.values), 0.0)

    @cached_property
    @torch.inference_mode(False)
    def clamped(self) -> Tensor:
        """e, with zeros in place of negative values."""
        return self.values.clamp(min=0)

    @cached_property
    def indefinite(self) -> bool:
        """Whether negative eigenvalues are more than rounding."""
        tolerance = torch.finfo(self.dtype).eps ** 0.5
        return bool((self.values < -tolerance * self.values.abs().amax(-1, keepdim=True)).any())


def eigh_in_place(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose symmetric matrices (*b, p, p) into eigenvalues and eigenvectors, which overwrite the matrices.

    LAPACK stores matrices by columns and overwrites what it decomposes, so a transposed view saves the copy.
    """
    columns = matrix.contiguous().mT
    values = matrix.new_empty(matrix.shape[:-1])
    torch.linalg.eigh(columns, out=(values, columns))
    return values, columns


def within_span(matrix: Tensor, columns: int, tolerance: float) -> tuple[Tensor, Tensor] | None:
    """Decompose positive semi-definite matrices (*b, p, p) of low rank by a sketch (Halko et al. 2011, Alg. 5.3).

    Returns eigenvalues, ascending up to rounding, and eigenvectors; None where a sketch of so many columns leaves more
    than `tolerance` of a matrix. The memory of the matrix is overwritten, by the eigenvectors if there are any.
    """
    *batch, p, _ = matrix.shape
    noise = torch.randn(p, columns, dtype=matrix.dtype, generator=torch.Generator().manual_seed(0)).to(matrix.device)
    whole = torch.linalg.qr(matrix @ noise, mode="complete").Q
    span, rest = whole[..., :columns], whole[..., columns:]
    inside, norm = span.mT @ matrix, matrix.norm(dim=(-2, -1))
    small = inside @ span
    left = matrix.reshape(-1, p, p).baddbmm_(span.reshape(-1, p, columns), inside.reshape(-1, columns, p), alpha=-1)
    if bool((left.norm(dim=(-2, -1)) > tolerance * norm.reshape(-1)).any()):
        return None
    values, vectors = torch.linalg.eigh((small + small.mT) / 2)
    every = matrix.mT  # stored by columns, as those of `eigh`
    every[..., : p - columns] = rest
    every[..., p - columns :] = span @ vectors
    return torch.cat([values.new_zeros(*batch, p - columns), values], -1), every


TOGETHER = 32  # how many numbers share a logarithm
PIECE = 2**16  # how many numbers are handled at a time, so that they stay in the cache
FEW = 2**14  # fewer numbers than this take the plain way
EPS = torch.finfo(torch.float64).eps
RELATIVE = 1e-10  # share of the sum that may be lost by rounding 1 + x


def sum_log1p(x: Tensor) -> Tensor:
    """Σ log(1 + x), a float64 scalar.

    A logarithm costs as much as ten multiplications, so `TOGETHER` numbers 1 + x are multiplied and share a logarithm.
    Where that would lose digits (x tiny beside 1, far below zero, products out of range), and where gradients are
    needed, every number has its own.
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
