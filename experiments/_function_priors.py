"""Two priors that paper 000 proposes against its weakness out of distribution, over a last layer of features φ(x).

The empirical covariance prior (Izmailov et al. 2021, section 6) gives the weights of class k, bias included, the prior

    w_k ~ N(0, (S + ε I) / τ),    S = Σ_n φ(x_n) φ(x_n)ᵀ / n, scaled to a mean diagonal of 1,  φ with a 1 appended,

so that directions in which no training data vary have hardly any prior variance.

The Gaussian-process prior adds a function to every output of the network, f_k(x) = w_kᵀ φ(x) + g_k(x), with

    g_k ~ GP(0, s² k),    k(x, x') = exp(−‖φ(x) − φ(x')‖² / 2ℓ²) ≈ ψ(x)ᵀ ψ(x'),
    ψ_j(x) = √(2/m) cos(ω_jᵀ φ(x) / ℓ + b_j)

by m random Fourier features (Rahimi and Recht 2007), ω_j ~ N(0, I), b_j ~ U(0, 2π). With g_k = v_kᵀ ψ and
v_k ~ N(0, s² I) the model is again a last layer, now over [φ, ψ] with weights [w_k, v_k], at which v_k = 0: the
network's own outputs stay as they are, and its posterior covariance is that of the Gaussian process
K** − K*n (K_nn + Λ⁻¹)⁻¹ K_n* with kernel φᵀφ'/τ + s² ψᵀψ', whatever its likelihood's curvature Λ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lapwing
from lapwing.linalg import Dense


@dataclass(frozen=True)
class Fourier:
    """Random Fourier features of a squared-exponential kernel of unit variance: (n, d) → (n, m)."""

    frequencies: Tensor  # (d, m), already divided by ℓ
    phases: Tensor  # (m,)

    @classmethod
    def draw(cls, size: int, count: int, length: float, generator: torch.Generator) -> Fourier:
        """Draw `count` features over inputs of length `size`, for the length scale ℓ."""
        frequencies = torch.randn(size, count, generator=generator, dtype=torch.float64) / length
        return cls(frequencies, 2 * math.pi * torch.rand(count, generator=generator, dtype=torch.float64))

    def __call__(self, features: Tensor) -> Tensor:
        waves = torch.cos(features @ self.frequencies.to(features) + self.phases.to(features))
        return waves * math.sqrt(2 / len(self.phases))


def extended(head: nn.Linear, extra: int) -> nn.Linear:
    """The same last layer over more features, whose weights are zero."""
    layer = nn.Linear(head.in_features + extra, head.out_features, dtype=head.weight.dtype)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:, : head.in_features] = head.weight
        layer.bias.copy_(head.bias)
    return layer


def process_prior(tau: float, variance: float, size: int, extra: int, classes: int) -> lapwing.Prior:
    """Precision τ for weights of features and the bias, 1/s² for those of Fourier features."""
    each = torch.full((classes, size + extra), tau, dtype=torch.float64)
    each[:, size:] = 1 / variance
    return lapwing.Prior(torch.cat([each.flatten(), torch.full((classes,), tau, dtype=torch.float64)]))


def covariance_prior(features: Tensor, tau: float, classes: int, floor: float = 1e-3) -> lapwing.Prior:
    """The empirical covariance prior of a last layer over these features (n, d)."""
    rows = torch.cat([features, torch.ones_like(features[:, :1])], 1).double()
    second = rows.T @ rows / len(rows)
    second = second / second.diagonal().mean()
    precision = tau * torch.linalg.inv(second + floor * torch.eye(len(second), dtype=torch.float64))
    size = features.shape[1]
    whole = torch.zeros(classes * (size + 1), classes * (size + 1), dtype=torch.float64)
    for k in range(classes):  # a layer's weights come first, row by row, then its biases
        place = torch.cat([k * size + torch.arange(size), torch.tensor([classes * size + k])])
        whole[place[:, None], place] = (precision + precision.T) / 2
    return lapwing.Prior(Dense(whole))


def median_distance(features: Tensor) -> float:
    """The median distance between different rows, of at most 1,000 of them: the usual length scale."""
    return float(torch.pdist(features[:1000]).median())
