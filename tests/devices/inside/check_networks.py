"""Networks beyond a plain stack on the test device: recurrent, attention, tokens, several inputs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Categorical
from tests.devices import workout
from tests.devices.elsewhere import device

HERE = device()
N, T = 16, 5


class Recurrent(nn.Module):
    """The last state of an LSTM or GRU, and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


class Transformer(nn.Module):
    """Tokens, one layer of attention, a class per sequence or per token."""

    def __init__(self, per_token: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 3)
        self.per_token = per_token

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.embed(x))
        return self.head(h if self.per_token else h.mean(1))


class Pair(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 4), nn.Linear(2, 4, bias=False), nn.Linear(4, 3)
        self.gate = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("shift", torch.linspace(0, 1, 4))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x) * self.gate + self.b(z) + self.shift))


class Pixels(nn.Module):
    """Segmentation: a class per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(1, 2, 2, groups=1)
        self.norm, self.out = nn.GroupNorm(1, 2), nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.up(x))))


def case(name: str) -> tuple[nn.Module, Any, Tensor, Any]:
    """Return (model, inputs, targets, likelihood)."""
    torch.manual_seed(0)
    y, tokens = torch.arange(N) % 3, torch.arange(N * T).reshape(N, T) % 7
    if name in ("lstm", "gru"):
        return Recurrent(name).double(), torch.randn(N, T, 3).double(), y, "classification"
    if name == "transformer":
        return Transformer().double().eval(), tokens, y, "classification"
    if name == "tokens":
        return Transformer(per_token=True).double().eval(), tokens, tokens % 3, "classification"
    if name == "pixels":
        return (
            Pixels().double(),
            torch.randn(N, 1, 3, 3).double(),
            torch.arange(N * 16).reshape(N, 4, 4) % 3,
            Categorical(class_dim=1),
        )
    assert name == "two inputs"
    return Pair().double(), (torch.randn(N, 3).double(), torch.randn(N, 2).double()), y, "classification"


def part(x: Any, rows: slice, place: torch.device) -> Any:
    return tuple(part(t, rows, place) for t in x) if isinstance(x, tuple) else x[rows].to(place)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "nystrom", "matrixfree", "lowrank"])
@pytest.mark.parametrize("name", ["lstm", "gru", "transformer", "tokens", "pixels", "two inputs"])
def test_networks(name: str, structure: str, tmp_path: Path) -> None:
    model, x, y, likelihood = case(name)
    host = torch.device("cpu")
    found = []
    for net, place in ((model, host), (copy.deepcopy(model).to(HERE), HERE)):
        train, held_out = ((part(x, rows, place), y[rows].to(place)) for rows in (slice(0, 11), slice(11, N)))
        every = workout.steps(net, train, held_out, likelihood, tmp_path, structure=structure)
        found.append(workout.run(every, None if structure == "kron" else workout.QUICK))
    workout.assert_same(found[1], found[0], drawn=False)
