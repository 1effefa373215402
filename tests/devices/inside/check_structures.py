"""Every structure on the test device: all that one does with a posterior gives the numbers of the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import EKFAC, KFRA, Functional, Hessian, Kron, LowRank, MatrixFree, MCFisher, Nystrom, VaLLA, subnetwork
from tests.devices import workout
from tests.devices.elsewhere import device

HERE = device()
STRUCTURES: dict[str, dict[str, Any]] = {
    "auto": {},
    "diag": {"structure": "diag"},
    "blockdiag": {"structure": "blockdiag"},
    "kron expand": {"structure": Kron("expand")},
    "kron reduce": {"structure": Kron("reduce")},
    "kron with a tolerance": {"structure": "kron", "factor": lapwing.GGN(tolerance=1e-3)},
    "kron mc": {"structure": "kron", "factor": MCFisher(2)},
    "ekfac": {"structure": EKFAC()},
    "full": {"structure": "full"},
    "full hessian": {"structure": "full", "factor": Hessian(), "prior": 30.0, "repair": True},
    "diag empirical": {"structure": "diag", "factor": lapwing.EmpiricalFisher()},
    "lowrank": {"structure": LowRank(10)},
    "lowrank lanczos": {"structure": LowRank(10, method="lanczos")},
    "lowrank nystrom": {"structure": LowRank(10, method="nystrom")},
    "functional": {"structure": Functional()},
    "functional points": {"structure": Functional(points=6)},
    "nystrom": {"structure": Nystrom(10)},
    "matrixfree": {"structure": MatrixFree()},
    "kfra": {"structure": "kron", "factor": KFRA()},
    "valla": {"structure": VaLLA(5)},
    "last layer": {"structure": "full", "select": "last_layer"},
    "subnetwork": {"structure": "full", "select": subnetwork(9, by="variance")},
    "random subnetwork": {"structure": "full", "select": subnetwork(9, by="random")},
    "prior with a mean": {"structure": "kron", "prior": lapwing.Prior({"0.*": 2.0, "*": 3.0}, mean=0.1)},
}


def mlp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), torch.randn(20, 4).double()


def cnn() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2))
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(12, 3)).double()
    x = torch.randn(20, 1, 6, 6).double()
    with torch.no_grad():
        model(x)  # statistics of batch norm
    return model.eval(), x


def compare(make: Any, name: str, folder: Path, *, move: bool, steps: Any = None) -> None:
    """Run the steps on both devices, with data on the host or already moved."""
    model, x = make()
    y = torch.arange(len(x)) % 3

    def results(model: nn.Module, place: torch.device) -> dict[str, Any]:
        train, held_out = (x[:14].to(place), y[:14].to(place)), (x[14:].to(place), y[14:].to(place))
        return workout.run(workout.steps(model, train, held_out, "classification", folder, **STRUCTURES[name]), steps)

    host = torch.device("cpu")
    expected = results(model, host)
    there = results(copy.deepcopy(model).to(HERE), HERE if move else host)
    workout.assert_same(there, expected, drawn=make is mlp)


@pytest.mark.parametrize("name", STRUCTURES)
def test_mlp_with_data_on_the_host(name: str, tmp_path: Path) -> None:
    compare(mlp, name, tmp_path, move=False, steps=workout.QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCTURES)
def test_mlp_with_data_on_the_device(name: str, tmp_path: Path) -> None:
    compare(mlp, name, tmp_path, move=True)


@pytest.mark.slow
@pytest.mark.parametrize("move", [False, True], ids=["data on the host", "data on the device"])
@pytest.mark.parametrize("name", [name for name in STRUCTURES if name not in ("kfra", "prior with a mean")])
def test_cnn(name: str, move: bool, tmp_path: Path) -> None:
    compare(cnn, name, tmp_path, move=move)


class Placeless(nn.Module):
    """A network that makes a tensor where the default device says, as users do who have set one."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * torch.ones(3, dtype=x.dtype)


@pytest.mark.parametrize("name", ["auto", "diag", "kron mc", "full", "lowrank", "matrixfree", "last layer"])
def test_a_default_device_changes_nothing(name: str, tmp_path: Path) -> None:
    model, x = mlp()
    y = torch.arange(len(x)) % 3
    if name != "matrixfree":  # whose solves run in a thread of autograd, which knows no default device
        model = Placeless(model)

    def results(model: nn.Module, place: torch.device) -> dict[str, Any]:
        train, held_out = (x[:14].to(place), y[:14].to(place)), (x[14:].to(place), y[14:].to(place))
        return workout.run(workout.steps(model, train, held_out, "classification", tmp_path, **STRUCTURES[name]))

    expected = results(model, torch.device("cpu"))
    there = copy.deepcopy(model).to(HERE)
    with torch.device(HERE):
        found = results(there, HERE)
    workout.assert_same(found, expected, drawn=True)
    assert {type(value) for value in found.values()} == {type(value) for value in expected.values()}


def test_pictures_and_metrics_under_a_default_device() -> None:
    model, x = mlp()
    y = torch.arange(len(x)) % 3
    la = lapwing.fit(model.to(HERE), (x, y), "classification", structure="diag")
    apart = la.predict(x)
    expected = lapwing.evaluate({"Laplace": la}, (x, y)).table()
    with torch.device(HERE):
        report = lapwing.evaluate({"Laplace": la}, (x.to(HERE), y.to(HERE)))
        assert [line.split()[:4] for line in report.table().splitlines()] == [
            line.split()[:4] for line in expected.splitlines()
        ]
        assert report.figures()
        p = la.predict(x.to(HERE))
        assert torch.equal(p.epistemic.cpu(), apart.epistemic.cpu())
        assert lapwing.metrics.rejection(p, y).risk.shape[0] > 0
        lapwing.plots.ecdf({"Laplace": p.entropy})
        lapwing.plots.roc(p.entropy, p.entropy + 1)
