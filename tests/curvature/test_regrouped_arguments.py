"""Samples of several batches run together only where their batches agree in everything but the samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.curvature.onepass import Regrouped


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, task: str) -> Tensor:
        return 30 * getattr(self, task)(torch.tanh(self.body(x)))


class Euler(nn.Module):
    """A step of a given size, once or as the entries of a list say, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.h = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, step: Any) -> Tensor:
        if isinstance(step, (list, tuple)):
            step = torch.tensor(step, dtype=x.dtype)[:, None] if len(step) == len(x) else sum(step)
        if isinstance(step, Step):
            step = step.size
        return 30 * self.h(x + step * torch.tanh(self.f(x)))


class Step:
    def __init__(self, size: float) -> None:
        self.size = size


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
        parts = [torch.tanh(self.a(left))] if left is not None else []
        parts += [2 * torch.sigmoid(self.b(right))] if right is not None else []
        return 30 * self.h(sum(parts))


def alternating(first: Callable[[Tensor], dict], second: Callable[[Tensor], dict]) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (64,), generator=generator)
    made = [(first, second)[k % 2](part) for k, part in enumerate(x.split(8))]
    return [{**batch, "labels": labels} for batch, labels in zip(made, y.split(8), strict=True)]


CASES: dict[str, tuple[type[nn.Module], list[dict]]] = {
    "a name": (TwoHeads, alternating(lambda x: {"x": x, "task": "a"}, lambda x: {"x": x, "task": "b"})),
    "a number": (Euler, alternating(lambda x: {"x": x, "step": 0.1}, lambda x: {"x": x, "step": 2.0})),
    "a list": (Euler, alternating(lambda x: {"x": x, "step": [0.1, 0.2]}, lambda x: {"x": x, "step": [2.0, 0.2]})),
    "a list of one value per sample": (
        Euler,
        alternating(lambda x: {"x": x, "step": [0.1, 2.0] * 4}, lambda x: {"x": x, "step": [2.0, 0.1] * 4}),
    ),
    "an object": (Euler, alternating(lambda x: {"x": x, "step": Step(0.1)}, lambda x: {"x": x, "step": Step(2.0)})),
    "a shared tensor": (
        Euler,
        alternating(
            lambda x: {"x": x, "step": torch.tensor([[0.1]]).double()},
            lambda x: {"x": x, "step": torch.tensor([[2.0]]).double()},
        ),
    ),
    "order of names": (
        Sides,
        alternating(lambda x: {"left": x, "right": x.flip(1)}, lambda x: {"right": x.flip(1), "left": x}),
    ),
    "absent names": (Sides, alternating(lambda x: {"left": x}, lambda x: {"right": x})),
}


def truth(model: nn.Module, batches: list[dict]) -> Tensor:
    """Σ JᵀΛJ, one row of J at a time, of every batch as it is."""
    weights, total = list(model.parameters()), 0.0
    for batch in batches:
        for f in model(**{name: value for name, value in batch.items() if name != "labels"}):
            rows = [torch.autograd.grad(c, weights, retain_graph=True, materialize_grads=True,
                                        allow_unused=True) for c in f]  # fmt: skip
            j = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
            p = f.detach().softmax(-1)
            total = total + j.T @ (p.diag() - p[:, None] * p) @ j
    assert isinstance(total, Tensor)
    return total


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_batches_that_differ_in_more_than_samples(case: str, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    admit = Regrouped.admit
    monkeypatch.setattr(Regrouped, "admit", lambda *a, **k: taken.append(admit(*a, **k)) or taken[-1])
    kind, batches = CASES[case]
    torch.manual_seed(0)
    model = kind().double()
    expected = truth(model, batches)
    found = lapwing.fit(
        model, batches, "classification", structure=structure, factor=lapwing.GGN(tolerance=1e-3), progress=False
    )
    expected = expected if structure == "full" else expected.diagonal().diag()
    assert (found.curvature.dense() - expected).norm() < 2e-3 * expected.norm()
    # what can be compared still shares its passes
    assert any(taken) == (case not in ("a list of one value per sample", "an object", "a shared tensor"))
