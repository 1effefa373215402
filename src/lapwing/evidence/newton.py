"""Newton's method for a concave function inside a box, with steps limited for log-precisions."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

LONGEST_STEP = 4.0  # in log-precision, a factor of 55: where the function is nearly linear Newton's step has no limit
SUFFICIENT = 1e-4  # Armijo's constant


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
