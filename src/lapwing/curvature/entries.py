"""Structures that keep entries of the curvature exactly: its diagonal, its blocks, or all of it.

They also serve a `MatrixFactor`, which computes the whole matrix by itself, such as the exact Hessian.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.curvature.closed import Head, unfolded
from lapwing.curvature.curvature import Accumulator, Estimate, Structure, accumulate, blocks_of, layout_of
from lapwing.curvature.factor import Factor
from lapwing.curvature.onepass import Totals
from lapwing.curvature.problem import Problem
from lapwing.errors import TooLarge
from lapwing.linalg import BlockDiagonal, Dense, Diagonal, Jacobian
from lapwing.model import Plan
from lapwing.storage import register


class MatrixFactor(Factor):
    """A factor without directions, which computes the whole matrix by itself; the structures here keep a part of it."""

    structures = ("full", "blockdiag", "diag")
    mergeable = False

    @abstractmethod
    def matrix(self, problem: Problem) -> tuple[Tensor, Totals]:
        """Pass over the data once; return the curvature (P, P) and the totals."""

    def width(self, outputs: int) -> int:
        return 0


def head_places(problem: Problem) -> Tensor:
    """Return where the weights (o, i) and the bias of a last layer are in the flat vector, row by row."""
    return problem.plan.blocks[0].places.index.to(problem.network.params.device)


def head_sums(problem: Problem) -> Tensor:
    """Return zeros for `Head.gram`, (pairs, i, i)."""
    params, (_, o, i) = problem.network.params, problem.plan.blocks[0].shape
    return torch.zeros(o * (o + 1) // 2, i, i, dtype=params.dtype, device=params.device)


class DiagAccumulator(Accumulator):
    """Σ J² for every weight."""

    def __init__(self, problem: Problem) -> None:
        params = problem.network.params
        self.tensors = {"diagonal": torch.zeros(params.size, dtype=params.dtype, device=params.device)}
        self.places = slice(None) if problem.reader is None else head_places(problem)

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        self.tensors["diagonal"] += jacobian.square_sum()

    def closed(self, head: Head) -> None:
        self.tensors["diagonal"][self.places] += (head.diagonal().mT @ head.a.square()).reshape(-1)

    def finish(self) -> Diagonal:
        return Diagonal(self.tensors["diagonal"])


@register(name="diag")
@dataclass(frozen=True, eq=False)
class Diag(Structure):
    """Keep one number per weight: the cheapest structure, without any correlation. It takes any diagonal prior.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", structure=lapwing.Diag())  # or "diag"
    """

    mergeable = closed_form = True
    bound = "lower"

    def bytes(self, plan: Plan, itemsize: int) -> int:
        return 2 * itemsize * sum(block.size for block in plan.blocks)

    def estimate(self, problem: Problem) -> Estimate:
        if isinstance(problem.factor, MatrixFactor):
            matrix, totals = problem.factor.matrix(problem)
            return Estimate(Diagonal(matrix.diagonal().clone()), totals)
        return accumulate(problem, DiagAccumulator(problem))


class BlockDiagAccumulator(Accumulator):
    """Σ J Jᵀ inside each block."""

    def __init__(self, problem: Problem) -> None:
        params = problem.network.params
        self.blocks, self.layout = blocks_of(problem), layout_of(problem)
        self.outputs = 0
        if problem.reader is not None:
            self.outputs, self.tensors = problem.reader.features.shape[0], {"head": head_sums(problem)}
            return
        self.tensors = {
            str(k): torch.zeros(block.size, block.size, dtype=params.dtype, device=params.device)
            for k, block in enumerate(self.blocks)
        }

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        for k, block in enumerate(self.blocks):
            if block.kind != "unused":
                self.tensors[str(k)] += jacobian.rows[k].gram()

    def closed(self, head: Head) -> None:
        self.tensors["head"] += head.gram()

    def finish(self) -> BlockDiagonal:
        if self.outputs:
            self.tensors["0"] = unfolded(self.tensors.pop("head"), self.outputs)
        names = tuple(", ".join(block.names) for block in self.blocks)
        matrices = [self.tensors[str(k)] for k in range(len(self.blocks))]
        return BlockDiagonal(self.layout, tuple(Dense(0.5 * (m + m.mT)) for m in matrices), names)


@register(name="blockdiag")
@dataclass(frozen=True, eq=False)
class BlockDiag(Structure):
    """Keep the exact curvature inside each block and nothing between blocks. A block is one operation's weight and
    bias, or a group of small parameters.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", structure=lapwing.BlockDiag())  # or "blockdiag"
    """

    mergeable = closed_form = True
    bound = "lower"

    def bytes(self, plan: Plan, itemsize: int) -> int:
        return sum(block.size**2 for block in plan.blocks) * (2 * itemsize + 16)

    def estimate(self, problem: Problem) -> Estimate:
        if not isinstance(problem.factor, MatrixFactor):
            return accumulate(problem, BlockDiagAccumulator(problem))
        layout, names = layout_of(problem), tuple(", ".join(block.names) for block in blocks_of(problem))
        matrix, totals = problem.factor.matrix(problem)
        parts = tuple(Dense(matrix[index][:, index].clone()) for index in layout.index)
        return Estimate(BlockDiagonal(layout, parts, names), totals)


class FullAccumulator(Accumulator):
    """Σ J Jᵀ over all weights."""

    def __init__(self, problem: Problem) -> None:
        params = problem.network.params
        self.outputs = 0
        if problem.reader is not None:
            self.outputs, self.places = problem.reader.features.shape[0], head_places(problem)
            self.tensors = {"head": head_sums(problem)}
            return
        self.tensors = {"matrix": torch.zeros(params.size, params.size, dtype=params.dtype, device=params.device)}

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        rows = jacobian.dense().flatten(0, 1)
        self.tensors["matrix"].addmm_(rows.T, rows)

    def closed(self, head: Head) -> None:
        self.tensors["head"] += head.gram()

    def finish(self) -> Dense:
        if self.outputs:
            found = unfolded(self.tensors.pop("head"), self.outputs)
            order = self.places.argsort()
            return Dense(found.index_select(0, order).index_select(1, order))
        matrix = self.tensors["matrix"]
        return Dense(0.5 * (matrix + matrix.mT))


@register(name="full")
@dataclass(frozen=True, eq=False)
class Full(Structure):
    """Keep the whole matrix: memory grows with the square and time with the cube of the number of weights.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", structure=lapwing.Full())  # or "full"
    """

    mergeable = closed_form = True
    bound = "exact"

    def bytes(self, plan: Plan, itemsize: int) -> int:
        size = sum(block.size for block in plan.blocks)
        return size**2 * (2 * itemsize + 16)  # the matrix, its symmetrized copy, eigenvectors and work in float64

    def estimate(self, problem: Problem) -> Estimate:
        if isinstance(problem.factor, MatrixFactor):
            matrix, totals = problem.factor.matrix(problem)
            return Estimate(Dense(matrix), totals)
        return accumulate(problem, FullAccumulator(problem), row_bytes=24 * problem.network.params.size)


@register(name="hessian")
@dataclass(frozen=True, eq=False)
class Hessian(MatrixFactor):
    """The exact Hessian of the negative log-likelihood, by one second backward pass per weight. It may be indefinite.

    Examples:
        >>> exact = lapwing.Hessian()
        >>> la = lapwing.fit(model, train_loader, "classification", structure="full", factor=exact, repair=True)
    """

    definite = False

    def matrix(self, problem: Problem) -> tuple[Tensor, Totals]:
        """Return Σ_n φ·∇²_θ(−log p(y_n | f_n)), (P, P), and the totals of the pass."""
        params, likelihood = problem.network.params, problem.likelihood
        needed = params.size**2 * torch.finfo(params.dtype).bits // 8
        if needed > problem.memory:
            raise TooLarge(
                f"the exact Hessian of {params.size:,} weights needs {needed / 1e9:.3g} GB. Use factor='ggn', or "
                "select fewer weights."
            )
        total = torch.zeros(params.size, params.size, dtype=params.dtype, device=params.device)
        statistics, seen = torch.zeros((), dtype=torch.float64), 0.0
        gradient = torch.zeros(params.size, dtype=torch.float64, device=params.device)
        with problem.network.borrow(differentiable=True):
            for batch in problem.read("fit (Hessian)"):
                f = problem.network.functional(None, batch.inputs)
                y = problem.prepare(batch, f)
                statistics = statistics + likelihood.statistics(f.detach(), y, batch.weights)
                seen += likelihood.count(f, y, batch.weights)
                logs = likelihood.log_prob(f, y).reshape(f.shape[0], -1).sum(1)
                logs = logs if batch.weights is None else logs * batch.weights.to(logs)
                first, rows = _derivatives(problem, -logs.sum() * likelihood.common_factor.detach().to(logs))
                gradient -= first
                total += rows
        return 0.5 * (total + total.mT), Totals(statistics, seen, gradient)


def _derivatives(problem: Problem, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient (P,) and the Hessian (P, P) of a loss."""
    params = problem.network.params
    leaves = list(problem.network.leaves().values())

    slope = params.pick(params.flatten(torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)))
    rows = []
    for entry in slope:
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if entry.requires_grad:
            found = torch.autograd.grad(entry, leaves, retain_graph=True, allow_unused=True)
        rows.append(params.pick(params.flatten(found)).detach())
    return slope.detach().double(), torch.stack(rows)
