"""Methods to compare a posterior with. Each has `predict(x) -> Prediction`, and `fit` where it needs data.

Examples:
    >>> scaled = baselines.TemperatureScaled.fit(model, val_loader)
    >>> print(lapwing.evaluate({"Laplace": la, "scaled": scaled}, test_loader).table())
"""

from lapwing.baselines.dropout import MCDropout
from lapwing.baselines.ensemble import DeepEnsemble
from lapwing.baselines.hmc import HMC
from lapwing.baselines.meanfield import MeanField
from lapwing.baselines.swag import SWAG
from lapwing.baselines.temperature import TemperatureScaled

__all__ = ["HMC", "SWAG", "DeepEnsemble", "MCDropout", "MeanField", "TemperatureScaled"]
