"""Temperature scaling: the calibration that a posterior has to beat."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.curvature.shards import require_one_process
from lapwing.errors import BadData, UnsupportedOperation
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.model.batches import Batches
from lapwing.model.module import borrowed, call, output_tensor, outside_autocast

LOWEST, HIGHEST = 0.01, 100.0


@dataclass(frozen=True, eq=False)
class TemperatureScaled:
    """A classifier whose logits are divided by one number T > 0 (Guo et al. 2017, section 4.2).

    `TemperatureScaled.fit` finds the T with the smallest NLL on held-out data; accuracy does not change. It is called
    as the network is: `scaled(x)` returns f(x) / T.

    Example:
        >>> scaled = TemperatureScaled.fit(model, val_loader)
        >>> lapwing.evaluate({"MAP": model, "MAP + T": scaled}, test_loader, likelihood="classification").table()
    """

    model: nn.Module
    temperature: float
    likelihood: Likelihood

    @classmethod
    def fit(cls, model: nn.Module, data: Any, likelihood: str | Likelihood = "classification") -> "TemperatureScaled":
        """Find the temperature of smallest validation NLL between 0.01 and 100; `data` as in `lapwing.fit`."""
        require_one_process("temperature scaling")
        likelihood = resolve_likelihood(likelihood)
        if not likelihood.has_logits:
            raise UnsupportedOperation(
                f"temperature scaling divides logits, and {type(likelihood).__name__} has none: use it with "
                "Categorical, Bernoulli or BradleyTerry"
            )
        f, y = logits(model, data, likelihood)
        return cls(model, best_temperature(f, y, likelihood), likelihood)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with borrowed(self.model) as module, torch.no_grad():
            return output_tensor(module(*args, **kwargs)) / self.temperature


@outside_autocast
def logits(model: nn.Module, data: Any, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    """Return all outputs f (N, *event, C) and targets of the data, in float64."""
    outputs, targets = [], []
    with borrowed(model) as module, torch.no_grad():
        for batch in Batches(data, model, device_of(model)):
            f = likelihood.outputs(output_tensor(call(module, batch.inputs)))
            outputs.append(f.double())
            targets.append(likelihood.targets(f, batch.targets))
    return torch.cat(outputs), torch.cat(targets)


@outside_autocast
def best_temperature(f: Tensor, y: Tensor, likelihood: Likelihood) -> float:
    """Return T = e^{−u} where d/du Σ −log p(y | e^u f) = 0, by Newton steps inside a bracket that bisection shrinks.

    The NLL is convex in 1/T, so its slope changes sign once; without a change T is the end of the allowed range.
    """
    low, high = -math.log(HIGHEST), -math.log(LOWEST)
    u = 0.0
    for _ in range(100):
        slope, curvature = _slope(f, y, likelihood, u)
        if slope > 0:
            high = u
        else:
            low = u
        newton = u - slope / curvature if curvature > 0 else low
        following = newton if low < newton < high else (low + high) / 2
        if abs(following - u) < 1e-10:
            break
        u = following
    temperature = math.exp(-u)
    if not 1.01 * LOWEST < temperature < 0.99 * HIGHEST:
        warnings.warn(
            f"the validation NLL has no minimum between temperatures {LOWEST} and {HIGHEST} (it stopped at "
            f"{temperature:.3g}): every item may be right, or none. Use more validation data.",
            stacklevel=3,
        )
    return temperature


def _slope(f: Tensor, y: Tensor, likelihood: Likelihood, u: float) -> tuple[float, float]:
    """Return the first and second derivative of the mean NLL of e^u f with respect to u."""
    with torch.enable_grad():
        log_scale = torch.tensor(u, dtype=torch.float64, device=f.device, requires_grad=True)
        loss = -likelihood.log_prob(log_scale.exp() * f, y).mean()
        (slope,) = torch.autograd.grad(loss, log_scale, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, log_scale)
    if not slope.isfinite():
        raise BadData(f"the validation NLL at temperature {math.exp(-u):.3g} is not finite: check the data")
    return slope.item(), curvature.item()


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer; the CPU for a model without any."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
