"""Pictures of predictions. Each function takes tensors and returns a matplotlib `Figure` that nobody else holds.

They need the extra `report`: pip install 'lapwing-torch[report]'. docs/report.md shows each of them.

Example:
    >>> figure = plots.reliability({"MAP": (confidence, correct)})
    >>> figure.savefig("reliability.png")
"""

from lapwing.plots.calibration import coverage, reliability, risk_coverage
from lapwing.plots.distributions import ecdf, entropies, separation, uncertain_images
from lapwing.plots.outside import roc, scores
from lapwing.plots.regression import band, parity, residuals
from lapwing.plots.tuning import evidence, surface, temperature

__all__ = [
    "band",
    "coverage",
    "ecdf",
    "entropies",
    "evidence",
    "parity",
    "reliability",
    "residuals",
    "risk_coverage",
    "roc",
    "scores",
    "separation",
    "surface",
    "temperature",
    "uncertain_images",
]
