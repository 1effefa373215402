"""Pictures of predictions. Each function takes tensors and returns a matplotlib `Figure` that nobody else holds.

They need the extra `report`: pip install 'lapwing-torch[report]'. docs/report.md shows each of them.

Examples:
    >>> p = la.predict(x)
    >>> figure = plots.reliability({"Laplace": (p.confidence, p.label == y)})
    >>> figure.savefig("reliability.png")
"""

from lapwing.plots.choices import evidence, surface, temperature
from lapwing.plots.targets import band, coverage, parity, reliability, residuals, risk_coverage
from lapwing.plots.uncertainty import ecdf, entropies, roc, scores, separation, uncertain_images

__all__ = [
    "band", "coverage", "ecdf", "entropies", "evidence", "parity", "reliability", "residuals", "risk_coverage", "roc",
    "scores", "separation", "surface", "temperature", "uncertain_images",
]  # fmt: skip
