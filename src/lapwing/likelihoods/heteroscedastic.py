"""Regression whose noise depends on the input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributions import Independent, Normal
from torch.nn.functional import logsigmoid, softplus

from lapwing.errors import BadData, refuse_export
from lapwing.likelihoods.likelihood import (
    Likelihood,
    as_target,
    match_shape,
    promote,
    require_finite,
)
from lapwing.likelihoods.marginal import SPACING, Marginal, MixtureMarginal, Outputs, normal_nodes, safe_sqrt
from lapwing.storage import register

STEP = 0.25  # largest distance of two nodes of ρ
FINEST = 32  # times the usual number of nodes, at most, to keep to that distance
TAIL = 8.0  # log of the largest ratio E[σ⁴]/σ⁴ that moments of y may come from
LEVEL = 0.95  # probability of the central interval of y whose width bounds the standard deviation of y
FAR = 0.5  # nats per target by which another reading of the outputs must be better to be mentioned
READINGS = {
    "natural": ("(η₁, ρ)", 'pass lapwing.HeteroscedasticGaussian(parametrization="natural")'),
    "mean": ("(μ, log σ²)", 'pass lapwing.HeteroscedasticGaussian(parametrization="mean")'),
    "deviation": ("(μ, σ)", 'return (μ, 2 log σ) and pass lapwing.HeteroscedasticGaussian(parametrization="mean")'),
    "variance": ("(μ, σ²)", 'return (μ, log σ²) and pass lapwing.HeteroscedasticGaussian(parametrization="mean")'),
}


@register(name="heteroscedastic")
@dataclass(frozen=True, eq=False)
class HeteroscedasticGaussian(Likelihood):
    """y_k ~ N(μ_k, σ_k²), both from the network, whose last dimension 2K holds K entries of each kind.

    "natural": f = (η₁, ρ) with η₂ = −½ softplus(ρ), so σ² = −1/(2η₂) = 1/softplus(ρ) and μ = −η₁/(2η₂) = η₁σ². Every
    f is valid, so a linear model in (η₁, ρ) is too. With s₁ = (σ, −μσ·sigmoid ρ) and s₂ = (0, sigmoid ρ·σ²/√2) in
    these coordinates, Λ = s₁s₁ᵀ + s₂s₂ᵀ (the roots in (η₁, η₂) times ∂η₂/∂ρ = −½ sigmoid ρ).

    "mean": f = (μ, log σ²), Λ = diag(1/σ², ½).

    Λ is the Fisher information and does not depend on y. Targets: (B, *event, K), without the K where it is 1.

    Examples:
        >>> both = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))  # the mean and log σ²
        >>> la = lapwing.fit(both, (inputs, targets), lapwing.HeteroscedasticGaussian(parametrization="mean"))
        >>> la.predict(inputs).aleatoric.shape
        torch.Size([40, 1])
    """

    links: ClassVar[tuple[str, ...]] = ("quadrature", "mc")

    parametrization: Literal["natural", "mean"] = "natural"

    def __post_init__(self) -> None:
        if self.parametrization not in ("natural", "mean"):
            raise BadData(f'parametrization="{self.parametrization}": use "natural" (η₁, ρ) or "mean" (μ, log σ²).')

    def split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the K first and the K second parameters, each (B, *event, K)."""
        first, second = promote(f).chunk(2, -1)
        return first, second

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and σ², (B, *event, K)."""
        first, second = self.split(f)
        if self.parametrization == "mean":
            return first, second.exp()
        variance = 1 / precision(second)
        return first * variance, variance

    def conditional(self, f: Tensor) -> Independent:
        mean, variance = self.moments(f)
        return Independent(Normal(mean, variance.sqrt(), validate_args=False), 1, validate_args=False)

    def outputs(self, raw: Tensor) -> Tensor:
        if raw.ndim < 2 or raw.shape[-1] % 2:
            raise BadData(
                f"outputs of shape {tuple(raw.shape)}: HeteroscedasticGaussian needs an even last dimension 2K, "
                "two parameters per target (K of the first kind, then K of the second)."
            )
        return promote(raw)

    def targets(self, f: Tensor, y: Any) -> Tensor:
        shape = torch.Size((*f.shape[:-1], f.shape[-1] // 2))
        y = match_shape(as_target(f, y), shape, shape[-1:], "HeteroscedasticGaussian").to(promote(f).dtype)
        require_finite(f, y)
        return y

    def doubts(self, f: Tensor, y: Tensor) -> list[str]:
        """Say where the outputs explain the targets far better when they are read in another of the usual ways."""
        first, second = self.split(f.detach())
        log_probs = {"this": self.log_prob(f.detach(), y).mean().item()}
        for other in {"natural", "mean"} - {self.parametrization}:
            log_probs[other] = HeteroscedasticGaussian(other).log_prob(f.detach(), y).mean().item()  # type: ignore[arg-type]
        if bool((second > 0).all()):
            for name, power in (("deviation", 2.0), ("variance", 1.0)):
                law = Normal(first, second ** (power / 2), validate_args=False)
                log_probs[name] = law.log_prob(y).sum(-1).mean().item()
        best = max(log_probs, key=lambda name: log_probs[name])
        if best == "this" or not log_probs[best] > log_probs["this"] + FAR * y.shape[-1]:
            return []
        told = (
            f"the outputs of the network explain the targets far better as {READINGS[best][0]} than as "
            f"{READINGS[self.parametrization][0]}, as which parametrization={self.parametrization!r} reads them: "
        )
        return [told + READINGS[best][1]]

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean, variance = self.moments(f)
        return -(((y - mean) / variance.sqrt()).square() + (2 * math.pi * variance).log()).sum(-1) / 2

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        mean, variance = self.moments(f)
        error = y - mean
        if self.parametrization == "mean":
            return torch.cat([error / variance, (error.square() / variance - 1) / 2], -1)
        _, rho = self.split(f)
        slope = rho.sigmoid() / 2  # −∂η₂/∂ρ
        return torch.cat([error, -slope * (error * (error + 2 * mean) - variance)], -1)

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Return S (B, *event, 2K, 2K): first the K columns s₁, then the K columns s₂."""
        first, second = self.split(f)
        if self.parametrization == "mean":
            return torch.diag_embed(torch.cat([(-second / 2).exp(), torch.full_like(second, math.sqrt(0.5))], -1))
        variance = 1 / precision(second)
        sigma = variance.sqrt()
        slope = (logsigmoid(second) + variance.log()).exp()  # sigmoid ρ·σ², between 0 and 1
        upper = torch.cat([torch.diag_embed(sigma), torch.diag_embed(torch.zeros_like(sigma))], -1)
        lower = torch.cat([torch.diag_embed(-first * slope * sigma), torch.diag_embed(slope * math.sqrt(0.5))], -1)
        return torch.cat([upper, lower], -2)

    def sample_target(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean, variance = self.moments(f.detach())
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + variance.sqrt() * noise

    def marginal(self, f: Outputs) -> Marginal:
        """Return a mixture over nodes of the second parameter, given which everything is Gaussian.

        Given ρ, f₁ = m + b(ρ − ρ̄) + e with b = Cov(f₁, ρ)/Var(ρ) and Var e = r, and μ = a(ρ) f₁ with a = σ² (natural)
        or 1 (mean). So y | ρ ~ N(a(m + b(ρ − ρ̄)), a²r + σ²), E[σ²] is the aleatoric part and Var μ = E[a²r] +
        Var[a(m + b(ρ − ρ̄))] the epistemic one: the whole 2 × 2 covariance counts, not Var(f₁) alone.

        Densities and quantiles are those of this mixture, always. So are mean and variances while the standard
        deviation of y is at most the width of its central 95 % interval, as for all but extreme laws (for a Gaussian it
        is a quarter of it). Otherwise they would come from noise levels in the far tail of ρ that this interval does
        not see; they are then those under a narrower spread of ρ, with which it is that width (see `_narrowed`).
        """
        refuse_export("a heteroscedastic regression cannot be exported, since its moments take a search per item")
        dtype, k = promote(f.mean).dtype, f.mean.shape[-1] // 2
        covariance = f.item_covariance.double()
        diagonal = covariance.diagonal(dim1=-2, dim2=-1)
        cross = covariance[..., :k, k:].diagonal(dim1=-2, dim2=-1)
        slope = torch.where(diagonal[..., k:] > 0, cross / diagonal[..., k:].clamp(min=1e-300), 0.0)
        rest = (diagonal[..., :k] - slope * cross).clamp(min=0)
        scale = safe_sqrt(diagonal[..., k:])
        finer = self._finer(scale)
        spacing = SPACING / finer
        x, log_weights = normal_nodes(covariance, finer)
        x, weights = (part.reshape(-1, *(1,) * slope.ndim) for part in (x, log_weights.exp()))
        center, noise, known, drift = self._given(f.mean.double(), slope, rest, scale * x)
        variance = known + noise
        coarse = drift.abs() * scale * spacing > variance.sqrt()
        if bool(coarse.any()):
            # Neighbors stand apart: spread such a node over its cell, N(0, 1) = Σ w N(x_q √(1−h²), h²).
            shrunk = self._given(f.mean.double(), slope, rest, scale * x * math.sqrt(1 - spacing**2))
            center = torch.where(coarse, shrunk[0], center)
            spread = shrunk[1] + shrunk[2] + (shrunk[3] * scale * spacing).square()
            variance = torch.where(coarse, spread, variance)
        law = Normal(center, variance.sqrt(), validate_args=False)
        narrow = self._narrowed(f.mean.double(), slope, rest, scale, x, weights, law)
        mean, aleatoric, epistemic = self._averaged(f.mean.double(), slope, rest, narrow * x, weights)
        return MixtureMarginal(law, log_weights, mean.to(dtype), aleatoric.to(dtype), epistemic.to(dtype))

    def _finer(self, scale: Tensor) -> int:
        """Return by how much nodes must be closer than usual, where μ = η₁σ² grows like exp(−ρ) from node to node.

        Between two nodes μ is taken to be linear in ρ: at a step of 0.94, which the usual nodes have at a standard
        deviation of 10, a seventh of the mass of a node would come to lie on the other side of zero.
        """
        widest = float(scale.detach().max()) if self.parametrization == "natural" and scale.numel() else 0.0
        return min(FINEST, max(1, math.ceil(widest * SPACING / STEP)))

    def _narrowed(
        self, f: Tensor, slope: Tensor, rest: Tensor, scale: Tensor, x: Tensor, weights: Tensor, law: Normal
    ) -> Tensor:
        """Return the standard deviation of ρ that moments are taken with: `scale`, or less where its tail is too heavy.

        In natural parameters μ = η₁σ² and σ² = 1/softplus(ρ), which grows like exp(−ρ) below zero (σ² = exp(ρ) above it
        in the other ones). Moments over a wide Gaussian ρ then come from noise levels that no data have shown: at a
        standard deviation of 10 the mean of y is e⁵⁰ times its median. Two limits keep them where the law of y is:
        log E[σ⁴] is at most `TAIL` above that at the mean of ρ (natural parameters), and the standard deviation of y is
        at most the width of its central interval of probability `LEVEL`.
        """
        with torch.no_grad():
            found = self._bounded(f, scale, x, weights)
            mean, aleatoric, epistemic = self._averaged(f, slope, rest, found * x, weights)
            half, tail = (aleatoric + epistemic).sqrt() / 2, (1 - LEVEL) / 2
            above, below = ((weights * law.cdf(mean + side * half)).sum(0) for side in (1, -1))
            heavy = (above >= 1 - tail) | (below <= tail)  # elsewhere the interval holds the mean ± half a deviation
            if bool(heavy.any()):
                first, second = (part[heavy] for part in self.split(f))
                slope, rest, limit = (part[heavy][:, None] for part in (slope, rest, found))  # (n, 1) each
                center, deviation = (part[:, heavy][..., None] for part in (law.loc, law.scale))
                law = Normal(center, deviation, validate_args=False)
                found = found.clone()
                found[heavy] = self._within(torch.stack([first, second], -1), slope, rest, limit, law, x, weights)
        return torch.where(found < scale, found, scale)

    def _bounded(self, f: Tensor, scale: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Return the largest spread of ρ up to `scale` with log E[σ⁴] at most `TAIL` above that at the mean of ρ."""
        if self.parametrization == "mean":
            return scale
        rho, log_weights = self.split(f)[1], weights.log()

        def fits(spread: Tensor) -> Tensor:
            excess = (log_weights - 2 * precision(rho + spread * x).log()).logsumexp(0) + 2 * precision(rho).log()
            return excess <= TAIL  # the excess grows with the spread, since σ⁴ is convex in ρ

        fine = fits(scale)
        return scale if bool(fine.all()) else torch.where(fine, scale, _largest(fits, scale))

    def _within(
        self, f: Tensor, slope: Tensor, rest: Tensor, scale: Tensor, law: Normal, x: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the largest spread of ρ up to `scale`, (n,), at which y deviates by its interval at most.

        f is (n, 2), `slope`, `rest` and `scale` are (n, 1), and the law of y is (Q, n, 1).
        """
        log_weights, x, weights = weights.flatten().log(), x.reshape(-1, 1, 1), weights.reshape(-1, 1, 1)
        mixture = MixtureMarginal(law, log_weights, *self._averaged(f, slope, rest, scale * x, weights))
        width = mixture.quantile((1 + LEVEL) / 2) - mixture.quantile((1 - LEVEL) / 2)

        def fits(spread: Tensor) -> Tensor:
            _, aleatoric, epistemic = self._averaged(f, slope, rest, spread * x, weights)
            return aleatoric + epistemic <= width.square()

        return torch.where(fits(scale), scale, _largest(fits, scale))[:, 0]

    def _averaged(
        self, f: Tensor, slope: Tensor, rest: Tensor, step: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, aleatoric and epistemic variance of y over nodes ρ̄ + step with their weights."""
        center, noise, known, _ = self._given(f, slope, rest, step)
        mean = (weights * center).sum(0)
        return mean, (weights * noise).sum(0), (weights * (known + (center - mean).square())).sum(0)

    def _given(self, f: Tensor, slope: Tensor, rest: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return E[μ|ρ], σ², Var(μ|ρ) and the derivative of E[μ|ρ] in ρ at ρ = ρ̄ + step, each (Q, B, *event, K)."""
        first, second = self.split(f)
        center, noise = self.moments(torch.cat([first + slope * step, second + step], -1))
        if self.parametrization == "mean":
            noise = noise.clamp(max=torch.finfo(noise.dtype).tiny ** -0.4)  # as far as `precision` goes
            return center, noise, rest.expand(noise.shape), slope.expand(noise.shape)
        return center, noise, noise.square() * rest, noise * (slope - center * (second + step).sigmoid())


def _largest(fits: Callable[[Tensor], Tensor], limit: Tensor) -> Tensor:
    """Return the largest number between 0 and `limit` that fits, by bisection, element by element."""
    low, high = torch.zeros_like(limit), limit
    for _ in range(50):
        middle = (low + high) / 2
        inside = fits(middle)
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return low


def precision(rho: Tensor) -> Tensor:
    """Return softplus(ρ) = 1/σ², kept so far from zero that σ⁴ is finite: nodes of a wide posterior reach far down."""
    return softplus(rho).clamp(min=torch.finfo(rho.dtype).tiny ** 0.4)
