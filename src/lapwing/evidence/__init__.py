"""The evidence, and choosing priors, noise, temperature and models by it or by held-out data."""

from lapwing.evidence.evidence import Comparison, compare, effective_parameters, evidence_of, log_evidence, stationarity
from lapwing.evidence.heldout import Score, collect, linked
from lapwing.evidence.maximize import tune_evidence, tune_grid
from lapwing.evidence.search import Candidates, default_learn, nodes_for, search, tune_validation
from lapwing.evidence.settings import (
    Groups,
    Rule,
    Setting,
    Trials,
    Tuning,
    check_logit_temperature,
    lowest,
    partition,
    resolve_rule,
    widest,
)

__all__ = [
    "Candidates", "Comparison", "Groups", "Rule", "Score", "Setting", "Trials", "Tuning", "check_logit_temperature",
    "collect", "compare", "default_learn", "effective_parameters", "evidence_of", "linked", "log_evidence", "lowest",
    "nodes_for", "partition", "resolve_rule", "search", "stationarity", "tune_evidence", "tune_grid", "tune_validation",
    "widest",
]  # fmt: skip
