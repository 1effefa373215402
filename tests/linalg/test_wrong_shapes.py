"""Matrices, layouts and rows whose parts do not fit are refused with what came and what fits."""

from collections.abc import Callable

import pytest
import torch

from lapwing.linalg import BlockDiagonal, Dense, DenseRows, Diagonal, Layout
from lapwing.linalg.kronecker import EigenKronecker
from lapwing.linalg.rows import MatrixRows

EYE = torch.eye(2, dtype=torch.float64)
HALVES = Layout.contiguous([2, 3])
MATRIX = BlockDiagonal(HALVES, (Dense(EYE), Diagonal(torch.ones(3, dtype=torch.float64))))

CASES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no blocks": (lambda: BlockDiagonal(Layout(0, []), ()), ValueError, "at least one block"),
    "too few names": (
        lambda: BlockDiagonal(HALVES, MATRIX.blocks, (("a",),)), ValueError, "a name for each of 2 blocks, got 1"
    ),
    "one scale": (
        lambda: EigenKronecker(EYE[None], EYE[None], EYE[None], left_scale=torch.ones(1, 2)), ValueError, "or neither"
    ),
    "an index of floats": (lambda: Layout(2, [torch.ones(2)]), ValueError, "block 0: expected a vector of int64"),
    "an entry outside": (lambda: Layout(2, [torch.tensor([0, 5])]), ValueError, "must lie in 0 … 1"),
    "an entry twice": (lambda: Layout(2, [torch.tensor([0, 0])]), ValueError, "1 of them distinct"),
    "gather": (lambda: HALVES.gather(torch.zeros(4)), ValueError, "vectors of length 5"),
    "scatter": (lambda: HALVES.scatter([torch.zeros(2), torch.zeros(2)]), ValueError, r"sizes \[2, 3\], got \[2, 2\]"),
    "no terms": (lambda: MatrixRows(()), ValueError, "at least one term"),
    "flat rows": (lambda: DenseRows(torch.zeros(3, 4)), ValueError, "samples, directions, parameters"),
    "a square diagonal": (lambda: Diagonal(EYE), ValueError, "a vector of diagonal entries"),
    "a number to add": (lambda: MATRIX + 1.0, TypeError, "expected a PSD matrix to add, got float"),
    "another size": (lambda: MATRIX + Dense(EYE), ValueError, "size 2 to one of size 5"),
    "a short vector": (lambda: MATRIX.matvec(torch.zeros(4)), ValueError, "vectors of length 5"),
    "a negative scale": (lambda: MATRIX.scale(-1.0), ValueError, "a number ≥ 0 only"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_that_do_not_fit_are_refused(name: str) -> None:
    wrong, kind, message = CASES[name]
    with pytest.raises(kind, match=message):
        wrong()
