"""Eigen-decompositions that are computed once, in float64, and sums of the logarithms of eigenvalues."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import BadData

SPARE = 8  # columns more than the rank of a sketch
NOTHING = 64  # times the rounding of the entries, in norm: what is no more than this is outside no range
PAYS = 0.4  # share of the size that the rank may have: the same time from about a half on


@dataclass(frozen=True, eq=False)
class Spectrum:
    """M = U diag(e) Uᵀ for symmetric M (*b, p, p), computed on first use.

    Eigenvalues are float64, ascending, and zero where they are negative by no more than the rounding of `dtype`, the
    type the entries of M came in; vectors are in that type. Both are constants without a graph. (A float32 `eigh` of a
    rank-60 400 × 400 matrix gave 169 negative eigenvalues, hence float64. With float32 vectors, whose
    eigenvalues were mended to float64, solves with a shift of 1e-4 of the largest were still 1e-3 wrong.)

    A sum of few outer products, no more than `rank`, is decomposed within their span, which is several times faster; a
    matrix that turns out to reach beyond is decomposed as a whole.
    """

    matrix: Tensor
    dtype: torch.dtype
    rank: int | None = None

    @cached_property
    @torch.inference_mode(False)  # whoever asks first: others may want gradients
    def _eigh(self) -> tuple[Tensor, Tensor]:
        if not bool(torch.isfinite(self.matrix).all()):
            raise BadData(
                "the curvature holds NaN or Inf, so it has no eigenvalues. Look for overflow in the network's outputs "
                "or for bad inputs."
            )
        values, vectors = self._decompose()
        rounding = (values < 0) & (values >= -self._tolerance(values))
        return values.masked_fill(rounding, 0.0), vectors.to(self.dtype)

    def _decompose(self) -> tuple[Tensor, Tensor]:
        if self.rank is not None and self.rank + SPARE <= PAYS * self.matrix.shape[-1]:
            found = within_span(self._symmetric, self.rank + SPARE, NOTHING * torch.finfo(self.dtype).eps)
            if found is not None:
                return found
        return eigh_in_place(self._symmetric)

    @property
    def _symmetric(self) -> Tensor:
        """In float64 and in memory of its own."""
        matrix = self.matrix.detach()
        return matrix.to(torch.float64, copy=True).add_(matrix.mT).div_(2)

    def _tolerance(self, values: Tensor) -> Tensor:
        return self.matrix.shape[-1] * torch.finfo(self.dtype).eps * values.abs().amax(-1, keepdim=True)

    @property
    def values(self) -> Tensor:
        """e, (*b, p) float64."""
        return self._eigh[0]

    @property
    def vectors(self) -> Tensor:
        """U, (*b, p, p): eigenvectors are columns."""
        return self._eigh[1]

    @property
    def significant(self) -> Tensor:
        """e with zeros where the matrix' own rounding cannot tell it from zero."""
        return self.values.masked_fill(self.values.abs() <= self._tolerance(self.values), 0.0)

    @cached_property
    @torch.inference_mode(False)
    def clamped(self) -> Tensor:
        """e with negative values at zero."""
        return self.values.clamp(min=0)

    @cached_property
    def indefinite(self) -> bool:
        """Whether negative eigenvalues are more than rounding."""
        tolerance = torch.finfo(self.dtype).eps ** 0.5
        return bool((self.values < -tolerance * self.values.abs().amax(-1, keepdim=True)).any())


def eigh_in_place(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of symmetric matrices (*b, p, p), the vectors in their memory: LAPACK, which has columns
    in a row, overwrites what it decomposes, and the matrix need not be copied for it."""
    columns = matrix.contiguous().mT
    values = matrix.new_empty(matrix.shape[:-1])
    torch.linalg.eigh(columns, out=(values, columns))
    return values, columns


def within_span(matrix: Tensor, columns: int, tolerance: float) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues, ascending but for rounding below zero, and vectors of symmetric positive matrices (*b, p, p) from a
    sketch with so many columns (Halko et al. 2011, Alg. 5.3); None where more than `tolerance` of a matrix is left. The
    matrix is overwritten, if not None by the vectors."""
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
    every = matrix.mT  # columns in memory as those of `eigh`
    every[..., : p - columns] = rest
    every[..., p - columns :] = span @ vectors
    return torch.cat([values.new_zeros(*batch, p - columns), values], -1), every


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
