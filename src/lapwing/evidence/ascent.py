"""Two ways up the log evidence: Newton's method to its maximum, and bounded steps of MacKay's fixed point.

With x_g = log τ_g, u = log φ, q_g = ‖θ̂ − μ₀‖² over group g, k the power of φ in the precision,

    F(x, u) = T·log p(D|θ̂, u) − ½ Σ_g e^{x_g} q_g − ½ [log|T e^{−ku} H + Π(x)| − log|Π(x)|].

In an eigenbasis that the groups respect the bracket is Σ_p softplus(log T e_p − k u − x_{g(p)}), and F splits into one
term per group. Otherwise its derivatives follow from the posterior covariance Σ: with m_g = τ_g Σ_{p∈g} Σ_pp and
C_gh = τ_g τ_h Σ_{p∈g, p'∈h} Σ_pp'²,

    ∂F/∂x_g = ½(|g| − m_g − τ_g q_g),    −∂²F/∂x_g∂x_h = ½(δ_gh (m_g + τ_g q_g) − C_gh).

At fixed weights F has its only maximum where (MacKay 1992, Eq. 3.10)

    τ_g = γ_g / ‖θ_g − μ_g‖²,    φ = RSS / (NK − γ),    γ_g = −∂(log|H/φ + Π| − log|Π|)/∂ log τ_g.

In logarithms, x ← log γ(x) − log q has a slope between −1 and 0 in each coordinate, so that half steps converge. While
the weights are still being trained, the full way would chase them; so `move` goes by a bounded amount.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lapwing.errors import NotPositiveDefinite
from lapwing.evidence.settings import Groups
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD
from lapwing.posterior import Belief

LONGEST_STEP = 4.0  # in log-precision, a factor of 55: where the function is nearly linear Newton's step has no limit
SUFFICIENT = 1e-4  # Armijo's constant
ITERATIONS = 60
TOLERANCE = 1e-3  # change of a log-precision per step below which it stops: the weights move on anyway
BOUNDS = (1e-8, 1e10)


class Curve(ABC):
    """Second derivatives at a point: −∇²F, positive semi-definite because F is concave."""

    @abstractmethod
    def diagonal(self) -> Tensor: ...

    @abstractmethod
    def solve(self, gradient: Tensor, free: Tensor) -> Tensor:
        """Return Newton's step (−∇²F)⁻¹∇F in the free coordinates, and zero in the others."""


@dataclass(frozen=True, eq=False)
class DenseCurve(Curve):
    matrix: Tensor

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def solve(self, gradient: Tensor, free: Tensor) -> Tensor:
        inner = self.matrix * free * free[:, None] + torch.diag((~free).to(gradient.dtype))
        ridge = 1e-13 * inner.diagonal().max() + 1e-30
        eye = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        return torch.linalg.solve(inner + ridge * eye, gradient * free)


@dataclass(frozen=True, eq=False)
class Arrow(Curve):
    """A diagonal with one border row: log-precisions that interact only with the dispersion, the last coordinate."""

    shaft: Tensor  # (G,)
    border: Tensor  # (G,) or (0,) where there is no last coordinate
    corner: Tensor  # (1,) or (0,)

    def diagonal(self) -> Tensor:
        return torch.cat([self.shaft, self.corner])

    def solve(self, gradient: Tensor, free: Tensor) -> Tensor:
        gradient = gradient * free
        count = len(self.shaft)
        shaft = torch.where(free[:count], self.shaft, 1.0) + 1e-30
        direct = gradient[:count] / shaft
        if not len(self.corner) or not free[count]:
            return torch.cat([direct, torch.zeros_like(self.corner)])
        border = self.border * free[:count]
        schur = self.corner - (border**2 / shaft).sum()
        last = (gradient[count:] - (border * direct).sum()) / (schur.clamp_min(0.0) + 1e-12 * self.corner + 1e-30)
        return torch.cat([direct - border * last / shaft, last])


class Concave(ABC):
    """A concave function with its derivatives."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def derivatives(self, x: Tensor) -> tuple[Tensor, Curve]:
        """Return ∇F (d,) and −∇²F."""


@dataclass(frozen=True, eq=False)
class Optimum:
    x: Tensor
    value: float
    iterations: int
    converged: bool
    slope: float


def maximize(
    function: Concave, start: Tensor, lower: Tensor, upper: Tensor, *, tolerance: float = 1e-10, limit: int = 500
) -> Optimum:
    """Run projected Newton steps with backtracking until the quadratic model promises a gain below `tolerance`.

    The tolerance is absolute in F or relative to rounding, whichever is larger. Coordinates at a bound whose gradient
    points outward are held there.
    """
    x = torch.minimum(torch.maximum(start, lower), upper)
    value = function.value(x)
    promise = float("inf")
    for iteration in range(limit):
        gradient, curve = function.derivatives(x)
        free = ~(((x <= lower) & (gradient < 0)) | ((x >= upper) & (gradient > 0)))
        step = curve.solve(gradient, free).clamp(-LONGEST_STEP, LONGEST_STEP)
        promise = (gradient * step).sum().item()
        if promise < 0 or not torch.isfinite(step).all():  # clipping turned it: fall back to the separable step
            safe = curve.diagonal().clamp_min(1e-30)
            step = (gradient * free / safe).clamp(-LONGEST_STEP, LONGEST_STEP)
            promise = (gradient * step).sum().item()
        if 0.5 * promise <= max(tolerance, 1e-15 * abs(value.item())):
            return _last(function, x, value, step, lower, upper, iteration, promise)
        x, value, moved = _backtrack(function, x, value, gradient, step, lower, upper)
        if not moved:  # rounding hides what is left to gain
            return Optimum(x, value.item(), iteration, promise < 1e-6 * (1 + abs(value.item())), promise)
    return Optimum(x, value.item(), limit, False, promise)


def _last(
    function: Concave, x: Tensor, value: Tensor, step: Tensor, lower: Tensor, upper: Tensor, count: int, promise: float
) -> Optimum:
    """Take one more step: it gains less than the tolerance but squares the distance to the maximum."""
    there = torch.minimum(torch.maximum(x + step, lower), upper)
    new = function.value(there)
    slack = 1e-14 * (1 + abs(value.item()))
    if torch.isfinite(new) and new >= value - slack:
        x, value = there, new
    return Optimum(x, value.item(), count, True, promise)


def _backtrack(
    function: Concave, x: Tensor, value: Tensor, gradient: Tensor, step: Tensor, lower: Tensor, upper: Tensor
) -> tuple[Tensor, Tensor, bool]:
    length = 1.0
    for _ in range(40):
        there = torch.minimum(torch.maximum(x + length * step, lower), upper)
        new = function.value(there)
        if torch.isfinite(new) and new >= value + SUFFICIENT * (gradient * (there - x)).sum():
            return there, new, True
        length *= 0.5
    return x, value, False


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
        """Split x into log-precisions and log φ."""
        return (x[:-1], x[-1]) if self.learned else (x, self.start)

    def derivatives(self, log_dispersion: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and minus the second derivative in log φ, each (1,), or (0,) if it is not learned."""
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

    Newton's matrix is exact for up to `exact` groups of up to `dense` weights. Beyond, it is replaced by the diagonal
    ½(m_g + τ_g q_g), an upper bound that needs marginal variances only and converges linearly.
    """

    matrix: PSD  # T·H
    groups: Groups
    squares: Tensor  # (G,)
    fit: Fit
    exact: int = 1024
    dense: int = 8192

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
        if self.groups.count > self.exact or self.groups.size > self.dense:
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


@dataclass(frozen=True, eq=False)
class Moved:
    """The result of a step: precisions (G,), likelihood, the log evidence there, and γ."""

    precision: Tensor
    likelihood: Likelihood
    evidence: float
    effective: float


def move(
    belief: Belief,
    groups: Groups,
    precision: Tensor,
    *,
    learn: tuple[str, ...] = ("prior",),
    reach: float = 1.0,
    bounds: tuple[float, float] = BOUNDS,
    tolerance: float = TOLERANCE,
) -> Moved:
    """Go from `precision` (G,) and the belief's noise towards the maximum of the evidence.

    Each log τ and log φ moves by at most `reach`. A group without curvature keeps its precision: the evidence says
    nothing about it.
    """
    curvature, likelihood = belief.curvature, belief.likelihood
    squares = groups.squares(belief)
    start = precision.double().log()
    noise = likelihood.dispersion.detach().double().log()
    low, high = (torch.tensor(b, dtype=torch.float64, device=start.device).log() for b in bounds)
    x, u = start, noise
    for _ in range(ITERATIONS):
        bracket, effective = _effective(belief, groups, x, u)
        there, further = x, u
        if "prior" in learn:
            target = (effective.clamp_min(1e-30) / squares.clamp_min(1e-30)).log()
            target = torch.where(effective > 0, target, x)
            there = _within(0.5 * (x + target), start, reach).clamp(low, high)
        if "dispersion" in learn:
            taken = belief.power * effective.sum()
            step = likelihood.with_dispersion(u.exp()).dispersion_step(curvature.statistics, taken)
            further = _within(u + 0.5 * step, noise, reach)
        change = max((there - x).abs().max().item(), (further - u).abs().item())
        x, u = there, further
        if change < tolerance:
            break
    bracket, effective = _effective(belief, groups, x, u)
    told = likelihood.with_dispersion(u.exp()) if "dispersion" in learn else likelihood
    fit = told.log_likelihood(curvature.statistics).detach()
    value = fit - 0.5 * (x.exp() * squares).sum() - 0.5 * bracket
    return Moved(x.exp(), told, value.item(), effective.sum().item())


def _effective(belief: Belief, groups: Groups, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """log|H/φᵏ + Π| − log|Π| and γ (G,)."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        scaled = belief.curvature.matrix.scale((-belief.power * u).exp())
        bracket = scaled.logdet_ratio(groups.diagonal(x.exp()))
        (slope,) = torch.autograd.grad(bracket, x)
    return bracket.detach(), -slope


def _within(x: Tensor, center: Tensor, reach: float) -> Tensor:
    return torch.minimum(torch.maximum(x, center - reach), center + reach)
