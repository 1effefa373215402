"""Derivatives of the evidence in precisions of layers, units and weights, against dense algebra; values that are equal
and values that are not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.linalg import LowRank

F64 = torch.float64
BLOCKS = (("0.weight", "0.bias"), ("2.weight", "2.bias"))


def fitted(structure: str) -> tuple[lapwing.Laplace, Tensor]:
    """A posterior and its curvature, dense."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = torch.randn(20, 3, dtype=F64), torch.arange(20) % 2
    fit = lambda kind: lapwing.fit(model, data, "classification", structure=kind, progress=False)  # noqa: E731
    la = fit(structure)
    return la, fit("full" if structure == "matrixfree" else structure).curvature.dense()


def of_layers(t: Tensor) -> Tensor:
    return torch.cat([t[0].expand(16), t[1].expand(10)])


def of_units(t: Tensor) -> Tensor:
    return torch.cat([t[:4].repeat_interleave(3), t[:4], t[4:].repeat_interleave(4), t[4:]])


def dense(la: lapwing.Laplace, curvature: Tensor, spread: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The part of the evidence that depends on the prior."""
    theta = la.params.flat

    def value(t: Tensor) -> Tensor:
        p = spread(t)
        return -0.5 * (theta.square() * p).sum() - 0.5 * (torch.logdet(curvature + torch.diag(p)) - p.log().sum())

    return value


@pytest.mark.parametrize("t", [torch.tensor([0.7, 0.7], dtype=F64), torch.tensor([0.3, 2.0], dtype=F64)], ids=str)
@pytest.mark.parametrize("form", ["per_block", "globs"])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "full", "blockdiag", "diag"])
def test_first_and_second_derivatives_by_layer(structure: str, form: str, t: Tensor) -> None:
    la, curvature = fitted(structure)
    exact = dense(la, curvature, of_layers)

    def value(t: Tensor) -> Tensor:
        prior = lapwing.Prior.per_block(t, BLOCKS) if form == "per_block" else {"0.*": t[0], "*": t[1]}
        return la.replace(prior=prior).log_evidence()

    for derivative in (torch.autograd.functional.jacobian, torch.autograd.functional.hessian):
        torch.testing.assert_close(derivative(value, t), derivative(exact, t), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("apart", [0.0, 0.1])
@pytest.mark.parametrize("structure", ["kron", "full", "blockdiag", "diag", "matrixfree", "lowrank", "functional"])
def test_first_derivatives_by_unit(structure: str, apart: float) -> None:
    la, curvature = fitted(structure)
    t = 0.7 + apart * torch.arange(6, dtype=F64)
    found = torch.autograd.functional.jacobian(lambda t: la.replace(prior=of_units(t)).log_evidence(), t)
    exact = torch.autograd.functional.jacobian(dense(la, curvature, of_units), t)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_second_derivatives_by_weight_are_refused(structure: str) -> None:
    la, _ = fitted(structure)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.functional.hessian(
            lambda t: la.replace(prior=t).log_evidence(), torch.full((26,), 0.7, dtype=F64)
        )


def test_gradients_reach_directions_that_hold_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    basis, shift = torch.randn(5, 7, generator=generator, dtype=F64), torch.linspace(0.5, 1, 7, dtype=F64)
    values = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.5], dtype=F64, requires_grad=True)
    v = torch.randn(7, generator=generator, dtype=F64)
    whole = (basis.T * values) @ basis + torch.diag(shift)
    for got, want in (
        (LowRank(basis, values, shift).logdet(), torch.logdet(whole)),
        (v @ LowRank(basis, values, shift).solve(v), v @ torch.linalg.solve(whole, v)),
        (LowRank(basis, values, shift).inverse_diagonal().sin().sum(), torch.linalg.inv(whole).diagonal().sin().sum()),
    ):
        a, b = (torch.autograd.grad(x, values, retain_graph=True)[0] for x in (got, want))
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
