"""The log evidence at a fixed θ̂ as a concave function of log-precisions and, where it is learned, the log-dispersion.

With x_g = log τ_g, u = log φ, q_g = ‖θ̂ − μ₀‖² over group g, k the power of φ in the precision,

    F(x, u) = T·log p(D|θ̂, u) − ½ Σ_g e^{x_g} q_g − ½ [log|T e^{−ku} H + Π(x)| − log|Π(x)|].

In an eigenbasis that the groups respect the bracket is Σ_p softplus(log T e_p − k u − x_{g(p)}), and F splits into one
term a group. Otherwise its derivatives follow from the posterior covariance Σ: with m_g = τ_g Σ_{p∈g} Σ_pp and
C_gh = τ_g τ_h Σ_{p∈g, p'∈h} Σ_pp'²,

    ∂F/∂x_g = ½(|g| − m_g − τ_g q_g),    −∂²F/∂x_g∂x_h = ½(δ_gh (m_g + τ_g q_g) − C_gh).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lapwing.errors import NotPositiveDefinite
from lapwing.evidence.groups import Groups
from lapwing.evidence.newton import Arrow, Concave, Curve, DenseCurve
from lapwing.linalg import PSD


@dataclass(frozen=True, eq=False)
class Fit:
    """T·log p(D|θ̂) as a function of log φ, and how φ enters the precision.

    `log_likelihood` maps a 0-d log φ to T times the log-likelihood, differentiably. `learned` says whether log φ is the
    last coordinate; otherwise it stays at `start`.
    """

    log_likelihood: Callable[[Tensor], Tensor]
    start: Tensor
    power: int = 1
    learned: bool = False

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x -> (log-precisions, log φ)."""
        return (x[:-1], x[-1]) if self.learned else (x, self.start)

    def derivatives(self, log_dispersion: Tensor) -> tuple[Tensor, Tensor]:
        """First and minus the second derivative in log φ, each (1,), or (0,) where it is not learned."""
        if not self.learned:
            empty = log_dispersion.new_zeros(0)
            return empty, empty
        with torch.enable_grad():
            u = log_dispersion.detach().clone().requires_grad_()
            (first,) = torch.autograd.grad(self.log_likelihood(u), u, create_graph=True)
            (second,) = torch.autograd.grad(first, u)
        return first.detach()[None], -second[None]


@dataclass(frozen=True, eq=False)
class SpectralEvidence(Concave):
    """F where every eigenvector lies inside one group."""

    log_eigenvalues: Tensor  # (M,) log(T·e_p) of the eigenvalues above zero
    group: Tensor  # (M,)
    squares: Tensor  # (G,)
    fit: Fit

    def value(self, x: Tensor) -> Tensor:
        log_tau, u = self.fit.split(x)
        bracket = softplus(self._exponent(log_tau, u)).sum()
        return self.fit.log_likelihood(u) - 0.5 * (log_tau.exp() * self.squares).sum() - 0.5 * bracket

    def _exponent(self, log_tau: Tensor, u: Tensor) -> Tensor:
        return self.log_eigenvalues - self.fit.power * u - log_tau[self.group]

    def _sum(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self.squares).index_add(0, self.group, values)

    def derivatives(self, x: Tensor) -> tuple[Tensor, Curve]:
        log_tau, u = self.fit.split(x)
        share = torch.sigmoid(self._exponent(log_tau, u))
        effective, spread = self._sum(share), self._sum(share * (1 - share))
        first, second = self.fit.derivatives(u)
        k, learned = self.fit.power, len(first)
        pull = log_tau.exp() * self.squares
        gradient = torch.cat([0.5 * (effective - pull), first + 0.5 * k * effective.sum()[None][:learned]])
        border = 0.5 * k * spread if learned else first
        return gradient, Arrow(0.5 * (spread + pull), border, second + 0.5 * k**2 * spread.sum()[None][:learned])


@dataclass(frozen=True, eq=False)
class CovarianceEvidence(Concave):
    """F for groups that cut through eigenvectors: a dense block with several precisions inside.

    Newton's matrix is exact up to `exact` groups; beyond, it is replaced by the diagonal ½(m_g + τ_g q_g) above it,
    which needs marginal variances only and converges linearly.
    """

    matrix: PSD  # T·H
    groups: Groups
    squares: Tensor  # (G,)
    fit: Fit
    exact: int = 1024

    def _scale(self, u: Tensor) -> Tensor:
        return (-self.fit.power * u).exp()

    def value(self, x: Tensor) -> Tensor:
        log_tau, u = self.fit.split(x)
        try:
            bracket = self.matrix.scale(self._scale(u)).logdet_ratio(self.groups.diagonal(log_tau.exp()))
        except NotPositiveDefinite:  # an exact Hessian under too small a prior: no posterior, no evidence
            return x.new_tensor(-torch.inf)
        return self.fit.log_likelihood(u) - 0.5 * (log_tau.exp() * self.squares).sum() - 0.5 * bracket

    def derivatives(self, x: Tensor) -> tuple[Tensor, Curve]:
        log_tau, u = self.fit.split(x)
        tau = log_tau.exp()
        precision = self.matrix.scale(self._scale(u)) + self.groups.diagonal(tau)
        left = tau * self.groups.total(precision.inverse_diagonal().double())  # m
        effective = self.groups.total(torch.ones(self.groups.size, dtype=tau.dtype, device=tau.device)) - left
        pull = tau * self.squares
        first, second = self.fit.derivatives(u)
        k, learned = self.fit.power, len(first)
        gradient = torch.cat([0.5 * (effective - pull), first + 0.5 * k * effective.sum()[None][:learned]])
        if self.groups.count > self.exact:
            corner = second + 0.5 * k**2 * left.sum()[None][:learned]
            return gradient, Arrow(0.5 * (left + pull), torch.zeros_like(left) if learned else first, corner)
        shared = _squared_covariance(precision, self.groups) * tau * tau[:, None]  # C
        spread = left - shared.sum(1)
        curve = 0.5 * (torch.diag(left + pull) - shared)
        if learned:
            border = 0.5 * k * spread
            corner = second + 0.5 * k**2 * spread.sum()
            curve = torch.cat([torch.cat([curve, border[:, None]], 1), torch.cat([border, corner])[None]])
        return gradient, DenseCurve(curve)


def _squared_covariance(precision: PSD, groups: Groups) -> Tensor:
    """Σ_{p∈g, p'∈h} Σ_pp'², (G, G)."""
    index = groups.index.to(precision.device)
    total = torch.zeros(groups.count, groups.count, dtype=torch.float64, device=precision.device)
    for block, part in precision.blockwise(index):
        square = block.solve(torch.eye(block.size, dtype=block.dtype, device=block.device)).double().square()
        rows = torch.zeros(groups.count, block.size, dtype=square.dtype, device=square.device)
        total = total.index_add(1, part, rows.index_add(0, part, square))
    return total
