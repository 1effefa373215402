"""The whole curvature matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.curvature.factor import Hessian
from lapwing.curvature.hessian import hessian_estimate
from lapwing.curvature.problem import Problem
from lapwing.curvature.structure import Accumulator, Estimate, Structure, one_pass
from lapwing.linalg import Dense, Jacobian
from lapwing.model import Plan


class FullAccumulator(Accumulator):
    """Σ J Jᵀ over all weights."""

    def __init__(self, problem: Problem) -> None:
        params = problem.network.params
        self.tensors = {"matrix": torch.zeros(params.size, params.size, dtype=params.dtype, device=params.device)}

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        rows = jacobian.dense().flatten(0, 1)
        self.tensors["matrix"].addmm_(rows.T, rows)

    def finish(self) -> Dense:
        matrix = self.tensors["matrix"]
        return Dense(0.5 * (matrix + matrix.mT))


@dataclass(frozen=True, eq=False)
class Full(Structure):
    """Every correlation; memory and time grow with the square and the cube of the number of weights."""

    resumes = True

    def bytes(self, plan: Plan, itemsize: int) -> int:
        size = sum(block.size for block in plan.blocks)
        return size**2 * (2 * itemsize + 16)  # the matrix, its symmetrized copy, eigenvectors and work in float64

    def estimate(self, problem: Problem) -> Estimate:
        if isinstance(problem.factor, Hessian):
            return hessian_estimate(problem, Dense)
        return one_pass(problem, FullAccumulator(problem), row_bytes=24 * problem.network.params.size)
