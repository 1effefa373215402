"""f(x, θ_s) for weights drawn from the posterior: no linearization, one forward pass a draw."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliLaw
from torch.distributions import Categorical as CategoricalLaw

from lapwing.likelihoods import Likelihood
from lapwing.model import Network, batch_size, take
from lapwing.model.inputs import Inputs
from lapwing.predictive.function import SampledFunction
from lapwing.predictive.links import inner_law, log_class_probs

LOOKED_AT = 64  # items of a batch that are compared with the network's own predictions
SURE = 0.9  # probability from which the network itself counts as sure of its label
FEWEST_DRAWS, FEWEST_ITEMS = 5, 8  # below which labels may differ by chance


def sampled_function(
    network: Network, weights: Tensor, inputs: Inputs, differentiable: bool = False
) -> SampledFunction:
    """The outputs at each row of weights (s, P), as a mixture. `differentiable` keeps the graph to the inputs."""
    network.require_apart(inputs)
    with network.copied(), torch.set_grad_enabled(differentiable):
        return SampledFunction(None, torch.stack([network.at_weights(theta, inputs) for theta in weights]))


def warn_of_collapse(network: Network, likelihood: Likelihood, function: SampledFunction, inputs: Inputs) -> None:
    """Warn where networks with sampled weights have lost the labels that the network itself is sure of.

    No labels of the data are needed: of the items of which the network itself is sure, which must be at least half of
    those looked at, the sampled networks together give most another label. Untrained networks are not sure of half
    their inputs, and few draws or few items say nothing. Inputs unlike the training data can look the same, which the
    warning says. It costs one forward pass of at most `LOOKED_AT` items.
    """
    if not isinstance(inner_law(likelihood, function.mean), BernoulliLaw | CategoricalLaw):
        return
    size = batch_size(inputs)
    with torch.no_grad():
        draws = function.samples[:, :LOOKED_AT].detach()
        if len(draws) < FEWEST_DRAWS:
            return
        own = network.forward(take(inputs, slice(0, LOOKED_AT), size) if size > LOOKED_AT else inputs)
        confidence, label = log_class_probs(likelihood, own).exp().max(-1)
        sure = confidence > SURE
        if int(sure.sum()) < max(FEWEST_ITEMS, sure.numel() / 2):
            return
        sampled = log_class_probs(likelihood, draws).exp().mean(0).argmax(-1)
        agreeing = float((sampled == label)[sure].double().mean())
    if agreeing < 0.5:
        warnings.warn(
            f"the sampled weights have lost what the network knows: of inputs that it is sure of, {agreeing:.0%} keep "
            "their label (unless these inputs are unlike the training data, accuracy has collapsed). Use the "
            "linearized predictive, la.predict(x), which does not sample weights through the network; or tune the "
            "prior on held-out data first, la.tune(val_loader).",
            stacklevel=4,
        )
