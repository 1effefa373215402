"""How a batch is cut into pieces: by what the graph keeps, and without any effect on the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.curvature import onepass
from lapwing.curvature.kron import KronAccumulator
from lapwing.linalg import Jacobian
from lapwing.model import selfcheck


def fitted(structure: str) -> lapwing.Laplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    return lapwing.fit(model, (x, y), "classification", structure=structure, factor=lapwing.GGN(tolerance=0.0))


def test_what_the_graph_keeps_is_inputs_and_activations() -> None:
    plan = fitted("diag").plan
    assert plan is not None
    assert plan.graph == 8 * (4 + 6)  # x for the first weight; tanh(h) for the tanh and for the second weight


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each piece of the fits that follow has."""
    found: list[int] = []
    feed = onepass._Pass._feed

    def seen(self: Any, at: Any, *args: Any) -> None:
        found.append(at.n)
        feed(self, at, *args)

    monkeypatch.setattr(onepass._Pass, "_feed", seen)
    return found


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac"])
def test_pieces_do_not_change_the_numbers(structure: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fitted(structure)
    sizes.clear()
    for name in ("CHUNK", "TOGETHER"):
        monkeypatch.setattr(onepass, name, 80 * 3)  # three graphs
    monkeypatch.setattr(onepass, "SMALL", 0)
    pieces = fitted(structure)
    assert max(sizes) <= 3
    torch.testing.assert_close(pieces.curvature.dense().trace(), whole.curvature.dense().trace())
    if structure != "ekfac":  # whose basis is arbitrary where factors are singular
        torch.testing.assert_close(pieces.curvature.dense(), whole.curvature.dense())


def test_few_directions_do_not_make_large_graphs(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all directions of a sample are wanted at once, more bytes of gradients may be under way, not of graphs."""
    monkeypatch.setattr(onepass, "CHUNK", 80 * 3)  # three graphs
    fitted("diag")
    assert max(sizes) == 3


class Unseen(torch.autograd.Function):
    """x Wᵀ by an operation that the tape does not see: its rows come from a loop over samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return Unseen.apply(x, self.weight)


def pooled(last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


CASES = {  # numbers that a direction of a sample takes: gradients or sums of the matrices, rows, and the direction
    "matrices": (lambda: pooled(nn.Linear(8, 5)), 8 + 5 + 5),
    "derived": (lambda: pooled(nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))), 8 + 5 + (5 + 5 + 40) + 5),
    "looped": (lambda: pooled(Looped()), 8 + 40 + 5),
    "pixels": (lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 2, 1)), 8 + 2 + 2 * 64),
}


@pytest.mark.parametrize("case", CASES)
def test_directions_count_all_they_take(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at once only as long as what is made of each is small."""
    torch.manual_seed(0)
    (build, numbers), n = CASES[case], 6
    model, pixels = build(), case == "pixels"
    y = torch.arange(n)[:, None, None].expand(n, 8, 8) % 2 if pixels else torch.arange(n) % 5
    seen = []
    update = KronAccumulator.update

    def counted(self: KronAccumulator, jacobian: Jacobian, fresh: Tensor | None) -> None:
        seen.append(jacobian.r)
        update(self, jacobian, fresh)

    monkeypatch.setattr(KronAccumulator, "update", counted)
    monkeypatch.setattr(selfcheck, "BATCHED_SAMPLE", 0)  # no two directions in one backward pass
    likelihood = lapwing.Categorical(class_dim=1) if pixels else "classification"
    options = {"structure": lapwing.Kron(sharing="reduce"), "factor": lapwing.GGN(tolerance=0.0), "progress": False}
    for small, several in ((2 * 4 * n * numbers - 1, 1), (2 * 4 * n * numbers, 2)):
        seen.clear()
        monkeypatch.setattr(onepass, "SMALL", small)
        lapwing.fit(model, (torch.randn(n, 1, 10, 10), y), likelihood, **options)
        assert max(seen) == several
