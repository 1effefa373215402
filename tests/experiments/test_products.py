"""Estimators and least squares from products, against dense algebra."""

from __future__ import annotations

import math

import pytest
import torch
from experiments._products import (
    deflated_density,
    differentiable_logdet,
    hutchinson,
    hutchpp,
    lsmr,
    xtrace,
)
from tests.linalg.test_krylov import Counted, curvature, generator, orthogonal, rows, spectrum
from torch import Tensor

from lapwing.errors import NotConverged
from lapwing.linalg.krylov import signs, xdiag
from lapwing.linalg.solvers import Sketch


@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(40, 25), (25, 40)])
def test_lsmr_is_least_squares(shape: tuple[int, int], damping: float) -> None:
    a = torch.randn(*shape, generator=generator(5), dtype=torch.float64)
    b = rows(3, size=shape[0])
    found = lsmr(lambda x: x @ a.T, lambda y: y @ a, b, damping=damping, tolerance=1e-12)
    eye = damping * torch.eye(shape[1], dtype=torch.float64)
    expected = torch.linalg.pinv(torch.cat([a, eye])) @ torch.cat([b.T, torch.zeros(shape[1], 3, dtype=b.dtype)])
    torch.testing.assert_close(found.x, expected.T, rtol=1e-7, atol=1e-9)
    with pytest.raises(NotConverged, match="LSMR"):
        lsmr(lambda x: x @ a.T, lambda y: y @ a, b, iterations=2)


class TestEstimators:
    @pytest.mark.parametrize("method", [hutchpp, xtrace])
    def test_exact_on_low_rank(self, method) -> None:
        half = rows(6)
        found = method(lambda v: v @ half.T @ half, half, 60, generator(3))
        torch.testing.assert_close(found.value, half.square().sum(), rtol=1e-9, atol=0)

    @pytest.mark.parametrize("method", [hutchpp, xtrace])
    def test_unbiased_and_error_bars_hold(self, method) -> None:
        a = curvature()
        each = [method(Counted(a), a, 24, generator(k)) for k in range(60)]
        truth = a.trace()
        values, errors = torch.stack([e.value for e in each]), torch.stack([e.error for e in each])
        assert abs(float(values.mean() - truth)) < 4 * float(values.std()) / math.sqrt(60)
        inside = ((values - truth).abs() < 3 * errors).double().mean()
        assert inside > 0.8
        plain = torch.stack([hutchinson(Counted(a), signs(24, a, generator(k))).value for k in range(60)])
        assert float((values - truth).square().mean()) < float((plain - truth).square().mean())

    def test_products_are_counted(self) -> None:
        for method in (hutchpp, xtrace, xdiag):
            a = Counted(curvature())
            assert method(a, a.matrix, 24, generator()).products >= a.count - 1


@pytest.mark.parametrize("rank", [0, 20, 60])
def test_deflation_sharpens_and_one_density_serves_every_shift(rank: int) -> None:
    a = curvature()
    sketch = Sketch(orthogonal().T[:rank].contiguous(), spectrum()[:rank])
    density = deflated_density(Counted(a), sketch, a, probes=8, steps=60, generator=generator())
    for tau in (0.1, 1.0, 100.0):
        found = density.trace(lambda e, tau=tau: (e / tau).log1p())
        truth = (spectrum() / tau).log1p().sum()
        assert abs(float(found.value - truth)) < 4 * float(found.error) + 1e-8 * float(truth)
        if rank == 60:
            assert float(found.error) < 2e-3 * float(truth)


def test_logdet_against_finite_differences() -> None:
    """With probes √P·e_p the Monte Carlo average is the trace itself."""
    small = curvature(0.5, 12)
    probes = 12**0.5 * torch.eye(12, dtype=torch.float64)

    def matrix(c: Tensor, d: Tensor) -> Tensor:
        return c * small + torch.diag(d)

    c = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    d = (rows(1, size=12)[0].square() + 1).requires_grad_()
    solved = torch.linalg.solve(matrix(c, d).detach(), probes)
    value = differentiable_logdet(lambda v: v @ matrix(c, d), matrix(c, d).logdet(), probes, solved)
    found = torch.autograd.grad(value, (c, d))
    expected = torch.autograd.grad(matrix(c, d).logdet(), (c, d))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
