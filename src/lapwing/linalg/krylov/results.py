"""Results of iterative methods, with the accuracy they reached and what happens where that is not enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lapwing.errors import NotConverged, warn

Matvec = Callable[[Tensor], Tensor]
"""A symmetric matrix as a function of blocks of row vectors: (k, P) → (k, P)."""

Policy = Literal["raise", "warn", "accept"]
"""What to do with a result that missed its tolerance."""


@dataclass(frozen=True, eq=False)
class Solution:
    """Approximate solutions x (k, P) of A x = b, with the relative residual ‖b − A x‖/‖b‖ that each row reached.

    `residuals` are computed from A x, not from a recurrence. `products` counts matrix–vector products.
    """

    x: Tensor
    residuals: Tensor  # (k,)
    tolerance: float
    iterations: int
    products: int
    restarts: int = 0

    @property
    def converged(self) -> bool:
        return bool((self.residuals <= self.tolerance).all())

    def demand(self, policy: Policy, what: str) -> Solution:
        """Return this solution if it converged; else raise `NotConverged`, warn, or accept it, as the policy says."""
        if not self.converged and policy != "accept":
            bad = int((self.residuals > self.tolerance).sum())
            report(
                policy,
                f"{what} left {bad} of {len(self.residuals)} columns above the relative residual {self.tolerance:.3g} "
                f"after {self.iterations} iterations: the largest is {float(self.residuals.max()):.3g}. "
                "Allow more iterations, use a preconditioner of higher rank, a larger prior precision, float64, "
                "or a looser tolerance.",
            )
        return self


@dataclass(frozen=True, eq=False)
class Estimate:
    """A Monte Carlo estimate, float64, with its standard error from `probes` independent or exchangeable probes."""

    value: Tensor
    error: Tensor
    probes: int
    products: int


def report(policy: Policy, message: str) -> None:
    """Raise `NotConverged` or warn, as the policy says."""
    if policy == "raise":
        raise NotConverged(message)
    warn(message)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Multiply A Bᵀ for blocks of rows (j, P) and (k, P), accumulated in float64 whatever the dtype."""
    if a.dtype == torch.float64 and b.dtype == torch.float64:
        return a @ b.T
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    step = max(1, 2**22 // max(1, a.shape[0] + b.shape[0]))
    for start in range(0, a.shape[1], step):
        total += a[:, start : start + step].double() @ b[:, start : start + step].double().T
    return total
