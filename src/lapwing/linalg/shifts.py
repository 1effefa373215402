"""One matrix under many shifts A + ρ I: its eigenvalues, and J (A + ρ I)⁻¹ Jᵀ for many ρ from one rotation of J."""

from __future__ import annotations

from collections.abc import Iterable

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
        return matrix.grid().reshape(-1)
    if isinstance(matrix, LowRank) and not bool(matrix.shift.any()):
        half = matrix.basis.double() * matrix._roots[:, None]
        return torch.linalg.eigvalsh(half @ half.T).clamp(min=0)
    return None


def shifted_products(matrix: PSD, rows: Rows, shifts: Tensor, pairs: Tensor) -> Tensor:
    """J_a (A + ρ I)⁻¹ J_bᵀ of each sample, for each of the shifts ρ (m,) and pairs (a, b) (2, k): (m, n, k).

    For one block. J is brought to the eigenbasis once, whatever the number of shifts.
    """
    if isinstance(matrix, Kronecker):
        matrix = matrix._eigen(matrix.grid())
    values = eigenvalues(matrix)
    if values is None:
        ones = torch.ones(matrix.size, dtype=torch.float64, device=matrix.device)
        each = [(matrix + Diagonal(rho * ones)).quadratic(rows) for rho in shifts]
        return torch.stack([gram[:, pairs[0], pairs[1]] for gram in each])
    if values.min() + shifts.min() <= 0:
        raise ValueError(f"shifts must exceed {-values.min().item():.3g}, got {shifts.min().item():.3g}")
    if isinstance(matrix, LowRank):
        return _low_rank_products(matrix, rows, shifts, pairs)
    rotated = _rotated(matrix, rows)
    weights = 1 / (values.to(rotated.dtype) + shifts.to(rotated.dtype)[:, None])  # (m, size)
    if isinstance(rotated, MatrixRows) and rotated._outer:
        return _outer_products(rotated, weights, pairs)
    pieces = []
    for start, length in chunks(rotated.n, pairs.shape[1] * rotated.size * rotated.dtype.itemsize):
        block = rotated.narrow(start, length).dense()
        pieces.append((block[:, pairs[0]] * block[:, pairs[1]]) @ weights.T)  # (n, k, m)
    return torch.cat(pieces).movedim(-1, 0)


def _rotated(matrix: PSD, rows: Rows) -> Rows:
    """J in the eigenbasis of A."""
    if isinstance(matrix, EigenKronecker):
        return matrix._rotated(rows)
    rows = matrix._rows(rows)
    return DenseRows(rows.dense() @ matrix.spectrum.vectors) if isinstance(matrix, Dense) else rows


def _outer_products(rows: MatrixRows, weights: Tensor, pairs: Tensor) -> Tensor:
    """Rows that are single outer products: the squared side without directions meets the weights first."""
    left, right = rows._sides  # (n, r|1, q, o), (n, r|1, q, i)
    grid = weights.reshape(len(weights), rows.q, rows.o, rows.i)
    if right.shape[1] == 1:
        shared = torch.einsum("mqoi,nqi->nqom", grid, right[:, 0].square()).flatten(1, 2)
        side = left.expand(-1, rows.r, -1, -1).flatten(2)
    else:
        shared = torch.einsum("mqoi,nqo->nqim", grid, left[:, 0].square()).flatten(1, 2)
        side = right.flatten(2)
    return ((side[:, pairs[0]] * side[:, pairs[1]]) @ shared).movedim(-1, 0)


def _low_rank_products(matrix: LowRank, rows: Rows, shifts: Tensor, pairs: Tensor) -> Tensor:
    """J Jᵀ/ρ − (J V) diag(e/(ρ(e + ρ))) (J V)ᵀ for A = V diag(e) Vᵀ, in float64."""
    half = matrix.basis.double() * matrix._roots[:, None]
    values, vectors = torch.linalg.eigh(half @ half.T)
    keep = values > values.max() * len(values) * torch.finfo(torch.float64).eps
    values, basis = values[keep], (vectors[:, keep].T @ half) / values[keep].sqrt()[:, None]
    wide = matrix._rows(rows).to(torch.float64)
    inside = wide.matvec(basis)  # (rank, n, r)
    whole = wide.weighted_gram(torch.ones(matrix.size, dtype=torch.float64, device=matrix.device))
    shifts = shifts.double()
    weights = values / (shifts[:, None] * (values + shifts[:, None]))
    cut = torch.einsum("mj,jnk->mnk", weights, inside[..., pairs[0]] * inside[..., pairs[1]])
    return (whole[:, pairs[0], pairs[1]] / shifts[:, None, None] - cut).to(matrix.dtype)


def block_rows(matrix: PSD, rows: Rows) -> Iterable[Rows]:
    """The rows of each of `blocks_of(matrix)`, factored where they come so."""
    return matrix._parts(rows) if isinstance(matrix, BlockDiagonal) else (rows,)
