"""Probabilities of a wide last layer without covariances of its outputs."""

import pytest
import torch
from torch import nn

import lapwing
from lapwing.predictive.function import contrasts
from lapwing.predictive.predictive import shared_root

CLASSES = 70  # beyond 64 outputs covariances are not formed


def wide(tail: nn.Module | None = None) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES), *([] if tail is None else [tail])]
    return nn.Sequential(*layers).double(), torch.randn(90, 6).double(), torch.randint(CLASSES, (90,))


def fit(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, structure: str, select: str = "last_layer"
) -> lapwing.Laplace:
    return lapwing.fit(model, (x, y), "classification", structure=structure, select=select, prior=0.5)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag"])
def test_root_gives_the_covariance_of_brute_force_jacobians(structure: str) -> None:
    model, x, y = wide()
    la = fit(model, x, y, structure)
    found = shared_root(la.network, la.plan, la.posterior.precision, x[:4])
    assert found is not None
    root, spread = found
    covariance = torch.einsum("co,no,do->ncd", root, spread.square(), root)
    head, features = model[2], model[:2](x[:4]).detach()
    weights = torch.cat([p.detach().flatten() for p in (head.weight, head.bias)])
    size = head.weight.numel()

    def outputs(theta: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return theta[:size].reshape(head.weight.shape) @ a + theta[size:]

    sigma, predicted = la.posterior.covariance(), la.predict(x[:4]).function.covariance
    for n, a in enumerate(features):
        jacobian = torch.func.jacrev(outputs)(weights, a)
        torch.testing.assert_close(covariance[n], jacobian @ sigma @ jacobian.T, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(predicted[n], jacobian @ sigma @ jacobian.T, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_probabilities_are_those_of_samples_from_the_covariance() -> None:
    model, x, y = wide()
    la = fit(model, x, y, "kron")
    prediction = la.predict(x[:3], samples=8192)
    generator = torch.Generator().manual_seed(1)
    root = torch.linalg.cholesky(prediction.function.covariance + 1e-12 * torch.eye(CLASSES).double())
    noise = torch.randn(40_000, 3, CLASSES, generator=generator, dtype=torch.float64)
    draws = (prediction.function.mean + (root @ noise[..., None])[..., 0]).softmax(-1)
    error = draws.std(0) / len(draws) ** 0.5 + draws.std(0) / 8192**0.5
    assert bool(((prediction.probs - draws.mean(0)).abs() < 5 * error).all())


def test_an_item_does_not_depend_on_its_batch() -> None:
    model, x, y = wide()
    la = fit(model, x, y, "kron")
    torch.testing.assert_close(la.predict(x[:5]).probs[2:3], la.predict(x[2:3]).probs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("tail", "select", "structure"),
    [(nn.Softplus(), "last_layer", "kron"), (None, "all", "kron"), (None, "last_layer", "full")],
)
def test_other_networks_selections_and_structures_have_none(
    tail: nn.Module | None, select: str, structure: str
) -> None:
    model, x, y = wide(tail)
    la = fit(model, x, y, structure, select)
    assert shared_root(la.network, la.plan, la.posterior.precision, x[:4]) is None
    assert torch.isfinite(la.predict(x[:2]).probs).all()


def test_contrasts_span_what_is_left_without_the_average() -> None:
    basis = contrasts(7, torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(basis @ basis.T, torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(basis.T @ basis, torch.eye(7, dtype=torch.float64) - 1 / 7)


class Twice(torch.autograd.Function):
    """Values as they are, gradients times two."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:
        return 2 * g


class Scaling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Twice.apply(x)


def test_what_follows_the_head_counts_by_its_derivative_too() -> None:
    model, x, y = wide(Scaling())
    la = fit(model, x, y, "kron")
    assert shared_root(la.network, la.plan, la.posterior.precision, x[:4]) is None


def test_one_token_is_no_item_without_tokens() -> None:
    model, x, y = wide()
    la = fit(model, x[:, None], y[:, None], "kron")
    inputs = torch.randn(128, 1, 6, generator=torch.Generator().manual_seed(3)).double()
    probs = la.predict(inputs).probs
    assert probs.shape == (128, 1, CLASSES)
    torch.testing.assert_close(probs[:1], la.predict(inputs[:1]).probs, rtol=1e-10, atol=1e-12)
