"""The distribution of y where f itself is uncertain: p(y) = ∫ p(y | f) p(f) df."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor
from torch.distributions import Distribution, Normal

from lapwing.errors import UnsupportedOperation

_NODES, _RANGE = 256, 12.0
_HALF_LOG_2PI = math.log(2 * math.pi) / 2


class Outputs(Protocol):
    """A Gaussian distribution of f; each part is computed when it is read."""

    @property
    def mean(self) -> Tensor: ...  # (B, *event, C)

    @property
    def variance(self) -> Tensor: ...  # (B, *event, C)

    @property
    def item_covariance(self) -> Tensor: ...  # (B, *event, C, C)


class Marginal(ABC):
    """p(y) for targets y (B, *event, K), or (B, *event) where a target is a single number.

    `mean`, `aleatoric` = E_f[Var(y | f)] and `epistemic` = Var_f[E(y | f)] are for each output, and their sum is the
    variance of y (law of total variance). `log_prob` is for an item, over all its outputs together.
    """

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor | None:
        """Return log p(y), (B, *event), or None where only the laws of single outputs are known."""

    @abstractmethod
    def quantile(self, level: float) -> Tensor:
        """Return y with p(output ≤ y) = level, output by output."""

    @abstractmethod
    def cdf(self, y: Tensor) -> Tensor:
        """Return p(output ≤ y), output by output."""

    def entropy(self) -> Tensor | None:
        """Return the entropy, (B, *event), or None where there is no closed form."""
        return None

    def crps(self, y: Tensor) -> Tensor | None:
        """Return the continuous ranked probability score of each output, or None where there is no closed form."""
        return None


@dataclass(frozen=True, eq=False)
class NormalMarginal(Marginal):
    """y ~ N(mean, C + diag(aleatoric)) with C the covariance of f, read only where there are several outputs."""

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    covariance: Callable[[], Tensor]

    @cached_property
    def _cholesky(self) -> Tensor:
        if self.mean.shape[-1] == 1:
            return (self.aleatoric + self.epistemic).double().sqrt()[..., None]
        factor, failed = torch.linalg.cholesky_ex(
            self.covariance().double() + torch.diag_embed(self.aleatoric.double())
        )
        return torch.where((failed > 0)[..., None, None], torch.nan, factor)

    def _log_root_determinant(self) -> Tensor:
        """Return ½ log|2π(C + noise)|."""
        logs = self._cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return logs + self.mean.shape[-1] * math.log(2 * math.pi) / 2

    def log_prob(self, y: Tensor) -> Tensor:
        error = (y - self.mean).double()[..., None]
        white = torch.linalg.solve_triangular(self._cholesky, error, upper=False)[..., 0]
        return (-white.square().sum(-1) / 2 - self._log_root_determinant()).to(self.mean.dtype)

    def entropy(self) -> Tensor:
        return (self._log_root_determinant() + self.mean.shape[-1] / 2).to(self.mean.dtype)

    def quantile(self, level: float) -> Tensor:
        score = torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).item()
        return self.mean + score * (self.aleatoric + self.epistemic).sqrt()

    def cdf(self, y: Tensor) -> Tensor:
        return torch.special.ndtr((y - self.mean) / (self.aleatoric + self.epistemic).sqrt())

    def crps(self, y: Tensor) -> Tensor:
        return normal_crps(self.mean, (self.aleatoric + self.epistemic).sqrt(), y)


@dataclass(frozen=True, eq=False)
class MixtureMarginal(Marginal):
    """y ~ Σ_q w_q p_q(y). `components` has batch_shape (Q, *shape of y): one law per output.

    `whole`: the Q components are joint over the outputs of an item (they come from draws of f), not one output at a
    time (they come from quadrature). Results are computed in the dtype of the components and have that of `mean`.
    """

    components: Distribution
    log_weights: Tensor  # (Q,)
    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    event_dims: int = 1
    whole: bool = False

    def _log_weights(self, ndim: int) -> Tensor:
        return self.log_weights.reshape((-1,) + (1,) * (ndim - 1))

    def log_prob(self, y: Tensor) -> Tensor | None:
        if self.event_dims and not self.whole and y.shape[-1] > 1:
            return None
        parts = self.components.log_prob(y.to(self.log_weights.dtype))
        parts = parts.sum(-1) if self.event_dims else parts
        return (parts + self._log_weights(parts.ndim)).logsumexp(0).to(self.mean.dtype)

    def quantile(self, level: float) -> Tensor:
        """Solve Σ_q w_q F_q(y) = level by bisection in t, where y = c + s·sinh t for the most probable component.

        Components may reach over fifty orders of magnitude (a noise that is itself uncertain). Bisection in y would
        then end far from a quantile of ordinary size; in t it is exact relative to the distance from c.
        """
        likeliest = int(self.log_weights.argmax())
        center, unit = self.components.mean[likeliest], self.components.stddev[likeliest].clamp(min=1e-100)
        lower, upper = (torch.asinh((edge - center) / unit) for edge in self._bracket())
        for _ in range(80):
            middle = (lower + upper) / 2
            reached = self.cdf(center + unit * middle.sinh()) >= level
            lower, upper = torch.where(reached, lower, middle), torch.where(reached, middle, upper)
        return (center + unit * upper.sinh()).to(self.mean.dtype)

    def cdf(self, y: Tensor) -> Tensor:
        parts = self.components.cdf(y.to(self.log_weights.dtype))
        return (parts * self._log_weights(parts.ndim).exp()).sum(0)

    def crps(self, y: Tensor) -> Tensor | None:
        law = self.components
        if len(self.log_weights) > 1 or not isinstance(law, Normal):
            return None
        return normal_crps(law.loc[0], law.scale[0], y)

    def entropy(self) -> Tensor | None:
        """Return −Σ_q w_q E_q[log p(y)] for one output with Gaussian components, y at Gauss–Hermite nodes."""
        law = self.components
        if self.whole or not self.event_dims or self.mean.shape[-1] > 1 or not isinstance(law, Normal):
            return None
        likely = (self.log_weights > math.log(1e-12)).nonzero()[:, 0]
        outer = likely[::4]  # every fourth node is a good rule too
        x, inner = (torch.from_numpy(part).to(self.log_weights) for part in hermegauss(8))
        shape = (-1,) + (1,) * self.mean.ndim
        center, scale = law.loc[likely], law.scale[likely]  # (Q, B, *event, 1)
        log_weights = (self.log_weights[likely] - _HALF_LOG_2PI).reshape(shape) - scale.log()
        total = torch.zeros_like(law.loc[0, ..., 0])
        for weight, q in zip(self.log_weights[outer].softmax(0), outer):
            y = law.loc[q] + x.reshape(shape) * law.scale[q]
            log_p = (log_weights - ((y[:, None] - center) / scale).square() / 2).logsumexp(1)[..., 0]
            total = total - weight * torch.tensordot(inner / inner.sum(), log_p, 1)
        return total.to(self.mean.dtype)

    def _bracket(self) -> tuple[Tensor, Tensor]:
        likely = self.log_weights > math.log(1e-12)
        center, spread = self.components.mean[likely], 40 * self.components.stddev[likely]
        lower, upper = (center - spread).amin(0), (center + spread).amax(0)
        if not (lower.isfinite().all() and upper.isfinite().all()):
            raise UnsupportedOperation("the variance of y given f is not finite: no bracket for its quantiles.")
        bound = getattr(self.components.support, "lower_bound", None)
        return lower if bound is None else lower.clamp(min=bound), upper


@dataclass(frozen=True, eq=False)
class BlendedMarginal(Marginal):
    """y ~ Σ_k w_k p_k(y): several whole marginals, such as those of the members of an ensemble, mixed by weight."""

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    parts: tuple[Marginal, ...]
    weights: Tensor

    @classmethod
    def of(cls, parts: Sequence[Marginal], weights: Tensor) -> BlendedMarginal:
        """Mix by the law of total variance: E[Var] over the parts is aleatoric, Var of their means epistemic."""
        mean = torch.stack([w * part.mean for w, part in zip(weights, parts)]).sum(0)
        aleatoric = torch.stack([w * part.aleatoric for w, part in zip(weights, parts)]).sum(0)
        spread = [w * (part.epistemic + (part.mean - mean).square()) for w, part in zip(weights, parts)]
        return cls(mean, aleatoric, torch.stack(spread).sum(0), tuple(parts), weights)

    def log_prob(self, y: Tensor) -> Tensor | None:
        values = [part.log_prob(y) for part in self.parts]
        known = [value for value in values if value is not None]
        return log_mix(known, self.weights) if len(known) == len(values) else None

    def quantile(self, level: float) -> Tensor:
        """Bisect between the smallest and the largest quantile of the parts."""
        each = torch.stack([part.quantile(level) for part in self.parts])
        lower, upper = each.amin(0).double(), each.amax(0).double()
        for _ in range(60):
            middle = (lower + upper) / 2
            reached = self.cdf(middle) >= level
            lower, upper = torch.where(reached, lower, middle), torch.where(reached, middle, upper)
        return upper.to(self.mean.dtype)

    def cdf(self, y: Tensor) -> Tensor:
        return torch.stack([w * part.cdf(y) for w, part in zip(self.weights, self.parts)]).sum(0)


def log_mix(values: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return log Σ_k w_k exp(values_k)."""
    stacked = torch.stack(list(values))
    return (stacked + weights.log().to(stacked).reshape(-1, *(1,) * (stacked.ndim - 1))).logsumexp(0)


def normal_crps(mean: Tensor, stddev: Tensor, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score of N(mean, stddev²), in the units of y, in float64.

    σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (y − μ)/σ (Gneiting and Raftery 2007, Eq. 21 with the sign reversed: less
    is better).
    """
    mean, stddev, y = mean.double(), stddev.double(), y.double()
    z = (y - mean) / stddev
    density = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return stddev * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))


def sample_crps(samples: Tensor, y: Tensor) -> Tensor:
    """Estimate the score of `normal_crps` from draws (n, *shape of y), n ≥ 2: E|X − y| − ½ E|X − X′|, in float64.

    The second term averages over pairs of different draws (divided by n(n − 1)), which makes it unbiased.
    """
    samples, y, n = samples.double(), y.double(), samples.shape[0]
    error = (samples - y).abs().mean(0)
    # Σ_{i<j} (x_(j) − x_(i)) = Σ_i (2i − n − 1) x_(i) over sorted draws, i from 1
    rank = 2 * torch.arange(1, n + 1, dtype=torch.float64, device=samples.device) - n - 1
    return error - torch.einsum("n,n...->...", rank, samples.sort(0).values) / (n * (n - 1))


def normal_nodes(like: Tensor, finer: int = 1) -> tuple[Tensor, Tensor]:
    """Return nodes x (Q,) and log weights with Σ w g(x) ≈ E[g(x)], x ~ N(0, 1), in the dtype of `like`.

    The trapezoidal rule, which converges geometrically for a Gaussian weight: at a logit of standard deviation 10 the
    error of E[sigmoid] is below 1e-9 here and 3e-3 with 64 Gauss–Hermite nodes. `finer` divides their distance.
    """
    x = torch.linspace(-_RANGE, _RANGE, finer * (_NODES - 1) + 1, dtype=torch.float64)
    log_weights = (-x.square() / 2).log_softmax(0)
    return x.to(like), log_weights.to(like)


SPACING = 2 * _RANGE / (_NODES - 1)
"""The distance between two nodes."""


def safe_sqrt(values: Tensor) -> Tensor:
    """Return √values, with a derivative of 0 instead of ∞ at 0."""
    positive = values > 0
    return torch.where(positive, values.masked_fill(~positive, 1.0).sqrt(), 0.0)
