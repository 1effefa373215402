"""Every (e + ρ)⁻¹ as a combination of a few fixed ones, so that one pass over data serves all priors and temperatures.

The covariance of the outputs under precision c·H + τI is (1/c) J (H + ρI)⁻¹ Jᵀ with ρ = τ/c: one function of one number
ρ for each group of weights. In log ρ and log e the kernel 1/(e + ρ) is a sech, whose spectrum falls like exp(−πω), so
that few nodes ρ_j a decade carry it:

    (e + ρ)⁻¹ ≈ Σ_j a_j(ρ) (e + ρ_j)⁻¹  for all e in the spectrum of H.

With relative error at most δ for each e, the combination of J (H + ρ_j I)⁻¹ Jᵀ lies between 1 − δ and 1 + δ times the
truth as a matrix: it stays positive semi-definite, and every variance is right to δ. Spacing 2.5 a decade: δ ≈ 1e-4.

Ritter's factored damping of G ⊗ A is (g + √ρ)(a + √ρ) for each pair of eigenvalues, again a function of ρ alone, and
smoother: the same nodes carry it, fitted at pairs (g, a) as well.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PER_DECADE = 2.5
PADDING = 2  # nodes beyond either end, where the approximation would be worst
RIDGE = 1e-12


@dataclass(frozen=True, eq=False)
class Nodes:
    """Shifts ρ_j (m,), ascending, and the eigenvalues e (k,) and pairs (g, a) (l, 2) at which a_j(ρ) are fitted."""

    shifts: Tensor
    spectrum: Tensor
    pairs: Tensor | None = None

    @classmethod
    def spanning(
        cls, low: float, high: float, largest: float, factors: float | None = None, per_decade: float = PER_DECADE
    ) -> "Nodes":
        """Nodes for every ρ in [low, high] and every eigenvalue in [0, largest]; of damped factors in [0, factors]."""
        step = 1 / per_decade
        first, last = math.log10(low) - PADDING * step, math.log10(high) + PADDING * step
        shifts = torch.logspace(first, last, max(2, math.ceil((last - first) / step) + 1), dtype=torch.float64)
        start, stop = math.log10(low) - 3, max(math.log10(max(largest, 1e-30)), math.log10(low) - 2)
        count = max(20, math.ceil(12 * (stop - start)))
        grid = torch.logspace(start, stop, count, dtype=torch.float64)
        pairs = None if factors is None else _factor_pairs(math.sqrt(low), factors)
        return cls(shifts, torch.cat([grid.new_zeros(1), grid]), pairs)

    def _ratios(self, rho: Tensor) -> Tensor:
        """(e + ρ)/(e + ρ_j) and (g + √ρ)(a + √ρ)/((g + √ρ_j)(a + √ρ_j)), (*b, k + l, m)."""
        rho = rho[..., None, None]
        plain = (self.spectrum[:, None] + rho) / (self.spectrum[:, None] + self.shifts)
        if self.pairs is None:
            return plain
        g, a = self.pairs[:, :1], self.pairs[:, 1:]
        root, roots = rho.sqrt(), self.shifts.sqrt()
        return torch.cat([plain, (g + root) * (a + root) / ((g + roots) * (a + roots))], -2)

    def coefficients(self, rho: Tensor) -> Tensor:
        """a(ρ): (*b) -> (*b, m), by least squares in the relative error; differentiable."""
        ratios = self._ratios(rho.double())
        size = ratios.square().mean(-2, keepdim=True).sqrt().detach()
        columns = ratios / size
        normal = columns.mT @ columns / columns.shape[-2]
        eye = torch.eye(len(self.shifts), dtype=normal.dtype)
        right = columns.mean(-2)
        return torch.linalg.solve(normal + RIDGE * eye, right) / size[..., 0, :]

    def error(self, rho: Tensor) -> float:
        """δ: the largest relative error of (e + ρ)⁻¹ over the spectrum and all ρ given."""
        rho = rho.double().reshape(-1)
        fitted = (self._ratios(rho) @ self.coefficients(rho)[..., None])[..., 0]
        return (fitted - 1).abs().max().item()


def _factor_pairs(low: float, largest: float) -> Tensor:
    """Pairs g ≤ a of zero and of three points a decade from below `low` to `largest`, (l, 2)."""
    start, stop = math.log10(low) - 1.5, max(math.log10(max(largest, 1e-30)), math.log10(low) - 1)
    grid = torch.logspace(start, stop, max(6, math.ceil(3 * (stop - start))), dtype=torch.float64)
    return torch.combinations(torch.cat([grid.new_zeros(1), grid]), with_replacement=True)
