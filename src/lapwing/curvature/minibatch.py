"""Solves that read a batch at a time and finish with it: for data that should be passed over a few times only."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.curvature.problem import Problem
from lapwing.curvature.sweep import sweep
from lapwing.linalg import Jacobian
from lapwing.linalg.krylov import Policy, Solution
from lapwing.linalg.krylov.results import gram


def solve_by_batches(
    problem: Problem,
    scale: Tensor,
    shift: Tensor,
    v: Tensor,
    *,
    tolerance: float = 1e-2,
    passes: int = 20,
    unconverged: Policy = "raise",
) -> Solution:
    """(I + Σ_b Φ_bᵀΦ_b)⁻¹ v for v (s, P), where Φ_b = √c·SᵀJ·D^{-½} are the rows of one batch.

    The dual unknowns a_b = Φ_b x of a batch are solved for exactly while those of the others stay, batch after batch:
    block Gauss–Seidel on the kernel I + ΦΦᵀ, which converges for any prior and without a step size, in few passes where
    batches say different things and in many where a weak prior lets all of them pull on one direction. Memory: the rows
    of one batch, and one number for every output direction of the data and column. Every pass goes through the rows
    once; the residual is computed by a pass of its own when the last one moved x by less than `tolerance`.

        found = solve_by_batches(problem, c, tau, v);  found.residuals
    """
    wide = v.double()
    x, dual, used = wide.clone(), _Dual(scale.sqrt(), shift.rsqrt()), 0
    norms = wide.norm(dim=-1).clamp(min=1e-300)
    residuals = torch.full_like(norms, torch.inf)
    while used < passes:
        before = x
        x = dual.sweep(problem, x)
        used += 1
        if used == passes or bool(((x - before).norm(dim=-1) <= tolerance * norms).all()):
            residuals = (wide - x - dual.product(problem, x)).norm(dim=-1) / norms
            if bool((residuals <= tolerance).all()):
                break
    found = Solution(x.to(v.dtype), residuals, tolerance, used, used * len(v))
    return found.demand(unconverged, "the batch-by-batch solver")


class _Dual:
    """The unknowns a_b of every piece of data, in the order in which it is read."""

    def __init__(self, scale: Tensor, root: Tensor) -> None:
        self.scale, self.root = scale, root
        self.parts: list[Tensor] = []

    def rows(self, jacobian: Jacobian) -> Tensor:
        rows = jacobian.dense().flatten(0, 1)
        return rows * (self.scale * self.root).to(rows)

    def sweep(self, problem: Problem, x: Tensor) -> Tensor:
        """One pass: every piece's unknowns given all others'."""
        number, state = 0, [x]

        def update(jacobian: Jacobian, fresh: Tensor | None) -> None:
            nonlocal number
            rows = self.rows(jacobian)
            if number == len(self.parts):
                self.parts.append(x.new_zeros(len(x), len(rows)))
            old = self.parts[number]
            kernel = gram(rows, rows)
            inner = gram(state[0], rows) + old @ kernel
            eye = torch.eye(len(rows), dtype=kernel.dtype, device=kernel.device)
            new = torch.linalg.solve(eye + kernel, inner.T).T
            state[0] = state[0] - (new - old) @ rows.double()
            self.parts[number] = new
            number += 1

        sweep(problem, update, label="solve")
        return state[0]

    def product(self, problem: Problem, x: Tensor) -> Tensor:
        """Σ Φᵀ Φ x."""
        total = torch.zeros_like(x)

        def update(jacobian: Jacobian, fresh: Tensor | None) -> None:
            rows = self.rows(jacobian)
            total.add_(gram(x, rows) @ rows.double())

        sweep(problem, update, label="residual")
        return total
