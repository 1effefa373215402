"""Decompositions that are written out for ONNX, beside LAPACK's."""

import pytest
import torch

from lapwing.predictive.decompositions import MatrixPowers, WrittenOut, is_written_out, powers


def matrices(k: int, condition: float = 1e3, batch: tuple[int, ...] = (4,)) -> torch.Tensor:
    """Symmetric matrices with eigenvalues between 1/condition and 1."""
    torch.manual_seed(k)
    basis = torch.linalg.qr(torch.randn(*batch, k, k, dtype=torch.float64)).Q
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), k, dtype=torch.float64)
    return (basis * values) @ basis.mT


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e7])
@pytest.mark.parametrize("k", [1, 2, 3, 10, 33, 100])
@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_powers(k: int, condition: float, scale: float) -> None:
    a = scale * matrices(k, condition)
    root, back, inverse = powers(a)
    values, vectors = torch.linalg.eigh(a)
    for found, power in ((root, 0.5), (back, -0.5), (inverse, -1.0)):
        expected = (vectors * values[..., None, :] ** power) @ vectors.mT
        size = expected.abs().max()
        torch.testing.assert_close(found / size, expected / size, rtol=0, atol=1e-13 * k * condition**0.5)


def test_powers_of_zero_are_finite() -> None:
    for found in powers(torch.zeros(2, 3, 3, dtype=torch.float64)):
        assert bool(found.isfinite().all())


def test_a_root_of_a_singular_matrix() -> None:
    a = torch.ones(1, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(powers(a)[0], a / 2, rtol=0, atol=1e-8)


def test_the_powers_of_a_distribution_are_written_out_in_the_context_only() -> None:
    a = matrices(4)
    plain = MatrixPowers.apply(a, 1e-7, 3)
    with WrittenOut():
        written = MatrixPowers.apply(a, 1e-7, 3)
        assert is_written_out()
    assert not is_written_out()
    for one, other in zip(plain, written, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        assert not torch.equal(one, other)


@pytest.mark.parametrize("k", [1, 2, 5, 12])
def test_elimination(k: int) -> None:
    a = matrices(k, batch=(2, 3))
    with WrittenOut():
        found, slogdet = torch.linalg.cholesky(a), torch.linalg.slogdet(a)
        factor, failed = torch.linalg.cholesky_ex(a)
    torch.testing.assert_close(found, torch.linalg.cholesky(a), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(factor, found, rtol=0, atol=0)
    assert not bool(failed.any())
    torch.testing.assert_close(slogdet.logabsdet, torch.linalg.slogdet(a).logabsdet, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(slogdet.sign, torch.ones_like(slogdet.sign))


def test_elimination_of_a_matrix_that_is_not_positive_definite() -> None:
    a = torch.tensor([[[1.0, 2.0], [2.0, 1.0]], [[2.0, 1.0], [1.0, 2.0]]], dtype=torch.float64)
    with WrittenOut():
        _, failed = torch.linalg.cholesky_ex(a)
    assert [bool(each) for each in failed] == [True, False]
