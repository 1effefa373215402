"""Kernel-space samples: changes of the weights that leave the linearized training predictions unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lapwing.curvature.problem import Problem
from lapwing.errors import UnsupportedOperation
from lapwing.linalg.krylov import Policy, dots
from lapwing.linalg.solvers import Solution
from lapwing.model import batch_size, take

FLOOR = 1e-12  # share of the largest eigenvalue of a batch's kernel below which directions count as dependent


def project_to_nullspace(
    problem: Problem,
    v: Tensor,
    *,
    samples: int = 16,
    tolerance: float = 1e-3,
    passes: int = 50,
    unconverged: Policy = "raise",
) -> Solution:
    """Project v (s, P) onto {x : J_n x = 0 for all training data n}, which keeps linearized predictions on them.

    Cyclic projections x ← x − J_bᵀ(J_b J_bᵀ)⁺ J_b x over batches b of `samples` data (Kaczmarz; Miani et al. 2024,
    "Bayes without underfitting"): memory is that of one batch's rows. With v ~ N(0, τ⁻¹I) the result is the τ-scaled
    posterior in the limit of infinitely many copies of the data. `residuals` are ‖J x‖ / ‖J v‖ over all data.

        moved = project_to_nullspace(problem, torch.randn(8, problem.network.params.size))
    """
    if v.shape[-1] != problem.network.params.size:
        raise ValueError(f"expected rows of length {problem.network.params.size}, got {tuple(v.shape)}")
    if problem.plan.dynamic:
        raise UnsupportedOperation("alternating projections need a network whose operations do not depend on the data")
    x, start, used = v.double(), torch.zeros(len(v), dtype=torch.float64, device=v.device), 0
    residuals = torch.full_like(start, torch.inf)
    for number in range(passes + 1):
        total = torch.zeros_like(start)
        for rows in _rows(problem, samples):
            inside = dots(x, rows)  # (s, m)
            total += inside.square().sum(-1)
            if number < passes:
                x = x - (inside @ _inverse(dots(rows, rows))) @ rows.double()
        start = total.sqrt() if number == 0 else start
        # residuals are measured on every batch just before its own projection
        residuals = total.sqrt() / torch.where(start > 0, start, 1.0)
        used = number
        if number and bool((residuals <= tolerance).all()):
            break
    found = Solution(x.to(v.dtype), residuals, tolerance, used, used * len(v))
    return found.demand(unconverged, "alternating projections")


def _inverse(kernel: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((kernel + kernel.T) / 2)
    keep = values > FLOOR * values.max().clamp(min=0)
    return (vectors[:, keep] / values[keep]) @ vectors[:, keep].T


def _rows(problem: Problem, samples: int) -> Iterator[Tensor]:
    """Yield J of a few data at a time, (m, P), with one row per output."""
    for batch in problem.batches:
        total = batch_size(batch.inputs)
        for begin in range(0, total, samples):
            part = take(batch.inputs, slice(begin, begin + samples), total)
            with problem.network.borrow():
                at = problem.network.linearize(problem.plan, part)
                outputs = at.f[0].numel()
                eye = torch.eye(outputs, dtype=at.f.dtype, device=at.f.device)
                directions = eye.reshape(outputs, 1, *at.f.shape[1:]).expand(outputs, *at.f.shape)
                rows = at.jacobian(directions).dense().flatten(0, 1).detach()
            yield rows
