"""Temperature scaling: logits divided by one number, the simplest calibration of a classifier."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, UnsupportedOperation, brief, warn
from lapwing.evaluation.scoring import device_of, point_prediction
from lapwing.evidence.settings import best_logit_temperature
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.model.batches import Batches, Convention, require_one_process
from lapwing.model.calls import Inputs, call, explained, output_tensor, outside_autocast, outside_inference
from lapwing.model.copies import borrowed
from lapwing.predictive import Prediction
from lapwing.predictive.predictive import prepared

LOWEST, HIGHEST = 0.01, 100.0


@dataclass(frozen=True, eq=False)
class TemperatureScaled:
    """A classifier whose logits are divided by one number T > 0 (Guo et al. 2017, section 4.2).

    `TemperatureScaled.fit` finds the T with the smallest NLL on held-out data; accuracy does not change. It is called
    as the network is: `scaled(x)` returns f(x) / T, and `scaled.predict(x)` a `Prediction`.

    Examples:
        >>> scaled = lapwing.TemperatureScaled.fit(model, val_loader)
        >>> report = lapwing.evaluate({"MAP": model, "scaled": scaled}, test_loader, likelihood="classification")
        >>> print(report.table())
    """

    __repr__ = brief

    model: nn.Module
    temperature: float
    likelihood: Likelihood

    @classmethod
    def fit(cls, model: nn.Module, data: Any, likelihood: str | Likelihood = "classification") -> "TemperatureScaled":
        """Find the temperature of smallest validation NLL between 0.01 and 100; `data` as in `lapwing.fit`.

        Examples:
            >>> temperature = lapwing.TemperatureScaled.fit(model, val_loader).temperature
        """
        require_one_process("temperature scaling")
        likelihood = resolve_likelihood(likelihood)
        if not likelihood.has_logits:
            raise UnsupportedOperation(
                f"temperature scaling divides logits, and {type(likelihood).__name__} has none: use it with "
                "Categorical, Bernoulli or BradleyTerry"
            )
        f, y = logits(model, data, likelihood)
        return cls(model, best_temperature(f, y, likelihood), likelihood)

    @property
    def module(self) -> nn.Module:
        """The network itself."""
        return self.model

    @outside_inference
    def predict(self, x: Inputs, *, differentiable: bool = False) -> Prediction:
        """Return p(y | f(x)/T); `differentiable` keeps gradients to x.

        Examples:
            >>> probs = lapwing.TemperatureScaled.fit(model, val_loader).predict(x).probs
        """
        inputs = prepared(self.model, device_of(self.model), Convention(), x)
        return point_prediction(self.model, inputs, self.likelihood, self.temperature, differentiable)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with borrowed(self.model) as module, torch.no_grad():
            return output_tensor(module(*args, **kwargs)) / self.temperature


@outside_autocast
def logits(model: nn.Module, data: Any, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    """Return all outputs f (N, *event, C) and targets of the data, in float64."""
    outputs, targets = [], []
    with borrowed(model) as module, torch.no_grad():
        for batch in Batches(data, model, device_of(model)):
            with explained(batch.inputs):
                f = likelihood.outputs(output_tensor(call(module, batch.inputs)))
            outputs.append(f.double())
            targets.append(likelihood.targets(f, batch.targets))
    return torch.cat(outputs), torch.cat(targets)


@outside_autocast
def best_temperature(f: Tensor, y: Tensor, likelihood: Likelihood) -> float:
    """Return the T between 0.01 and 100 with the smallest Σ −log p(y | f/T); warn if it is at an end of that range."""
    mask = likelihood.mask(f, y)
    if mask is not None and not bool(mask.any()):
        raise BadData("the validation data hold no target that counts")
    if not bool(likelihood.log_prob(f, y).isfinite().all()):
        raise BadData("the validation NLL is not finite: check the data")
    temperature = best_logit_temperature(f, y, likelihood, limit=HIGHEST)
    if not 1.01 * LOWEST < temperature < 0.99 * HIGHEST:
        warn(
            f"the validation NLL has no minimum between temperatures {LOWEST} and {HIGHEST} (it stopped at "
            f"{temperature:.3g}): every item may be right, or none. Use more validation data.",
        )
    return temperature
