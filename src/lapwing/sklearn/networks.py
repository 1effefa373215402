"""Networks that an estimator makes and trains: a small MLP or the user's own, with early stopping on held-out data."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lapwing.errors import BadData

Loss = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Tensor, Tensor]
RATES = (1.0, 0.1)  # of the learning rate; training goes on with the next one where the last one no longer helps


class Standardized(nn.Module):
    """A network between standardized inputs and outputs: f(x) = center + scale · net((x − mean) / deviation)."""

    mean: Tensor
    deviation: Tensor
    center: Tensor
    scale: Tensor

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor | None = None) -> None:
        super().__init__()
        self.net = net
        like = next(net.parameters())
        self.register_buffer("mean", x.mean(0).to(like))
        self.register_buffer("deviation", _deviation(x).to(like))
        self.register_buffer("center", (torch.zeros(()) if y is None else y.mean(0)).to(like))
        self.register_buffer("scale", (torch.ones(()) if y is None else _deviation(y)).to(like))

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.net((x - self.mean) / self.deviation)
        return self.center + self.scale * f


def _deviation(values: Tensor) -> Tensor:
    """Return the standard deviation of each column, 1 for a column that does not vary."""
    deviation = values.std(0, correction=0)
    constant = deviation <= 10 * torch.finfo(values.dtype).eps * values.abs().amax(0)
    return torch.where(constant, 1.0, deviation)


def mlp(inputs: int, outputs: int, hidden: Sequence[int] | int) -> nn.Sequential:
    """Return a multilayer perceptron in float64 with smooth activations, which suit a linearized posterior."""
    layers: list[nn.Module] = []
    for width in hidden if isinstance(hidden, Iterable) else (hidden,):
        layers += [nn.Linear(inputs, width), nn.SiLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs)).double()


def made_by(factory: Callable[..., Any], inputs: int, outputs: int) -> nn.Module:
    """Call a factory as factory(inputs, outputs), or as factory() if it takes no arguments."""
    try:
        inspect.signature(factory).bind(inputs, outputs)
        arguments: tuple[int, ...] = (inputs, outputs)
    except TypeError:
        arguments = ()
    made = factory(*arguments)
    if not isinstance(made, nn.Module):
        raise BadData(f"module= made a {type(made).__name__}: a factory returns a torch.nn.Module")
    return made


@dataclass(frozen=True)
class Schedule:
    """How a network is trained: Adam, or what `optimizer(parameters)` makes, and when it stops.

    With held-out data, training stops after `patience` epochs without a lower loss, goes on with a smaller learning
    rate, and keeps the best weights. Without, it runs `epochs` epochs and `decay` pulls the weights to zero.
    """

    epochs: int
    patience: int
    batch_size: int
    learning_rate: float
    optimizer: Callable[[Any], Optimizer] | None
    decay: float

    def run(self, net: nn.Module, loss: Loss, train: Pair, held_out: Pair | None, seed: int) -> int:
        """Train the network in place and return the number of epochs."""
        generator = torch.Generator().manual_seed(seed)
        net.train()
        make = self.optimizer or (lambda own: torch.optim.Adam(own, self.learning_rate))
        optimizer = make([p for p in net.parameters() if p.requires_grad])
        if not isinstance(optimizer, Optimizer):
            raise BadData(f"optimizer= made a {type(optimizer).__name__}: it returns a torch optimizer")
        rates = [group["lr"] for group in optimizer.param_groups]
        epochs = 0
        best, lowest = copy.deepcopy(net.state_dict()), math.inf
        for factor in RATES if held_out is not None else RATES[:1]:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = factor * rate
            waited = 0
            while epochs < self.epochs and waited < self.patience:
                self._epoch(net, loss, train, optimizer, generator)
                epochs += 1
                if held_out is None:
                    continue
                value = _held_out_loss(net, loss, held_out)
                waited += 1
                if value < lowest:
                    waited = 0 if value < lowest - 1e-4 * abs(lowest) or math.isinf(lowest) else waited
                    best, lowest = copy.deepcopy(net.state_dict()), value
            if held_out is not None:
                net.load_state_dict(best)
        if math.isinf(lowest) and held_out is not None and epochs:
            raise BadData("the training diverged, its held-out loss was never finite: use a smaller learning_rate")
        net.eval()
        return epochs

    def _epoch(self, net: nn.Module, loss: Loss, data: Pair, optimizer: Optimizer, generator: torch.Generator) -> None:
        x, y = data
        parameters = [p for p in net.parameters() if p.requires_grad]
        for rows in torch.randperm(len(x), generator=generator).split(self.batch_size):
            if len(rows) == 1 < self.batch_size:
                continue  # a rest of one sample, of which batch normalization knows no variance

            def closure(rows: Tensor = rows) -> Tensor:
                optimizer.zero_grad()
                value = loss(net(x[rows]), y[rows])
                if self.decay:
                    value = value + self.decay / 2 * torch.stack([p.square().sum() for p in parameters]).sum()
                value.backward()
                return value

            optimizer.step(closure)  # type: ignore[arg-type]


def _held_out_loss(net: nn.Module, loss: Loss, data: Pair) -> float:
    net.eval()
    with torch.no_grad():
        value = float(loss(net(data[0]), data[1]))
    net.train()
    return value if math.isfinite(value) else math.inf
