"""One matrix under many shifts A + ρ I: its eigenvalues, and J (A + ρ I)⁻¹ Jᵀ for many ρ from one rotation of J."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.linalg.blockdiagonal import BlockDiagonal
from lapwing.linalg.dense import Dense
from lapwing.linalg.diagonal import Diagonal
from lapwing.linalg.eigenkronecker import EigenKronecker
from lapwing.linalg.kronecker import Kronecker
from lapwing.linalg.lowrank import LowRank
from lapwing.linalg.matrixrows import MatrixRows
from lapwing.linalg.psd import PSD
from lapwing.linalg.rows import DenseRows, Rows, chunks


def blocks_of(matrix: PSD) -> tuple[PSD, ...]:
    """The diagonal blocks, or the matrix itself as the only one."""
    return matrix.blocks if isinstance(matrix, BlockDiagonal) else (matrix,)


def eigenvalues(matrix: PSD) -> Tensor | None:
    """The eigenvalues of one block, float64; zeros may be left out. None where the structure has no eigenbasis.

    Those of a `Diagonal` are in the order of its entries. Negative ones (an exact Hessian) are not hidden.
    """
    if isinstance(matrix, Diagonal):
        return matrix.values.double()
    if isinstance(matrix, Dense) and matrix._spectral:
        return matrix._factor * matrix.spectrum.values + matrix._shift
    if isinstance(matrix, EigenKronecker) and matrix.left_scale is None:
        return matrix.values.reshape(-1)
    if isinstance(matrix, Kronecker):
        return matrix._product().reshape(-1)
    if isinstance(matrix, LowRank) and not bool(matrix.shift.any()):
        half = matrix.basis.double() * matrix._roots[:, None]
        return torch.linalg.eigvalsh(half @ half.T).clamp(min=0)
    return None


def shifted_quadratics(matrix: PSD, rows: Rows, shifts: Tensor) -> Tensor:
    """J (A + ρ I)⁻¹ Jᵀ of each sample for each of the shifts ρ (m,), for one block: (m, n, r, r)."""
    values, rotated = _diagonalized(matrix, rows)
    if rotated is None:
        ones = torch.ones(matrix.size, dtype=torch.float64, device=matrix.device)
        return torch.stack([(matrix + Diagonal(rho * ones)).quadratic(rows) for rho in shifts])
    if values.min() + shifts.min() <= 0:
        raise ValueError(f"shifts must exceed {-values.min().item():.3g}, got {shifts.min().item():.3g}")
    weights = 1 / (values + shifts.to(values)[:, None])  # (m, size)
    if isinstance(rotated, MatrixRows) and rotated._outer:
        return torch.stack([rotated.weighted_gram(w) for w in weights])
    pieces = []
    for start, length in chunks(rotated.n, 2 * rotated.r * rotated.size * rotated.dtype.itemsize):
        part = DenseRows(rotated.narrow(start, length).dense())  # formed once for all shifts
        pieces.append(torch.stack([part.weighted_gram(w) for w in weights]))
    return torch.cat(pieces, 1)


def _diagonalized(matrix: PSD, rows: Rows) -> tuple[Tensor, Rows | None]:
    """Eigenvalues (size,) and J in the eigenbasis; no rows where the structure has no eigenbasis."""
    if isinstance(matrix, Kronecker):
        matrix = matrix._eigen(matrix._product())
    values = None if isinstance(matrix, LowRank) else eigenvalues(matrix)
    if values is None:
        return torch.empty(0), None
    if isinstance(matrix, EigenKronecker):
        return values, matrix._rotated(rows)
    rows = matrix._rows(rows)
    if isinstance(matrix, Dense):
        return values, DenseRows(rows.dense() @ matrix.spectrum.vectors)
    return values, rows


def block_rows(matrix: PSD, rows: Rows) -> tuple[Rows, ...]:
    """The rows of each of `blocks_of(matrix)`, factored where they come so."""
    return matrix._parts(rows) if isinstance(matrix, BlockDiagonal) else (rows,)
