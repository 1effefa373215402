"""Priors, tempering, the belief that they form with a curvature, and the Gaussian posterior over the weights."""

from lapwing.posterior.posterior import (
    Belief,
    Posterior,
    Tempered,
    factored_precision,
    make_posterior,
    resolve_temperature,
)
from lapwing.posterior.prior import Prior, resolve_prior

__all__ = [
    "Belief", "Posterior", "Prior", "Tempered", "factored_precision", "make_posterior", "resolve_prior",
    "resolve_temperature",
]  # fmt: skip
