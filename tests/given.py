"""What pages and docstrings take for granted: a trained classifier, a regression, their data and posteriors."""

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from lapwing import attacks, baselines, metrics, plots


def descend(model: nn.Module, loss: Any, steps: int = 100) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


@cache
def trained() -> dict[str, Any]:
    """A classifier `model` with loaders and a batch (x, y), and a regression `network` with inputs and targets."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    centers = 2 * normal(3, 4)
    y = torch.arange(240) % 3
    x = centers[y] + normal(240, 4)
    inputs = torch.linspace(-2, 2, 40)[:, None]
    targets = inputs.sin() + 0.1 * normal(40, 1)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    network = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    torch.random.set_rng_state(state)
    descend(model, lambda: nn.functional.cross_entropy(model(x[:120]), y[:120]))
    descend(network, lambda: nn.functional.mse_loss(network(inputs), targets), 400)
    parts = {"train": slice(0, 120), "val": slice(120, 180), "test": slice(180, 240)}
    loaders = {f"{name}_loader": DataLoader(TensorDataset(x[part], y[part]), 30) for name, part in parts.items()}
    return {
        "model": model, "x": x[:8], "y": y[:8], **loaders, "noise": 5 * normal(8, 4), "images": normal(8, 1, 8, 8),
        "network": network, "inputs": inputs, "targets": targets,
    }  # fmt: skip


@cache
def evaluated() -> lapwing.Report:
    """A report on the classifier and its posterior."""
    model, loader = trained()["model"], trained()["test_loader"]
    la = lapwing.fit(model, trained()["train_loader"], "classification", progress=False)
    return lapwing.evaluate({"MAP": model, "Laplace": la}, loader, ood={"noise": trained()["noise"]}, progress=False)


@cache
def fitted() -> dict[str, Any]:
    """The names of `trained` with copies of the networks, and posteriors `la` and `regression` of these."""
    names = {
        "lapwing": lapwing, "torch": torch, "nn": nn,
        "attacks": attacks, "baselines": baselines, "metrics": metrics, "plots": plots, **trained(),
    }  # fmt: skip
    names["model"], names["network"] = copy.deepcopy(names["model"]), copy.deepcopy(names["network"])
    names["la"] = lapwing.fit(names["model"], names["train_loader"], "classification", progress=False)
    data = (names["inputs"], names["targets"])
    names["regression"] = lapwing.fit(names["network"], data, "regression", progress=False)
    names["report"] = evaluated()
    return names


def given() -> dict[str, Any]:
    """The names of `fitted`, made again if somebody has trained or converted the networks since."""
    for name in ("model", "network"):
        was, now = trained()[name].state_dict(), fitted()[name].state_dict()
        if any(now[key].dtype != value.dtype or not torch.equal(now[key], value) for key, value in was.items()):
            fitted.cache_clear()
            break
    return dict(fitted())
