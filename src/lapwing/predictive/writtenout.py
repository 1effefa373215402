"""What ONNX or its runtime lacks, in operations that they have: decompositions of small matrices, erf of doubles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

STEPS = 30
"""Steps of Newton and Schulz: an eigenvalue of 1e-8 of the trace takes 23 to come near 1, and 5 to reach it."""

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
