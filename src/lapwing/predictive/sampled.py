"""f(x, θ_s) for weights drawn from the posterior: no linearization, one forward pass a draw."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.model import Network
from lapwing.model.batches import Inputs
from lapwing.predictive.function import SampledFunction


def sampled_function(
    network: Network, weights: Tensor, inputs: Inputs, differentiable: bool = False
) -> SampledFunction:
    """The outputs at each row of weights (s, P), as a mixture. `differentiable` keeps the graph to the inputs."""
    network.require_apart(inputs)
    with network.copied(), torch.set_grad_enabled(differentiable):
        return SampledFunction(None, torch.stack([network.at_weights(theta, inputs) for theta in weights]))
