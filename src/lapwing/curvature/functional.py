"""Function space: the Gaussian process with kernel J Π⁻¹ Jᵀ, exact, on part of the data, or in its Nyström form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.curvature import Accumulator, Estimate, Structure
from lapwing.curvature.factor import Factor
from lapwing.curvature.onepass import Totals, pass_over
from lapwing.curvature.problem import Problem
from lapwing.curvature.product import totals_of, whole_factor
from lapwing.errors import TooLarge, UnsupportedOperation, require_whole
from lapwing.linalg import Jacobian
from lapwing.linalg import LowRank as LowRankMatrix
from lapwing.linalg.solvers import Sketch
from lapwing.model import Batch, Batches, Plan, batch_size, take
from lapwing.model.products import Products
from lapwing.storage import register


class RowsAccumulator(Accumulator):
    """All rows Φ (m, P) with G = ΦᵀΦ, without rows that are zero."""

    def __init__(self, problem: Problem) -> None:
        params = problem.network.params
        self.parts = [torch.zeros(0, params.size, dtype=params.dtype, device=params.device)]
        self.tensors = {}

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        rows = jacobian.dense().flatten(0, 1)
        self.parts.append(rows[(rows != 0).any(-1)])

    def finish(self) -> LowRankMatrix:
        rows = torch.cat(self.parts)
        if not len(rows):
            rows = rows.new_zeros(1, rows.shape[1])
        return LowRankMatrix(rows, rows.new_ones(len(rows), dtype=torch.float64), rows.new_zeros(rows.shape[1]))


@register(name="functional")
@dataclass(frozen=True, eq=False)
class Functional(Structure):
    """The exact Gaussian process of the linearized network, equal to the full weight-space posterior to rounding.

    Keeps the m = data × output directions rows Φ of SᵀJ, and inverts the m × m kernel I + c·Φ Π⁻¹ Φᵀ instead of a
    P × P matrix (Khan et al. 2019; Immer et al. 2021): for networks with more weights than the data have outputs. Joint
    covariances, the evidence and any prior per weight are exact. `points` takes that many data at random and scales
    their curvature by n / points, so that the posterior is as narrow as all data make it; the log-likelihood is that of
    all data.

        la = lapwing.fit(model, loader, "regression", structure=lapwing.Functional(points=500))
    """

    points: int | None = None
    seed: int = 0
    bound = "exact"

    def __post_init__(self) -> None:
        if self.points is not None:
            require_whole("points", self.points)

    def bytes(self, plan: Plan, itemsize: int) -> int:
        """Memory of one row and its float64 copy; `needed` counts the rows of a problem."""
        return sum(block.size for block in plan.blocks) * (itemsize + 8)

    def needed(self, problem: Problem) -> int | None:
        return None if problem.length is None else self._memory(problem, problem.length)

    def _memory(self, problem: Problem, data: int) -> int:
        """Bytes of the rows of so many data, a working copy, and the kernel."""
        rows, params = self._rows(problem, data), problem.network.params
        return 2 * rows * params.size * params.dtype.itemsize + 3 * 8 * rows**2

    def _rows(self, problem: Problem, data: int) -> int:
        return (data if self.points is None else min(data, self.points)) * problem.factor.width(problem.outputs)

    def passes(self) -> int:
        return 2

    def _require_memory(self, problem: Problem) -> None:
        """Count the data, and refuse more rows than the memory holds."""
        data = _count(problem.batches)
        needed = self._memory(problem, data)
        if needed > problem.memory:
            raise TooLarge(
                f"structure='functional' keeps {self._rows(problem, data):,} rows of {problem.network.params.size:,} "
                f"weights and their kernel, about {needed / 1e9:.3g} GB, the budget is {problem.memory / 1e9:.3g} GB. "
                "Use Functional(points=...) on fewer data, Nystrom(rank), structure='matrixfree', which keeps no "
                "rows, or raise memory=."
            )

    def estimate(self, problem: Problem) -> Estimate:
        self._require_memory(problem)
        accumulator = RowsAccumulator(problem)
        if self.points is None:
            totals = pass_over(problem, accumulator.update)
            return Estimate(accumulator.finish(), totals, notes=(self._note(accumulator, 1.0),))
        totals = totals_of(problem)
        chosen = subset(problem.batches, self.points, self.seed)
        part = replace(problem, batches=chosen, first=None, rest=None)
        ratio = totals.seen / pass_over(part, accumulator.update).seen
        return Estimate(accumulator.finish().scale(ratio), totals, notes=(self._note(accumulator, ratio),))

    def _note(self, accumulator: RowsAccumulator, ratio: float) -> str:
        rows = sum(len(part) for part in accumulator.parts)
        scaled = f", scaled by {ratio:.4g} to all data" if ratio != 1 else ""
        return f"function space: a kernel of {rows:,} output directions{scaled}"


@register(name="nystrom")
@dataclass(frozen=True, eq=False)
class Nystrom(Structure):
    """The curvature inside a subspace of `rank` directions in weight space, exact there (ELLA, Deng et al. 2022).

    The span of the leading eigenvectors v_k = J̃ᵀu_k/√d_k of the kernel on random Jacobian rows; then one pass of
    `rank` JVPs adds up Σ φᵀΛφ with φ(x) = J(x)v. ELLA sets the variance outside the span to zero, which is
    over-confident away from its random rows; here the prior's variance stays there, so that variances are never below
    ELLA's. The evidence is an upper bound of that of the full GGN, because the eigenvalues of a compressed matrix are
    never larger.

        la = lapwing.fit(model, loader, "classification", structure=lapwing.Nystrom(rank=64))
    """

    rank: int = 32
    points: int | None = None  # data that give the rows; None: as many as give 2·rank rows
    seed: int = 0
    bound = "upper"

    def __post_init__(self) -> None:
        require_whole("the rank", self.rank)

    def bytes(self, plan: Plan, itemsize: int) -> int:
        return 4 * self.rank * sum(block.size for block in plan.blocks) * (itemsize + 8)

    def factor(self, factor: Factor | None) -> Factor | None:
        return whole_factor(factor)

    def passes(self) -> int:
        return 2

    def require(self, problem: Problem) -> None:
        super().require(problem)
        if not problem.factor.exact:
            raise UnsupportedOperation("structure='nystrom' needs factor='ggn': its pass multiplies with Λ itself")

    def estimate(self, problem: Problem) -> Estimate:
        basis = self._basis(problem)
        products = Products(problem.network, problem.batches, problem.progress)
        core, totals = _project(problem, products, basis)
        values, turn = torch.linalg.eigh((core + core.T) / 2)
        matrix = LowRankMatrix(turn.T.to(basis) @ basis, values.clamp(min=0), basis.new_zeros(basis.shape[1]))
        note = f"Nyström: a subspace of {len(basis)} directions, only the prior outside it"
        return Estimate(matrix, totals, notes=(note,))

    def extend(self, problem: Problem, matrix: Any, state: dict[str, Tensor]) -> Estimate:
        """Add data inside the subspace of the first fit."""
        products = Products(problem.network, problem.batches, problem.progress)
        core, totals = _project(problem, products, matrix.basis)
        values, turn = torch.linalg.eigh(core + torch.diag(matrix.values.double()))
        grown = LowRankMatrix(turn.T.to(matrix.basis) @ matrix.basis, values.clamp(min=0), matrix.shift)
        return Estimate(grown, totals)

    def _basis(self, problem: Problem) -> Tensor:
        """Orthonormal rows V (k, P) from Jacobian rows at random data."""
        first = next(iter(problem.batches))
        outputs = problem.network.forward(first.inputs)[0].numel()
        points = self.points or max(2, -(-2 * self.rank // outputs))
        generator = torch.Generator().manual_seed(self.seed)
        rows = []
        with problem.network.borrow():
            for batch in subset(problem.batches, points, self.seed):
                at = problem.network.linearize(problem.plan, batch.inputs)
                count = min(outputs, 64)
                picked = torch.randperm(outputs, generator=generator)[:count]
                eye = torch.eye(outputs, dtype=at.f.dtype)[picked].to(at.f.device)
                directions = eye.reshape(count, 1, *at.f.shape[1:]).expand(count, *at.f.shape)
                rows.append(at.jacobian(directions).dense().flatten(0, 1).detach())
        sketch = Sketch.of_rows(torch.cat(rows), floor=1e-10)
        return sketch.basis[: self.rank]


def _project(problem: Problem, products: Products, basis: Tensor) -> tuple[Tensor, Totals]:
    """Σ (J V)ᵀ φΛ (J V), (k, k) float64, and the totals."""
    core = torch.zeros(len(basis), len(basis), dtype=torch.float64, device=basis.device)
    for batch, f, inside in products.jacobian(basis, label="fit (Nyström)"):
        y = problem.prepare(batch, f)
        image = problem.likelihood.curvature_product(f, y, inside)
        if batch.weights is not None:
            image = image * batch.weights.to(f).reshape(-1, *(1,) * (f.ndim - 1))
        core += inside.flatten(1).double() @ image.flatten(1).double().T
    return core, totals_of(problem)


def _count(batches: Batches) -> int:
    return sum(batch_size(batch.inputs) for batch in batches)


def subset(batches: Batches, points: int, seed: int) -> Batches:
    """Draw `points` data without replacement, as batches of their own."""
    total = _count(batches)
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:points].sort().values
    return Batches(list(_cut(batches, chosen)), batches.module, batches.device, _as_it_is)


def _cut(batches: Batches, chosen: Tensor) -> Iterator[tuple]:
    start = 0
    for batch in batches:
        size = batch_size(batch.inputs)
        here = chosen[(chosen >= start) & (chosen < start + size)] - start
        start += size
        if len(here):
            yield _taken(batch, here.to(batches.device), size)


def _taken(batch: Batch, rows: Tensor, size: int) -> tuple:
    weights = None if batch.weights is None else batch.weights[rows]
    return take(batch.inputs, rows, size), take(batch.targets, rows, size), weights


def _as_it_is(raw: tuple) -> tuple:
    return raw
