"""The largest eigenpairs of the curvature: from one pass over its rows, or from products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from lapwing.curvature.curvature import Accumulator, Estimate, Structure
from lapwing.curvature.factor import Factor
from lapwing.curvature.onepass import pass_over
from lapwing.curvature.problem import Problem
from lapwing.curvature.product import CurvatureProduct, totals_of, whole_factor
from lapwing.errors import BadData, require_whole
from lapwing.linalg import PSD, Jacobian
from lapwing.linalg import LowRank as LowRankMatrix
from lapwing.linalg.krylov import largest_eigenpairs
from lapwing.linalg.solvers import nystrom
from lapwing.model import Plan
from lapwing.model.products import Products
from lapwing.storage import register

BLOCK = 16  # starts of block Lanczos
OVERSAMPLE = 10  # random directions beyond the rank


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


def _gram(rows: Tensor, width: int = 4096) -> Tensor:
    """Return R Rᵀ in float64, summed from products of narrow pieces in the dtype of the rows."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for piece in rows.split(width, dim=1):
        total += piece @ piece.T
    return total


@register(name="lowrank")
@dataclass(frozen=True, eq=False)
class LowRank(Structure):
    """Uᵀ diag(d) U with `rank` rows: exact once the rank reaches that of the curvature, a lower bound before.

    `method`: "rows" keeps the leading subspace of the rows seen so far, in one pass; "lanczos" (block Lanczos, fully
    re-orthogonalized) and "nystrom" (randomized range finding) use products only, for networks with so many outputs
    that rows are too many; every block of products reads all data.

        la = lapwing.fit(model, loader, "classification", structure=lapwing.LowRank(rank=50))
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
        """Start from the rows of the first fit: what it dropped stays dropped."""
        if self.method != "rows":
            return self._by_products(problem, matrix)
        matrix = cast(LowRankMatrix, matrix)
        accumulator = LowRankAccumulator(problem, self.rank)
        accumulator.absorb(matrix.basis * matrix.values.sqrt().to(matrix.basis)[:, None])
        accumulator.tensors["dropped"] = accumulator.tensors["dropped"] + state["dropped"].to(
            accumulator.tensors["dropped"]
        )
        return self._sweep(problem, accumulator)

    def _sweep(self, problem: Problem, accumulator: LowRankAccumulator) -> Estimate:
        totals = pass_over(problem, accumulator.update, row_bytes=32 * problem.network.params.size)
        matrix = accumulator.finish()
        dropped = accumulator.tensors["dropped"]
        total = float(dropped) + float(matrix.trace())
        share = float(dropped) / total if total > 0 else 0.0
        return Estimate(matrix, totals, {"dropped": dropped}, (f"rank {self.rank} drops {share:.2%} of the trace",))

    def _by_products(self, problem: Problem, before: PSD | None) -> Estimate:
        product = CurvatureProduct(
            problem, Products(problem.network, problem.batches, problem.progress), None, self.seed
        )
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
