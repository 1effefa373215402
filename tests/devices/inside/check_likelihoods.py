"""Every likelihood on the test device, and networks whose outputs are many or have positions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gamma

import lapwing
from lapwing import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from tests.devices import workout
from tests.devices.elsewhere import device

HERE = device()
N = 20


@dataclass(frozen=True, eq=False)
class OwnGamma(Likelihood):
    """A user's likelihood: everything but this line by autograd and Monte Carlo."""

    def conditional(self, f: Tensor) -> Gamma:
        return Gamma(torch.full_like(f[..., 0], 2.0), f[..., 0].exp(), validate_args=False)


def classes(k: int) -> Tensor:
    return torch.arange(N) % k


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5)).double() + 0.1


CASES: dict[str, tuple[Any, int, Callable[[], Tensor]]] = {
    "classification": ("classification", 3, lambda: classes(3)),
    "soft labels": ("classification", 3, lambda: positive(N, 3).softmax(-1)),
    "ignored labels": (Categorical(ignore_index=-1), 3, lambda: classes(4) - 1),
    "many classes": ("classification", 70, lambda: classes(70)),
    "regression": ("regression", 2, lambda: positive(N, 2)),
    "noise": (Gaussian(0.3), 1, lambda: positive(N, 1)),
    "noise per output": (Gaussian(torch.tensor([0.3, 2.0])), 2, lambda: positive(N, 2)),
    "binary": ("binary", 1, lambda: classes(2)[:, None].double()),
    "labels": (Bernoulli(), 3, lambda: (positive(N, 3) > 0.6).double()),
    "counts": ("counts", 2, lambda: positive(N, 2).mul(5).round()),
    "heteroscedastic": ("heteroscedastic", 2, lambda: positive(N, 1)),
    "heteroscedastic mean": (HeteroscedasticGaussian("mean"), 4, lambda: positive(N, 2)),
    "preference": ("preference", 2, lambda: classes(2)),
    "own": (OwnGamma(), 1, lambda: positive(N)),
}


def mlp(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def compare(name: str, folder: Path, structure: str, *, move: bool, steps: Any = None) -> None:
    likelihood, outputs, targets = CASES[name]
    y, x = targets(), torch.randn(N, 4, generator=torch.Generator().manual_seed(1)).double()
    model = mlp(outputs)

    def results(model: nn.Module, place: torch.device) -> dict[str, Any]:
        train, held_out = (x[:14].to(place), y[:14].to(place)), (x[14:].to(place), y[14:].to(place))
        return workout.run(workout.steps(model, train, held_out, likelihood, folder, structure=structure), steps)

    host = torch.device("cpu")
    expected = results(model, host)
    workout.assert_same(results(copy.deepcopy(model).to(HERE), HERE if move else host), expected, drawn=False)


@pytest.mark.parametrize("name", CASES)
def test_diag_with_data_on_the_host(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, "diag", move=False, steps=workout.QUICK)


PAIRS = [(name, structure) for name in CASES for structure in ("kron", "full", "matrixfree")]
PAIRS.remove(("many classes", "matrixfree"))  # one iterative solution per draw and step: minutes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "structure"), PAIRS)
def test_structures_with_data_on_the_device(name: str, structure: str, tmp_path: Path) -> None:
    steps = workout.QUICK if structure == "matrixfree" else None  # which iterates for each step
    compare(name, tmp_path, structure, move=True, steps=steps)


@pytest.mark.parametrize("place", [HERE, torch.device("cpu")], ids=["elsewhere", "cpu"])
def test_drawing_leaves_the_global_states_alone(place: torch.device) -> None:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1)).double()
    p = lapwing.fit(mlp(1).to(place), (x, positive(N)), OwnGamma(), structure="diag").predict(x)
    before = torch.random.get_rng_state(), torch.ops.elsewhere.state()
    p.sample(3)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert torch.equal(torch.ops.elsewhere.state(), before[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:tuning by the evidence")
@pytest.mark.parametrize("name", ["regression", "noise per output"])
def test_the_noise_is_learned(name: str, tmp_path: Path) -> None:
    likelihood, outputs, targets = CASES[name]
    y, x = targets(), torch.randn(N, 4, generator=torch.Generator().manual_seed(1)).double()
    model = mlp(outputs)
    there = copy.deepcopy(model).to(HERE)
    for structure in ("diag", "kron", "full", "matrixfree"):
        for data in (None, (x[14:], y[14:])):
            method = "evidence" if data is None else "validation"
            found = []
            for net in (model, there):
                la = lapwing.fit(net, (x[:14], y[:14]), likelihood, structure=structure)
                tuned = la.tune(data, method=method, learn=("prior", "noise"))
                found.append((tuned.likelihood.dispersion.cpu(), tuned.predict(x).variance.cpu()))
            torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-8)
