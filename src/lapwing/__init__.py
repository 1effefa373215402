# ruff: noqa: E402
"""Lapwing: a posterior over the weights of any trained PyTorch network, by the Laplace approximation.

Curvature × Prior × Likelihood → Posterior → Prediction.
"""

import gc

_collecting = gc.isenabled()
gc.disable()  # a full collection of all that torch has made would take a third of this import

from lapwing import attacks, baselines, metrics, plots
from lapwing.baselines.temperature import TemperatureScaled
from lapwing.curvature import (
    EKFAC,
    GGN,
    BlockDiag,
    Diag,
    EmpiricalFisher,
    Full,
    Functional,
    Hessian,
    Kron,
    LowRank,
    MatrixFree,
    MCFisher,
    Nystrom,
)
from lapwing.errors import (
    BadData,
    CannotWrite,
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
from lapwing.evaluation.evaluate import evaluate
from lapwing.evaluation.report import Report
from lapwing.evidence import compare, log_evidence
from lapwing.evidence.online import Online
from lapwing.extras.invariances import Affine, learn_invariances
from lapwing.extras.kfra import KFRA
from lapwing.extras.pruning import Pruned, prune, relevance
from lapwing.extras.valla import VaLLA
from lapwing.fitting import fit, load
from lapwing.laplace import Laplace
from lapwing.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from lapwing.model import subnetwork
from lapwing.posterior import Posterior, Prior, Tempered
from lapwing.predictive import Prediction
from lapwing.predictive.distilled import Distilled
from lapwing.predictive.mixture import Mixture
from lapwing.storage import register
from lapwing.training import Trained, train

if _collecting:
    gc.enable()

__version__ = "0.1.0.dev0"

__all__ = [
    "Affine", "BadData", "Bernoulli", "BlockDiag", "BradleyTerry", "CannotWrite", "Categorical", "CorruptFile", "Diag",
    "Distilled", "EKFAC", "EmpiricalFisher", "Full", "Functional", "GGN", "Gaussian", "Hessian",
    "HeteroscedasticGaussian", "IncompatiblePrior", "KFRA", "Kron", "Laplace", "LapwingError", "Likelihood", "LowRank",
    "MCFisher", "MatrixFree", "Mixture", "NotConverged", "NotPositiveDefinite", "NotReiterable", "Nystrom", "Online",
    "Poisson", "Posterior", "Prediction", "Prior", "Pruned", "Report", "TemperatureScaled", "Tempered", "TooLarge",
    "Trained", "UnsupportedModel", "UnsupportedOperation", "VaLLA", "VersionMismatch", "attacks", "baselines",
    "compare", "evaluate", "fit", "learn_invariances", "load", "log_evidence", "metrics", "plots", "prune", "register",
    "relevance", "subnetwork", "train",
]  # fmt: skip
