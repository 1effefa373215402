"""How a batch is cut into pieces: by what the graph keeps, and without any effect on the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lapwing
from lapwing.curvature import sweep


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
    feed = sweep._Pass._feed

    def seen(self: Any, at: Any, *args: Any) -> None:
        found.append(at.n)
        feed(self, at, *args)

    monkeypatch.setattr(sweep._Pass, "_feed", seen)
    return found


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac"])
def test_pieces_do_not_change_the_numbers(structure: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fitted(structure)
    sizes.clear()
    for name in ("CHUNK", "TOGETHER"):
        monkeypatch.setattr(sweep, name, 80 * 3)  # three graphs
    monkeypatch.setattr(sweep, "SMALL", 0)
    pieces = fitted(structure)
    assert max(sizes) <= 3
    torch.testing.assert_close(pieces.curvature.dense().trace(), whole.curvature.dense().trace())
    if structure != "ekfac":  # whose basis is arbitrary where factors are singular
        torch.testing.assert_close(pieces.curvature.dense(), whole.curvature.dense())


def test_few_directions_do_not_make_large_graphs(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all directions of a sample are wanted at once, more bytes of gradients may be under way, not of graphs."""
    monkeypatch.setattr(sweep, "CHUNK", 80 * 3)  # three graphs
    fitted("diag")
    assert max(sizes) == 3
