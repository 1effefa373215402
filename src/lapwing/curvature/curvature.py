"""Estimate the curvature of the log-likelihood of a network on its data, choosing a structure for "auto"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from lapwing.curvature.ekfac import EKFAC
from lapwing.curvature.entries import Diag, Full
from lapwing.curvature.factor import Factor
from lapwing.curvature.functional import Functional
from lapwing.curvature.kron import Kron
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.curvature.onepass import Totals
from lapwing.curvature.problem import Problem
from lapwing.curvature.shards import require_same, sharded, together
from lapwing.curvature.structure import OTHER_OPERATIONS, Estimate, Structure, layout_of
from lapwing.errors import BadData, UnsupportedOperation
from lapwing.linalg import PSD, Layout
from lapwing.model import Params, PlanChanged, dynamic_plan
from lapwing.storage import named

FULL_BELOW = 1500  # "auto" keeps the whole matrix up to this many weights
FUNCTIONAL_BELOW = 512  # "auto" keeps all Jacobian rows up to this many


@dataclass(frozen=True, eq=False)
class Curvature:
    """Σ Jᵀ S Sᵀ J over the data at unit dispersion, without prior, noise or temperature.

    `statistics` give the log-likelihood for any noise, `gradient` is Σ φ·∇θ log p (None for sampled factors). Both and
    the matrix are scaled to `n_data`; `seen` counts the data that were read.

        la.curvature.matrix, la.curvature.n_data
    """

    matrix: PSD
    layout: Layout
    names: tuple[tuple[str, ...], ...]
    statistics: Tensor
    n_data: float
    seen: float
    structure: Structure
    factor: Factor
    gradient: Tensor | None = None
    notes: tuple[str, ...] = ()
    state: dict[str, Tensor] = field(default_factory=dict, repr=False)
    params: Params | None = field(default=None, repr=False)  # the weights it was computed at

    @property
    def dispersion_power(self) -> int:
        return self.factor.dispersion_power

    @property
    def size(self) -> int:
        return self.matrix.size

    def dense(self) -> Tensor:
        """The curvature as a (P, P) tensor in the flat order of the parameters."""
        return self.matrix.dense()


def choose_structure(problem: Problem) -> tuple[Structure, str]:
    """Choose the structure for "auto", and say why."""
    params, plan, served = problem.network.params, problem.plan, problem.factor.structures
    itemsize = params.dtype.itemsize
    if params.index is not None:
        return Full(), "full, because the selection asks for a dense structure"
    if served:
        return named(Structure)[served[0]](), f"{served[0]}, because factor {type(problem.factor).__name__} asks for it"
    if params.size <= FULL_BELOW and Full().bytes(plan, itemsize) <= problem.memory:
        return Full(), f"full, because {params.size:,} weights are few (up to {FULL_BELOW:,})"
    if problem.length is not None and problem.batches.reiterable and not sharded():
        rows, needed = problem.length * problem.factor.width(problem.outputs), Functional().needed(problem)
        if rows <= FUNCTIONAL_BELOW and rows < params.size and needed is not None and needed <= problem.memory:
            return Functional(), (
                f"functional, because the data have at most {rows:,} output directions, fewer than {params.size:,} "
                f"weights: exact for this factor, in {needed / 1e6:,.3g} MB"
            )
    if problem.batches.reiterable and EKFAC().bytes(plan, itemsize) <= problem.memory:
        exact = MatrixFree().bytes(plan, itemsize)
        return EKFAC(), (
            f"ekfac, because {params.size:,} weights are too many for a full matrix (structure='matrixfree' would be "
            f"exact, with {exact / 1e6:,.3g} MB and two gradients of all data for every product)"
        )
    if Kron().bytes(plan, itemsize) <= problem.memory:
        return Kron(), "kron, because the data can be read only once or ekfac exceeds the memory budget"
    small = MatrixFree(rank=32, columns=4, probes=4, steps=10, samples=32, predictive="samples")
    needed = small.bytes(plan, itemsize)
    if problem.batches.reiterable and needed <= problem.memory and not sharded():
        return small, (
            f"matrixfree, because Kronecker factors exceed the memory budget and {needed / 1e6:,.3g} MB of vectors do "
            "not; every product reads all data, about two gradients of them"
        )
    return Diag(), "diag, because Kronecker factors exceed the memory budget"


def estimate_curvature(problem: Problem, structure: Structure | None, n_data: float | None = None) -> Curvature:
    """Run the structure over the data and scale the result to the size of the data set that it stands for."""
    notes: tuple[str, ...] = ()
    if structure is None:
        structure, why = choose_structure(problem)
        notes = (f"structure: {why}",)
    _require(problem, structure)
    require_same({"structure": repr(structure)})
    problem, estimate = _robustly(problem, structure, structure.estimate)
    notes = (*notes, *problem.plan.notes, *estimate.notes, *estimate.totals.notes)
    return _finish(problem, structure, estimate, n_data, notes)


def extend_curvature(problem: Problem, curvature: Curvature) -> Curvature:
    """Add the data of a problem to a curvature; `n_data` grows by what is seen."""
    structure = curvature.structure
    _require(problem, structure)
    ratio = curvature.n_data / curvature.seen
    raw = curvature.matrix if ratio == 1 else curvature.matrix.scale(1 / ratio)

    def extend(problem: Problem) -> Estimate:
        return structure.extend(_in_blocks_of(curvature, problem), raw, curvature.state)

    problem, estimate = _robustly(_in_blocks_of(curvature, problem), structure, extend)
    more = estimate.totals
    gradient = None
    if curvature.gradient is not None and more.gradient is not None:
        gradient = curvature.gradient / ratio + more.gradient
    totals = Totals(curvature.statistics / ratio + more.statistics, curvature.seen + more.seen, gradient)
    notes = tuple(dict.fromkeys((*curvature.notes, *estimate.notes)))
    n_data = curvature.n_data + more.seen
    return _finish(problem, structure, replace(estimate, totals=totals), n_data, notes)


def _in_blocks_of(curvature: Curvature, problem: Problem) -> Problem:
    """Return the problem with the blocks that the curvature has: those of the tape, or those of a loop over samples."""
    without = replace(problem, plan=dynamic_plan(problem.network.params, "a loop over samples, as in the fit"))
    for same in (problem, without):
        if curvature.layout.same_as(layout_of(same)) and curvature.structure.continues(curvature.matrix, same):
            return same
    raise UnsupportedOperation(OTHER_OPERATIONS)


def _require(problem: Problem, structure: Structure) -> None:
    structure.require(problem)
    served = problem.factor.structures
    if served and structure.name not in served:
        raise UnsupportedOperation(
            f"factor {type(problem.factor).__name__} needs structure={' or '.join(map(repr, served))}, not "
            f"{structure.name!r}. Use one of these, or factor='ggn'."
        )


def _robustly(
    problem: Problem, structure: Structure, estimate: Callable[[Problem], Estimate]
) -> tuple[Problem, Estimate]:
    """Estimate, and start over without the tape where the operations change from batch to batch."""
    try:
        with together():
            return problem, estimate(problem)
    except PlanChanged:
        problem.batches.require_reiterable("a network whose operations change from batch to batch")
        note = "a loop over samples for all weights: the operations change from batch to batch"
        problem = replace(problem, plan=dynamic_plan(problem.network.params, note))
        structure.require(problem)
        return problem, estimate(problem)


def _finish(
    problem: Problem, structure: Structure, estimate: Estimate, n_data: float | None, notes: tuple[str, ...]
) -> Curvature:
    totals = estimate.totals
    if not totals.seen > 0:
        raise BadData("no datum counts: all weights are zero")
    n = totals.seen if n_data is None else float(n_data)
    ratio = n / totals.seen
    unused = [name for block in problem.plan.blocks if block.kind == "unused" for name in block.names]
    if unused:
        notes = (*notes, f"no curvature, only the prior: {', '.join(unused)} do not reach the outputs")
    params = problem.network.params
    names = (params.names,) if params.index is not None else tuple(block.names for block in problem.plan.blocks)
    return Curvature(
        matrix=estimate.matrix if ratio == 1 else estimate.matrix.scale(ratio),
        layout=layout_of(problem),
        names=names,
        statistics=totals.statistics * ratio,
        n_data=n,
        seen=totals.seen,
        structure=structure,
        factor=problem.factor,
        gradient=None if totals.gradient is None else (totals.gradient * ratio).to(params.dtype),
        notes=tuple(dict.fromkeys(notes)),
        state=estimate.state,
        params=params,
    )
