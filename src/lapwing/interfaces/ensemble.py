"""A fixed set of weight samples, used as an ensemble of networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from lapwing.errors import UnsupportedModel
from lapwing.likelihoods import Likelihood
from lapwing.model import Network
from lapwing.model.batches import Inputs
from lapwing.model.fingerprint import checksum
from lapwing.model.module import outside_inference
from lapwing.predictive import Prediction, predict_targets
from lapwing.predictive.sampled import sampled_function


@dataclass(frozen=True, eq=False)
class Ensemble:
    """n networks with weights (n, P), the same for every input. Iterating gives {name: tensor} of each member.

    for weights in la.ensemble(5): torch.func.functional_call(model, weights, (x,))
    """

    network: Network
    likelihood: Likelihood
    weights: Tensor
    scalar: bool = False
    state: tuple[str, ...] = ()  # checksum of the module at the fit
    logit_temperature: float = 1.0
    inputs: Callable[[Inputs], Inputs] = lambda x: x  # inputs as the posterior's own predictions read them
    shifted: bool = False  # position t predicts the label at t + 1

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.network.params.unflatten(theta) for theta in self.weights)

    @outside_inference
    def predict(self, x: Inputs, *, link: str = "mc", differentiable: bool = False) -> Prediction:
        """The mixture of the members' predictions."""
        if self.state and checksum(self.network.module) != self.state:
            raise UnsupportedModel("the module has changed since the fit; restore it, or fit again")
        function = sampled_function(self.network, self.weights, self.inputs(x), differentiable)
        function = function if self.logit_temperature == 1.0 else function.scaled(1 / self.logit_temperature)
        return predict_targets(function, self.likelihood, link=link, scalar=self.scalar, shifted=self.shifted)
