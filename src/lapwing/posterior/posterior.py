"""The Gaussian posterior N(θ̂, (T/φ·H + Π)⁻¹) over the selected weights."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import (
    IncompatiblePrior,
    NotPositiveDefinite,
    TooLarge,
    UnsupportedOperation,
    brief,
    require_generator,
)
from lapwing.linalg import PSD, Diagonal
from lapwing.model.module import outside_autocast

DENSE_BYTES = 2 * 1024**3


@dataclass(frozen=True, eq=False)
class Posterior:
    """N(mean, precision⁻¹) over the selected weights.

    `increase` is what `make_posterior(repair=True)` had to add to the prior precision.

        draws = la.posterior.sample(10)  # (10, P)
        la.posterior.log_prob(draws)
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
        """P, the number of selected weights."""
        return self.precision.size

    @outside_autocast
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n weight vectors as rows, (n, P)."""
        require_generator(generator, self.mean.device)
        return self.mean + self.precision.sample(n, generator=generator)

    @outside_autocast
    def log_prob(self, theta: Tensor) -> Tensor:
        """Return the log-density at weights (*batch, P), as (*batch)."""
        offset = theta - self.mean
        distance = (offset * self.precision.matvec(offset)).sum(-1)
        return 0.5 * (self.precision.logdet() - distance - self.size * math.log(2 * math.pi))

    @cached_property
    @outside_autocast
    def variance(self) -> Tensor:
        """Marginal variances, (P,)."""
        return self.precision.inverse_diagonal()

    @outside_autocast
    def covariance(self, memory: int = DENSE_BYTES) -> Tensor:
        """Return the dense covariance (P, P); `TooLarge` if it and a working copy need more than `memory` bytes."""
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
