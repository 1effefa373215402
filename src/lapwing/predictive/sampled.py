"""f(x, θ_s) for weights drawn from the posterior: no linearization, one forward pass per draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliLaw
from torch.distributions import Categorical as CategoricalLaw

from lapwing.errors import brief, warn
from lapwing.likelihoods import Likelihood
from lapwing.model import Network, batch_size, take
from lapwing.model.calls import Inputs, outside_autocast, outside_inference
from lapwing.model.watch import Watch
from lapwing.predictive.function import BLOCK, FunctionDistribution, fixed_generator
from lapwing.predictive.links import inner_law, log_class_probs, predict_targets
from lapwing.predictive.prediction import Prediction

LOOKED_AT = 16  # items of a batch that are compared with the network's own predictions
SURE = 0.9  # probability from which the network itself counts as sure of its label
FEWEST_DRAWS, FEWEST_ITEMS = 5, 8  # below which labels may differ by chance


@dataclass(frozen=True, eq=False, init=False, repr=False)
class SampledFunction(FunctionDistribution):
    """The outputs of S sampled networks, samples (S, B, *event, C), with equal weights: `method="sampled"`.

    Variances are those of this mixture (divided by S). Row s is one network at all inputs, so draws are joint.

    Example: `SampledFunction(None, f[None])` is a network without uncertainty.
    """

    _mean: Tensor
    samples: Tensor
    has_covariance = False

    def __init__(self, mean: Tensor | None, samples: Tensor) -> None:
        object.__setattr__(self, "_mean", samples.mean(0) if mean is None else mean)
        object.__setattr__(self, "samples", samples)
        if self._mean.shape != samples.shape[1:]:
            raise ValueError(f"samples {tuple(samples.shape)} do not fit a mean of shape {tuple(self._mean.shape)}")

    @property
    def mean(self) -> Tensor:
        return self._mean

    def scaled(self, factor: float) -> SampledFunction:
        return SampledFunction(factor * self.mean, factor * self.samples)

    def take(self, index: Tensor) -> SampledFunction:
        return SampledFunction(self.mean[index], self.samples[:, index])

    def stored(self) -> SampledFunction:
        return SampledFunction(self.mean.detach(), self.samples.detach())

    @cached_property
    def variance(self) -> Tensor:
        return (self.samples - self.samples.mean(0)).square().mean(0)

    @cached_property
    @outside_autocast
    def covariance(self) -> Tensor:
        centered = self.samples - self.samples.mean(0)
        return torch.einsum("s...c,s...d->...cd", centered, centered) / len(centered)

    @outside_autocast
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.samples.device
        generator = fixed_generator(device) if generator is None else generator
        return self.samples[torch.randint(len(self.samples), (n,), generator=generator, device=device)]

    def blocks(self, n: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """Yield the samples themselves, whatever n."""
        size = max(1, BLOCK // max(1, self.mean.numel()))
        yield from self.samples.split(size)


def sampled_function(
    network: Network, weights: Tensor, inputs: Inputs, differentiable: bool = False
) -> SampledFunction:
    """Run the network at each row of weights (s, P). `differentiable` keeps the graph to the inputs."""
    network.require_apart(inputs)
    with torch.set_grad_enabled(differentiable):
        return SampledFunction(None, network.at_each(weights, inputs))


def warn_of_collapse(network: Network, likelihood: Likelihood, function: SampledFunction, inputs: Inputs) -> None:
    """Warn where networks with sampled weights have lost the labels that the network itself is sure of.

    The check needs no labels. It warns where the network itself is sure of at least half of the items looked at, and
    the sampled networks together give most of those another label. Untrained networks are not sure of half their
    inputs, and few draws or few items say nothing. Inputs unlike the training data can look the same, which the
    warning says. The check costs one forward pass of at most `LOOKED_AT` items, or nothing if there are too few.
    """
    if function.samples.shape[0] < FEWEST_DRAWS or function.mean[..., 0].numel() < FEWEST_ITEMS:
        return
    if not isinstance(inner_law(likelihood, function.mean), BernoulliLaw | CategoricalLaw):
        return
    size = batch_size(inputs)
    with torch.no_grad():
        draws = function.samples[:, :LOOKED_AT].detach()
        own = network.forward(take(inputs, slice(0, LOOKED_AT), size) if size > LOOKED_AT else inputs)
        confidence, label = log_class_probs(likelihood, own).exp().max(-1)
        sure = confidence > SURE
        if int(sure.sum()) < max(FEWEST_ITEMS, sure.numel() / 2):
            return
        sampled = log_class_probs(likelihood, draws).exp().mean(0).argmax(-1)
        agreeing = float((sampled == label)[sure].double().mean())
    if agreeing < 0.5:
        warn(
            f"the sampled weights have lost what the network knows: of inputs that it is sure of, {agreeing:.0%} keep "
            "their label (unless these inputs are unlike the training data, accuracy has collapsed). Use the "
            "linearized predictive, la.predict(x), which does not sample weights through the network; or tune the "
            "prior for it on held-out data first, la.tune(val_loader, predictive='sampled')."
        )


@dataclass(frozen=True, eq=False)
class Ensemble:
    """n networks with fixed weights (n, P), the same for every input. Iterating gives {name: tensor} per member.

    Example: `for weights in la.ensemble(5): torch.func.functional_call(model, weights, (x,))`
    """

    __repr__ = brief

    network: Network
    likelihood: Likelihood
    weights: Tensor
    scalar: bool = False
    watch: Watch | None = None  # what the module was like at the fit
    logit_temperature: float = 1.0
    inputs: Callable[[Inputs], Inputs] = lambda x: x  # inputs as the posterior's own predictions read them
    shifted: bool = False  # position t predicts the label at t + 1

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.network.params.unflatten(theta) for theta in self.weights)

    @outside_inference
    def predict(self, x: Inputs, *, link: str = "mc", differentiable: bool = False) -> Prediction:
        """Return the mixture of the members' predictions."""
        if self.watch is not None:
            self.watch.require_unchanged(self.network.module, self.network.params)
        inputs = self.inputs(x)
        with self.network.explaining(inputs):
            function = sampled_function(self.network, self.weights, inputs, differentiable)
        warn_of_collapse(self.network, self.likelihood, function, inputs)
        function = function if self.logit_temperature == 1.0 else function.scaled(1 / self.logit_temperature)
        return predict_targets(function, self.likelihood, link=link, scalar=self.scalar, shifted=self.shifted)
