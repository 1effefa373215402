"""Mean-field variational inference against its closed-form optimum on linear models, and its bound by quadrature."""

import math

import pytest
import torch
from tests import dense
from torch import Tensor, nn

import lapwing
from lapwing.baselines import MeanField
from lapwing.baselines.meanfield import Bound, _rows
from lapwing.baselines.training import Task
from lapwing.errors import IncompatiblePrior, NotConverged

NOISE, PRIOR = 0.5, 2.0


def problem(n: int = 60) -> tuple[Tensor, Tensor]:
    x = dense.randn(n, 3, seed=2) @ torch.tensor([[1.0, 0.8, 0], [0, 0.6, 0.5], [0, 0, 1.0]]).double()
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + NOISE * dense.randn(n, 1, seed=3)


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The precision of the exact posterior of (w, b), and its mean."""
    a = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    precision = a.T @ a / NOISE**2 + PRIOR * torch.eye(4).double()
    return precision, torch.linalg.solve(precision, a.T @ y / NOISE**2)[:, 0]


class Written(nn.Module):
    """The linear model without a linear layer, whose weights must be drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).sum(-1, keepdim=True) + self.b


@pytest.mark.parametrize(("make", "draws", "rate"), [(lambda: nn.Linear(3, 1), 4, 0.03), (Written, 8, 0.03)])
def test_a_linear_model_reaches_the_optimum(make: type, draws: int, rate: float) -> None:
    x, y = problem()
    model = dense.build(make)
    before = [p.detach().clone() for p in model.parameters()]
    field = MeanField.fit(
        model, (x, y), lapwing.Gaussian(noise=NOISE), prior=PRIOR, epochs=700, rate=rate, start=0.1, draws=draws,
        batch_size=60,
    )  # fmt: skip
    precision, mean = exact(x, y)
    assert torch.allclose(field.deviation, precision.diagonal().rsqrt(), rtol=0.05)
    assert (field.mean - mean).abs().max() < 0.1 * precision.diagonal().rsqrt().max()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    samples = field.predict(x[:4], samples=3000).function.samples
    a = torch.cat([x[:4], torch.ones(4, 1).double()], 1)
    assert torch.allclose(samples.var(0)[:, 0], (a.square() @ field.deviation.square()), rtol=0.12)
    assert torch.allclose(samples.mean(0)[:, 0], a @ field.mean, atol=0.02)


def bound_of(model: nn.Module, data: tuple[Tensor, Tensor], n_data: float | None = None) -> Bound:
    options = {"prior": PRIOR, "batch_size": 60, "n_data": n_data, "generator": torch.Generator().manual_seed(0)}
    task = Task.of(model, data, lapwing.Gaussian(noise=NOISE), "MeanField", **options)
    return Bound(task, 4000, _rows(task))


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 1), Written])
def test_the_bound_is_that_of_the_closed_form(make: type) -> None:
    x, y = problem()
    bound = bound_of(dense.build(make), (x, y))
    assert bool(bound.rows) == (make is not Written)
    mean, deviation = dense.randn(4, seed=7), dense.randn(4, seed=8).exp()
    with bound.task.running(), torch.no_grad():
        found = bound(next(iter(bound.task.batches)), mean, deviation)
    a = torch.cat([x, torch.ones(60, 1).double()], 1)
    spread = (a.square() @ deviation.square()).sum()
    residual = (y[:, 0] - a @ mean).square().sum()
    nll = (residual + spread) / (2 * NOISE**2) + 60 * math.log(NOISE * math.sqrt(2 * math.pi))
    q = torch.distributions.Normal(mean, deviation)
    kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, PRIOR**-0.5)).sum()
    assert found.item() == pytest.approx(((nll + kl) / 60).item(), rel=0.04)


def test_only_what_is_used_is_drawn() -> None:
    """A layer that draws its outputs needs one number per sample and unit, and none per weight."""
    for make, numbers in ((lambda: nn.Linear(3, 1), (60, 1)), (Written, (3,))):
        bound = bound_of(dense.build(make), problem())
        generator, own = bound.task.generator, torch.Generator()
        own.set_state(generator.get_state())
        with bound.task.running(), torch.no_grad():
            bound._expected(next(iter(bound.task.batches)), torch.zeros(4).double(), torch.ones(4).double())
        torch.randn(numbers, generator=own, dtype=torch.float64)
        if numbers == (3,):
            torch.randn(1, generator=own, dtype=torch.float64)  # the bias
        assert torch.equal(generator.get_state(), own.get_state())


def test_shared_and_positional_weights_are_drawn_not_their_outputs() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.once, self.many = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            positions = self.many(x[..., None]).sum(-1)  # one row per position, not per sample
            return self.once(self.twice(self.twice(x)) + positions)

    x, y = problem()
    assert bound_of(dense.build(Shared), (x, y)).rows == {"once.weight", "once.bias"}


def test_n_data_scales_the_likelihood() -> None:
    x, y = problem()
    precision, _ = exact(x, y)
    field = MeanField.fit(
        dense.build(lambda: nn.Linear(3, 1)), (x, y), lapwing.Gaussian(noise=NOISE), prior=PRIOR, epochs=700, rate=0.03,
        start=0.1, batch_size=60, n_data=240, draws=4,
    )  # fmt: skip
    expected = 4 * (precision.diagonal() - PRIOR) + PRIOR
    assert torch.allclose(field.deviation, expected.rsqrt(), rtol=0.05)


def test_what_cannot_be_trained_is_refused() -> None:
    x, y = problem(8)
    with pytest.raises(NotConverged, match="smaller rate"):
        MeanField.fit(dense.build(lambda: nn.Linear(3, 1)), (x, y * 1e200), lapwing.Gaussian(noise=1e-100), epochs=1)
    full = lapwing.fit(dense.build(lambda: nn.Linear(3, 1)), (x, y), lapwing.Gaussian(noise=0.5), structure="full")
    with pytest.raises(IncompatiblePrior, match="one precision per weight"):
        MeanField.fit(full.module, (x, y), full.likelihood, prior=lapwing.Prior.from_posterior(full.posterior))
