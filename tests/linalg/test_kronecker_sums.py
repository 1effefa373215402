"""Sums of matrices in Kronecker bases against dense algebra: what is exact, and what the projection promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing import IncompatiblePrior, NotPositiveDefinite
from lapwing.linalg import PSD, Diagonal, EigenKronecker, Kronecker, SimultaneousKronecker
from lapwing.linalg.commonbasis import nearest_product
from lapwing.testing.matrices import Draw

Q, O, I = 2, 3, 4
P = Q * O * I
F64 = torch.float64


def draw(seed: int, dtype: torch.dtype = F64) -> Draw:
    return Draw(torch.Generator().manual_seed(seed), dtype)


def product(seed: int, rank: int | None = None) -> Kronecker:
    make = draw(seed)
    return Kronecker(make.psd(Q, size=O, rank=rank), make.psd(Q, size=I, rank=rank))


def constant(value: float) -> Diagonal:
    return Diagonal(torch.full((P,), value, dtype=F64))


def ekfac(seed: int) -> EigenKronecker:
    make = draw(seed)
    return EigenKronecker(make.orthogonal(Q, size=O), make.orthogonal(Q, size=I), make(Q, O, I).square() + 0.1)


IDENTITY = Kronecker(torch.eye(O, dtype=F64).repeat(Q, 1, 1), torch.eye(I, dtype=F64).repeat(Q, 1, 1))
WITHIN = ekfac(4)
EXACT: dict[str, tuple[PSD, PSD]] = {
    "two products": (product(1), product(2)),
    "a singular product": (product(1, rank=1), product(2)),
    "the singular one second": (product(1), product(2, rank=1)),
    "the identity": (ekfac(1), IDENTITY),
    "damped factor by factor": (product(1), product(2).damped(2.0, constant(0.3), split=1.5)),
    "in one eigenbasis": (WITHIN, EigenKronecker(WITHIN.left.clone(), WITHIN.right.clone(), ekfac(5).values)),
}
PROJECTED: dict[str, tuple[PSD, PSD]] = {
    "a prior with a shift": (product(1), product(2) + constant(0.3)),
    "two with a shift": (product(1) + constant(0.1), product(2) + constant(0.3)),
    "two estimated spectra": (ekfac(1), ekfac(2)),
    "a third product": (product(3), product(1) + product(2)),
}


def sums(cases: dict[str, tuple[PSD, PSD]], name: str) -> tuple[SimultaneousKronecker, Tensor]:
    data, prior = cases[name]
    total = data + prior
    assert isinstance(total, SimultaneousKronecker)
    return total, data.dense() + prior.dense()


@pytest.mark.parametrize("name", EXACT)
def test_a_common_basis_makes_the_sum_exact(name: str) -> None:
    total, dense = sums(EXACT, name)
    torch.testing.assert_close(total.dense(), dense)
    torch.testing.assert_close(total.logdet(), torch.logdet(dense))
    torch.testing.assert_close(total.inverse_diagonal(), torch.linalg.inv(dense).diagonal())
    assert total.neglected == 0.0


@pytest.mark.parametrize("name", PROJECTED)
def test_elsewhere_the_diagonal_is_the_nearest_gaussian_in_the_basis(name: str) -> None:
    """KL(q ‖ p) = ½ (tr(P Q⁻¹) − log |P Q⁻¹| − n) is stationary in the values of q, and neglected is what was lost."""
    total, dense = sums(PROJECTED, name)
    values = total.values.clone().requires_grad_()
    moved = SimultaneousKronecker(total.left, total.right, total.left_dual, total.right_dual, values)
    inverse = moved.solve(torch.eye(P, dtype=F64))
    kl = 0.5 * ((dense * inverse).sum() - torch.logdet(dense) + moved.logdet() - P)
    (slope,) = torch.autograd.grad(kl, values)
    assert float(slope.abs().max()) < 1e-10
    assert 1e-4 < float(kl.detach()) < 2
    assert float(total.logdet()) > float(torch.logdet(dense))
    dual = torch.block_diag(*(torch.kron(a, b) for a, b in zip(total.left_dual, total.right_dual, strict=True)))
    inside = dual.T @ dense @ dual
    outside = (inside - torch.diag(inside.diagonal())).norm() / inside.norm()
    assert total.neglected == pytest.approx(float(outside), rel=1e-6)
    torch.testing.assert_close(total.values.reshape(-1), inside.diagonal())


@pytest.mark.parametrize("name", PROJECTED)
def test_the_basis_is_the_best_of_three(name: str) -> None:
    data, prior = PROJECTED[name]
    total, dense = sums(PROJECTED, name)
    for own in (data.in_kronecker_basis(), prior.in_kronecker_basis()):
        assert own is not None
        dual = torch.block_diag(*(torch.kron(a, b) for a, b in zip(own[2], own[3], strict=True)))
        kept = (dual.T @ dense @ dual).diagonal().log().sum() - 2 * torch.linalg.slogdet(dual).logabsdet
        assert float(total.logdet()) <= float(kept) + 1e-9


@pytest.mark.parametrize("name", [*EXACT, *PROJECTED])
def test_ratio_of_determinants(name: str) -> None:
    data, prior = (EXACT | PROJECTED)[name]
    if name == "the singular one second":
        with pytest.raises(NotPositiveDefinite):
            data.logdet_ratio(prior)
        return
    torch.testing.assert_close(data.logdet_ratio(prior), (data + prior).logdet() - torch.logdet(prior.dense()))


def test_the_nearest_product_has_the_smallest_divergence() -> None:
    values = draw(3)(Q, O, I).square() + 0.1

    def divergence(logs: Tensor) -> Tensor:
        log = logs[:, :O, None] + logs[:, None, O:]
        return (values * (-log).exp() + log).sum()

    rows, columns = nearest_product(values)
    logs = torch.cat([rows.log(), columns.log()], 1).requires_grad_()
    (slope,) = torch.autograd.grad(divergence(logs), logs)
    assert float(slope.abs().max()) < 1e-8
    exact = nearest_product(rows[:, :, None] * columns[:, None])
    torch.testing.assert_close(exact[0][:, :, None] * exact[1][:, None], rows[:, :, None] * columns[:, None])


def test_sums_without_a_basis_are_refused() -> None:
    with pytest.raises(NotPositiveDefinite, match="neither of the two"):
        product(1, rank=1) + product(2, rank=1)
    with pytest.raises(IncompatiblePrior, match="Kronecker product"):
        (product(1) + product(2)) + constant(0.3)
    wide = Kronecker(draw(1).psd(1, size=6), draw(1).psd(1, size=I))
    with pytest.raises(IncompatiblePrior, match="Kronecker product"):
        product(1) + wide


def test_a_spoiled_file_is_noticed() -> None:
    total = product(1) + product(2)
    assert total.flaw() == ""
    spoiled = SimultaneousKronecker(total.left, total.right, total.left_dual * 1.1, total.right_dual, total.values)
    assert "left dual" in spoiled.flaw()
    negative = SimultaneousKronecker(total.left, total.right, total.left_dual, total.right_dual, -total.values)
    assert "eigenvalues" in negative.flaw()
