"""Priors over functions on conjugate models: the library's posterior against dense algebra."""

import torch
from experiments._function_priors import Fourier, covariance_prior, extended, process_prior
from torch import nn

import lapwing

TAU, VARIANCE, NOISE, CLASSES = 0.7, 2.5, 0.3, 2


def data(n: int = 40, d: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 0.3, 0.01])
    y = torch.randn(n, CLASSES, generator=generator, dtype=torch.float64)
    return x, y, torch.randn(7, d, generator=generator, dtype=torch.float64)


def variance(
    layer: nn.Linear, x: torch.Tensor, y: torch.Tensor, at: torch.Tensor, prior: lapwing.Prior
) -> torch.Tensor:
    la = lapwing.fit(layer, (x, y), lapwing.Gaussian(noise=NOISE), structure="full", prior=prior, progress=False)
    return la.predict(at).function.covariance


def test_the_process_prior_is_a_gaussian_process() -> None:
    x, y, new = data()
    psi = Fourier.draw(3, 50, 0.8, torch.Generator().manual_seed(1))
    head = nn.Linear(3, CLASSES, dtype=torch.float64)
    layer = extended(head, 50)
    rows, far = (torch.cat([each, psi(each)], 1) for each in (x, new))
    torch.testing.assert_close(layer(rows), head(x))
    found = variance(layer, rows, y, far, process_prior(TAU, VARIANCE, 3, 50, CLASSES))

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b.T + 1) / TAU + VARIANCE * psi(a) @ psi(b).T

    inner = torch.linalg.inv(kernel(x, x) + NOISE**2 * torch.eye(len(x), dtype=torch.float64))
    expected = (kernel(new, new) - kernel(new, x) @ inner @ kernel(x, new)).diagonal()
    torch.testing.assert_close(found, expected[:, None, None] * torch.eye(CLASSES, dtype=torch.float64))


def test_fourier_features_have_the_squared_exponential_kernel() -> None:
    x, _, new = data()
    psi = Fourier.draw(3, 200_000, 1.7, torch.Generator().manual_seed(2))
    exact = torch.exp(-torch.cdist(new, x).square() / (2 * 1.7**2))
    assert (psi(new) @ psi(x).T - exact).abs().max() < 0.015  # five standard errors of 200,000 features
    assert exact.min() < 0.5 < exact.max()


def test_the_empirical_covariance_prior() -> None:
    x, y, new = data()
    head = nn.Linear(3, CLASSES, dtype=torch.float64)
    found = variance(head, x, y, new, covariance_prior(x, TAU, CLASSES, floor=0.01))
    ones = torch.ones(len(x), 1, dtype=torch.float64)
    rows, far = torch.cat([x, ones], 1), torch.cat([new, ones[: len(new)]], 1)
    second = rows.T @ rows / len(rows)
    prior = (second / second.diagonal().mean() + 0.01 * torch.eye(4, dtype=torch.float64)) / TAU  # a covariance
    weights = prior - prior @ rows.T @ torch.linalg.inv(rows @ prior @ rows.T + NOISE**2 * torch.eye(40)) @ rows @ prior
    expected = (far @ weights @ far.T).diagonal()
    torch.testing.assert_close(found, expected[:, None, None] * torch.eye(CLASSES, dtype=torch.float64))


def test_directions_without_data_have_little_variance_under_it() -> None:
    x, y, _ = data()
    head, unseen = nn.Linear(3, CLASSES, dtype=torch.float64), torch.tensor([[0.0, 0.0, 5.0]], dtype=torch.float64)
    plain = variance(head, x, y, unseen, lapwing.Prior(TAU))
    empirical = variance(head, x, y, unseen, covariance_prior(x, TAU, CLASSES))
    assert (empirical < 0.1 * plain)[0, 0, 0]
