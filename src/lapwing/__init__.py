"""Lapwing: a posterior over the weights of any trained PyTorch network, by the Laplace approximation.

Curvature × Prior × Likelihood → Posterior → Prediction.
"""

from lapwing.errors import (
    BadData,
    CorruptFile,
    IncompatiblePrior,
    LapwingError,
    NotConverged,
    NotPositiveDefinite,
    NotReiterable,
    TooLarge,
    UnsupportedModel,
    UnsupportedOperation,
    VersionMismatch,
)
from lapwing.evaluation import metrics

__version__ = "0.1.0.dev0"

__all__ = [
    "BadData",
    "CorruptFile",
    "IncompatiblePrior",
    "LapwingError",
    "NotConverged",
    "NotPositiveDefinite",
    "NotReiterable",
    "TooLarge",
    "UnsupportedModel",
    "UnsupportedOperation",
    "VersionMismatch",
    "metrics",
]
