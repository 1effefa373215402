"""Monte Carlo dropout: the masks of training, kept at prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lapwing.baselines.mixing import known_likelihood, mixed
from lapwing.errors import UnsupportedModel, require_generator, require_whole
from lapwing.evaluation.scoring import device_of
from lapwing.likelihoods import Likelihood
from lapwing.model.calls import Inputs, batch_size, call, output_tensor, outside_inference
from lapwing.model.copies import borrowed
from lapwing.predictive import Prediction

WHOLE_CHANNELS: dict[Callable, bool] = {F.dropout: False, F.dropout1d: True, F.dropout2d: True, F.dropout3d: True}
"""Dropout functions, and whether they drop whole channels (the second dimension)."""
OTHERS = (F.alpha_dropout, F.feature_alpha_dropout)


@dataclass(frozen=True, eq=False)
class MCDropout:
    """The average of `samples` networks with dropout masks drawn at prediction (Gal and Ghahramani 2016).

    All calls of dropout are active, `nn.Dropout` layers and `F.dropout` alike, on a private copy of the model; batch
    norm and everything else stay in eval mode. One draw has one mask for all inputs (where the first dimension is that
    of the samples), so that it is one network, and without a generator the masks are the same at every call and for any
    split into batches. The model is read when it predicts, not copied: predictions follow if it is trained further.

    Examples:
        >>> dropped = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
        >>> dropout = baselines.MCDropout(dropped, "classification", samples=10)
        >>> dropout.predict(x).entropy.shape
        torch.Size([8])
    """

    module: nn.Module
    likelihood: Likelihood
    samples: int = 50

    def __init__(self, model: nn.Module, likelihood: str | Likelihood, samples: int = 50) -> None:
        require_whole("the number of dropout masks", samples)
        _require_masks(model)
        object.__setattr__(self, "module", model)
        object.__setattr__(self, "likelihood", known_likelihood(likelihood, "MCDropout"))
        object.__setattr__(self, "samples", samples)

    @outside_inference
    def predict(
        self,
        x: Inputs,
        *,
        samples: int | None = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Return the mixture of the networks under drawn masks."""
        device = device_of(self.module)
        require_generator(generator, device)
        generator = torch.Generator(device).manual_seed(0) if generator is None else generator
        count = self.samples if samples is None else samples
        require_whole("the number of dropout masks", count)

        def run(inputs: Inputs) -> Iterable[Tensor]:
            size = batch_size(inputs)
            with borrowed(self.module) as own, torch.set_grad_enabled(differentiable):
                for _ in range(count):
                    with Masks(generator, size) as masks:
                        out = output_tensor(call(own, inputs))
                    if not masks.drawn:
                        raise UnsupportedModel(
                            "no dropout was seen in the forward pass, so that all draws would be the same network: "
                            "MCDropout needs nn.Dropout layers or calls of torch.nn.functional.dropout"
                        )
                    yield out

        return mixed(self.module, self.likelihood, x, run, differentiable=differentiable)


class Masks(TorchFunctionMode):
    """Makes every call of dropout draw a mask from a generator, the same one for all `size` samples of the batch."""

    def __init__(self, generator: torch.Generator, size: int) -> None:
        super().__init__()
        self.generator, self.size = generator, size
        self.drawn = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in OTHERS:
            raise UnsupportedModel("MCDropout knows nn.Dropout, 1d, 2d and 3d; alpha dropout has no masks that scale")
        if func not in WHOLE_CHANNELS:
            return func(*args, **kwargs)
        x, p = _arguments(*args, **kwargs)
        self.drawn += 1
        shape = [1 if k == 0 and length == self.size else length for k, length in enumerate(x.shape)]
        if WHOLE_CHANNELS[func]:
            shape = [*shape[:2], *[1] * (x.ndim - 2)]
        keep = torch.rand(shape, generator=self.generator, device=x.device, dtype=torch.float64) >= p
        return x * keep.to(x.dtype) / (1 - p) if p < 1 else x * 0


def _arguments(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Tensor, float]:
    return input, p


def _require_masks(model: nn.Module) -> None:
    """Refuse layers with dropout inside, which cannot be switched on from outside."""
    for name, part in model.named_modules():
        inside = isinstance(part, nn.MultiheadAttention | nn.RNNBase) and part.dropout > 0
        if inside:
            raise UnsupportedModel(
                f"{name or type(part).__name__} has dropout inside ({type(part).__name__}), which MCDropout cannot "
                "switch on: set its dropout to 0 and keep nn.Dropout layers"
            )
