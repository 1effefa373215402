"""The evidence, and choosing priors, noise, temperature and models by it or by held-out data."""

from lapwing.evidence.by_evidence import tune_evidence
from lapwing.evidence.evidence import effective_parameters, log_evidence, stationarity
from lapwing.evidence.groups import Groups
from lapwing.evidence.tuning import Rule, Setting, Tuning, lowest, widest

__all__ = [
    "Groups",
    "Rule",
    "Setting",
    "Tuning",
    "effective_parameters",
    "log_evidence",
    "lowest",
    "stationarity",
    "tune_evidence",
    "widest",
]
