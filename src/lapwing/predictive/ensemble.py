"""A fixed set of weight samples, used as an ensemble of networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from lapwing.likelihoods import Likelihood
from lapwing.model import Network
from lapwing.model.fingerprint import Watch
from lapwing.model.inputs import Inputs
from lapwing.model.module import outside_inference
from lapwing.predictive import Prediction, predict_targets
from lapwing.predictive.sampled import sampled_function, warn_of_collapse


@dataclass(frozen=True, eq=False)
class Ensemble:
    """n networks with weights (n, P), the same for every input. Iterating gives {name: tensor} of each member.

    for weights in la.ensemble(5): torch.func.functional_call(model, weights, (x,))
    """

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
        """The mixture of the members' predictions."""
        if self.watch is not None:
            self.watch.require_unchanged(self.network.module, self.network.params)
        inputs = self.inputs(x)
        with self.network.explaining(inputs):
            function = sampled_function(self.network, self.weights, inputs, differentiable)
        warn_of_collapse(self.network, self.likelihood, function, inputs)
        function = function if self.logit_temperature == 1.0 else function.scaled(1 / self.logit_temperature)
        return predict_targets(function, self.likelihood, link=link, scalar=self.scalar, shifted=self.shifted)
