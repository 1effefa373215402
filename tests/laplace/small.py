"""A small network with its data, for tests of what every fit promises."""

from typing import Any

import torch
from torch import Tensor, nn

import lapwing
from lapwing import Laplace

STRUCTURES = ("diag", "blockdiag", "kron", "ekfac", "full", "lowrank")


X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))


Y = torch.arange(24) * 7 % 3


def net(outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))


def batches(x: Any = X, y: Any = Y, size: int = 8) -> list:
    return [(x[k : k + size], y[k : k + size]) for k in range(0, len(x), size)]


def fit(model: Any = None, data: Any = "default", likelihood: Any = "classification", **options: Any) -> Laplace:
    data = batches() if isinstance(data, str) else data
    return lapwing.fit(net() if model is None else model, data, likelihood, **options)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bump(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] += 0.5
