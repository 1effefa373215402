"""Counts: a Poisson law with a log rate per output, and its mixture over Gaussian log rates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor
from torch.distributions import Independent
from torch.distributions import Poisson as PoissonLaw

from lapwing.errors import refuse_export
from lapwing.likelihoods.likelihood import Likelihood, as_target, match_shape, require, require_finite
from lapwing.likelihoods.marginal import SPACING, Marginal, Outputs, normal_nodes, safe_sqrt
from lapwing.model.calls import promote
from lapwing.storage import register


@register(name="counts")
@dataclass(frozen=True, eq=False)
class Poisson(Likelihood):
    """y_k ~ Poisson(exp f_k): the network emits log rates. Λ = diag(exp f).

    Targets: counts 0, 1, 2, … of the shape of f; (B, *event) too where there is one output.

    Examples:
        >>> counts = torch.poisson(torch.ones(40, 1))
        >>> la = lapwing.fit(network, (inputs, counts), lapwing.Poisson())  # or "counts"
        >>> low, high = la.predict(inputs).interval(0.9)
    """

    links: ClassVar[tuple[str, ...]] = ("quadrature", "mc")

    def conditional(self, f: Tensor) -> Independent:
        return Independent(PoissonLaw(f.exp(), validate_args=False), 1, validate_args=False)

    def targets(self, f: Tensor, y: Any) -> Tensor:
        y = match_shape(as_target(f, y), f.shape, f.shape[-1:], "Poisson").to(promote(f).dtype)
        require_finite(f, y)
        require(
            (y >= 0) & (y == y.round()),
            y,
            "the counts 0, 1, 2, …: Poisson takes whole numbers that are not negative",
            'For other numbers use likelihood="regression".',
        )
        return y

    def doubts(self, f: Tensor, y: Tensor) -> list[str]:
        f = promote(f).detach()
        if bool((f >= 0).all()) and self.log_prob(f.clamp(min=1e-6).log(), y).mean() > self.log_prob(f, y).mean():
            return [
                "the outputs of the network are not negative and explain the counts better as rates than as log rates: "
                "the exponential will be applied twice. Return the logarithm of the rate"
            ]
        return []

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        f = promote(f)
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y - promote(f).exp()

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.diag_embed((promote(f) / 2).exp())

    def sample_target(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(promote(f).detach().exp(), generator=generator)

    def marginal(self, f: Outputs) -> Marginal:
        return LognormalPoisson(promote(f.mean), promote(f.variance))


@dataclass(frozen=True, eq=False)
class LognormalPoisson(Marginal):
    """Counts whose log rate is N(center, spread), output by output; (B, *event, K).

    With E = exp(m + v/2): E[y] = E[Var(y|f)] = E and Var(E[y|f]) = E²(e^v − 1), exactly.
    """

    center: Tensor
    spread: Tensor

    @property
    def mean(self) -> Tensor:  # type: ignore[override]
        return (self.center + self.spread / 2).exp()

    @property
    def aleatoric(self) -> Tensor:  # type: ignore[override]
        return self.mean

    @property
    def epistemic(self) -> Tensor:  # type: ignore[override]
        return self.mean.square() * self.spread.expm1()

    def log_prob(self, y: Tensor) -> Tensor | None:
        if y.shape[-1] > 1:
            return None
        return self._log_mass(y.double())[..., 0].to(self.center.dtype)

    def _log_mass(self, y: Tensor) -> Tensor:
        """Return log ∫ N(f; m, v) Poisson(y; e^f) df by quadrature around the mode of the integrand, for any rate."""
        m, v = self.center.double(), self.spread.double().clamp(min=1e-12)
        with torch.no_grad():
            # Newton for (f − m)/v + e^f = y, a convex increasing function, from the right of its root: monotone.
            mode = torch.maximum(m, (y + 1).log())
            for _ in range(30):
                rate = mode.exp()
                mode = mode - ((mode - m) / v + rate - y) / (1 / v + rate)
            width = (1 / v + mode.exp()).rsqrt()
            x = normal_nodes(m)[0][::2]
            f = mode + width * x.reshape(-1, *(1,) * mode.ndim)  # (Q, ...)
        log_normal = -(f - m).square() / (2 * v) - (2 * math.pi * v).log() / 2
        log_poisson = y * f - f.exp() - torch.lgamma(y + 1)
        return (log_normal + log_poisson).logsumexp(0) + (width * 2 * SPACING).log()

    def quantile(self, level: float) -> Tensor:
        """Return the smallest count c with p(y ≤ c) ≥ level, by bisection."""
        rate, weights = self._rates()
        lower = torch.full_like(self.center, -1.0, dtype=torch.float64)
        upper = (rate + 40 * rate.sqrt() + 40).amax(0).ceil()
        while bool((upper - lower > 1).any()):
            middle = ((lower + upper) / 2).floor()
            reached = (_at_most(middle, rate, weights) >= level) & (middle >= 0)
            lower, upper = torch.where(reached, lower, middle), torch.where(reached, middle, upper)
        return upper.to(self.center.dtype)

    def cdf(self, y: Tensor) -> Tensor:
        return torch.where(y >= 0, _at_most(y.double().floor(), *self._rates()), 0.0)

    def _rates(self) -> tuple[Tensor, Tensor]:
        """Return rates at nodes of the log rate, (Q, B, *event, K), and their weights."""
        x, log_weights = normal_nodes(self.center.double())
        x, log_weights = x[log_weights > math.log(1e-12)], log_weights[log_weights > math.log(1e-12)]
        shape = (-1,) + (1,) * self.center.ndim
        rate = (self.center.double() + safe_sqrt(self.spread.double()) * x.reshape(shape)).exp()
        return rate, log_weights.exp().reshape(shape)

    def entropy(self) -> Tensor | None:
        """Return the entropy of one output: a sum over counts below 64, and an integral beyond, where p is smooth."""
        if self.center.shape[-1] > 1:
            return None
        refuse_export("the entropy of counts cannot be exported, since its range is searched for")
        shape = (-1,) + (1,) * self.center.ndim
        small = torch.arange(64, dtype=torch.float64, device=self.center.device)
        x, weights = (torch.from_numpy(part).to(small) for part in leggauss(96))
        first = (self.quantile(1e-10).double() - 0.5).clamp(min=63.5).log()
        last = (self.quantile(1 - 1e-10).double() + 0.5).clamp(min=63.5).log()
        large = (first + (last - first) * (1 + x.reshape(shape)) / 2).exp()  # (96, B, *event, 1)
        y = torch.cat([small.reshape(shape).expand(-1, *self.center.shape), large])
        weights = torch.cat([torch.ones_like(y[:64]), weights.reshape(shape) * large * (last - first) / 2])
        log_p = self._log_mass(y)
        return -(weights * log_p.exp() * log_p).sum(0)[..., 0].to(self.center.dtype)


def _at_most(y: Tensor, rate: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_q w_q p(count ≤ y) over Poisson rates."""
    return (weights * torch.special.gammaincc(y.clamp(min=0) + 1, rate)).sum(0)
