"""Curvature kept as a few rows: its largest eigenpairs, the part inside a Nyström subspace, or all rows of few data.

With all rows, the posterior is the Gaussian process with kernel J Π⁻¹ Jᵀ (function space), of all data or of a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from lapwing.curvature.curvature import Accumulator, Estimate, Structure
from lapwing.curvature.factor import Factor
from lapwing.curvature.onepass import pass_over
from lapwing.curvature.problem import Problem
from lapwing.curvature.product import CurvatureProduct, totals_of, whole_factor
from lapwing.errors import BadData, TooLarge, UnsupportedOperation, require_whole
from lapwing.linalg import PSD, Jacobian
from lapwing.linalg import LowRank as LowRankMatrix
from lapwing.linalg.krylov import largest_eigenpairs
from lapwing.linalg.solvers import Sketch, nystrom
from lapwing.model import Batches, Plan, batch_size, take
from lapwing.model.batches import as_it_is
from lapwing.storage import register

BLOCK = 16  # starts of block Lanczos
OVERSAMPLE = 10  # random directions beyond the rank
WIDTH = 4096  # weights at a time in products of rows


class LowRankAccumulator(Accumulator):
    """Rows R (k, P) with RᵀR ⪯ Σ J Jᵀ, the best of rank k at each step; `dropped` is the trace that is lost."""

    def __init__(self, problem: Problem, rank: int) -> None:
        params = problem.network.params
        self.rank = min(rank, params.size)
        self.tensors = {
            "rows": torch.zeros(0, params.size, dtype=params.dtype, device=params.device),
            "dropped": torch.zeros((), dtype=torch.float64, device=params.device),
        }

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        self.absorb(jacobian.dense().flatten(0, 1))

    def absorb(self, rows: Tensor) -> None:
        for piece in rows.split(max(self.rank, 32)):
            stacked = torch.cat([self.tensors["rows"], piece])
            if len(stacked) <= 2 * self.rank:  # cut only when there is twice too much: half the decompositions
                self.tensors["rows"] = stacked
            else:
                self._cut(stacked, self.rank)

    def _cut(self, stacked: Tensor, rank: int) -> None:
        small = _gram(stacked)
        values, vectors = torch.linalg.eigh(0.5 * (small + small.T))
        keep = min(rank, len(values))
        self.tensors["dropped"] = self.tensors["dropped"] + values[:-keep].clamp(min=0).sum()
        self.tensors["rows"] = vectors[:, -keep:].T.to(stacked) @ stacked

    def finish(self) -> LowRankMatrix:
        if len(self.tensors["rows"]) > self.rank:
            self._cut(self.tensors["rows"], self.rank)
        rows = self.tensors["rows"]
        values = rows.double().square().sum(1)
        unit = torch.where(values > 0, values, torch.ones_like(values)).rsqrt().to(rows)
        basis = rows * unit[:, None]
        if len(basis) == 0:
            basis, values = rows.new_zeros(1, rows.shape[1]), values.new_zeros(1)
        return LowRankMatrix(basis, values, rows.new_zeros(rows.shape[1]))


def _gram(rows: Tensor) -> Tensor:
    """Return R Rᵀ in float64, summed from products of narrow pieces in the dtype of the rows."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for piece in rows.split(WIDTH, dim=1):
        total += piece @ piece.T
    return total


@register(name="lowrank")
@dataclass(frozen=True, eq=False)
class LowRank(Structure):
    """Uᵀ diag(d) U with `rank` rows: exact if the curvature has at most this rank, a lower bound otherwise.

    `method`: "rows" keeps the leading subspace of the rows seen so far, in one pass; "lanczos" (block Lanczos, fully
    re-orthogonalized) and "nystrom" (randomized range finding) use products only, for networks with so many outputs
    that rows are too many; every block of products reads all data.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", structure=lapwing.LowRank(rank=20))
    """

    rank: int = 100
    method: Literal["rows", "lanczos", "nystrom"] = "rows"
    seed: int = 0
    bound = "upper"

    def __post_init__(self) -> None:
        require_whole("the rank", self.rank)
        if self.method not in ("rows", "lanczos", "nystrom"):
            raise BadData(f"method is 'rows', 'lanczos' or 'nystrom', got {self.method!r}")

    def bytes(self, plan: Plan, itemsize: int) -> int:
        return 4 * self.rank * sum(block.size for block in plan.blocks) * (itemsize + 8)

    def factor(self, factor: Factor | None) -> Factor | None:
        return factor if self.method == "rows" else whole_factor(factor)

    def passes(self) -> int:
        return 1 if self.method == "rows" else 2

    def estimate(self, problem: Problem) -> Estimate:
        if self.method != "rows":
            return self._by_products(problem, None)
        return self._sweep(problem, LowRankAccumulator(problem, self.rank))

    def extend(self, problem: Problem, matrix: PSD, state: dict[str, Tensor]) -> Estimate:
        """Continue from the rows of the first fit; rows that it dropped stay dropped."""
        if self.method != "rows":
            return self._by_products(problem, matrix)
        matrix = cast(LowRankMatrix, matrix)
        accumulator = LowRankAccumulator(problem, self.rank)
        accumulator.absorb(matrix.basis * matrix.values.sqrt().to(matrix.basis)[:, None])
        accumulator.tensors["dropped"] += state["dropped"].to(accumulator.tensors["dropped"])
        return self._sweep(problem, accumulator)

    def _sweep(self, problem: Problem, accumulator: LowRankAccumulator) -> Estimate:
        totals = pass_over(problem, accumulator.update, row_bytes=32 * problem.network.params.size)
        matrix = accumulator.finish()
        dropped = accumulator.tensors["dropped"]
        total = float(dropped) + float(matrix.trace())
        share = float(dropped) / total if total > 0 else 0.0
        return Estimate(matrix, totals, {"dropped": dropped}, (f"rank {self.rank} drops {share:.2%} of the trace",))

    def _by_products(self, problem: Problem, before: PSD | None) -> Estimate:
        product = CurvatureProduct(problem, None, self.seed)
        rank = min(self.rank, product.size)
        generator = torch.Generator(product.device).manual_seed(self.seed)

        def matvec(v: Tensor) -> Tensor:
            image = product.matvec(v).to(v.dtype)
            return image if before is None else image + before.matvec(v)

        if self.method == "nystrom":
            like = torch.empty(0, product.size, dtype=product.dtype, device=product.device)
            sketch = nystrom(matvec, like, min(rank + OVERSAMPLE, product.size), generator)
            basis, values, how = sketch.basis[:rank], sketch.values[:rank], f"{sketch.products} products"
        else:
            block = min(rank, BLOCK)
            start = torch.randn(block, product.size, generator=generator, dtype=product.dtype, device=product.device)
            steps = 3 * -(-rank // block) + 10
            pairs = largest_eigenpairs(matvec, start, rank, tolerance=1e-4, steps=steps, unconverged="accept")
            basis, values = pairs.vectors, pairs.values.clamp(min=0)
            worst = float(pairs.residuals.max() / values.max().clamp(min=1e-300))
            how = f"{pairs.products} products, largest residual {worst:.1e} of the largest eigenvalue"
        matrix = LowRankMatrix(basis, values, basis.new_zeros(product.size))
        return Estimate(matrix, totals_of(problem), notes=(f"rank {len(values)} by {self.method}: {how}",))


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

    Examples:
        >>> la = lapwing.fit(network, (inputs, targets), "regression", structure=lapwing.Functional(points=30))
        >>> low, high = la.predict(inputs).interval(0.95)
    """

    points: int | None = None
    seed: int = 0
    bound = "exact"

    def __post_init__(self) -> None:
        if self.points is not None:
            require_whole("points", self.points)

    def bytes(self, plan: Plan, itemsize: int) -> int:
        """Return the bytes of one row and its float64 copy; `needed` counts the rows of a problem."""
        return sum(block.size for block in plan.blocks) * (itemsize + 8)

    def needed(self, problem: Problem) -> int | None:
        return None if problem.length is None else self._memory(problem, problem.length)

    def _memory(self, problem: Problem, data: int) -> int:
        """Return the bytes of the rows of the data, a working copy, and the kernel."""
        rows, params = self._rows(problem, data), problem.network.params
        return 2 * rows * params.size * params.dtype.itemsize + 3 * 8 * rows**2

    def _rows(self, problem: Problem, data: int) -> int:
        return (data if self.points is None else min(data, self.points)) * problem.factor.width(problem.outputs)

    def passes(self) -> int:
        return 2

    def estimate(self, problem: Problem) -> Estimate:
        data = _count(problem.batches)
        needed = self._memory(problem, data)
        if needed > problem.memory:
            raise TooLarge(
                f"structure='functional' keeps {self._rows(problem, data):,} rows of {problem.network.params.size:,} "
                f"weights and their kernel, about {needed / 1e9:.3g} GB, the budget is {problem.memory / 1e9:.3g} GB. "
                "Use Functional(points=...) on fewer data, Nystrom(rank), structure='matrixfree', which keeps no "
                "rows, or raise memory=."
            )

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
    over-confident away from its random rows. Here the prior's variance stays there, so that variances are never below
    ELLA's. The log evidence is an upper bound of the log evidence with the full GGN, because the eigenvalues of a
    compressed matrix are never larger.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", structure=lapwing.Nystrom(rank=20))
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
        note = f"Nyström: a subspace of {len(basis)} directions, only the prior outside it"
        return Estimate(compressed(basis, _project(problem, basis)), totals_of(problem), notes=(note,))

    def extend(self, problem: Problem, matrix: Any, state: dict[str, Tensor]) -> Estimate:
        """Add data inside the subspace of the first fit."""
        core = _project(problem, matrix.basis) + torch.diag(matrix.values.double())
        return Estimate(compressed(matrix.basis, core), totals_of(problem))

    def _basis(self, problem: Problem) -> Tensor:
        """Return orthonormal rows V (k, P) from Jacobian rows at random data."""
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


def compressed(basis: Tensor, core: Tensor) -> LowRankMatrix:
    """Return Vᵀ C V for orthonormal rows V (k, P) and a core C (k, k), whose negative eigenvalues are rounding."""
    values, turn = torch.linalg.eigh((core + core.T) / 2)
    return LowRankMatrix(turn.T.to(basis) @ basis, values.clamp(min=0), basis.new_zeros(basis.shape[1]))


def _project(problem: Problem, basis: Tensor) -> Tensor:
    """Return Σ (J V)ᵀ φΛ (J V), (k, k) float64."""
    core = torch.zeros(len(basis), len(basis), dtype=torch.float64, device=basis.device)
    for batch, f, inside in problem.products.jacobian(basis, label="fit (Nyström)"):
        y = problem.prepare(batch, f)
        image = problem.likelihood.curvature_product(f, y, inside)
        if batch.weights is not None:
            image = image * batch.weights.to(f).reshape(-1, *(1,) * (f.ndim - 1))
        core += inside.flatten(1).double() @ image.flatten(1).double().T
    return core


def _count(batches: Batches) -> int:
    return sum(batch_size(batch.inputs) for batch in batches)


def subset(batches: Batches, points: int, seed: int) -> Batches:
    """Draw `points` data without replacement, as batches of their own."""
    total = _count(batches)
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:points].sort().values
    return Batches(list(_cut(batches, chosen)), batches.module, batches.device, as_it_is)


def _cut(batches: Batches, chosen: Tensor) -> Iterator[tuple]:
    start = 0
    for batch in batches:
        size = batch_size(batch.inputs)
        here = chosen[(chosen >= start) & (chosen < start + size)] - start
        start += size
        if len(here):
            rows = here.to(batches.device)
            weights = None if batch.weights is None else batch.weights[rows]
            yield take(batch.inputs, rows, size), take(batch.targets, rows, size), weights
