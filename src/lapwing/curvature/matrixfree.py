"""The exact curvature as products with vectors: only a sketch is kept, which makes iterations short."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lapwing.curvature.curvature import Estimate, Structure
from lapwing.curvature.factor import GGN, Factor
from lapwing.curvature.fewrows import LowRankAccumulator
from lapwing.curvature.onepass import Totals, pass_over
from lapwing.curvature.problem import Problem
from lapwing.curvature.product import ROWS, CurvatureProduct, totals_of, whole_factor
from lapwing.errors import BadData, CorruptFile, UnsupportedOperation, require_whole
from lapwing.linalg import PSD, Jacobian
from lapwing.linalg.krylov import Policy
from lapwing.linalg.operator import Operator, Solver
from lapwing.linalg.rows import chunks
from lapwing.linalg.solvers import Sketch, nystrom
from lapwing.model import Network, Plan
from lapwing.storage import first_flaw, flaw_of_scalar, flaw_of_values, register

NEGLIGIBLE = 1e-4  # share of the curvature in output space, then of the trace of rows, that the sketch leaves out


def _large(squares: Tensor) -> Tensor:
    """Return the indices of all rows but the smallest, whose squared norms sum to at most NEGLIGIBLE of the total."""
    order = squares.argsort()
    keep = squares[order].cumsum(0) > NEGLIGIBLE * squares.sum()
    return order[keep]


@register(name="matrixfree")
@dataclass(frozen=True, eq=False)
class MatrixFree(Structure):
    """The whole curvature, exactly, without a matrix: solves, samples and log-determinants by products over the data.

    - `rank` is the size of the sketch that preconditions solves. `sketch="rows"` makes it from rows in one pass where a
      sample has few outputs; otherwise, and with `sketch="nystrom"`, it is randomized Nyström from `rank` products.
    - `tolerance` is that of every solve (None: 1e-8 in float64, 1e-4 in float32), with at most `iterations` steps for
      `columns` vectors at a time.
    - `probes` and `steps` are those of the log-determinant, whose standard error the summary shows.
    - `sampling="sketch"` draws weights from the sketch and the prior only.
    - `predictive` computes covariances by "solve", by "samples" (`samples` weight draws) or by the "sketch".
    - `method="batches"` solves with the rows of one batch at a time (`solve_by_batches`, at most `iterations` passes),
      for data that are slow to read, many columns and loose tolerances.

    Memory: about rank + 6·columns vectors of weights. The data are kept by reference and read again.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", structure=lapwing.MatrixFree(rank=50))
    """

    rank: int = 128
    sketch: Literal["rows", "nystrom", "none"] = "rows"
    tolerance: float | None = None
    iterations: int = 500
    columns: int = 16
    probes: int = 8
    steps: int = 20
    samples: int = 64
    sampling: Literal["solve", "sketch"] = "solve"
    predictive: Literal["solve", "samples", "sketch"] = "solve"
    unconverged: Policy = "raise"
    seed: int = 0
    method: Literal["cg", "batches"] = "cg"
    reads_data = True
    bound = "exact"

    def __post_init__(self) -> None:
        for name in ("rank", "iterations", "columns", "probes", "steps", "samples"):
            require_whole(name, getattr(self, name))
        for name, allowed in (
            ("sketch", ("rows", "nystrom", "none")),
            ("sampling", ("solve", "sketch")),
            ("predictive", ("solve", "samples", "sketch")),
            ("method", ("cg", "batches")),
        ):
            if getattr(self, name) not in allowed:
                raise BadData(f"{name} is one of {allowed}, got {getattr(self, name)!r}")

    def bytes(self, plan: Plan, itemsize: int) -> int:
        size = sum(block.size for block in plan.blocks)
        sketch = 0 if self.sketch == "none" else 3 * self.rank * itemsize
        return size * (sketch + 8 * 6 * max(self.columns, self.probes) + 8 * self.steps * self.probes)

    def factor(self, factor: Factor | None) -> Factor | None:
        return whole_factor(factor)

    def passes(self) -> int:
        return 2

    def solver(self, dtype: torch.dtype) -> Solver:
        tolerance = self.tolerance or (1e-8 if dtype == torch.float64 else 1e-4)
        return Solver(
            tolerance, self.iterations, self.columns, self.probes, self.steps, self.samples, self.sampling,
            self.predictive, self.unconverged, self.seed, self.method,
        )  # fmt: skip

    def estimate(self, problem: Problem) -> Estimate:
        if problem.progress or (problem.progress is None and sys.stderr.isatty()):
            tqdm.write(self.cost(problem), file=sys.stderr)
        totals, (sketch, trace) = totals_of(problem), self._sketch(problem)
        kept = replace(problem, first=None, rest=None)
        product = CurvatureProduct(kept, None, self.seed)
        if self._how(problem) == "nystrom":
            like = torch.empty(0, product.size, dtype=product.dtype, device=product.device)
            # not the seed of the probes: probes inside the sketch's own range would see no remainder
            generator = torch.Generator(product.device).manual_seed(self.seed + 7919)
            sketch = nystrom(lambda v: product.matvec(v).to(v.dtype), like, self.rank, generator)
        matrix = Operator(product, sketch, solver=self.solver(product.dtype))
        return Estimate(matrix, totals, notes=self._notes(matrix, totals, trace))

    def cost(self, problem: Problem) -> str:
        """Say what a fit costs in bytes, products and seconds; one gradient of the first batch is timed."""
        itemsize = torch.finfo(problem.network.params.dtype).bits // 8
        megabytes = self.bytes(problem.plan, itemsize) / 1e6
        batch = next(iter(problem.batches))
        begin = time.perf_counter()
        problem.products.vjp(batch.inputs, lambda f: f[None])
        seconds, length = time.perf_counter() - begin, problem.batches.length
        whole = f"{seconds * length:,.3g} s" if length else f"{seconds:.3g} s for each batch"
        return (
            f"matrix-free: {megabytes:,.3g} MB for {self.rank} + 6 × {max(self.columns, self.probes)} vectors of "
            f"{problem.network.params.size:,} weights and {self.steps} × {self.probes} of the log-determinant. A "
            f"product takes about two gradients of all data, a gradient about {whole}; a solve at least 2 products "
            f"per column, log_evidence() {self.probes * self.steps} products."
        )

    def _how(self, problem: Problem) -> str:
        """Return "rows" where outputs are few. Of many outputs a few sampled rows would make a poor sketch."""
        many = problem.factor.exact and problem.outputs > ROWS
        return "nystrom" if self.sketch == "rows" and many else self.sketch

    def _sketch(self, problem: Problem) -> tuple[Sketch, float]:
        """Pass over the rows once; return their leading subspace without negligible rows, and the trace of all rows."""
        params = problem.network.params
        if self._how(problem) != "rows":
            return Sketch.empty(torch.empty(0, params.size, dtype=params.dtype, device=params.device)), 0.0
        leading, trace = LowRankAccumulator(problem, self.rank), 0.0

        def update(jacobian: Jacobian, fresh: Tensor | None) -> None:
            nonlocal trace
            for start, length in chunks(jacobian.n, jacobian.r * jacobian.size * jacobian.dtype.itemsize // 4):
                rows = jacobian.narrow(start, length).dense().flatten(0, 1)
                squares = torch.linalg.vector_norm(rows, dim=-1).double().square()
                trace += float(squares.sum())
                leading.absorb(rows[_large(squares)])

        factor = GGN(tolerance=NEGLIGIBLE) if problem.factor.exact else problem.factor
        pass_over(problem, update, factor, label="sketch", gradient=False)
        sketch = Sketch.of_rows(leading.tensors["rows"])
        return Sketch(sketch.basis[: self.rank], sketch.values[: self.rank]), trace

    def stored(self, matrix: PSD) -> tuple[dict[str, Tensor], Any]:
        return _tensors(cast(Operator, matrix)), {"type": self.name}

    def restored(self, tensors: Mapping[str, Tensor], description: Any, problem: Problem) -> Operator:
        """Rebuild the matrix that `stored` wrote, for the same network and data, without a pass over them."""
        sketch = Sketch(tensors["basis"], tensors["values"])
        _require_sound(sketch, tensors)
        product = CurvatureProduct(problem, tensors.get("diagonal"), self.seed)
        if sketch.basis.shape[-1] != product.size:
            raise BadData(
                f"the file holds vectors of {sketch.basis.shape[-1]} weights, the selection has {product.size}"
            )
        return Operator(product, sketch, tensors["factor"], solver=self.solver(product.dtype))

    def moved(self, matrix: PSD, network: Network, device: torch.device | str) -> Operator:
        """Return the matrix on another device; data are sent there batch by batch."""
        own = cast(Operator, matrix)
        product, tensors = cast(CurvatureProduct, own.product), {k: v.to(device) for k, v in _tensors(own).items()}
        batches = replace(product.problem.batches, device=torch.device(device))
        problem = replace(product.problem, network=network, batches=batches)
        fresh = CurvatureProduct(problem, tensors.get("diagonal"), product.seed)
        return Operator(fresh, Sketch(tensors["basis"], tensors["values"]), tensors["factor"], solver=own.solver)

    def _notes(self, matrix: Operator, totals: Totals, trace: float) -> tuple[str, ...]:
        tolerance = matrix.product.problem.factor.tolerance  # type: ignore[attr-defined]
        left = f", without samples that hold {tolerance:g} of the curvature in output space" if tolerance else ""
        note = (
            f"matrix-free: every product reads {totals.seen:g} data (two gradients of them{left}) and solves take "
            f"{self.columns} vectors at a time; sketch of rank {matrix.sketch.rank}"
        )
        if trace > 0:
            note += f", which holds {float(matrix.sketch.values.sum()) / trace:.2%} of the trace of its rows"
        return (note,)


def _tensors(matrix: Operator) -> dict[str, Tensor]:
    """Return what a file holds of a matrix-free curvature: its sketch, scale and diagonal. The data are read again."""
    if not isinstance(matrix.product, CurvatureProduct):
        raise UnsupportedOperation(
            "this matrix-free posterior holds the data of several fits and cannot be stored; fit once on all data"
        )
    tensors = {
        "basis": matrix.sketch.basis,
        "values": matrix.sketch.values,
        "factor": torch.as_tensor(matrix.factor, dtype=torch.float64).detach(),
    }
    return tensors if matrix.product.exact is None else {**tensors, "diagonal": matrix.product.exact}


def _require_sound(sketch: Sketch, tensors: Mapping[str, Tensor]) -> None:
    """Refuse numbers that no fit can have stored."""
    diagonal = tensors.get("diagonal")
    if diagonal is not None and diagonal.shape != sketch.basis.shape[-1:]:
        raise CorruptFile(f"the stored diagonal has shape {tuple(diagonal.shape)}; fit again, or restore a copy")
    found = first_flaw(
        sketch.flaw(),
        flaw_of_scalar("its factor", tensors["factor"]),
        "" if diagonal is None else flaw_of_values("its diagonal", diagonal),
    )
    if found:
        raise CorruptFile(f"the stored sketch is impossible: {found}; fit again, or restore a copy")


def require_same_data(problem: Problem, statistics: Tensor, seen: float) -> None:
    """Refuse data with another number or log-likelihood than the data of the fit; takes one forward pass."""
    count, total = 0.0, torch.zeros_like(statistics)
    for batch in problem.batches:
        f = problem.network.forward(batch.inputs)
        y = problem.prepare(batch, f)
        count += problem.likelihood.count(f, y, batch.weights)
        total = total + problem.likelihood.statistics(f, y, batch.weights).to(total)
    if abs(count - seen) > 1e-6 * seen:
        raise BadData(f"the posterior was fitted on {seen:g} data, these are {count:g}; pass the same")
    if not torch.allclose(total, statistics, rtol=1e-3, atol=1e-6):
        raise BadData(
            "these are not the data of the fit: the network's log-likelihood of them is another "
            f"({statistics.tolist()} then, {total.tolist()} now); pass the same"
        )
