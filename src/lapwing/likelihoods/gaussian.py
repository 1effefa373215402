"""Regression with one noise level per output, known or estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Independent, Normal

from lapwing.errors import BadData, warn
from lapwing.likelihoods.likelihood import (
    Likelihood,
    as_target,
    match_shape,
    promote,
    require_finite,
    weighted_sum,
)
from lapwing.likelihoods.marginal import Marginal, NormalMarginal, Outputs
from lapwing.storage import register

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
        """Return σ, () or (K,), in the dtype and on the device of f."""
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
        """Several outputs: the curvature depends on the ratios between their noise, though not on a common factor."""
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

        The noise that a user gave stays as it is. An output without residuals gets the smallest noise of the others.
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
                "says nothing about their noise: give it, as in Gaussian(noise=0.1)",
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
