"""HMC against a conjugate model: Bayesian linear regression in closed form."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tests import dense
from torch import nn

import lapwing
from lapwing.baselines import HMC
from lapwing.baselines.hmc import _potential
from lapwing.baselines.training import Task
from lapwing.errors import TooLarge

NOISE, PRIOR = 0.5, 2.0


@pytest.fixture(scope="module")
def fitted() -> tuple[HMC, torch.Tensor, torch.Tensor]:
    x, y = dense.randn(15, 2, seed=2), dense.randn(15, 1, seed=3)
    model = dense.build(lambda: nn.Linear(2, 1))
    state, weights = torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    hmc = HMC.fit(model, (x, y), lapwing.Gaussian(noise=NOISE), prior=PRIOR, samples=600, warmup=150, chains=2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    return hmc, x, y


def test_draws_have_the_moments_of_the_exact_posterior(fitted: tuple[HMC, torch.Tensor, torch.Tensor]) -> None:
    hmc, x, y = fitted
    a = torch.cat([x, torch.ones(15, 1).double()], 1)
    precision = a.T @ a / NOISE**2 + PRIOR * torch.eye(3).double()
    covariance = precision.inverse()
    mean = covariance @ a.T @ y[:, 0] / NOISE**2
    scale = covariance.diagonal().sqrt()
    error = hmc.ess.rsqrt()  # of the mean, in standard deviations
    assert ((hmc.weights.mean(0) - mean) / scale / error).abs().max() < 4
    assert ((hmc.weights.T.cov() - covariance) / (scale[:, None] * scale)).abs().max() < 0.2
    p = hmc.predict(x[:5])
    exact = (a[:5] @ covariance * a[:5]).sum(-1)
    assert torch.allclose(p.function.variance[:, 0], exact, rtol=0.25)


def test_it_reports_convergence(fitted: tuple[HMC, torch.Tensor, torch.Tensor]) -> None:
    hmc, x, _ = fitted
    assert hmc.weights.shape == (1200, 3)
    assert hmc.r_hat.shape == hmc.ess.shape == (3,)
    assert hmc.output_r_hat.max() < 1.05
    assert hmc.ess.min() > 100
    assert "R-hat at most" in hmc.summary()
    assert hmc.predict(x, samples=10).function.samples.shape == (10, 15, 1)
    few = hmc.sample(7, torch.Generator().manual_seed(0))
    assert not torch.equal(few, hmc.sample(7))
    assert all((hmc.weights == theta).all(1).any() for theta in few)


def test_the_same_generator_gives_the_same_draws() -> None:
    x, y = dense.randn(6, 1), dense.randn(6, 1)
    model = dense.build(lambda: nn.Linear(1, 1))
    runs = []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        runs.append(
            HMC.fit(model, (x, y), lapwing.Gaussian(1.0), samples=150, warmup=60, chains=1, generator=generator).weights
        )
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_chains_that_have_not_mixed_warn_and_large_networks_are_refused() -> None:
    x, y = dense.randn(6, 1), dense.randn(6, 1)
    with pytest.warns(UserWarning, match="not mixed"):
        HMC.fit(dense.build(lambda: nn.Linear(1, 1)), (x, y), lapwing.Gaussian(0.01), samples=4, warmup=1, chains=2)
    with pytest.raises(TooLarge, match="hundreds of weights"):
        HMC.fit(nn.Linear(100, 100), (torch.randn(2, 100), torch.zeros(2).long()), "classification")


class Branching(nn.Module):
    """A linear layer that reads a value of its weights, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if self.inner.bias.sum() < 0.5 else self.inner(2 * x)


@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 1), Branching])
def test_the_potential_is_the_log_joint(make: Callable[[], nn.Module]) -> None:
    x, y, model = dense.randn(15, 2, seed=2), dense.randn(15, 1, seed=3), dense.build(make)
    task = Task.of(model, (x, y), lapwing.Gaussian(noise=NOISE), "HMC", prior=PRIOR, n_data=30.0)
    at = [dense.randn(3, seed=seed) for seed in (4, 5, 6)]
    at += [torch.cat([each[:2], -2 * each[2:].abs() * sign]) for each in at for sign in (1, -1)]
    with task.running():
        energy = _potential(task, [batch for _, batch in task.each(1)])
        gaps = []
        for theta in at:
            own, exact = theta.clone().requires_grad_(), theta.clone().requires_grad_()
            wide = 2 if isinstance(model, Branching) and exact[2] >= 0.5 else 1
            mean = wide * x @ exact[:2] + exact[2]
            known = (y[:, 0] - mean).square().sum() / NOISE**2 + PRIOR / 2 * exact.square().sum()  # 30 data for 15
            found = energy(own)
            gaps.append((found - known).item())
            assert torch.allclose(torch.autograd.grad(found, own)[0], torch.autograd.grad(known, exact)[0])
    assert max(gaps) - min(gaps) < 1e-9  # equal up to a constant


def test_importing_the_baselines_does_not_import_pyro() -> None:
    code = "import sys; from lapwing.baselines import HMC; print('pyro' in sys.modules)"
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
