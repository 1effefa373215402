"""Σ log(1 + x) with shared logarithms, against `math.fsum` of one logarithm each."""

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lapwing.errors import NotPositiveDefinite
from lapwing.linalg import (
    PSD,
    BlockDiagonal,
    Dense,
    Diagonal,
    EigenKronecker,
    Kronecker,
    Layout,
    blocks,
    kronecker,
    spectrum,
)
from lapwing.linalg.spectrum import FEW, sum_log1p


def exact(x: Tensor) -> float:
    return math.fsum(math.log1p(v) for v in x.double().flatten().tolist())


def spread(n: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return 10 ** (low + (high - low) * torch.rand(n, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, FEW - 1, FEW, FEW + 5, 3 * FEW + 31])
@pytest.mark.parametrize(("low", "high"), [(-3, 3), (-8, 8), (8, 12), (-14, -9), (-30, -20), (100, 300)])
def test_any_size_of_numbers(n: int, low: float, high: float) -> None:
    x = spread(n, low, high, torch.Generator().manual_seed(n))
    assert float(sum_log1p(x)) == pytest.approx(exact(x), rel=2e-10, abs=0)


def test_rows_and_float32() -> None:
    x = spread(2 * FEW, -4, 4, torch.Generator().manual_seed(0)).float().reshape(2, FEW // 4, 4)
    got = sum_log1p(x)
    assert got.dtype == torch.float64
    assert float(got) == pytest.approx(exact(x), rel=2e-10)


@pytest.mark.parametrize(
    "change", [lambda x: x.fill_(-0.999999999999), lambda x: x[5:9].fill_(-3.0), lambda x: x[:1].fill_(math.nan)]
)
def test_numbers_near_minus_one_and_beyond(change: Callable[[Tensor], Tensor]) -> None:
    x = spread(FEW, -1, 1, torch.Generator().manual_seed(0))
    change(x)
    torch.testing.assert_close(sum_log1p(x), x.log1p().sum(), rtol=1e-12, atol=0, equal_nan=True)


def test_gradients_are_those_of_each() -> None:
    x = spread(FEW, -2, 2, torch.Generator().manual_seed(0)).requires_grad_()
    (found,) = torch.autograd.grad(sum_log1p(x), x)
    torch.testing.assert_close(found, 1 / (1 + x.detach()))


def test_logarithms_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared above is the fast way, where it is meant to be taken."""
    x = spread(FEW, -2, 2, torch.Generator().manual_seed(0))
    monkeypatch.setattr(spectrum, "TOGETHER", 1)
    alone = sum_log1p(x)
    monkeypatch.undo()
    assert float(sum_log1p(x)) == pytest.approx(float(alone), rel=1e-12)
    monkeypatch.setattr(Tensor, "log1p", lambda _: pytest.fail("one logarithm each"))
    sum_log1p(x)


@pytest.mark.parametrize("piece", [1, 7, 50, 10**6])
@pytest.mark.parametrize("product", [False, True])
def test_products_of_eigenvalues_in_pieces(piece: int, product: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of a Kronecker product against its dense log-determinant, for a constant prior and for R ⊗ K."""
    monkeypatch.setattr(kronecker, "PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    g, a = (torch.randn(2, k, k, dtype=torch.float64, generator=generator) for k in (5, 4))
    matrix = Kronecker(g @ g.mT, a @ a.mT, 0.3)
    rows, columns = (0.5 + torch.rand(2, k, dtype=torch.float64, generator=generator) for k in (5, 4))
    values = (rows[:, :, None] * columns[:, None, :]).flatten() if product else torch.full((40,), 0.7).double()
    dense = torch.eye(40, dtype=torch.float64) + matrix.dense() / values
    assert float(matrix.logdet_ratio(Diagonal(values))) == pytest.approx(float(torch.logdet(dense)), rel=1e-12)


def one_number(size: int, value: float = 0.7) -> Diagonal:
    return Diagonal(torch.tensor(value, dtype=torch.float64).expand(size))


def three_blocks() -> BlockDiagonal:
    """Kronecker of low rank, in an eigenbasis, and diagonal: all know their eigenvalues; out of order in the vector."""
    generator = torch.Generator().manual_seed(0)
    g, a, u, v, values = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in [(2, 5, 3), (2, 4, 6), (1, 3, 3), (1, 4, 4), (1, 3, 4)]
    )
    bases = torch.linalg.qr(u)[0], torch.linalg.qr(v)[0]
    blocks = (
        Kronecker(g @ g.mT, a @ a.mT, 0.3),
        EigenKronecker(*bases, values.square()),
        Diagonal(torch.arange(8, dtype=torch.float64)),
    )
    order = torch.randperm(60, generator=generator)
    return BlockDiagonal(Layout(60, tuple(order.split([40, 12, 8]))), blocks)


def by_dense_algebra(matrix: PSD, precision: Tensor) -> Tensor:
    return torch.logdet(torch.eye(matrix.size, dtype=torch.float64) + matrix.dense() / precision)


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("precision", [1e-3, 0.7, 1e3])
def test_blocks_under_one_precision(precision: float, scale: float) -> None:
    """Value and derivative by the precision of the sum over all blocks, against a dense determinant."""
    matrix, tau = three_blocks().scale(scale), torch.tensor(precision, dtype=torch.float64, requires_grad=True)
    got, want = matrix.logdet_ratio(Diagonal(tau.expand(60))), by_dense_algebra(matrix, tau)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, tau), torch.autograd.grad(want, tau))


def test_blocks_under_one_precision_are_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eigenvalues are asked for once, and only where they are few enough to be kept."""
    matrix = three_blocks()
    monkeypatch.setattr(Kronecker, "logdet_ratio", lambda *_: pytest.fail("block by block"))
    matrix.logdet_ratio(one_number(60))
    monkeypatch.setattr(Kronecker, "known_eigenvalues", lambda _: pytest.fail("asked again"))
    again = matrix.logdet_ratio(one_number(60, 0.5))
    assert float(again) == pytest.approx(float(by_dense_algebra(matrix, torch.tensor(0.5))), rel=1e-12)
    rescaled = matrix.scale(2.0).scale(torch.tensor(0.5)).scale(3.0)
    got = rescaled.logdet_ratio(one_number(60, 0.5))
    assert float(got) == pytest.approx(float(by_dense_algebra(matrix, torch.tensor(0.5 / 3))), rel=1e-6)
    monkeypatch.setattr(blocks, "KEPT", 59)
    with pytest.raises(pytest.fail.Exception, match="block by block"):
        three_blocks().logdet_ratio(one_number(60))


def test_blocks_that_do_not_know_their_eigenvalues() -> None:
    matrix = BlockDiagonal(Layout(2, (torch.arange(1), torch.arange(1, 2))), (Dense(torch.eye(1)), one_number(1)))
    torch.testing.assert_close(matrix.logdet_ratio(one_number(2)), by_dense_algebra(matrix, torch.tensor(0.7)).double())


def test_gradients_by_the_scale_of_blocks() -> None:
    """A scale that carries a graph keeps it: eigenvalues are constants, and are not used."""
    c = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    matrix = three_blocks()
    matrix.logdet_ratio(one_number(60))
    got = torch.autograd.grad(matrix.scale(c).logdet_ratio(one_number(60)), c)
    want = torch.autograd.grad(by_dense_algebra(matrix, torch.tensor(0.7) / c), c)
    torch.testing.assert_close(got, want)


def test_blocks_that_may_be_indefinite_are_looked_at() -> None:
    """A Hessian's diagonal below −τ is refused, as block by block, and so is an indefinite factor, by its name."""
    layout = Layout(4, (torch.arange(4),))
    hessian = BlockDiagonal(layout, (Diagonal(torch.tensor([1.0, -2.0, 0.0, 3.0])),), ("conv",))
    factor = torch.diag(torch.tensor([1.0, -2.0]))[None]
    kron = BlockDiagonal(layout, (Kronecker(factor, torch.eye(2)[None]),), ("conv",))
    for matrix in (hessian, kron):
        with pytest.raises(NotPositiveDefinite, match=r"conv.*smallest eigenvalue is -"):
            matrix.logdet_ratio(one_number(4))


def test_kept_eigenvalues_are_of_no_context() -> None:
    """Whoever asks first: inference mode, a transform, no gradients; the next may differentiate or copy."""
    tau = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(by_dense_algebra(three_blocks(), tau), tau)

    def first(matrix: BlockDiagonal, context: str) -> None:
        if context == "transform":
            got = torch.func.grad(lambda t: matrix.logdet_ratio(Diagonal(t.expand(60))))(tau.detach())
            torch.testing.assert_close(got, want)
            return
        with torch.inference_mode() if context == "inference" else torch.no_grad():
            matrix.logdet_ratio(one_number(60))

    for context in ("transform", "inference", "no_grad"):
        matrix = three_blocks()
        _ = matrix.blocks[0].factor_eigenvalues  # type: ignore[attr-defined]  # made by the fit
        first(matrix, context)
        (got,) = torch.autograd.grad(matrix.logdet_ratio(Diagonal(tau.expand(60))), tau)
        torch.testing.assert_close(got, want)
        copy.deepcopy(matrix)
        pickle.dumps(matrix)


@pytest.mark.parametrize("piece", [1, 7, 59, 60, 1000])
def test_kept_eigenvalues_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "PIECE", piece)
    got = three_blocks().logdet_ratio(one_number(60, 0.5))
    assert float(got) == pytest.approx(float(by_dense_algebra(three_blocks(), torch.tensor(0.5))), rel=1e-12)
