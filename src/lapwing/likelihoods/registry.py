"""Names of likelihoods, for the front door and for files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lapwing.errors import BadData, CorruptFile
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.bradley_terry import BradleyTerry
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian
from lapwing.likelihoods.likelihood import Likelihood
from lapwing.likelihoods.poisson import Poisson

NAMES: dict[str, Callable[[], Likelihood]] = {
    "classification": Categorical,
    "regression": Gaussian,
    "binary": Bernoulli,
    "counts": Poisson,
    "heteroscedastic": HeteroscedasticGaussian,
    "preference": BradleyTerry,
}
FAMILIES: dict[str, Callable[..., Likelihood]] = {
    family.__name__: family
    for family in (Categorical, Gaussian, Bernoulli, Poisson, HeteroscedasticGaussian, BradleyTerry)
}


def resolve_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood of this name ("classification", "regression", ...), or the object itself."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str) or likelihood not in NAMES:
        names = ", ".join(f'"{name}"' for name in NAMES)
        raise BadData(f"likelihood={likelihood!r}: use one of {names}, or an object such as Gaussian(noise=0.1).")
    return NAMES[likelihood]()


def likelihood_from_spec(spec: dict[str, Any], likelihood: Likelihood | None = None) -> Likelihood:
    """The likelihood a file describes. A user's own is not in the file: the caller passes it, and names must agree."""
    family = spec.get("family")
    if spec.get("own"):
        if likelihood is None:
            raise BadData(
                f"the file was made with your own likelihood {family!r}: pass it, load(..., likelihood={family}())."
            )
        if type(likelihood).__qualname__ != family:
            raise BadData(f"the file was made with likelihood {family!r}, not {type(likelihood).__qualname__!r}.")
        if likelihood.spec() != spec:
            options = likelihood.spec().get("options")
            raise BadData(f"the file was made with {family}({spec.get('options')}), not with {family}({options}).")
        return likelihood
    if family not in FAMILIES:
        raise CorruptFile(f"unknown likelihood {family!r} in the file; known: {', '.join(FAMILIES)}.")
    try:
        stored = FAMILIES[family](**{key: value for key, value in spec.items() if key not in ("family", "own")})
    except (BadData, TypeError, ValueError, RuntimeError) as error:
        raise CorruptFile(f"the file describes an impossible likelihood {family!r}: {error}") from error
    if likelihood is not None and likelihood.spec() != spec:
        raise BadData(
            f"the file was made with {spec}, not with {likelihood.spec()}. Load first, then .replace(likelihood=...)."
        )
    return stored
