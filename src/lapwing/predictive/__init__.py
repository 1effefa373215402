"""From weights to outputs to targets."""

from lapwing.predictive.function import FunctionDistribution, GaussianFunction, MixtureFunction, SampledFunction
from lapwing.predictive.prediction import Prediction, predict_targets

__all__ = [
    "FunctionDistribution",
    "GaussianFunction",
    "MixtureFunction",
    "Prediction",
    "SampledFunction",
    "predict_targets",
]
