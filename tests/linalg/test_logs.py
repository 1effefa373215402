"""Σ log(1 + x) with shared logarithms, against `math.fsum` of one logarithm each."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lapwing.linalg import Diagonal, Kronecker, kronecker, logs
from lapwing.linalg.logs import FEW, sum_log1p


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
    monkeypatch.setattr(logs, "TOGETHER", 1)
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
