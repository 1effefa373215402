"""Regression: Gaussian noise of one level per output, known or estimated, or given by the network for each input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributions import Independent, Normal
from torch.nn.functional import logsigmoid, softplus

from lapwing.errors import BadData, refuse_export, warn
from lapwing.likelihoods.likelihood import Likelihood, as_target, match_shape, require_finite, weighted_sum
from lapwing.likelihoods.marginal import (
    SPACING,
    Marginal,
    MixtureMarginal,
    NormalMarginal,
    Outputs,
    normal_nodes,
    safe_sqrt,
)
from lapwing.model.calls import promote
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
SHOWN = 8  # noise levels that are printed


@register(name="regression")
@dataclass(frozen=True, eq=False)
class Gaussian(Likelihood):
    """y_k ~ N(f_k, σ_k²). `noise` is the standard deviation σ: a number, or one per output.

    Without `noise` it is unknown: `fit` estimates one per output from the training residuals, and every `tune` learns
    a common factor of them. A noise that the user gives stays as it is unless `learn` names it. `estimated` says which
    of the two a fitted likelihood is. Before a fit an unknown noise counts as 1.

    The dispersion is the geometric mean of σ², φ = exp(mean_k log σ_k²), and the factor holds the ratios:
    S Sᵀ = φ·Λ = diag(φ / σ_k²), the identity for one common noise. So a common factor of the noise may change after a
    fit (`dataclasses.replace(likelihood, noise=...)`), the ratios may not: see `same_curvature`.

    Targets: the shape of f; (B, *event) too where there is one output.

    Examples:
        >>> la = lapwing.fit(network, (inputs, targets), lapwing.Gaussian(noise=0.3))
        >>> low, high = la.predict(inputs).interval(0.95)
        >>> estimated = lapwing.fit(network, (inputs, targets), lapwing.Gaussian())  # or "regression"
    """

    links: ClassVar[tuple[str, ...]] = ("exact", "mc")
    dispersion_name: ClassVar[str] = "noise"
    dispersion_unit: ClassVar[float] = 0.5

    noise: float | Tensor | None = None
    estimated: bool = field(default=False, metadata={"later": True})  # whether the noise was learned from data

    def __post_init__(self) -> None:
        if not isinstance(self.noise, float | Tensor | None):
            try:
                noise = torch.as_tensor(self.noise, dtype=torch.float64)
            except (TypeError, ValueError, RuntimeError) as error:
                raise BadData(
                    f"noise={self.noise!r} is no number: it is a standard deviation, as in Gaussian(noise=0.3), or one "
                    "per output."
                ) from error
            object.__setattr__(self, "noise", noise)
        noise = self._noise
        if noise.ndim > 1 or noise.numel() == 0 or not bool((noise > 0).all() & noise.isfinite().all()):
            raise BadData(
                f"noise={noise.tolist()}: it is a standard deviation, one positive number or one per output (K,)."
            )

    @property
    def _noise(self) -> Tensor:
        """The noise σ as a tensor, () or (K,); 1 where it is unknown."""
        if isinstance(self.noise, Tensor):
            return self.noise.double()
        return torch.tensor(1.0 if self.noise is None else self.noise, dtype=torch.float64)

    def sigma(self, f: Tensor) -> Tensor:
        """Return σ, () or (K,), in the dtype and on the device of f.

        Examples:
            >>> lapwing.Gaussian(noise=[0.1, 0.2]).sigma(torch.zeros(5, 2))
            tensor([0.1000, 0.2000])
        """
        noise = self._noise
        if noise.ndim == 1 and noise.shape[0] not in (1, f.shape[-1]):
            raise BadData(
                f"noise has {noise.shape[0]} entries, but the network has {f.shape[-1]} outputs: "
                "give one number, or one per output."
            )
        return noise.to(promote(f))

    def noise_variance(self, f: Tensor) -> Tensor:
        return self.sigma(f).square().expand(f.shape[-1])

    def conditional(self, f: Tensor) -> Independent:
        return Independent(Normal(f, self.sigma(f).expand(f.shape), validate_args=False), 1, validate_args=False)

    def targets(self, f: Tensor, y: Any) -> Tensor:
        y = as_target(f, y)
        if _class_indices(f, y):
            raise BadData(
                f"targets are whole numbers of shape {tuple(y.shape)} below {f.shape[-1]}, the number of outputs: "
                'class indices. Use likelihood="classification"; Gaussian needs one number per output.'
            )
        y = match_shape(y, f.shape, f.shape[-1:], "Gaussian").to(promote(f).dtype)
        self.sigma(f)
        require_finite(f, y)
        return y

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        sigma = self.sigma(f)
        return -(((y - f) / sigma).square() / 2 + sigma.log() + math.log(2 * math.pi) / 2).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return (y - f) / self.sigma(f).square()

    def factor(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        self.sigma(f)
        return torch.diag_embed(self._ratios().to(promote(f)).expand(f.shape))

    def _ratios(self) -> Tensor:
        """Return √φ / σ_k, () or (K,), whose geometric mean is 1."""
        log_sigma = self._noise.detach().double().log()
        return (log_sigma.mean() - log_sigma).exp()

    def sample_target(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        f = promote(f).detach()
        return f + self.sigma(f).detach() * torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)

    def marginal(self, f: Outputs) -> Marginal:
        """Return y ~ N(m, V + diag σ²)."""
        noise = self.sigma(f.mean).square().expand(f.mean.shape)
        return NormalMarginal(promote(f.mean), noise, promote(f.variance), lambda: f.item_covariance)

    @property
    def dispersion(self) -> Tensor:
        return (2 * self._noise.log().mean()).exp()

    @property
    def known(self) -> bool:
        return self.noise is not None

    @property
    def learns_dispersion(self) -> bool:
        return self.estimated or not self.known

    @property
    def dispersion_bounds(self) -> tuple[float, float]:
        now = self.dispersion.item()
        return now / 1e12, now * 1e12

    def estimates_first(self, outputs: int) -> bool:
        """Whether several outputs have an unknown noise: the curvature depends on the ratios between their levels."""
        return not self.known and outputs > 1

    def with_dispersion(self, dispersion: float | Tensor) -> Gaussian:
        """Return the same ratios between outputs with another φ; gradients flow from it."""
        phi = torch.as_tensor(dispersion, dtype=torch.float64)
        factor = (phi / self.dispersion.detach().to(phi.device)).sqrt()
        return Gaussian(self._noise.detach().to(phi.device) * factor, self.learns_dispersion)

    def best_dispersion(self, f: Tensor, y: Tensor, held: float = 0.0) -> float:
        """Return φ from the mean square of the residuals; the ratios between outputs are kept."""
        squares = ((y - f).double() / self.sigma(f).double()).square()
        items = squares[..., 0].numel()
        ratio = (items * squares.mean().item() + held) / (items + held)
        return max(ratio, 1e-24) * self.dispersion.item()

    def estimate(self, statistics: Tensor) -> Gaussian:
        """Estimate σ_k² = Σ r_k²/n per output where the noise is unknown, and only a common factor of an estimate.

        A noise that the user gave stays as it is. An output without residuals gets the smallest noise of the others.
        """
        if not self.learns_dispersion:
            return self
        squares = statistics[1:].double() / statistics[0].double()
        if self.known:
            relative = (squares / self._noise.to(squares).square())[squares > 0]
            return self.with_dispersion(relative.mean().cpu() * self.dispersion.detach()) if len(relative) else self
        seen = squares[squares > 0]
        if len(seen) < len(squares):
            warn(
                f"{len(squares) - len(seen)} of {len(squares)} outputs have no residuals on the training data, which "
                "says nothing about their noise: give it, as in Gaussian(noise=0.1)"
            )
        least = seen.min() if len(seen) else torch.ones_like(statistics[0])
        return Gaussian(torch.where(squares > 0, squares, least).sqrt().cpu(), estimated=True)

    def statistics(self, f: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return (1 + C,): the number of items, then Σ (y − f)² per output."""
        square = (y - f).double().square()
        return weighted_sum(torch.cat([torch.ones_like(square[..., :1]), square], -1), weights)

    def flaw(self, statistics: Tensor) -> str:
        if statistics.ndim == 1 and not (len(statistics) > 1 and bool((statistics >= 0).all())):
            return f"the statistics are {statistics.tolist()}"
        if self._noise.ndim and len(self._noise) not in (1, len(statistics) - 1):
            return f"there are {len(self._noise)} noise levels for {len(statistics) - 1} outputs"
        return super().flaw(statistics)

    def log_likelihood(self, statistics: Tensor) -> Tensor:
        count, square = statistics[0], statistics[1:]
        variance = self._noise.to(statistics).square().expand(square.shape)
        return -(square / variance + count * (2 * math.pi * variance).log()).sum() / 2

    def same_curvature(self, other: Likelihood) -> bool:
        """Whether the ratios between the noise of the outputs are the same."""
        if not isinstance(other, Gaussian):
            return False
        mine, theirs = self._ratios(), other._ratios()
        sizes = {r.shape[0] for r in (mine, theirs) if r.numel() > 1}
        return len(sizes) < 2 and bool(((mine / theirs.to(mine)) - 1).abs().max() < 1e-6)

    def spec(self) -> dict[str, Any]:
        noise = None if self.noise is None else self._noise.detach().double().tolist()
        return {"family": "Gaussian", "noise": noise, **({"estimated": True} if self.estimated else {})}

    def __str__(self) -> str:
        if self.noise is None:
            return "Gaussian, noise unknown"
        noise = self._noise.detach().reshape(-1).tolist()
        shown = ", ".join(f"{each:.4g}" for each in noise[:SHOWN]) + (", …" if len(noise) > SHOWN else "")
        return f"Gaussian, noise {shown}{' (learned from data)' if self.estimated else ''}"


def _class_indices(f: Tensor, y: Tensor) -> bool:
    """Whether integer targets name one of several outputs per item, as class indices do."""
    whole = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    if not whole or f.shape[-1] == 1 or y.shape != f.shape[:-1]:
        return False
    return bool(((y >= 0) & (y < f.shape[-1])).all())


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
        """Return the K first and the K second parameters, each (B, *event, K).

        Examples:
            >>> first, second = lapwing.HeteroscedasticGaussian().split(torch.zeros(5, 4))
            >>> first.shape, second.shape
            (torch.Size([5, 2]), torch.Size([5, 2]))
        """
        first, second = promote(f).chunk(2, -1)
        return first, second

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and σ², (B, *event, K).

        Examples:
            >>> likelihood = lapwing.HeteroscedasticGaussian(parametrization="mean")
            >>> mean, variance = likelihood.moments(torch.tensor([[3.0, 0.0]]))
            >>> float(mean), float(variance)
            (3.0, 1.0)
        """
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

        Densities and quantiles always come from this mixture. Mean and variances do too if the standard deviation of y
        is at most the width of its central 95 % interval. That holds for all but extreme laws; for a Gaussian the
        deviation is a quarter of the width. Otherwise mean and variances would come from noise levels in the far tail
        of ρ, outside this interval. They are then taken with a narrower spread of ρ, for which the deviation equals the
        width (see `_narrowed`).
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
