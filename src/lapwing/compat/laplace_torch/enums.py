"""The choices of laplace-torch by name. Each is a string, so that "glm" and PredType.GLM are equal."""

from enum import StrEnum


class SubsetOfWeights(StrEnum):
    """Which weights have a posterior."""

    ALL = "all"
    LAST_LAYER = "last_layer"
    SUBNETWORK = "subnetwork"


class HessianStructure(StrEnum):
    """The form in which the curvature is stored."""

    FULL = "full"
    KRON = "kron"
    DIAG = "diag"
    LOWRANK = "lowrank"
    GP = "gp"


class FunctionalApproximation(StrEnum):
    """How a posterior in function space is approximated; this layer has only "sod", a subset of data."""

    SOD = "sod"
    NYSTROM = "nystrom"
    VARIATIONAL = "variational"


class Likelihood(StrEnum):
    """What the outputs of the network mean."""

    REGRESSION = "regression"
    CLASSIFICATION = "classification"
    REWARD_MODELING = "reward_modeling"


class PredType(StrEnum):
    """How predictions are made: linearized ("glm", "gp") or by networks with sampled weights ("nn")."""

    GLM = "glm"
    NN = "nn"
    GP = "gp"


class LinkApprox(StrEnum):
    """How uncertain logits become probabilities."""

    MC = "mc"
    PROBIT = "probit"
    BRIDGE = "bridge"
    BRIDGE_NORM = "bridge_norm"


class TuningMethod(StrEnum):
    """How the prior precision is chosen."""

    MARGLIK = "marglik"
    GRIDSEARCH = "gridsearch"


class PriorStructure(StrEnum):
    """How many prior precisions there are: one, one per parameter tensor, or one per weight."""

    SCALAR = "scalar"
    DIAG = "diag"
    LAYERWISE = "layerwise"
