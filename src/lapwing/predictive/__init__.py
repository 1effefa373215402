"""From weights to outputs to targets: distributions of f, links to y, and predictions."""

from lapwing.predictive import classes, values  # noqa: F401  the kinds of predictions
from lapwing.predictive.function import FunctionDistribution, GaussianFunction
from lapwing.predictive.links import ClassLaw, predict_targets, register_link
from lapwing.predictive.mixture import MixtureFunction
from lapwing.predictive.prediction import Prediction
from lapwing.predictive.sampled import SampledFunction

__all__ = [
    "ClassLaw", "FunctionDistribution", "GaussianFunction", "MixtureFunction", "Prediction", "SampledFunction",
    "predict_targets", "register_link",
]  # fmt: skip
