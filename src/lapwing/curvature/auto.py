"""The structure that `structure="auto"` means."""

from __future__ import annotations

from dataclasses import dataclass

from lapwing.curvature.curvature import Estimate, Structure
from lapwing.curvature.ekfac import EKFAC
from lapwing.curvature.entries import Diag, Full
from lapwing.curvature.kron import Kron
from lapwing.curvature.lowrank import Functional
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.curvature.problem import Problem
from lapwing.model import Plan
from lapwing.model.batches import sharded
from lapwing.storage import named, register

FULL_BELOW = 1500  # "auto" keeps the whole matrix up to this many weights
FUNCTIONAL_BELOW = 512  # "auto" keeps all Jacobian rows up to this many


@register
@dataclass(frozen=True, eq=False)
class Auto(Structure):
    """Choose a structure by the number of weights and outputs, the data and the memory; `la.summary()` says why."""

    mergeable = closed_form = True

    def bytes(self, plan: Plan, itemsize: int) -> int:
        return 0

    def passes(self) -> int:
        return 2  # at most, before the choice

    def estimate(self, problem: Problem) -> Estimate:
        return self.chosen(problem)[0].estimate(problem)

    def chosen(self, problem: Problem) -> tuple[Structure, str]:
        params, plan, served = problem.network.params, problem.plan, problem.factor.structures
        itemsize = params.dtype.itemsize
        if params.index is not None:
            return Full(), "full, because the selection asks for a dense structure"
        if served:
            return named(Structure)[
                served[0]
            ](), f"{served[0]}, because factor {type(problem.factor).__name__} asks for it"
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
                f"ekfac, because {params.size:,} weights are too many for a full matrix (structure='matrixfree' would "
                f"be exact, with {exact / 1e6:,.3g} MB and two gradients of all data for every product)"
            )
        if Kron().bytes(plan, itemsize) <= problem.memory:
            return Kron(), "kron, because the data can be read only once or ekfac exceeds the memory budget"
        small = MatrixFree(rank=32, columns=4, probes=4, steps=10, samples=32, predictive="samples")
        needed = small.bytes(plan, itemsize)
        if problem.batches.reiterable and needed <= problem.memory and not sharded():
            return small, (
                f"matrixfree, because Kronecker factors exceed the memory budget and {needed / 1e6:,.3g} MB of vectors "
                "do not; every product reads all data, about two gradients of them"
            )
        return Diag(), "diag, because Kronecker factors exceed the memory budget"
