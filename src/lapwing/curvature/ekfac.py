"""Kronecker eigenbases with exact second moments in them (EKFAC)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from lapwing.curvature.closed import Head
from lapwing.curvature.curvature import Accumulator, Estimate, Structure
from lapwing.curvature.factor import GGN, Factor
from lapwing.curvature.kron import (
    SHOWN,
    KroneckerFactor,
    KroneckerSums,
    Sharing,
    bytes_of,
    kept_alike,
    kept_as,
    sums_of,
)
from lapwing.curvature.onepass import pass_over
from lapwing.curvature.problem import Problem
from lapwing.errors import UnsupportedOperation
from lapwing.linalg import PSD, BlockDiagonal, Dense, Diagonal, EigenKronecker, Jacobian, Kronecker
from lapwing.model import Plan
from lapwing.storage import register

BASIS = 1e-3
"""Share of a classifier's curvature that is left out when its eigenbasis is computed."""


class MomentAccumulator(Accumulator):
    """Second moments E_ij = Σ_{n,r} (U_Gᵀ (Σ_t g aᵀ) U_A)²_ij of Kronecker blocks in a given basis; other sums."""

    def __init__(self, problem: Problem, basis: BlockDiagonal) -> None:
        params = problem.network.params
        self.basis, self.blocks = basis, problem.plan.blocks
        self.tensors = {}
        for k, block in enumerate(self.blocks):
            shape = (block.size, block.size) if kept_as(block) == "dense" else (block.size,)
            dtype = torch.float64 if kept_as(block) == "kron" else params.dtype
            self.tensors[str(k)] = torch.zeros(shape, dtype=dtype, device=params.device)

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        for k, block in enumerate(self.blocks):
            if block.kind == "unused":
                continue
            rows, base = jacobian.rows[k], self.basis.blocks[k]
            if kept_as(block) == "kron":
                own = cast(EigenKronecker, base)
                self.tensors[str(k)] += rows.rotate(own.left, own.right).square_sum()
            else:
                self.tensors[str(k)] += rows.gram() if kept_as(block) == "dense" else rows.square_sum()

    def closed(self, head: Head) -> None:
        if kept_as(self.blocks[0]) != "kron":
            self.tensors["0"] += (head.diagonal().mT @ head.a.square()).reshape(-1)
            return
        own = cast(EigenKronecker, self.basis.blocks[0])
        squares = (head.a @ own.right[0].to(head.a)).square()
        self.tensors["0"] += (head.diagonal(own.left[0]).mT @ squares).reshape(-1)

    def finish(self) -> BlockDiagonal:
        blocks: list[PSD] = []
        for k, base in enumerate(self.basis.blocks):
            total = self.tensors[str(k)]
            if base.factored:
                own = cast(EigenKronecker, base)
                blocks.append(replace(own, values=total.reshape(own.shape)))
            else:
                blocks.append(Dense(0.5 * (total + total.mT)) if total.ndim == 2 else Diagonal(total))
        return BlockDiagonal(self.basis.layout, tuple(blocks), self.basis.names)


def eigenbasis(sums: KroneckerSums, problem: Problem) -> BlockDiagonal:
    """Return zero blocks in the eigenbasis of the factors; each factor is freed when it is decomposed."""
    matrix = sums.basis(problem)
    sums.tensors.clear()
    layout, names, blocks = matrix.layout, matrix.names, [*matrix.blocks]
    del matrix
    zero = torch.zeros((), dtype=torch.float64)
    for k, block in enumerate(blocks):
        if block.factored:
            own = cast(Kronecker, block)
            bases = own.left_spectrum.vectors, own.right_spectrum.vectors
            blocks[k] = EigenKronecker(*bases, zero.to(own.device).expand(own.shape))
    return BlockDiagonal(layout, tuple(blocks), names)


@register(name="ekfac")
@dataclass(frozen=True, eq=False)
class EKFAC(Structure):
    """A Kronecker eigenbasis with the exact diagonal in it (George et al. 2018): the trace is exact, the evidence is
    a lower bound of that of the block-diagonal curvature.

    It takes two passes over the data. `basis` is the factor of the first pass; any orthonormal basis is valid. None
    takes the factor of the fit, but for the exact GGN of a classifier the smallest directions, with 1e-3 of the
    curvature, are left out of the basis (never of the moments). That saves about a fifth of the time and hardly changes
    a number (decision 22); `EKFAC(basis=GGN(tolerance=0))` insists on all. `EKFAC(basis=KFRA())` back-propagates
    nothing in the first pass, for feed-forward networks. `sharing` is that of `Kron`.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", structure=lapwing.EKFAC())  # or "ekfac"
    """

    basis: Factor | None = None
    sharing: Sharing = "auto"
    subnetworks = False
    mergeable = closed_form = True
    bound = "lower"

    def passes(self) -> int:
        return 2

    def bytes(self, plan: Plan, itemsize: int) -> int:
        moments = sum(16 * block.size for block in plan.blocks if kept_as(block) == "kron")
        return sum(bytes_of(block, itemsize) for block in plan.blocks) + moments

    def estimate(self, problem: Problem) -> Estimate:
        basis, notes = self._basis(problem)
        first, remembering = sums_of(problem, self.sharing, basis), problem.remembering(SHOWN)
        first.fill(remembering, "fit (basis)", gradient=False)
        moments = MomentAccumulator(problem, eigenbasis(first, remembering))
        totals = pass_over(problem, moments.update, label="fit (moments)", together=True, state=moments.tensors,
                           closed=moments.closed)  # fmt: skip
        return Estimate(moments.finish(), totals, notes=(f"basis with {first.note}", *notes))

    def require(self, problem: Problem) -> None:
        super().require(problem)
        if self.basis is not None and "kron" not in (self.basis.structures or ("kron",)):
            raise UnsupportedOperation(
                f"an eigenbasis needs Kronecker factors, which factor {type(self.basis).__name__} does not have. Use "
                "EKFAC() or EKFAC(basis=GGN())."
            )
        if isinstance(problem.factor, KroneckerFactor):
            name = type(problem.factor).__name__
            raise UnsupportedOperation(
                f"the moments of structure='ekfac' need the directions of every sample, which factor {name} does not "
                f"have. Use structure='kron', or EKFAC(basis={name}()) with factor='ggn'."
            )

    def _basis(self, problem: Problem) -> tuple[Factor | None, tuple[str, ...]]:
        """Return the factor of the first pass, and notes about it."""
        own = problem.factor
        if self.basis is not None or not isinstance(own, GGN) or (own.tolerance or 0.0) >= BASIS or problem.few:
            return self.basis, ()
        if not problem.likelihood.softmax:
            return None, ()
        return replace(own, tolerance=BASIS), (f"basis: from directions that hold all but {BASIS:g} of the curvature",)

    def continues(self, matrix: PSD, problem: Problem) -> bool:
        return kept_alike(problem, matrix)

    def extend(self, problem: Problem, matrix: PSD, state: dict[str, Tensor]) -> Estimate:
        """Add second moments in the basis of the first fit; a new fit on all data would have another basis."""
        moments = MomentAccumulator(problem, cast(BlockDiagonal, matrix))
        totals = pass_over(problem, moments.update, label="update (moments)", together=True, state=moments.tensors,
                           closed=moments.closed)  # fmt: skip
        note = "updated in the eigenbasis of the first fit (a new fit on all data would find another)"
        return Estimate(matrix + moments.finish(), totals, notes=(note,))
