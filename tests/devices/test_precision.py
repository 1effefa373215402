"""Networks in half precision, under autocast and in channels-last memory, against float64.

Half-precision networks keep sums, factors and predictions in float32. What differs from float64 is then the rounding of
the network itself: bfloat16 has 8 bits, so that a curvature is within 1 %, float16 has 11 bits, within 0.2 %.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing

N = 40
LABELS = torch.arange(N) % 3
STRUCTURES = ("diag", "blockdiag", "kron", "ekfac", "full", "lowrank", "functional", "nystrom", "matrixfree")
# relative error of the curvature's diagonal, of variances of f; absolute of probabilities, of the evidence in nats
TOLERANCES = {
    torch.float32: (2e-6, 2e-5, 2e-6, 1e-3),
    torch.float16: (2e-3, 5e-3, 1e-3, 5e-2),
    torch.bfloat16: (1e-2, 5e-2, 5e-3, 2e-1),
}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2))
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        model(torch.randn(32, 2, 6, 6))  # statistics of batch norm
    return model.eval()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)).eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4,)),
    "cnn": (cnn, (2, 6, 6)),
    "transformer": (transformer, (3, 8)),
}


class Autocast(nn.Module):
    """A network whose own forward pass is under autocast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.model(x)


def inputs(name: str) -> Tensor:
    return torch.randn(N, *NETWORKS[name][1], generator=torch.Generator().manual_seed(3))


def fitted(model: nn.Module, x: Tensor, structure: str) -> tuple[lapwing.Laplace, dict[str, Tensor]]:
    la = lapwing.fit(model, (x, LABELS), "classification", structure=structure)
    p = la.predict(x)
    with torch.autocast("cpu", enabled=False):  # a matrix that is asked by hand follows autocast
        diagonal = la.curvature.matrix.diagonal()
    return la, {
        "diagonal": diagonal,
        "variance": p.function.variance,
        "probs": p.probs,
        "evidence": la.log_evidence(),
    }


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    diagonal, variance, probs, evidence = TOLERANCES[dtype]
    error = {name: (found[name].double() - expected[name]).detach() for name in expected}
    assert error["diagonal"].norm() <= diagonal * expected["diagonal"].norm()
    assert (error["variance"] / expected["variance"]).abs().max() <= variance
    assert error["probs"].abs().max() <= probs
    assert error["evidence"].abs() <= evidence
    assert all(value.dtype in (torch.float32, torch.float64) for value in found.values())


def reference(name: str, structure: str) -> dict[str, Tensor]:
    return fitted(NETWORKS[name][0]().double(), inputs(name).double(), structure)[1]


def check(name: str, structure: str, dtype: torch.dtype, make: Callable[[nn.Module], nn.Module], x: Tensor) -> None:
    la, found = fitted(make(NETWORKS[name][0]()), x, structure)
    assert_near(found, reference(name, structure), dtype)
    assert la.curvature.matrix.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("structure", ["diag", "kron", "matrixfree"])
def test_half_precision_networks(structure: str, dtype: torch.dtype) -> None:
    check("cnn", structure, dtype, lambda model: model.to(dtype), inputs("cnn").to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_structure_in_half_precision(name: str, structure: str, dtype: torch.dtype) -> None:
    check(name, structure, dtype, lambda model: model.to(dtype), inputs(name).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("name", NETWORKS)
def test_autocast_inside_a_network_is_part_of_it(name: str, structure: str, dtype: torch.dtype) -> None:
    check(name, structure, dtype, lambda model: Autocast(model, dtype), inputs(name))


def everything(model: nn.Module, x: Tensor, structure: str) -> dict[str, Any]:
    """Numbers of all that a user may put under autocast."""
    la, found = fitted(model, x, structure)
    tuned = la.tune((x, LABELS), grid={"prior": [0.5, 2.0]}, learn="prior")
    p = tuned.predict(x)
    sampled = la.predict(x, method="sampled", samples=4)
    report = lapwing.evaluate({"MAP": model, "Laplace": la}, (x, LABELS)).to_dict()["models"]
    return {
        **found,
        "novelty": p.novelty if structure != "matrixfree" else p.mean,  # slow to converge in float32
        "entropy": p.entropy,
        "log_prob": p.log_prob(LABELS),
        "sample": p.function.sample(3),
        "weights": la.posterior.sample(2, torch.Generator().manual_seed(0)),
        "density": la.posterior.log_prob(la.params.flat + 0.1),
        "jvp": la.predict(x, link="jvp").probs,
        "sampled": sampled.probs,
        "ensemble": la.ensemble(2).predict(x).probs,
        "joint": la.predict(x[:4], joint=True).function.covariance,
        "linear mode": la.linear_mode((x, LABELS)).log_joint,
        "update": la.update((x, LABELS)).log_evidence() if structure in ("diag", "kron", "full") else torch.zeros(()),
        "nll": torch.tensor([row["nll"] for row in report.values()]),
    }


@pytest.mark.filterwarnings("ignore:tuning by")
@pytest.mark.parametrize("structure", ["diag", "kron", "full", "lowrank", "matrixfree"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_autocast_around_a_call_changes_nothing(name: str, structure: str) -> None:
    x, model = inputs(name), NETWORKS[name][0]()
    expected = everything(copy.deepcopy(model), x, structure)
    with torch.autocast("cpu", torch.bfloat16):
        found = everything(model, x, structure)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_training_under_autocast_keeps_the_evidence_in_full_precision() -> None:
    x = inputs("mlp")
    with torch.autocast("cpu", torch.bfloat16):
        trained = lapwing.train(mlp(), (x, LABELS), "classification", epochs=2, burnin=0, structure="full")
    la = lapwing.fit(
        trained.module, (x, LABELS), "classification", structure="full", prior=trained.laplace.prior, n_data=N
    )
    torch.testing.assert_close(la.log_evidence(), trained.laplace.log_evidence())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_channels_last(structure: str) -> None:
    last = torch.channels_last
    x = inputs("cnn").to(memory_format=last)
    check("cnn", structure, torch.float32, lambda model: model.to(memory_format=last), x)


def test_channels_last_in_batches_and_in_half_precision() -> None:
    dtype, last = torch.bfloat16, torch.channels_last
    x = inputs("cnn").to(dtype, memory_format=last)
    check("cnn", "kron", dtype, lambda model: model.to(dtype, memory_format=last), x)
