"""Decompositions of small covariances: roots that autograd can follow, and those written out that ONNX lacks.

What ONNX or its runtime lacks is made of operations that they have; so is the error function of doubles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

STEPS = 30
"""Steps of Newton and Schulz: an eigenvalue of 1e-8 of the trace takes 23 to come near 1, and 5 to reach it."""

ZERO = 1e6  # inverse variance of what stands for zero, in units of the largest that may

_HERE = threading.local()


class Logdet(NamedTuple):
    """What `torch.linalg.slogdet` returns."""

    sign: Tensor
    logabsdet: Tensor


class WrittenOut(TorchFunctionMode):
    """Inside this context, decompositions of positive semi-definite matrices are made of sums and products.

    ONNX has no decomposition, and ONNX Runtime no error function in double precision. It is for tracing our own
    formulas only: `slogdet` takes no pivots, which positive definite matrices do not need and others do.

        with WrittenOut():
            factor = torch.linalg.cholesky(covariance)
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        other = {
            torch.linalg.cholesky: _cholesky,
            torch.linalg.cholesky_ex: _cholesky_ex,
            torch.linalg.slogdet: _slogdet,
            torch.erf: _erf,
            Tensor.erf: _erf,
        }.get(func)
        return func(*args, **(kwargs or {})) if other is None else other(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        _HERE.depth = getattr(_HERE, "depth", 0) + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _HERE.depth -= 1
        super().__exit__(*error)


def is_written_out() -> bool:
    """Whether this thread is inside `WrittenOut`."""
    return getattr(_HERE, "depth", 0) > 0


def _erf(x: Tensor) -> Tensor:
    """Return erf(x), in single precision inside: ONNX Runtime knows no other."""
    return torch.special.erf(x.float()).to(x)


def powers(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return A^½, A^−½ and A⁻¹ for symmetric positive definite A (..., K, K).

    These are the coupled iterations of Newton and Schulz, Y ← Y T and Z ← T Z with T = (3I − Z Y) / 2, which start at
    Y = A / tr A and Z = I (Higham, Functions of Matrices, Eq. 6.35). Directions with less than 1e-8 of the trace are
    not finished: they have a smaller root and a smaller inverse than they should, both finite.
    """
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp(min=torch.finfo(matrix.dtype).tiny ** 0.5)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    y, z = matrix / trace, eye.expand_as(matrix)
    for _ in range(STEPS):
        t = 1.5 * eye - 0.5 * (z @ y)
        y, z = y @ t, t @ z
    root = trace.sqrt()
    return root * y, z / root, (z @ z) / trace


def pivots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eliminate one row after the other; return the Cholesky factor of (..., K, K) and its squared diagonal, (..., K).

    A matrix that is not positive definite has a pivot that is not positive, and NaN in its factor.
    """
    columns, found = [], []
    for k in range(matrix.shape[-1]):
        pivot = matrix[..., k : k + 1, k]
        column = matrix[..., :, k] / pivot.sqrt()
        matrix = matrix - column[..., :, None] * column[..., None, :]
        columns.append(column)
        found.append(pivot[..., 0])
    factor = torch.stack(columns, -1)
    lower = torch.ones(factor.shape[-2:], dtype=torch.bool, device=factor.device).tril()
    return torch.where(lower, factor, torch.zeros_like(factor)), torch.stack(found, -1)


def _cholesky(matrix: Tensor) -> Tensor:
    return pivots(matrix)[0]


def _cholesky_ex(matrix: Tensor) -> tuple[Tensor, Tensor]:
    factor, found = pivots(matrix)
    return factor, (~(found > 0)).any(-1).to(torch.int32)


def _slogdet(matrix: Tensor) -> Logdet:
    found = pivots(matrix)[1]
    return Logdet(torch.ones_like(found[..., 0]), found.log().sum(-1))


class MatrixPowers(torch.autograd.Function):
    """The first `count` of A^½, A^−½, A⁻¹ for symmetric A (..., C, C), which may be singular.

    Eigenvalues up to `rounding` of the largest stand for zero, where A⁻¹ is very large. Unlike a Cholesky factor the
    root exists for singular A, and unlike eigenvectors the powers are continuous in A, so that rounding in A only
    rounds the result. Backward by divided differences (Daleckiĭ and Kreĭn), which are zero on the null space, where
    the root has no derivative.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rounding: float, count: int) -> tuple[Tensor, ...]:
        if is_written_out():
            return powers((matrix + matrix.mT) / 2)[:count]
        fine = matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)  # one item must not break its batch
        values, vectors = torch.linalg.eigh(torch.where(fine, (matrix + matrix.mT) / 2, 0.0))
        vectors = torch.where(fine, vectors, torch.nan)
        floor = rounding * values[..., -1:]
        inside = values > floor
        roots = torch.where(inside, values, 0.0).sqrt()
        backs = torch.where(inside, values.clamp(min=torch.finfo(values.dtype).tiny).rsqrt(), 0.0)
        ctx.save_for_backward(roots, backs, vectors)
        ctx.set_materialize_grads(True)
        each = roots, backs, torch.where(inside, 1 / values.masked_fill(~inside, 1.0), ZERO / floor)
        return tuple((vectors * power[..., None, :]) @ vectors.mT for power in each[:count])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        roots, backs, vectors = ctx.saved_tensors
        total = roots[..., :, None] + roots[..., None, :]
        slope = torch.where(total > 0, 1 / total.masked_fill(total == 0, 1.0), 0.0)
        pairs = backs[..., :, None] * backs[..., None, :]
        slopes = slope, -slope * pairs, -pairs.square()
        inside = sum(vectors.mT @ gradient @ vectors * each for gradient, each in zip(gradients, slopes))
        found = vectors @ inside @ vectors.mT
        return (found + found.mT) / 2, None, None


def symmetric_root(matrix: Tensor) -> Tensor:
    """Return the symmetric square root of a positive semi-definite matrix (..., C, C); differentiable."""
    root: Tensor = MatrixPowers.apply(matrix.double(), matrix.shape[-1] * torch.finfo(matrix.dtype).eps, 1)[0]
    return root.to(matrix.dtype)
