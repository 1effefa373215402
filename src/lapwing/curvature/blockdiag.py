"""One dense block for each weight matrix with its bias, and for each group of small parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.curvature.factor import Hessian
from lapwing.curvature.hessian import hessian_estimate
from lapwing.curvature.problem import Problem
from lapwing.curvature.structure import Accumulator, Estimate, Structure, blocks_of, layout_of, one_pass
from lapwing.linalg import BlockDiagonal, Dense, Jacobian
from lapwing.model import Plan


class BlockDiagAccumulator(Accumulator):
    """Σ J Jᵀ inside each block."""

    def __init__(self, problem: Problem) -> None:
        params = problem.network.params
        self.blocks, self.layout = blocks_of(problem), layout_of(problem)
        self.tensors = {
            str(k): torch.zeros(block.size, block.size, dtype=params.dtype, device=params.device)
            for k, block in enumerate(self.blocks)
        }

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        for k, block in enumerate(self.blocks):
            if block.kind != "unused":
                self.tensors[str(k)] += jacobian.rows[k].gram()

    def finish(self) -> BlockDiagonal:
        names = tuple(", ".join(block.names) for block in self.blocks)
        matrices = [self.tensors[str(k)] for k in range(len(self.blocks))]
        return BlockDiagonal(self.layout, tuple(Dense(0.5 * (m + m.mT)) for m in matrices), names)


@dataclass(frozen=True, eq=False)
class BlockDiag(Structure):
    """Exact inside a block, nothing between blocks. A block is one operation's weight and bias."""

    resumes = True

    def bytes(self, plan: Plan, itemsize: int) -> int:
        return sum(block.size**2 for block in plan.blocks) * (2 * itemsize + 16)

    def estimate(self, problem: Problem) -> Estimate:
        if isinstance(problem.factor, Hessian):
            layout, blocks = layout_of(problem), blocks_of(problem)
            names = tuple(", ".join(block.names) for block in blocks)

            def cut(matrix: torch.Tensor) -> BlockDiagonal:
                parts = tuple(Dense(matrix[index][:, index].clone()) for index in layout.index)
                return BlockDiagonal(layout, parts, names)

            return hessian_estimate(problem, cut)
        return one_pass(problem, BlockDiagAccumulator(problem))
