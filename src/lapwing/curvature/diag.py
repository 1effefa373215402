"""The diagonal of the curvature, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.curvature.factor import Hessian
from lapwing.curvature.hessian import hessian_estimate
from lapwing.curvature.problem import Problem
from lapwing.curvature.structure import Accumulator, Estimate, Structure, one_pass
from lapwing.linalg import Diagonal, Jacobian
from lapwing.model import Plan


class DiagAccumulator(Accumulator):
    """Σ J² for every weight."""

    def __init__(self, problem: Problem) -> None:
        params = problem.network.params
        self.tensors = {"diagonal": torch.zeros(params.size, dtype=params.dtype, device=params.device)}

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        self.tensors["diagonal"] += jacobian.square_sum()

    def finish(self) -> Diagonal:
        return Diagonal(self.tensors["diagonal"])


@dataclass(frozen=True, eq=False)
class Diag(Structure):
    """One number a weight: the cheapest, blind to every correlation. Takes any diagonal prior."""

    resumes = True

    def bytes(self, plan: Plan, itemsize: int) -> int:
        return 2 * itemsize * sum(block.size for block in plan.blocks)

    def estimate(self, problem: Problem) -> Estimate:
        if isinstance(problem.factor, Hessian):
            return hessian_estimate(problem, lambda matrix: Diagonal(matrix.diagonal().clone()))
        return one_pass(problem, DiagAccumulator(problem))
