"""How often the host waits for the device: as often per batch, whatever the number of samples, directions and classes.

Counted are reads of single numbers (`.item()`, `bool`, `float`), operations whose result has a size that depends on
numbers (`nonzero`, masks), comparisons (`torch.equal`) and copies between host and device. docs/devices.md says what
the waits that are left are for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.predictive.levels import LEVELS
from tests.devices.elsewhere import counting, device

HERE = device()
SIZES = {"few": (3, 8), "more classes": (9, 8), "more samples": (3, 32)}


def mlp(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, classes)).to(HERE)


def cnn(classes: int) -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(body, nn.Linear(64, classes)).to(HERE)


def batches(make: Any, count: int, classes: int, size: int) -> list[tuple[Tensor, Tensor]]:
    shape = (4,) if make is mlp else (1, 8, 8)
    x = torch.randn(count * size, *shape, generator=torch.Generator().manual_seed(0)).to(HERE)
    y = (torch.arange(count * size) % classes).to(HERE)
    return list(zip(x.split(size), y.split(size), strict=True))


def waits(work: Callable[[], object]) -> int:
    """Count the waits of some work."""
    with counting() as found:
        work()
    return sum(found.values())


FITS = {  # waits per batch that are accepted
    "diag": 22, "blockdiag": 22, "kron": 22, "full": 22, "lowrank": 22, "functional": 24, "nystrom": 22, "ekfac": 60,
    "matrixfree": 32,
}  # fmt: skip


@pytest.mark.parametrize("make", [mlp, pytest.param(cnn, marks=pytest.mark.slow)])
@pytest.mark.parametrize("structure", FITS)
def test_waits_of_a_batch_in_a_fit(structure: str, make: Any) -> None:
    found = {}
    for name, (classes, size) in SIZES.items():
        model = make(classes)
        two, three = (
            waits(
                lambda count=count, model=model, classes=classes, size=size: lapwing.fit(
                    model, batches(make, count, classes, size), "classification", structure=structure
                )
            )
            for count in (2, 3)
        )
        found[name] = three - two
    assert max(found.values()) <= FITS[structure], found
    assert found["more classes"] <= found["few"], found
    assert found["more samples"] <= found["few"] + 2, found  # samples that wait for others are read with them


def test_waits_of_directions_over_positions() -> None:
    """A class per position: a product with the curvature has one direction for each class of each position."""
    likelihood, found = lapwing.Categorical(), []
    for positions in (2, 6):
        f = torch.randn(5, positions, 4, device=HERE)
        y = likelihood.targets(f, (torch.arange(5 * positions).reshape(5, positions) % 4).to(HERE))
        found.append(waits(lambda f=f, y=y: list(lapwing.GGN().directions(likelihood, f, y))))
    assert found[0] == found[1]


PER_LEVEL = 8  # waits for one level of points: which items are open, which are wide, and their error
WAYS: dict[str, dict[str, Any]] = {
    "linearized": {},
    "mc": {"link": "mc"},
    "joint": {"joint": True},
    "jvp": {"link": "jvp"},
    "sampled": {"method": "sampled"},
}


@pytest.mark.parametrize("make", [mlp, pytest.param(cnn, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_waits_of_a_prediction(way: str, make: Any) -> None:
    found = {}
    for name, (classes, size) in SIZES.items():
        la = lapwing.fit(make(classes), batches(make, 2, classes, 8), "classification", structure="kron")
        ((x, _),) = batches(make, 1, classes, size)
        _ = la.predict(x, **WAYS[way]).probs  # what is made once
        for samples in (6, 30) if way in ("jvp", "sampled", "mc") else (None,):
            found[name, samples] = waits(lambda x=x, la=la, n=samples: la.predict(x, samples=n, **WAYS[way]).probs)
    # without `samples`, points double until the error is small enough: one decision per level, of which there are few
    levels = LEVELS * PER_LEVEL if way in ("linearized", "joint") else 0
    assert max(found.values()) <= min(found.values()) + levels, found


def test_waits_with_many_classes() -> None:
    """Beyond 64 classes predictions come from forward-mode products."""
    la = lapwing.fit(mlp(70), batches(mlp, 2, 70, 40), "classification", structure="diag")
    found = {}
    for size in (4, 12):
        ((x, _),) = batches(mlp, 1, 70, size)
        _ = la.predict(x).probs
        for samples in (16, 64):
            found[size, samples] = waits(lambda x=x, n=samples: la.predict(x, samples=n).probs)
    assert max(found.values()) - min(found.values()) <= 2, found


@pytest.mark.filterwarnings("ignore:tuning by the evidence")
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_waits_of_tuning(structure: str) -> None:
    by_evidence, per_batch = {}, {}
    for name, (classes, size) in SIZES.items():
        la = lapwing.fit(mlp(classes), batches(mlp, 6, classes, 8), "classification", structure=structure)
        by_evidence[name] = waits(lambda la=la: la.tune(method="evidence"))
        two, three = (
            waits(
                lambda count=count, la=la, classes=classes, size=size: la.tune(
                    batches(mlp, count, classes, size), grid={"prior": [0.5, 2.0]}, learn="prior"
                )
            )
            for count in (2, 3)
        )
        per_batch[name] = three - two
    assert max(by_evidence.values()) <= 100, by_evidence  # a few for each step of Newton
    assert max(per_batch.values()) <= 40, per_batch
