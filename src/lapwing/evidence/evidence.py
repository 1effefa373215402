"""The log evidence log p(D|M) of the Laplace approximation, and what follows from it."""

from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.linalg import PSD
from lapwing.linalg.logs import PIECE
from lapwing.linalg.rows import added
from lapwing.model import Params
from lapwing.model.module import outside_inference
from lapwing.posterior import Tempered, resolve_prior, resolve_temperature

ResolvedPrior = tuple[Tensor, PSD]
"""μ₀ (P,) and Π, as `Prior.resolve` gives them."""


class FittedCurvature(Protocol):
    """What the evidence reads of a `Curvature`."""

    @property
    def matrix(self) -> PSD: ...
    @property
    def statistics(self) -> Tensor: ...
    @property
    def dispersion_power(self) -> int: ...
    @property
    def gradient(self) -> Tensor | None: ...


@outside_inference
def log_evidence(
    curvature: FittedCurvature,
    prior: Any,
    likelihood: str | Likelihood,
    *,
    mean: Tensor | None = None,
    temperature: float | Tensor | Tempered = 1.0,
    at: str = "map",
) -> Tensor:
    """T·log p(D|θ̂) − ½(θ̂−μ₀)ᵀΠ(θ̂−μ₀) − ½[log|T/φ·H + Π| − log|Π|], a float64 scalar.

    `prior` is what `lapwing.fit` takes (a scalar, a dict, a tensor, a `Prior`) or its mean and precision matrix; `mean`
    is θ̂ (P,), by default the weights that the curvature was computed at. Differentiable in prior precisions, prior
    mean, noise and temperature; exact for a linear-Gaussian model at its mode. Away from the mode `at="linear-mode"`
    adds ½gᵀΣg, g the gradient of the log joint at θ̂: the value at the mode of the linearized model, exact for a
    linear-Gaussian model at any θ̂.

    Diagonal, block-diagonal and EKFAC curvature give lower bounds of the full GGN's evidence; KFAC does not. At T ≠ 1
    this is the evidence of the tempered likelihood p(D|θ)^T, which cannot choose T. `Tempered(T, prior=True)` has the
    prior N(μ₀, (TΠ)⁻¹).

        lapwing.log_evidence(la.curvature, 1.0, la.likelihood)
    """
    if at not in ("map", "linear-mode"):
        raise ValueError(f"at={at!r}: use 'map' (θ̂ as it is) or 'linear-mode' (the mode of the linearized model)")
    tempered, likelihood = resolve_temperature(temperature), resolve_likelihood(likelihood)
    center, precision = prior if _is_resolved(prior) else _resolved(curvature, prior)
    mean = _weights(curvature).flat if mean is None else mean
    precision = _scaled(precision, tempered.prior_scale)
    scale = tempered.likelihood_scale(likelihood.dispersion, curvature.dispersion_power)
    fit = tempered.T * likelihood.log_likelihood(curvature.statistics)
    bracket = _scaled(curvature.matrix, scale).logdet_ratio(precision)
    value = fit - 0.5 * _distance(mean, center, precision) - 0.5 * bracket
    if at == "map":
        return value
    return value + _gain(curvature, scale, precision, mean.double() - center.double(), tempered, likelihood)


def _distance(mean: Tensor, center: Tensor, precision: PSD) -> Tensor:
    """(θ̂−μ₀)ᵀΠ(θ̂−μ₀); where both are one number for all weights, of a few at a time, which stay in the cache."""
    center = center.expand(mean.shape) if center.ndim == 0 else center
    single = center.stride(0) == 0 and not (center.requires_grad and center.is_leaf)
    constant = precision.constant() if precision.expanded and single else None
    if constant is not None:
        pieces = [(few.double() - center[0].double()).square().sum() for few in mean.split(PIECE)]
        return constant * added(pieces)
    offset = mean.double() - center.double()
    return (offset * precision.matvec(offset).double()).sum()


def _scaled(matrix: PSD, c: Tensor | float) -> PSD:
    """c times the matrix; the matrix itself for c = 1, with what it has cached."""
    fixed = not (isinstance(c, Tensor) and c.requires_grad)
    return matrix if fixed and float(c) == 1 else matrix.scale(c)


def _is_resolved(prior: Any) -> bool:
    return isinstance(prior, tuple) and len(prior) == 2 and isinstance(prior[1], PSD)


def _weights(curvature: FittedCurvature) -> Params:
    params: Params | None = getattr(curvature, "params", None)
    if params is None:
        raise UnsupportedOperation("this curvature does not know the weights it was computed at: pass mean=")
    return params


def _resolved(curvature: FittedCurvature, prior: Any) -> ResolvedPrior:
    params = _weights(curvature)
    return resolve_prior(prior).resolve(params.names, params.sizes, torch.float64, params.device, index=params.index)


def stationarity(
    curvature: FittedCurvature,
    prior: ResolvedPrior,
    likelihood: Likelihood,
    *,
    mean: Tensor,
    temperature: float | Tensor | Tempered = 1.0,
) -> float:
    """½gᵀΣg in nats: what the log joint would gain by moving from θ̂ to the mode of the linearized model.

    Well below one, θ̂ is a mode for the purposes of the evidence; far above, use `at="linear-mode"`.
    """
    tempered = resolve_temperature(temperature)
    center, precision = prior
    precision = precision.scale(tempered.prior_scale)
    scale = tempered.likelihood_scale(likelihood.dispersion, curvature.dispersion_power)
    offset = mean.double() - center.double()
    return _gain(curvature, scale, precision, offset, tempered, likelihood).item()


def effective_parameters(
    curvature: FittedCurvature,
    prior: ResolvedPrior,
    likelihood: Likelihood,
    *,
    temperature: float | Tensor | Tempered = 1.0,
) -> float:
    """γ = tr(c·H (c·H + Π)⁻¹) = Σ c e/(c e + τ): how many directions the data, not the prior, determine."""
    tempered = resolve_temperature(temperature)
    scale = tempered.likelihood_scale(likelihood.dispersion.detach(), curvature.dispersion_power)
    return curvature.matrix.effective_directions(scale.detach(), prior[1].scale(tempered.prior_scale)).item()


def _gain(
    curvature: FittedCurvature,
    scale: Tensor,
    precision: PSD,
    offset: Tensor,
    tempered: Tempered,
    likelihood: Likelihood,
) -> Tensor:
    """½gᵀΣg with g = T/φ·∇ − Π(θ̂−μ₀)."""
    if curvature.gradient is None:
        raise UnsupportedOperation(
            "this curvature holds no gradient of the log-likelihood, which the mode of the linearized model needs; fit "
            "again with a version and structure that store it, or use at='map'"
        )
    pull = precision.matvec(offset).double()
    factor = tempered.likelihood_scale(likelihood.dispersion)
    gradient = factor * curvature.gradient.double() - pull
    posterior = curvature.matrix.scale(scale) + precision
    return 0.5 * (gradient * posterior.solve(gradient).double()).sum()
