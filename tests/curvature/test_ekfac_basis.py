"""The eigenbasis of a classifier's EKFAC: cheaper than its moments, as good, and exact where that may matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import EKFAC, GGN
from lapwing.curvature.problem import FEW


def data(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 5, dtype=torch.float64, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long() + 2 * (x[:, 2] > 0.3).long()


def confident(n: int) -> nn.Module:
    """A classifier that is sure of most of its data, so that most directions hold next to nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 5)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.03)
    x, y = data(n)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def fitted(n: int, basis: GGN | None, **options: object) -> lapwing.Laplace:
    return lapwing.fit(confident(n), data(n), "classification", structure=EKFAC(basis), prior=1.0, **options)


def energy(la: lapwing.Laplace) -> float:
    """‖·‖² of what the basis holds on its diagonal: ‖block − EKFAC‖² is that of the block minus this."""
    return float(la.curvature.dense().square().sum())


def test_cheap_basis_is_as_good_and_keeps_the_whole_trace() -> None:
    cheap, whole, rough = (fitted(600, b) for b in (None, GGN(tolerance=0.0), GGN(tolerance=0.5)))
    full = lapwing.fit(confident(600), data(600), "classification", structure="blockdiag", prior=1.0)
    assert "all but 0.001 of the curvature" in cheap.summary()
    assert not torch.equal(cheap.curvature.dense(), whole.curvature.dense())
    trace = full.curvature.dense().trace()
    torch.testing.assert_close(cheap.curvature.dense().trace(), trace, rtol=1e-10, atol=0)
    exact, bound = energy(full), energy(whole)
    assert bound < exact
    assert abs(energy(cheap) - bound) < 2e-3 * (exact - energy(rough))
    assert energy(rough) < 0.99 * bound  # what a bad basis does
    torch.testing.assert_close(cheap.log_evidence(), whole.log_evidence(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("n", [1, FEW])
def test_few_data_have_the_whole_basis(n: int) -> None:
    by_default, whole = fitted(n, None), fitted(n, GGN(tolerance=0.0))
    assert "basis: from" not in by_default.summary()
    torch.testing.assert_close(by_default.curvature.dense(), whole.curvature.dense(), rtol=1e-9, atol=1e-12)


def test_one_datum_is_exact() -> None:
    found = fitted(1, None).curvature.dense()
    truth = lapwing.fit(confident(1), data(1), "classification", structure="blockdiag", prior=1.0).curvature.dense()
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12 * float(truth.abs().max()))


def test_what_was_asked_for_is_kept() -> None:
    model, (x, y) = confident(300), data(300)
    coarse = lapwing.fit(model, (x, y), "classification", structure="ekfac", factor=GGN(tolerance=1e-2))
    same = lapwing.fit(
        model, (x, y), "classification", structure=EKFAC(GGN(tolerance=1e-2)), factor=GGN(tolerance=1e-2)
    )
    torch.testing.assert_close(coarse.curvature.dense(), same.curvature.dense())
    values = torch.randn(300, 5, dtype=torch.float64)
    regression = lapwing.fit(model, (x, values), lapwing.Gaussian(1.0), structure="ekfac")
    assert "basis: from" not in regression.summary()
