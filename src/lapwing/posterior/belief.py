"""A belief: the curvature of the data with a prior, a likelihood and a temperature, which determine the posterior."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature import Curvature
from lapwing.errors import BadData, UnsupportedOperation, brief
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.linalg import PSD, Diagonal
from lapwing.posterior.posterior import Posterior, factored_precision, make_posterior
from lapwing.posterior.prior import Prior, resolve_prior


@dataclass(frozen=True, eq=False)
class Tempered:
    """How often the data count: the posterior precision is T·H/φ + Π, or T·(H/φ + Π) with `prior=True`.

    T > 1 sharpens, T = 1 is Bayes, T → 0 is the prior. T is the same as a number of pseudo-observations per datum
    (laplace-torch's temperature is 1/T). Generalized Laplace, Eq. 21–24; the fully tempered form is Eq. 3.

        lapwing.fit(model, data, "classification", temperature=Tempered(0.5, prior=True))
    """

    T: float | Tensor = 1.0
    prior: bool = False

    def __post_init__(self) -> None:
        value = torch.as_tensor(self.T).detach()
        if value.ndim:
            raise BadData(f"temperature must be a number or a 0-d tensor, got shape {tuple(value.shape)}")
        lowest = 0.0 < value.item() if self.prior else 0.0 <= value.item()
        if not (lowest and torch.isfinite(value)):
            raise BadData(f"temperature must be {'positive' if self.prior else 'at least 0'}, got {value.item()}")

    def likelihood_scale(self, dispersion: Tensor, power: int = 1) -> Tensor:
        """T/φ^power: what multiplies the stored curvature, 0-d; gradients flow into T and φ."""
        return torch.as_tensor(self.T, dtype=dispersion.dtype, device=dispersion.device) / dispersion**power

    @property
    def prior_scale(self) -> float | Tensor:
        """The factor of the prior precision: T if the prior is tempered, else 1."""
        return self.T if self.prior else 1.0

    @property
    def _number(self) -> float:
        return self.T.item() if isinstance(self.T, Tensor) else float(self.T)

    @property
    def is_bayes(self) -> bool:
        """Whether T is 1, so that the evidence is that of the model itself."""
        return self._number == 1.0

    def __repr__(self) -> str:
        return f"Tempered({self._number:.6g}{', prior=True' if self.prior else ''})"


def resolve_temperature(temperature: float | Tensor | Tempered) -> Tempered:
    """Return what `temperature=` means: a number or a `Tempered`."""
    if isinstance(temperature, Tempered):
        return temperature
    if isinstance(temperature, bool) or not isinstance(temperature, int | float | Tensor):
        raise BadData(f"temperature must be a number, a 0-d tensor or Tempered(T), not {type(temperature).__name__}")
    return Tempered(temperature)


@dataclass(frozen=True, eq=False)
class Belief:
    """Everything that determines the posterior N(θ̂, (T/φ·H + Π)⁻¹): what evidence, tuning and comparison take.

    `mean` is θ̂ (P,), by default the weights that the curvature was computed at. `logit_temperature` divides logits
    before they become probabilities. `damped` asks for Ritter's factored damping of Kronecker blocks, `repair` for the
    smallest increase of the prior precision that makes the posterior positive definite. Change one with
    `dataclasses.replace`; no data are read.

        belief = Belief.of(la.curvature, 0.1, la.likelihood)
        belief.posterior.variance
    """

    __repr__ = brief

    curvature: Curvature
    prior: Prior
    likelihood: Likelihood
    temperature: Tempered = field(default_factory=Tempered)
    logit_temperature: float = 1.0
    damped: bool = False
    repair: bool = False
    mean: Tensor | None = None

    @classmethod
    def of(
        cls,
        curvature: Curvature,
        prior: Any,
        likelihood: str | Likelihood,
        temperature: float | Tensor | Tempered = 1.0,
        mean: Tensor | None = None,
    ) -> Belief:
        """Build a belief from what `lapwing.fit` accepts; `prior` may also be a pair (mean, precision matrix)."""
        resolved = isinstance(prior, tuple) and len(prior) == 2 and isinstance(prior[1], PSD)
        chosen = Prior(prior[1], prior[0]) if resolved else resolve_prior(prior)
        family, tempered = resolve_likelihood(likelihood), resolve_temperature(temperature)
        return cls(curvature, chosen, family, tempered, mean=mean)

    @cached_property
    def weights(self) -> Tensor:
        """θ̂ (P,), the mean of the posterior."""
        if self.mean is not None:
            return self.mean
        if self.curvature.params is None:
            raise UnsupportedOperation("this curvature does not know the weights it was computed at: pass mean=")
        return self.curvature.params.flat

    @cached_property
    def resolved_prior(self) -> tuple[Tensor, PSD]:
        """The prior mean μ₀ (P,) and the prior precision Π as a matrix, in float64."""
        params = self.curvature.params
        if params is None:
            return self.prior.resolve((), (len(self.weights),), torch.float64, self.weights.device)
        return self.prior.resolve(params.names, params.sizes, torch.float64, params.device, index=params.index)

    @cached_property
    def prior_in_use(self) -> tuple[Tensor, PSD]:
        """The resolved prior, its precision raised by what `repair` had to add."""
        mean, matrix = self.resolved_prior
        increase = self.posterior.increase if self.repair and not self.damped else 0.0
        if not increase:
            return mean, matrix
        added = torch.full((len(self.weights),), increase, dtype=torch.float64, device=self.weights.device)
        return mean, matrix + Diagonal(added / self.temperature.prior_scale)

    @property
    def scale(self) -> Tensor:
        """T/φ^k, which multiplies the stored curvature; 0-d, gradients flow into T and φ."""
        return self.temperature.likelihood_scale(self.likelihood.common_factor, self.curvature.dispersion_power)

    @property
    def power(self) -> int:
        """The power k of a learned dispersion in `scale`: 0 where the curvature stays as it was at the fit."""
        return self.curvature.dispersion_power if self.likelihood.scales_curvature else 0

    @property
    def split(self) -> float | None:
        """√n for factored damping, None without it."""
        return max(self.curvature.n_data, 1.0) ** 0.5 if self.damped else None

    @cached_property
    def posterior(self) -> Posterior:
        """N(θ̂, Σ). Raises `NotPositiveDefinite` where there is none and `repair` is off."""
        prior = self.resolved_prior[1]
        if self.temperature.prior:
            prior = prior.scale(self.temperature.prior_scale)
        if self.damped:
            precision = factored_precision(self.curvature.matrix, self.scale, prior, split=self.split or 1.0)
            return Posterior(self.weights, precision)
        return make_posterior(self.weights, self.curvature.matrix, self.scale, prior, repair=self.repair)

    def require_posterior(self) -> None:
        """Raise if there is no posterior; no work where it certainly exists or where the prior carries gradients."""
        mean, matrix = self.resolved_prior
        tau = matrix.constant() if matrix.expanded else None
        certain = tau is not None and bool(tau > 0) and not self.repair and self.curvature.factor.definite
        if not (certain or mean.requires_grad or matrix.diagonal().requires_grad):
            _ = self.posterior

    @property
    def log_likelihood(self) -> Tensor:
        """Σ log p(y | f̂) of the training data under the current noise."""
        return self.likelihood.log_likelihood(self.curvature.statistics)

    @property
    def offset(self) -> Tensor:
        """θ̂ − μ₀ (P,), float64."""
        return self.weights.double() - self.resolved_prior[0].double()

    @property
    def log_joint(self) -> Tensor:
        """T·log p(D|θ̂) − ½(θ̂−μ₀)ᵀΠ(θ̂−μ₀)."""
        offset, scale = self.offset, self.temperature.prior_scale
        distance = (offset * self.prior_in_use[1].matvec(offset)).sum()
        return self.temperature.T * self.log_likelihood - 0.5 * scale * distance
