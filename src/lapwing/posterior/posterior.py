"""The Gaussian posterior N(θ̂, (T/φ·H + Π)⁻¹) over the selected weights, and the `Belief` that determines it.

A belief is the curvature H of the data with a prior precision Π, a likelihood of dispersion φ and a temperature T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature import Curvature
from lapwing.errors import (
    BadData,
    IncompatiblePrior,
    NotPositiveDefinite,
    TooLarge,
    UnsupportedOperation,
    brief,
    require_generator,
)
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.linalg import PSD, Diagonal
from lapwing.model.calls import outside_autocast
from lapwing.posterior.prior import Prior, resolve_prior

DENSE_BYTES = 2 * 1024**3


@dataclass(frozen=True, eq=False)
class Posterior:
    """N(mean, precision⁻¹) over the selected weights.

    `increase` is what `make_posterior(repair=True)` had to add to the prior precision.

    Examples:
        >>> draws = la.posterior.sample(10)
        >>> la.posterior.log_prob(draws).shape
        torch.Size([10])
    """

    __repr__ = brief

    mean: Tensor
    precision: PSD
    increase: float = 0.0

    def __post_init__(self) -> None:
        if tuple(self.mean.shape) != (self.precision.size,):
            raise ValueError(f"expected a mean of shape ({self.precision.size},), got {tuple(self.mean.shape)}")

    @property
    def size(self) -> int:
        """P, the number of selected weights.

        Examples:
            >>> la.posterior.size
            131
        """
        return self.precision.size

    @outside_autocast
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n weight vectors as rows, (n, P).

        Examples:
            >>> la.posterior.sample(10, torch.Generator().manual_seed(0)).shape
            torch.Size([10, 131])
        """
        require_generator(generator, self.mean.device)
        return self.mean + self.precision.sample(n, generator=generator)

    @outside_autocast
    def log_prob(self, theta: Tensor) -> Tensor:
        """Return the log-density at weights (*batch, P), as (*batch).

        Examples:
            >>> la.posterior.log_prob(la.posterior.mean).shape
            torch.Size([])
        """
        offset = theta - self.mean
        distance = (offset * self.precision.matvec(offset)).sum(-1)
        return 0.5 * (self.precision.logdet() - distance - self.size * math.log(2 * math.pi))

    @cached_property
    @outside_autocast
    def variance(self) -> Tensor:
        """Marginal variances, (P,).

        Examples:
            >>> la.posterior.variance.shape
            torch.Size([131])
        """
        return self.precision.inverse_diagonal()

    @outside_autocast
    def covariance(self, memory: int = DENSE_BYTES) -> Tensor:
        """Return the dense covariance (P, P); `TooLarge` if it and a working copy need more than `memory` bytes.

        Examples:
            >>> torch.allclose(la.posterior.covariance().diagonal(), la.posterior.variance)
            True
        """
        needed = 2 * self.size**2 * self.mean.element_size()
        if needed > memory:
            raise TooLarge(
                f"the covariance of {self.size} weights needs {needed / 1e9:.3g} GB of the allowed {memory / 1e9:.3g}. "
                "Use .variance, .sample(n) or .precision.solve(v), select fewer weights, or raise memory="
            )
        eye = torch.eye(self.size, dtype=self.mean.dtype, device=self.mean.device)
        dense = self.precision.solve(eye)
        return 0.5 * (dense + dense.mT)


def make_posterior(
    mean: Tensor, curvature: PSD, scale: float | Tensor, prior: PSD, *, repair: bool = False
) -> Posterior:
    """Return N(mean, (scale·curvature + prior)⁻¹), checked to be positive definite.

    A float32 or Monte Carlo estimate, or an exact Hessian, may leave an eigenvalue at or below zero: that raises
    `NotPositiveDefinite`. With `repair` the smallest sufficient amount is added to the prior precision instead, and
    kept as `Posterior.increase`.
    """
    precision = curvature.scale(scale) + prior
    try:
        precision.require_positive_definite()
    except NotPositiveDefinite as error:
        if not repair:
            raise NotPositiveDefinite(
                f"the posterior precision is not positive definite: {error} Or repair it by the smallest sufficient "
                "increase of the prior precision (repair=True)"
            ) from error
        return _repaired(mean, precision)
    return Posterior(mean, precision)


def _repaired(mean: Tensor, precision: PSD) -> Posterior:
    smallest = precision.smallest_eigenvalue().item()
    largest = precision.diagonal().detach().abs().max().item()
    margin = max(1e-6 * abs(smallest), precision.size * torch.finfo(precision.dtype).eps * largest)
    increase = max(0.0, -smallest) + margin
    shift = torch.full((precision.size,), increase, dtype=torch.float64, device=precision.device)
    repaired = precision + Diagonal(shift)
    repaired.require_positive_definite()
    return Posterior(mean, repaired, increase)


def factored_precision(curvature: PSD, scale: float | Tensor, prior: PSD, *, split: float = 1.0) -> PSD:
    """Return scale·curvature + prior with factored damping of every Kronecker block (Ritter et al. 2018, Eq. 9).

    (√c/s·G + √τ I) ⊗ (√c·s·A + √τ I) is never below c·G ⊗ A + τ I, so this is a view for prediction and sampling, and
    the evidence does not use it. `split` = √n gives the paper's scaling where G is a sum and A a mean over n data.
    Needs one precision per block; blocks of another kind add the prior exactly.
    """
    if not curvature.damps:
        raise UnsupportedOperation(
            f"factored damping is for Kronecker curvature (structure='kron'), not {type(curvature).__name__}"
        )
    if not prior.is_diagonal:
        raise IncompatiblePrior("factored damping needs one precision per block, not a matrix; use damping='exact'")
    return curvature.damped(scale, prior, split=split)


@dataclass(frozen=True, eq=False)
class Tempered:
    """A temperature T: the posterior precision is T·H/φ + Π, or T·(H/φ + Π) with `prior=True`.

    Each datum counts T times. T > 1 sharpens the posterior, T = 1 is Bayes, and T → 0 gives the prior
    (laplace-torch's temperature is 1/T). These are Eqs. 21 to 24 of Chen, Yu, Li and Lim, "Generalized Laplace
    Approximation"; with `prior=True` it is their Eq. 3.

    Examples:
        >>> cold = lapwing.fit(model, train_loader, "classification", temperature=lapwing.Tempered(2.0, prior=True))
        >>> warm = cold.replace(temperature=0.5)
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
        """Return T/φ^power, which multiplies the stored curvature, 0-d; gradients flow into T and φ.

        Examples:
            >>> float(lapwing.Tempered(0.5).likelihood_scale(torch.tensor(0.25)))
            2.0
        """
        return torch.as_tensor(self.T, dtype=dispersion.dtype, device=dispersion.device) / dispersion**power

    @property
    def prior_scale(self) -> float | Tensor:
        """The factor of the prior precision: T if the prior is tempered, else 1.

        Examples:
            >>> lapwing.Tempered(0.5).prior_scale, lapwing.Tempered(0.5, prior=True).prior_scale
            (1.0, 0.5)
        """
        return self.T if self.prior else 1.0

    @property
    def _number(self) -> float:
        return self.T.item() if isinstance(self.T, Tensor) else float(self.T)

    @property
    def is_bayes(self) -> bool:
        """Whether T is 1, so that the evidence is that of the model itself.

        Examples:
            >>> lapwing.Tempered(1.0).is_bayes
            True
        """
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

    Examples:
        >>> from lapwing.posterior import Belief
        >>> belief = Belief.of(la.curvature, 0.1, la.likelihood)
        >>> belief.posterior.variance.shape
        torch.Size([131])
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
        return self.temperature.likelihood_scale(self.likelihood.common_factor, self.curvature.factor.dispersion_power)

    @property
    def power(self) -> int:
        """The power k of a learned dispersion in `scale`: 0 where the curvature stays as it was at the fit."""
        return self.curvature.factor.dispersion_power if self.likelihood.scales_curvature else 0

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
