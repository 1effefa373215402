"""Regression with a known noise, for tests whose truth assumes one."""

from typing import Any

from lapwing import Gaussian


def unit_noise(likelihood: Any) -> Any:
    """Replace "regression", whose noise a fit would estimate, by a noise of 1; other likelihoods stay as they are."""
    return Gaussian(1.0) if isinstance(likelihood, str) and likelihood == "regression" else likelihood
