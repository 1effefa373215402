"""The evidence, and choosing priors, noise, temperature and models by it or by held-out data."""

from lapwing.evidence.by_evidence import tune_evidence
from lapwing.evidence.by_grid import tune_grid
from lapwing.evidence.by_loo import tune_loo
from lapwing.evidence.by_validation import nodes_for, search, tune_validation
from lapwing.evidence.candidates import Candidates, default_learn
from lapwing.evidence.compare import Comparison, compare
from lapwing.evidence.evidence import effective_parameters, evidence_of, log_evidence, stationarity
from lapwing.evidence.groups import Groups
from lapwing.evidence.scoring import Score, check_logit_temperature, linked
from lapwing.evidence.shown import keep_if_shown
from lapwing.evidence.sweep import collect
from lapwing.evidence.tuning import Rule, Setting, Trials, Tuning, lowest, resolve_rule, widest
from lapwing.evidence.variational import tune_bound, variational_bound

__all__ = [
    "Candidates",
    "Comparison",
    "Groups",
    "Rule",
    "Score",
    "Setting",
    "Trials",
    "Tuning",
    "check_logit_temperature",
    "collect",
    "compare",
    "default_learn",
    "effective_parameters",
    "evidence_of",
    "keep_if_shown",
    "linked",
    "log_evidence",
    "lowest",
    "nodes_for",
    "resolve_rule",
    "search",
    "stationarity",
    "tune_bound",
    "tune_evidence",
    "tune_grid",
    "tune_loo",
    "tune_validation",
    "variational_bound",
    "widest",
]
