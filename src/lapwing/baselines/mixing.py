"""Predictions as an equal mixture of several networks: what every baseline ends in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, require_generator, require_whole
from lapwing.evaluation.scoring import device_of
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.model import Params
from lapwing.model.batches import Convention
from lapwing.model.calls import Inputs, call, explained, output_tensor, outside_inference
from lapwing.model.copies import borrowed
from lapwing.predictive import Prediction, SampledFunction, predict_targets
from lapwing.predictive.predictive import prepared

Run = Callable[[Inputs], Iterable[Tensor]]
"""Gives what each network of a mixture returns for prepared inputs."""


def known_likelihood(likelihood: str | Likelihood, method: str) -> Likelihood:
    """Return what a name means, and refuse a likelihood whose noise is unknown."""
    found = resolve_likelihood(likelihood)
    if not found.known:
        raise BadData(
            f"{method} does not estimate the noise of {found}: give it, as in lapwing.Gaussian(noise=0.3), or take "
            "la.likelihood of a fitted posterior"
        )
    return found


def mixed(
    module: nn.Module,
    likelihood: Likelihood,
    x: Inputs,
    run: Run,
    *,
    differentiable: bool = False,
    convention: Convention | None = None,
) -> Prediction:
    """Return (1/S) Σ_s p(y | f_s(x)) for the outputs that `run` gives; `differentiable` keeps gradients to x."""
    convention = Convention() if convention is None else convention
    inputs = prepared(module, device_of(module), convention, x)
    with explained(inputs), torch.inference_mode(False), torch.set_grad_enabled(differentiable):
        raw = list(run(inputs))
        f = torch.stack([likelihood.outputs(each) for each in raw])
    return predict_targets(
        SampledFunction(None, f), likelihood, link="mc", scalar=raw[0].ndim == 1, shifted=bool(convention.shifted)
    )


@dataclass(frozen=True, eq=False)
class Weighted:
    """A module that runs at other weights than its own, with everything else as it was at the fit.

    `rest` holds copies of buffers and of parameters that are not among `params`.
    """

    module: nn.Module
    params: Params
    likelihood: Likelihood
    convention: Convention = field(default_factory=Convention)
    rest: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, module: nn.Module, params: Params, likelihood: Likelihood, convention: Convention) -> Weighted:
        """Copy what a module holds besides the parameters."""
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        rest = {name: value.detach().clone() for name, value in state.items() if name not in params.names}
        return cls(module, params, likelihood, convention, rest)

    def predict(self, weights: Tensor, x: Inputs, *, differentiable: bool = False) -> Prediction:
        """Mix the predictions of networks with weights (S, P)."""

        def run(inputs: Inputs) -> Iterable[Tensor]:
            with borrowed(self.module) as own, torch.set_grad_enabled(differentiable):
                for theta in weights:
                    values = {**self.params.unflatten(theta), **self.rest}
                    yield output_tensor(call(own, inputs, values))

        return mixed(self.module, self.likelihood, x, run, differentiable=differentiable, convention=self.convention)


@dataclass(frozen=True, eq=False)
class WeightDistribution(ABC):
    """A distribution over the weights of a network. It predicts as a mixture of networks with drawn weights."""

    network: Weighted

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n weight vectors, (n, P); the same at every call without a generator."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """How many networks predict, unless `predict` is told."""

    @property
    def module(self) -> nn.Module:
        """The network whose weights have this distribution."""
        return self.network.module

    @property
    def likelihood(self) -> Likelihood:
        """What the outputs of the network mean."""
        return self.network.likelihood

    def _noise(self, n: int, like: Tensor, generator: torch.Generator | None) -> Callable[[int], Tensor]:
        """Return a function that draws standard normal numbers (n, size), from a fixed seed without a generator."""
        require_generator(generator, like.device)
        own = torch.Generator(like.device).manual_seed(0) if generator is None else generator
        return lambda size: torch.randn(n, size, generator=own, dtype=like.dtype, device=like.device)

    @outside_inference
    def predict(
        self,
        x: Inputs,
        *,
        samples: int | None = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Return the mixture of networks at drawn weights."""
        count = self.samples if samples is None else samples
        require_whole("samples", count)
        return self.network.predict(self.sample(count, generator), x, differentiable=differentiable)
