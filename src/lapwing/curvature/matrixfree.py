"""The exact curvature by its products alone: nothing of it is kept but a sketch that makes iterations short."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lapwing.curvature.factor import GGN, Factor, MCFisher
from lapwing.curvature.lowrank import LowRankAccumulator
from lapwing.curvature.minibatch import solve_by_batches
from lapwing.curvature.problem import Problem, Totals
from lapwing.curvature.structure import Estimate, Structure
from lapwing.errors import BadData, UnsupportedOperation
from lapwing.likelihoods import Categorical, Likelihood
from lapwing.linalg import Jacobian
from lapwing.linalg.krylov import Policy, Sketch, Solution, nystrom, xdiag
from lapwing.linalg.operator import Operator, Product, Solver
from lapwing.linalg.rows import chunks
from lapwing.model import Batch, Network, Plan
from lapwing.model.products import Products

NEGLIGIBLE = 1e-4  # the smallest rows that together hold less than this share of the trace do not enter the sketch
SKETCH_DRAWS = 4  # sampled targets a datum where the sketch is sampled
DIRECTIONS = 64  # output directions a sample up to which the sketch is made of exact rows; beyond, of sampled ones


@dataclass(frozen=True, eq=False)
class CurvatureProduct(Product):
    """G = Σ_n J_nᵀ φΛ_n J_n of a problem, re-reading its data for every block of vectors.

    `exact` holds diag G where a pass has computed it.
    """

    problem: Problem
    products: Products
    exact: Tensor | None = None
    seed: int = 0

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.problem.network.params.size

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.problem.network.params.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.problem.network.params.device

    def matvec(self, v: Tensor) -> Tensor:
        return self.products.ggn(v.to(self.dtype).double(), self._middle)

    def _middle(self, batch: Batch, f: Tensor, u: Tensor) -> Tensor:
        y = self.problem.prepare(batch, f)
        likelihood, factor = self.problem.likelihood, self.problem.factor
        if isinstance(factor, GGN):
            image = curvature_of_outputs(likelihood, f, y, u)
        else:
            image = torch.zeros_like(u)
            for s in factor.directions(likelihood, f, y, self._generator(batch)):
                image += (u * s).flatten(2).sum(-1).reshape(len(u), -1, *(1,) * (f.ndim - 1)) * s
        return image if batch.weights is None else image * _columns(batch.weights, f)

    def _generator(self, batch: Batch) -> torch.Generator:
        """Sampled factors draw the same directions at every pass."""
        return torch.Generator(self.device).manual_seed(self.seed + batch.number)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        def pull(batch: Batch, f: Tensor) -> Tensor:
            y = self.problem.prepare(batch, f)
            likelihood, factor = self.problem.likelihood, self.problem.factor
            if isinstance(factor, GGN):
                u = root_noise(likelihood, f, y, n, generator)
            else:
                u = f.new_zeros(n, *f.shape)
                for s in factor.directions(likelihood, f, y, self._generator(batch)):
                    noise = torch.randn(n, f.shape[0], generator=generator, dtype=f.dtype, device=f.device)
                    u += noise.reshape(n, -1, *(1,) * (f.ndim - 1)) * s
            return u if batch.weights is None else u * _columns(batch.weights, f).sqrt()

        return self.products.transposed(pull, n)

    def diagonal(self) -> Tensor:
        if self.exact is not None:
            return self.exact
        like = torch.empty(0, self.size, dtype=torch.float64, device=self.device)
        return xdiag(self.matvec, like, 32, torch.Generator(self.device).manual_seed(self.seed)).value

    def white_solution(self, c: Tensor, shift: Tensor, v: Tensor, options: Solver) -> Solution:
        if isinstance(self.problem.factor, MCFisher):
            raise UnsupportedOperation("method='batches' re-reads rows, and sampled ones change: use factor='ggn'")
        return solve_by_batches(
            self.problem, c, shift, v, tolerance=options.tolerance, passes=options.iterations,
            unconverged=options.unconverged,
        )  # fmt: skip


def whole_factor(factor: Factor | None) -> Factor | None:
    """The exact GGN without a limit: products with Λ go through no output directions."""
    return GGN(limit=sys.maxsize) if factor is None or type(factor) is GGN else factor


def _columns(weights: Tensor, f: Tensor) -> Tensor:
    return weights.to(f).reshape(-1, *(1,) * (f.ndim - 1))


def curvature_of_outputs(likelihood: Likelihood, f: Tensor, y: Tensor, u: Tensor) -> Tensor:
    """φΛ u for u (s, n, *event, c); classes without a C × C matrix: p ∘ u − p (pᵀu)."""
    if isinstance(likelihood, Categorical):
        p = f.softmax(-1)
        image = p * (u - (p * u).sum(-1, keepdim=True))
        mask = likelihood.mask(f, y)
        return image if mask is None else image * mask[..., None]
    root = likelihood.factor(f, y).to(u)
    return torch.einsum("n...cr,n...dr,sn...d->sn...c", root, root, u)


def root_noise(likelihood: Likelihood, f: Tensor, y: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """S ε with E = φΛ, (n, B, *event, c); classes: √p ∘ ε − p (√pᵀε)."""
    if isinstance(likelihood, Categorical):
        p = f.softmax(-1)
        noise = torch.randn(n, *f.shape, generator=generator, dtype=f.dtype, device=f.device)
        half = p.sqrt() * noise
        drawn = half - p * half.sum(-1, keepdim=True)
        mask = likelihood.mask(f, y)
        return drawn if mask is None else drawn * mask[..., None]
    root = likelihood.factor(f, y)
    noise = torch.randn(n, *root.shape[:-2], root.shape[-1], generator=generator, dtype=root.dtype, device=root.device)
    return torch.einsum("b...cr,sb...r->sb...c", root, noise)


class SketchAccumulator(LowRankAccumulator):
    """The leading subspace of rows, a few samples at a time and without negligible rows; and Σ J² beside it."""

    def __init__(self, problem: Problem, rank: int) -> None:
        super().__init__(problem, rank)
        self.tensors["diagonal"] = torch.zeros(problem.network.params.size, dtype=torch.float64)

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        for start, length in chunks(jacobian.n, jacobian.r * jacobian.size * jacobian.dtype.itemsize // 4):
            rows = jacobian.narrow(start, length).dense().flatten(0, 1)
            squares = rows.square()
            self.tensors["diagonal"] += squares.sum(0).double().cpu()
            self._absorb(rows[_weighty(squares.sum(-1).double())])


def _weighty(squares: Tensor) -> Tensor:
    """All rows but the smallest, whose squared norms sum to at most NEGLIGIBLE of all."""
    order = squares.argsort()
    keep = squares[order].cumsum(0) > NEGLIGIBLE * squares.sum()
    return order[keep]


@dataclass(frozen=True, eq=False)
class MatrixFree(Structure):
    """The whole curvature, exactly, without a matrix: solves, samples and log-determinants by products over the data.

    A sketch of `rank` rows preconditions: exact ones from one pass where outputs are few, sampled ones (Monte Carlo
    Fisher) where they are many, or randomized Nyström (`sketch="nystrom"`, `rank` products). `tolerance` is that of
    every solve (None: 1e-8 in float64, 1e-4 in float32), `probes` and `steps` those of the log-determinant, whose
    standard error is `la.posterior.precision.ratio_estimate().error`. `sampling="sketch"` draws from sketch and prior
    alone. `predictive`: closed-form covariances by "solve"; by `samples` weight draws; or by the "sketch".
    `method="batches"` solves by the rows of a batch at a time (`solve_by_batches`, at most `iterations` passes): for
    data that are slow to read, many columns and loose tolerances.

    Memory: about rank + 6·columns vectors of weights. Data are kept by reference and re-read.

        la = lapwing.fit(model, loader, "classification", structure=MatrixFree(rank=200))
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

    def __post_init__(self) -> None:
        for name in ("rank", "iterations", "columns", "probes", "steps", "samples"):
            if getattr(self, name) < 1:
                raise BadData(f"{name} must be at least 1, got {getattr(self, name)}")
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
        totals, sketch, exact = self._sketch(problem)
        kept = replace(problem, first=None, rest=None)
        product = CurvatureProduct(kept, Products(problem.network, problem.batches, problem.progress), exact, self.seed)
        if self.sketch == "nystrom":
            like = torch.empty(0, product.size, dtype=product.dtype, device=product.device)
            # not the seed of the probes: probes inside the sketch's own range would see no remainder
            generator = torch.Generator(product.device).manual_seed(self.seed + 7919)
            sketch = nystrom(lambda v: product.matvec(v).to(v.dtype), like, self.rank, generator)
        matrix = Operator(product, sketch, solver=self.solver(product.dtype))
        return Estimate(matrix, totals, notes=self._notes(problem, matrix, totals))

    def _sketch(self, problem: Problem) -> tuple[Totals, Sketch, Tensor | None]:
        """One pass: statistics and gradient, the sketch, and diag G where rows are exact."""
        params = problem.network.params
        like = torch.empty(0, params.size, dtype=params.dtype, device=params.device)
        few = not isinstance(problem.factor, GGN) or self._directions(problem) <= DIRECTIONS
        if self.sketch != "rows":
            return _totals(problem), Sketch.empty(like), None
        accumulator = SketchAccumulator(problem, self.rank)
        factor = None if few else MCFisher(SKETCH_DRAWS)
        totals = problem.sweep(accumulator.update, factor, label="sketch")
        if not few:
            totals = replace(totals, gradient=_totals(problem).gradient)
        sketch = Sketch.of_rows(accumulator.tensors["rows"])
        sketch = Sketch(sketch.basis[: self.rank], sketch.values[: self.rank])
        exact = isinstance(problem.factor, GGN) and few
        return totals, sketch, accumulator.tensors["diagonal"].to(params.device) if exact else None

    def _directions(self, problem: Problem) -> int:
        first = next(iter(problem.batches))
        return problem.network.forward(first.inputs)[0].numel()

    def _notes(self, problem: Problem, matrix: Operator, totals: Totals) -> tuple[str, ...]:
        note = (
            f"matrix-free: every product reads {totals.seen:g} data (about two gradients of them) and solves take "
            f"{self.columns} vectors at a time; sketch of rank {matrix.sketch.rank}"
        )
        if matrix.product.exact is not None:  # type: ignore[attr-defined]
            whole = float(matrix.product.diagonal().sum())
            share = float(matrix.sketch.values.sum()) / whole if whole > 0 else 1.0
            note += f", which holds {share:.2%} of the trace"
        return (note,)


def stored(matrix: Operator) -> dict[str, Tensor]:
    """What a file keeps of a matrix-free curvature: its sketch, scale and diagonal. The data are read again."""
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


def restored(problem: Problem, structure: MatrixFree, tensors: Mapping[str, Tensor]) -> Operator:
    """The inverse of `stored`, for the same network and data; no pass over them."""
    sketch = Sketch(tensors["basis"], tensors["values"])
    products = Products(problem.network, problem.batches, problem.progress)
    product = CurvatureProduct(problem, products, tensors.get("diagonal"), structure.seed)
    if sketch.basis.shape[-1] != product.size:
        raise BadData(f"the file holds vectors of {sketch.basis.shape[-1]} weights, the selection has {product.size}")
    return Operator(product, sketch, tensors["factor"], solver=structure.solver(product.dtype))


def require_same_data(problem: Problem, statistics: Tensor, seen: float) -> None:
    """Refuse data whose number or log-likelihood is not that of the fit: one forward pass."""
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


def moved(matrix: Operator, network: Network, device: torch.device | str) -> Operator:
    """The same matrix on another device; data are sent there batch by batch."""
    product, tensors = matrix.product, {k: v.to(device) for k, v in stored(matrix).items()}
    assert isinstance(product, CurvatureProduct)
    batches = replace(product.problem.batches, device=torch.device(device))
    problem = replace(product.problem, network=network, batches=batches)
    fresh = CurvatureProduct(
        problem, Products(network, batches, problem.progress), tensors.get("diagonal"), product.seed
    )
    return Operator(fresh, Sketch(tensors["basis"], tensors["values"]), tensors["factor"], solver=matrix.solver)


def _totals(problem: Problem) -> Totals:
    """Statistics and gradient by one plain pass, without rows."""
    likelihood = problem.likelihood
    parts: list[tuple[Tensor, float]] = []

    def pull(batch: Batch, f: Tensor) -> Tensor:
        y = problem.prepare(batch, f)
        parts.append((likelihood.statistics(f, y, batch.weights), likelihood.count(f, y, batch.weights)))
        score = likelihood.score(f, y) * likelihood.dispersion.detach().to(f)
        return (score if batch.weights is None else score * _columns(batch.weights, f))[None]

    products = Products(problem.network, problem.batches, problem.progress)
    gradient = products.transposed(pull, 1, label="gradient")[0]
    kept = gradient if isinstance(problem.factor, GGN) else None
    return Totals(torch.stack([part for part, _ in parts]).sum(0), sum(count for _, count in parts), kept)
