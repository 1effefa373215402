"""Products of the curvature with vectors, re-reading the data, and solves that go through it batch by batch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.curvature.factor import GGN, Factor, larger
from lapwing.curvature.onepass import Totals, pass_over
from lapwing.curvature.problem import Problem
from lapwing.errors import UnsupportedOperation
from lapwing.linalg import Jacobian
from lapwing.linalg.krylov import Policy, dots, xdiag
from lapwing.linalg.operator import Product, Solver
from lapwing.linalg.solvers import Solution
from lapwing.model import Batch
from lapwing.model.calls import outside_inference, weighted
from lapwing.model.products import Keep, Products

MANY = 4  # for at least this many vectors, a forward pass first finds the samples above rounding
ROWS = 64  # output directions per sample up to which all rows are used; beyond, they are sampled


@dataclass(frozen=True, eq=False)
class CurvatureProduct(Product):
    """G = Σ_n J_nᵀ φΛ_n J_n of a problem, re-reading its data for every block of vectors.

    A sample whose curvature in output space is below the tolerance of the factor (by default the rounding of the
    network's dtype, for blocks of vectors) costs only a forward pass. `exact` holds diag G where it was read from a
    file; otherwise a pass over rows computes it, or estimates it where rows are many.
    """

    problem: Problem
    exact: Tensor | None = None
    seed: int = 0

    @cached_property
    def products(self) -> Products:
        return self.problem.products

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.problem.network.params.size

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.problem.network.params.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.problem.network.params.device

    @outside_inference
    def matvec(self, v: Tensor) -> Tensor:
        return self.products.ggn(v.to(self.dtype).double(), self._middle, keep=self._keep(len(v)))

    def _middle(self, batch: Batch, f: Tensor, u: Tensor) -> Tensor:
        y = self.problem.prepare(batch, f)
        likelihood, factor = self.problem.likelihood, self.problem.factor
        if factor.exact:
            image = likelihood.curvature_product(f, y, u)
        else:
            image = torch.zeros_like(u)
            for s in factor.directions(likelihood, f, y, self._generator(batch)):
                image += (u * s).flatten(2).sum(-1).reshape(len(u), -1, *(1,) * (f.ndim - 1)) * s
        return image if batch.weights is None else image * batch.weights.to(f).reshape(-1, *(1,) * (f.ndim - 1))

    def _keep(self, vectors: int) -> Keep | None:
        """Return the choice of samples above the tolerance; None where it would cost more than it saves."""
        factor = self.problem.factor
        if not factor.exact or factor.tolerance == 0 or self.problem.outputs > ROWS:
            return None
        return None if factor.tolerance is None and vectors < MANY else self._counting

    def _counting(self, batch: Batch, f: Tensor) -> Tensor:
        """Return the samples that hold all but the tolerance of the curvature in output space."""
        factor = self.problem.factor
        root = self.problem.likelihood.factor(f.double(), self.problem.prepare(batch, f))
        sizes = root.square().flatten(1).sum(1)
        if batch.weights is not None:
            sizes = sizes * batch.weights.to(sizes)
        tolerance = torch.finfo(f.dtype).eps if factor.tolerance is None else factor.tolerance
        return larger(sizes, tolerance).nonzero().flatten()

    def _generator(self, batch: Batch) -> torch.Generator:
        """Return a generator with which sampled factors draw the same directions at every pass."""
        return torch.Generator(self.device).manual_seed(self.seed + batch.number)

    @outside_inference
    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        def pull(batch: Batch, f: Tensor) -> Tensor:
            y = self.problem.prepare(batch, f)
            likelihood, factor = self.problem.likelihood, self.problem.factor
            if factor.exact:
                u = likelihood.root_noise(f, y, n, generator)
            else:
                u = f.new_zeros(n, *f.shape)
                for s in factor.directions(likelihood, f, y, self._generator(batch)):
                    noise = torch.randn(n, f.shape[0], generator=generator, dtype=f.dtype, device=f.device)
                    u += noise.reshape(n, -1, *(1,) * (f.ndim - 1)) * s
            return u if batch.weights is None else u * batch.weights.to(f).sqrt().reshape(-1, *(1,) * (f.ndim - 1))

        return self.products.transposed(pull, n, keep=self._keep(n))

    @outside_inference
    def diagonal(self) -> Tensor:
        if self.exact is not None:
            return self.exact
        problem = self.problem
        if not problem.factor.sampled and problem.outputs <= ROWS:
            total = torch.zeros(self.size, dtype=torch.float64, device=self.device)

            def update(jacobian: Jacobian, fresh: Tensor | None) -> None:
                total.add_(jacobian.square_sum())

            pass_over(problem, update, label="diagonal", gradient=False)
            return total
        like = torch.empty(0, self.size, dtype=torch.float64, device=self.device)
        return xdiag(self.matvec, like, 32, torch.Generator(self.device).manual_seed(self.seed)).value

    @outside_inference
    def white_solution(self, c: Tensor, shift: Tensor, v: Tensor, options: Solver) -> Solution:
        if self.problem.factor.sampled:
            raise UnsupportedOperation("method='batches' re-reads rows, and sampled ones change: use factor='ggn'")
        return solve_by_batches(
            self.problem, c, shift, v, tolerance=options.tolerance, passes=options.iterations,
            unconverged=options.unconverged,
        )  # fmt: skip


def whole_factor(factor: Factor | None) -> Factor | None:
    """Return the factor without the limit of the exact GGN, since products with Λ need no output directions."""
    if factor is None:
        return GGN(limit=sys.maxsize)
    return replace(factor, limit=sys.maxsize) if type(factor) is GGN else factor


def totals_of(problem: Problem) -> Totals:
    """Sum statistics and gradient in one pass without rows."""
    likelihood = problem.likelihood
    parts: list[tuple[Tensor, float]] = []

    def pull(batch: Batch, f: Tensor) -> Tensor:
        y = problem.prepare(batch, f)
        parts.append((likelihood.statistics(f, y, batch.weights), likelihood.count(f, y, batch.weights)))
        score = likelihood.score(f, y) * likelihood.common_factor.detach().to(f)
        return weighted(score, batch.weights)[None]

    gradient = problem.products.transposed(pull, 1, label="gradient")[0]
    kept = gradient if problem.factor.exact else None
    return Totals(torch.stack([part for part, _ in parts]).sum(0), sum(count for _, count in parts), kept)


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
    """Return (I + Σ_b Φ_bᵀΦ_b)⁻¹ v for v (s, P), where Φ_b = √c·SᵀJ·D^{-½} are the rows of one batch.

    The dual unknowns a_b = Φ_b x of one batch are solved for exactly while the others stay fixed, batch after batch:
    block Gauss–Seidel on the kernel I + ΦΦᵀ. It converges for any prior and without a step size, in few passes where
    batches differ and in many where a weak prior lets all of them pull in one direction. Memory: the rows of one batch,
    and one number per output direction of the data and column. Every pass goes through the rows once; the residual
    takes a pass of its own when the last one moved x by less than `tolerance`.

        found = solve_by_batches(problem, c, tau, v);  found.residuals
    """
    wide = v.double()
    x, dual, used = wide.clone(), _Dual(scale.sqrt(), shift.rsqrt()), 0
    norms = wide.norm(dim=-1).clamp(min=1e-300)
    residuals = torch.full_like(norms, torch.inf)
    while used < passes:
        before = x
        x = dual.improve(problem, x)
        used += 1
        if used == passes or bool(((x - before).norm(dim=-1) <= tolerance * norms).all()):
            residuals = (wide - x - dual.product(problem, x)).norm(dim=-1) / norms
            if bool((residuals <= tolerance).all()):
                break
    found = Solution(x.to(v.dtype), residuals, tolerance, used, used * len(v))
    return found.demand(unconverged, "the batch-by-batch solver")


class _Dual:
    """The unknowns a_b of every part of the data, in the order in which parts are read."""

    def __init__(self, scale: Tensor, root: Tensor) -> None:
        self.scale, self.root = scale, root
        self.parts: list[Tensor] = []

    def rows(self, jacobian: Jacobian) -> Tensor:
        rows = jacobian.dense().flatten(0, 1)
        return rows * (self.scale * self.root).to(rows)

    def improve(self, problem: Problem, x: Tensor) -> Tensor:
        """Solve for the unknowns of one part after the other, each time with all others fixed."""
        number, state = 0, [x]

        def update(jacobian: Jacobian, fresh: Tensor | None) -> None:
            nonlocal number
            rows = self.rows(jacobian)
            if number == len(self.parts):
                self.parts.append(x.new_zeros(len(x), len(rows)))
            old = self.parts[number]
            kernel = dots(rows, rows)
            inner = dots(state[0], rows) + old @ kernel
            eye = torch.eye(len(rows), dtype=kernel.dtype, device=kernel.device)
            new = torch.linalg.solve(eye + kernel, inner.T).T
            state[0] = state[0] - (new - old) @ rows.double()
            self.parts[number] = new
            number += 1

        pass_over(problem, update, label="solve")
        return state[0]

    def product(self, problem: Problem, x: Tensor) -> Tensor:
        """Return Σ Φᵀ Φ x."""
        total = torch.zeros_like(x)

        def update(jacobian: Jacobian, fresh: Tensor | None) -> None:
            rows = self.rows(jacobian)
            total.add_(dots(x, rows) @ rows.double())

        pass_over(problem, update, label="residual")
        return total
