"""Made-up inputs, for looking at a network without data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.cli.files.data import require_readable
from lapwing.errors import BadData, LapwingError

SAMPLES = 8
SIDES = (32, 28, 64, 224, 96, 8)  # of images, the most usual first
TOKENS = 16


@dataclass(frozen=True, eq=False)
class Repeated:
    """One batch that comes as often as so many samples need: data by their number alone."""

    batch: Any
    times: int

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.times):
            yield self.batch


def made_up(model: nn.Module, shape: tuple[int, ...] | None) -> Tensor:
    """Random inputs of this shape, or of the first guess that the network takes."""
    if shape is not None:
        x = _normal(model, shape)
        require_readable([x], model, "--input")
        return x
    for x in _guesses(model):
        try:
            require_readable([x], model, "a guess")
            return x
        except LapwingError:
            continue
    raise BadData(
        "the shape of an input cannot be guessed from the first layer: say --input 3,32,32 (without the batch), "
        "or --data for inputs that are no single tensor of numbers"
    )


def _guesses(model: nn.Module) -> Iterator[Tensor]:
    """Inputs that the first layer with weights would take."""
    layers = (m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Embedding))
    first = next(layers, None)
    if isinstance(first, nn.Linear):
        yield _normal(model, (first.in_features,))
        yield _normal(model, (TOKENS, first.in_features))
    elif isinstance(first, nn.Conv1d | nn.Conv2d):
        for side in SIDES:
            yield _normal(model, (first.in_channels, *(side,) * len(first.kernel_size)))
    elif isinstance(first, nn.Embedding):
        ids = torch.randint(first.num_embeddings, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))
        yield ids.to(first.weight.device)


def _normal(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    parameter = next(model.parameters())
    x = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(0))
    return x.to(parameter.device, parameter.dtype)
