"""Many shifts of one matrix against the matrix with each shift added."""

import pytest
import torch

from lapwing.errors import NotPositiveDefinite
from lapwing.linalg import PSD, BlockDiagonal, Dense, DenseRows, Diagonal, Kronecker, Layout, LowRank, MatrixRows, Term
from lapwing.linalg.rows import Rows

torch.manual_seed(0)
ROOT = torch.randn(4, 12, dtype=torch.float64)
SIDES = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(2, 2, 2, dtype=torch.float64)
KRONECKER = Kronecker(SIDES[0] @ SIDES[0].mT, SIDES[1] @ SIDES[1].mT)


class Plain(Dense):
    """A matrix that answers with the defaults of the interface, as one of a user's does."""

    eigenvalues, in_eigenbasis = PSD.eigenvalues, PSD.in_eigenbasis
    shifted_products, shifted_draws = PSD.shifted_products, PSD.shifted_draws


MATRICES: dict[str, PSD] = {
    "plain": Plain(ROOT.T @ ROOT),
    "diagonal": Diagonal(torch.rand(12, dtype=torch.float64)),
    "dense": Dense(ROOT.T @ ROOT).scale(0.5),
    "kronecker": KRONECKER.scale(2.0),
    "eigenkronecker": KRONECKER + Diagonal(torch.full((12,), 0.1).double()),
    "lowrank": LowRank(ROOT, torch.rand(4, dtype=torch.float64), torch.zeros(12).double()),
}


def matrix_rows(positions: int) -> MatrixRows:
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(5, 3, positions, 2, 3, dtype=torch.float64, generator=generator)
    right = torch.randn(5, 1, positions, 2, 2, dtype=torch.float64, generator=generator)
    return MatrixRows((Term(left, right),))


OUTER = matrix_rows(1).terms[0]
ROWS: dict[str, Rows] = {
    "outer": matrix_rows(1),
    "shared": matrix_rows(4),
    "tied": MatrixRows((Term(OUTER.left[:, :1], OUTER.left[:, :, :, :, :2]),)),
    "dense": DenseRows(matrix_rows(2).dense()),
}


PAIRS = torch.tensor([[0, 1, 2, 2], [0, 0, 1, 2]])


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_shifted_products(matrix: PSD, rows: Rows) -> None:
    shifts = torch.tensor([1e-3, 0.5, 1e4], dtype=torch.float64)
    got = matrix.shifted_products(rows, shifts, PAIRS)
    dense, jacobian = matrix.dense(), rows.dense()
    for k, shift in enumerate(shifts):
        inverse = torch.linalg.inv(dense + shift * torch.eye(12, dtype=torch.float64))
        expected = (jacobian @ inverse @ jacobian.mT)[:, PAIRS[0], PAIRS[1]]
        torch.testing.assert_close(got[k], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_eigenvalues(matrix: PSD) -> None:
    got = matrix.eigenvalues()
    assert got is not None
    expected = torch.linalg.eigvalsh(matrix.dense())
    torch.testing.assert_close(got.sort().values, expected[-len(got) :], rtol=1e-9, atol=1e-12)
    assert expected[: 12 - len(got)].abs().sum() < 1e-12


def test_no_eigenbasis() -> None:
    assert (MATRICES["dense"] + Diagonal(torch.arange(1, 13).double())).eigenvalues() is None
    shifted = MATRICES["lowrank"] + Diagonal(torch.ones(12).double())
    assert shifted.eigenvalues() is None
    shift = torch.tensor([0.5], dtype=torch.float64)
    got = shifted.shifted_products(ROWS["outer"], shift, PAIRS)[0]
    exact = (shifted + Diagonal(torch.full((12,), 0.5).double())).quadratic(ROWS["outer"])
    torch.testing.assert_close(got, exact[:, PAIRS[0], PAIRS[1]])


def test_blocks() -> None:
    layout = Layout(24, (torch.arange(0, 24, 2), torch.arange(1, 24, 2)))
    whole = BlockDiagonal(layout, (MATRICES["dense"], MATRICES["diagonal"]))
    rows = DenseRows(torch.randn(2, 3, 24, dtype=torch.float64))
    assert whole.diagonal_blocks() == whole.blocks
    assert whole.blocks[0].diagonal_blocks() == (whole.blocks[0],)
    shift = torch.tensor([0.3], dtype=torch.float64)
    parts = [*whole.blockwise_rows(torch.arange(24), rows)]
    assert torch.equal(parts[1][1], torch.arange(1, 24, 2))
    total = sum(block.shifted_products(part, shift, PAIRS)[0] for block, _, part in parts)
    exact = (whole + Diagonal(torch.full((24,), 0.3).double())).quadratic(rows)
    torch.testing.assert_close(total, exact[:, PAIRS[0], PAIRS[1]])
    torch.testing.assert_close(whole.shifted_products(rows, shift, PAIRS)[0], total)


def test_refuses_a_shift_that_leaves_it_indefinite() -> None:
    indefinite = Dense(torch.diag(torch.tensor([1.0, -2.0], dtype=torch.float64)))
    with pytest.raises(NotPositiveDefinite, match=r"eigenvalue is -2.*factor='ggn'"):
        indefinite.shifted_products(DenseRows(torch.ones(1, 3, 2).double()), torch.tensor([1.0]), PAIRS)


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_shifted_draws(matrix: PSD) -> None:
    """(A + ρI)^½ d = U z: the same for every shift, and standard normal."""
    shifts = torch.tensor([1e-3, 0.5, 1e4], dtype=torch.float64)
    draws = matrix.shifted_draws(2000, shifts, torch.Generator().manual_seed(0))
    assert draws is not None
    values, vectors = torch.linalg.eigh(matrix.dense())
    white = [(d @ vectors * (values + rho).clamp(min=0).sqrt()) @ vectors.T for d, rho in zip(draws, shifts)]
    torch.testing.assert_close(white[1], white[0], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(white[2], white[0], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(white[0].T.cov(), torch.eye(12, dtype=torch.float64), rtol=0, atol=0.12)


def test_shifted_draws_of_blocks() -> None:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    matrix = BlockDiagonal(Layout(24, tuple(order.split([12, 12]))), (MATRICES["kronecker"], MATRICES["lowrank"]))
    shifts = torch.tensor([0.1, 10.0], dtype=torch.float64)
    draws = matrix.shifted_draws(3, shifts, torch.Generator().manual_seed(0))
    assert draws is not None
    values, vectors = torch.linalg.eigh(matrix.dense())
    white = [(d @ vectors * (values + rho).clamp(min=0).sqrt()) @ vectors.T for d, rho in zip(draws, shifts)]
    torch.testing.assert_close(white[1], white[0], rtol=1e-7, atol=1e-7)


def test_shifted_draws_of_damped_factors() -> None:
    """d has the precision of the damped matrix: dᵀ A_ρ d = zᵀz whatever the shift."""
    shifts = torch.tensor([1e-2, 0.5, 1e2], dtype=torch.float64)
    draws = KRONECKER.shifted_draws(5, shifts, torch.Generator().manual_seed(0), split=2.0)
    assert draws is not None
    for d, rho in zip(draws, shifts):
        damped = KRONECKER.damped(1.0, Diagonal(rho.expand(12)), split=2.0).dense()
        z = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(torch.einsum("np,pq,nq->n", d, damped, d), z.square().sum(-1))


def test_an_indefinite_matrix_has_no_draws() -> None:
    hessian = Diagonal(torch.tensor([1.0, -0.5]).double())
    with pytest.raises(NotPositiveDefinite, match="indefinite"):
        hessian.shifted_draws(1, torch.tensor([0.1], dtype=torch.float64))
