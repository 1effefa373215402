"""The log evidence log p(D|M) of the Laplace approximation, and what follows from it."""

from typing import Any

from torch import Tensor

from lapwing.curvature import Curvature
from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD
from lapwing.linalg.rows import added
from lapwing.linalg.spectrum import PIECE
from lapwing.model.calls import outside_inference
from lapwing.posterior import Belief, Tempered


@outside_inference
def log_evidence(
    curvature: Curvature,
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
    return evidence_of(Belief.of(curvature, prior, likelihood, temperature, mean), at)


def evidence_of(belief: Belief, at: str = "map") -> Tensor:
    """Return the log evidence of a belief; see `log_evidence`. Damping is left out: the sum T/φ·H + Π is exact."""
    if at not in ("map", "linear-mode"):
        raise ValueError(f"at={at!r}: use 'map' (θ̂ as it is) or 'linear-mode' (the mode of the linearized model)")
    center, matrix = belief.prior_in_use
    precision = _scaled(matrix, belief.temperature.prior_scale)
    bracket = _scaled(belief.curvature.matrix, belief.scale).logdet_ratio(precision)
    fit = belief.temperature.T * belief.log_likelihood
    value = fit - 0.5 * _distance(belief.weights, center, precision) - 0.5 * bracket
    return value if at == "map" else value + _gain(belief)


def _distance(mean: Tensor, center: Tensor, precision: PSD) -> Tensor:
    """(θ̂−μ₀)ᵀΠ(θ̂−μ₀). Where μ₀ and Π are one number each, sum over pieces that stay in the processor's cache."""
    center = center.expand(mean.shape) if center.ndim == 0 else center
    single = center.stride(0) == 0 and not (center.requires_grad and center.is_leaf)
    constant = precision.constant() if precision.expanded and single else None
    if constant is not None:
        pieces = [(few.double() - center[0].double()).square().sum() for few in mean.split(PIECE)]
        return constant * added(pieces)
    offset = mean.double() - center.double()
    return (offset * precision.matvec(offset).double()).sum()


def _scaled(matrix: PSD, c: Tensor | float) -> PSD:
    """Multiply by c; return the matrix itself for c = 1, so that what it has cached is used."""
    fixed = not (isinstance(c, Tensor) and c.requires_grad)
    return matrix if fixed and float(c) == 1 else matrix.scale(c)


def stationarity(belief: Belief) -> float:
    """½gᵀΣg in nats: what the log joint would gain by moving from θ̂ to the mode of the linearized model.

    Well below one, θ̂ is a mode for the purposes of the evidence; far above, use `at="linear-mode"`.
    """
    return _gain(belief).item()


def effective_parameters(belief: Belief) -> float:
    """γ = tr(c·H (c·H + Π)⁻¹) = Σ c e/(c e + τ): how many directions the data, not the prior, determine."""
    prior = belief.prior_in_use[1].scale(belief.temperature.prior_scale)
    return belief.curvature.matrix.effective_directions(belief.scale.detach(), prior).item()


def _gain(belief: Belief) -> Tensor:
    """½gᵀΣg with g = T/φ·∇ − Π(θ̂−μ₀)."""
    curvature = belief.curvature
    if curvature.gradient is None:
        raise UnsupportedOperation(
            "this curvature holds no gradient of the log-likelihood, which the mode of the linearized model needs; fit "
            "again with a version and structure that store it, or use at='map'"
        )
    precision = belief.prior_in_use[1].scale(belief.temperature.prior_scale)
    factor = belief.temperature.likelihood_scale(belief.likelihood.common_factor)
    gradient = factor * curvature.gradient.double() - precision.matvec(belief.offset).double()
    posterior = curvature.matrix.scale(belief.scale) + precision
    return 0.5 * (gradient * posterior.solve(gradient).double()).sum()
