"""Kronecker factors Σ_n E[g gᵀ] ⊗ E[a aᵀ] of every weight matrix (KFAC), and exact second moments in their eigenbasis.

The latter are EKFAC. Weight sharing is expanded or reduced. A `KroneckerFactor` replaces these sums by its own.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Literal, cast

import torch
from torch import Tensor

from lapwing.curvature.closed import Head
from lapwing.curvature.curvature import OTHER_OPERATIONS, Accumulator, Estimate, Structure, layout_of
from lapwing.curvature.factor import GGN, Factor
from lapwing.curvature.onepass import Totals, pass_over
from lapwing.curvature.problem import Problem
from lapwing.errors import UnsupportedOperation
from lapwing.linalg import PSD, BlockDiagonal, Dense, Diagonal, EigenKronecker, Jacobian, Kronecker
from lapwing.linalg.kronecker import sharing_factors
from lapwing.linalg.rows import gram
from lapwing.model import Block, BlockRows, Digest, Plan
from lapwing.storage import register

Sharing = Literal["auto", "expand", "reduce"]
Bias = Literal["joint", "separate"]

DENSE_ROWS = 512  # small parameters (norms, raw tensors) have a dense block up to this size, else a diagonal
COUNTS = ("rows", "inner", "outer")  # sum of input weights; number of inputs and of gradients, which bound the ranks
SHOWN = 64  # samples whose single positions contribute to a reduced basis
SHARE = 1e-2  # share of the trace of a reduced factor that these positions add
ROUNDING = 1e-7  # relative rounding of a factor in float32
BASIS = 1e-3  # share of a classifier's curvature that is left out when its eigenbasis is computed
LARGEST_FACTOR = 8192  # a weight matrix with a longer side (a large vocabulary) has a diagonal block


def kept_as(block: Block) -> Literal["kron", "dense", "diag"]:
    """Return the form in which a Kronecker structure keeps a block."""
    if block.kind == "matrix":
        return "kron" if max(block.shape[1:]) <= LARGEST_FACTOR else "diag"
    return "dense" if block.kind == "rows" and block.size <= DENSE_ROWS else "diag"


KINDS = {"kron": (True, False), "dense": (False, False), "diag": (False, True)}
"""Whether a block is factored, and whether it is diagonal."""


def bytes_of(block: Block, itemsize: int) -> int:
    """Return the bytes of a block: its factors, their spectra and work in float64."""
    kept = kept_as(block)
    if kept != "kron":
        return (block.size**2 if kept == "dense" else block.size) * (itemsize + 16)
    q, o, i = block.shape
    return q * (o**2 + i**2) * (2 * itemsize + 16)


def kept_alike(problem: Problem, matrix: PSD) -> bool:
    """Whether each block of a matrix has the form in which a Kronecker structure keeps that block of the problem."""
    pairs = zip(problem.plan.blocks, matrix.diagonal_blocks(), strict=True)
    return all((own.factored, own.is_diagonal) == KINDS[kept_as(block)] for block, own in pairs)


def resolve_sharing(sharing: Sharing, problem: Problem) -> Literal["expand", "reduce"]:
    """Choose "reduce" if positions are pooled into one output per sample, "expand" if each position has a loss."""
    if sharing == "auto":
        return "expand" if problem.event else "reduce"
    return sharing


def _key(k: int, swapped: bool) -> str:
    return f"{k}.{'swapped' if swapped else 'plain'}"


def _of_inputs(k: int, swapped: bool) -> str:
    return f"{_key(k, swapped)}.{'left' if swapped else 'right'}"


def _of_gradients(k: int, swapped: bool) -> str:
    return f"{_key(k, swapped)}.{'right' if swapped else 'left'}"


class KroneckerSums(Accumulator):
    """Sums that end in Kronecker factors, and the pass over the data that fills them."""

    note: str  # for the summary

    @abstractmethod
    def fill(self, problem: Problem, label: str = "fit", gradient: bool = True) -> Totals:
        """Pass over the data once."""

    @abstractmethod
    def finish(self) -> BlockDiagonal: ...

    def basis(self, problem: Problem) -> BlockDiagonal:
        """Return factors whose eigenvectors are a basis for the curvature. The sums may be used up afterwards.

        The problem remembers `SHOWN` samples.
        """
        return self.finish()

    def sums_behind(self, matrix: BlockDiagonal, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Recover the raw sums from a finished matrix and its saved state."""
        return state


class KroneckerFactor(Factor):
    """A factor without directions, which makes the sums of Kronecker structures by itself."""

    structures = ("kron",)

    @abstractmethod
    def sums(self, problem: Problem) -> KroneckerSums:
        """Return empty sums for a problem, or refuse a network for which there are none."""

    def width(self, outputs: int) -> int:
        return 0


def sums_of(problem: Problem, sharing: Sharing, factor: Factor | None = None, bias: Bias = "joint") -> KroneckerSums:
    """Return empty Kronecker sums for the factor of a problem, or for another one."""
    factor = problem.factor if factor is None else factor
    if isinstance(factor, KroneckerFactor):
        return factor.sums(problem)
    return KronAccumulator(problem, resolve_sharing(sharing, problem), factor, bias)


class KronAccumulator(KroneckerSums):
    """Sums per block: covariances of inputs and gradients for each orientation, or a dense or diagonal block."""

    def __init__(
        self, problem: Problem, sharing: Literal["expand", "reduce"], factor: Factor, bias: Bias = "joint"
    ) -> None:
        params = problem.network.params
        self.factor, self.note = factor, f"weight sharing: {sharing}"
        self.separate, self.sharing, self.reduced = bias == "separate", sharing, sharing == "reduce"
        self.blocks, self.layout = problem.plan.blocks, layout_of(problem)
        own = [(k, block) for k, block in enumerate(self.blocks) if kept_as(block) == "kron"]
        self.factored = [(k, block, swapped) for k, block in own for swapped in orientations(block)]
        zeros = partial(torch.zeros, dtype=params.dtype, device=params.device)
        self.tensors: dict[str, Tensor] = {}
        for k, block in enumerate(self.blocks):
            if kept_as(block) == "dense":
                self.tensors[f"{k}.dense"] = zeros(block.size, block.size)
            elif kept_as(block) == "diag":
                self.tensors[f"{k}.diag"] = zeros(block.size)
        for k, block, swapped in self.factored:
            q, o, i = block.shape
            key = _key(k, swapped)
            self.tensors[f"{key}.left"] = zeros(q, o, o)
            self.tensors[f"{key}.right"] = zeros(q, i, i)
            for count in COUNTS:
                self.tensors[f"{key}.{count}"] = torch.zeros((), dtype=torch.float64, device=params.device)

    def fill(self, problem: Problem, label: str = "fit", gradient: bool = True) -> Totals:
        return pass_over(
            problem,
            self.update,
            self.factor,
            label=label,
            gradient=gradient,
            inputs=self.inputs,
            state=self.tensors,
            digest=self.digest,
            closed=None if self.reduced and problem.event else self.closed,
        )

    def closed(self, head: Head) -> None:
        key, weights = _key(0, False), head.rows(head.counts)
        if kept_as(self.blocks[0]) == "diag":
            self.tensors["0.diag"] += (head.diagonal().mT @ head.a.square()).reshape(-1)
            return
        a = head.a if bool((weights == 1).all()) else head.a * weights.sqrt()[:, None]
        self.tensors[f"{key}.left"] += head.total()[None].to(self.tensors[f"{key}.left"])
        self.tensors[f"{key}.right"] += gram(a)[None]
        self.tensors[f"{key}.rows"] += weights.sum()
        self.tensors[f"{key}.inner"] += len(a)
        self.tensors[f"{key}.outer"] += len(a) * head.width

    @property
    def digest(self) -> Digest:
        """How gradients are summed as they arrive, so that they need not stay in memory."""
        return Digest("sums" if self.reduced else "grams", frozenset(k for k, _, _ in self.factored))

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        if fresh is not None:
            self.inputs(jacobian, fresh)
        for k, block in enumerate(self.blocks):
            kept = kept_as(block)
            if block.kind != "unused" and kept != "kron":
                rows = jacobian.rows[k]
                self.tensors[f"{k}.{kept}"] += rows.gram() if kept == "dense" else rows.square_sum()
        for k, block, swapped in self.factored:
            assert isinstance(jacobian.rows, BlockRows)
            self.tensors[_of_gradients(k, swapped)] += jacobian.rows.gradient_gram(block, swapped, self.reduced)
            positions = jacobian.rows.positions(block, swapped, self.reduced)
            self.tensors[f"{_key(k, swapped)}.outer"] += jacobian.n * jacobian.r * positions

    def inputs(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        """Add the input side, once per sample: it does not depend on the directions."""
        assert isinstance(jacobian.rows, BlockRows)
        assert fresh is not None
        weights = None if bool((fresh == 1).all()) else fresh
        for k, block, swapped in self.factored:
            found, positions = jacobian.rows.input_gram(block, swapped, self.reduced, weights)
            self.tensors[_of_inputs(k, swapped)] += found
            self.tensors[f"{_key(k, swapped)}.rows"] += fresh.sum() * positions
            self.tensors[f"{_key(k, swapped)}.inner"] += len(fresh) * positions

    def finish(self) -> BlockDiagonal:
        """Return the factors. The factors of inputs are means, which replace their sums in memory."""
        names = tuple(", ".join(block.names) for block in self.blocks)
        return BlockDiagonal(self.layout, sharing_factors(self._block(k, b) for k, b in enumerate(self.blocks)), names)

    def basis(self, problem: Problem) -> BlockDiagonal:
        """Return the factors; reduced ones get a small share of the factors of single positions, from a few samples.

        Means of inputs and sums of gradients over positions are nearly zero in directions in which single positions
        are large: nine neighboring pixels have nearly equal means, and the gradients of the keys of an attention sum
        to zero. Without the share, rounding would choose the eigenvectors there, and with them the moments.
        """
        if self.reduced and problem.reader is None:
            few = problem.remembered_alone
            shared = self._shared(few)
            if shared:
                other = KronAccumulator(few, "expand", self.factor)
                other.fill(few, "fit (positions)", gradient=False)
                for k, swapped in shared:
                    self._add_share(other, k, swapped)
        return self.finish()

    def _shared(self, problem: Problem) -> list[tuple[int, bool]]:
        """Return the Kronecker blocks that a sample uses at several positions, by orientation."""
        assert problem.first is not None
        with problem.network.borrow():
            at = problem.network.linearize(problem.plan, problem.first.inputs)
            rows = at.jacobian(at.f.detach().new_zeros(0, *at.f.shape)).rows
        assert isinstance(rows, BlockRows)
        return [(k, swapped) for k, block, swapped in self.factored if rows.positions(block, swapped, False) > 1]

    def _add_share(self, other: KronAccumulator, k: int, swapped: bool) -> None:
        """Add the factors of another accumulator, each scaled to `SHARE` of the trace of our own factor.

        The share is at least the rounding of a sum over as many positions.
        """
        own, its = (sums._count(k, swapped) for sums in (self, other))
        for name, most in ((_of_inputs(k, swapped), own / its), (_of_gradients(k, swapped), own)):
            added = other.tensors[name] * most
            ratio = self.tensors[name].double().diagonal(dim1=1, dim2=2).sum(-1)
            ratio = ratio / added.double().diagonal(dim1=1, dim2=2).sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
            self.tensors[name] += SHARE * ratio.clamp(min=ROUNDING)[:, None, None].to(added) * added
        for count in ("inner", "outer"):
            self.tensors[f"{_key(k, swapped)}.{count}"] += other.tensors[f"{_key(k, swapped)}.{count}"]

    def _block(self, k: int, block: Block) -> PSD:
        kept = kept_as(block)
        if kept == "dense":
            matrix = self.tensors[f"{k}.dense"]
            return Dense(0.5 * (matrix + matrix.mT))
        if kept == "diag":
            return Diagonal(self.tensors[f"{k}.diag"])
        if len(orientations(block)) > 1:
            return Kronecker(*_nearest_product([self._pair(k, swapped) for swapped in orientations(block)]))
        (swapped,) = orientations(block)
        mean = self.tensors.pop(_of_inputs(k, swapped)).div_(self._count(k, swapped))
        gradients = self.tensors[_of_gradients(k, swapped)]
        counts = [float(self.tensors[f"{_key(k, swapped)}.{side}"]) for side in ("outer", "inner")]
        outer, inner = (int(count) if isfinite(count) else None for count in counts)
        if self.separate and block.bias:  # G ⊗ blockdiag(E[a aᵀ], 1): no use of a bias is swapped
            mean[:, -1, :-1], mean[:, :-1, -1] = 0, 0
            inner = None if inner is None else inner + 1
        if swapped:
            return Kronecker(mean, gradients, 1.0, (inner, outer))
        return Kronecker(gradients, mean, 1.0, (outer, inner))

    def _pair(self, k: int, swapped: bool) -> tuple[Tensor, Tensor]:
        left, right = (self.tensors[f"{_key(k, swapped)}.{side}"] for side in ("left", "right"))
        count = self._count(k, swapped)
        return (left / count, right) if swapped else (left, right / count)

    def _count(self, k: int, swapped: bool) -> float:
        return float(self.tensors[f"{_key(k, swapped)}.rows"]) or 1.0  # where no sample counts, both factors are zero

    def sums_behind(self, matrix: BlockDiagonal, state: dict[str, Tensor]) -> dict[str, Tensor]:
        found = dict(state)
        for k, (block, own) in enumerate(zip(self.blocks, matrix.blocks, strict=True)):
            if kept_as(block) != "kron" or len(orientations(block)) > 1:
                continue
            own = cast(Kronecker, own)
            (swapped,) = orientations(block)
            mean, name = own.left if swapped else own.right, _of_inputs(k, swapped)
            if name not in found:  # older files hold the sums
                found[name] = mean * state[f"{_key(k, swapped)}.rows"].to(mean)
        return found


def orientations(block: Block) -> tuple[bool, ...]:
    """Return the ways in which a block is used, plain or transposed, in the order of the terms of its rows."""
    return tuple(dict.fromkeys(swapped for _, swapped in block.uses))


def _nearest_product(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return one product with the partial traces of Σ_k L_k ⊗ R_k, for a matrix used both ways (tied head)."""
    traces = [(_trace(left), _trace(right)) for left, right in pairs]
    left = torch.stack([p[0] * t[1] for p, t in zip(pairs, traces, strict=True)]).sum(0)
    right = torch.stack([p[1] * t[0] for p, t in zip(pairs, traces, strict=True)]).sum(0)
    total = torch.stack([a * b for a, b in traces]).sum(0)
    return left, torch.where(total > 0, right / total, torch.zeros_like(right))


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]


@register(name="kron")
@dataclass(frozen=True, eq=False)
class Kron(Structure):
    """One Kronecker product G ⊗ A per weight matrix (KFAC; Martens and Grosse 2015; Ritter et al. 2018, section 2.2).

    For a layer h = W a the block of one sample is 𝓗 ⊗ a aᵀ with 𝓗 = (∂f/∂h)ᵀ Λ ∂f/∂h (Ritter et al. 2018, Eqs. 1 and
    14). KFAC takes G = Σ_n 𝓗_n and A = E[a aᵀ]: a product of expectations in place of the expectation of the product.

    `sharing` is for weights used at several positions: "expand" treats positions as samples (right for per-token
    losses), "reduce" sums gradients and averages inputs over positions (closer for pooled outputs; Eschenhagen et al.
    2023); "auto" takes "reduce" unless outputs have positions. Norm scales, raw parameters and other explicit rows have
    dense blocks (diagonal ones where large).

    `bias="joint"` keeps how a bias and the weights of its layer depend on each other, G ⊗ E[ā āᵀ] with ā = (a, 1).
    "separate" leaves that out: G ⊗ E[a aᵀ] for the weights and G for the bias, as laplace-torch does.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", structure="kron")
        >>> tokens = lapwing.Kron(sharing="expand")  # for networks with one loss per token or pixel
    """

    sharing: Sharing = "auto"
    bias: Bias = field(default="joint", metadata={"later": True})
    subnetworks = False
    mergeable = closed_form = True

    def __post_init__(self) -> None:
        if self.sharing not in ("auto", "expand", "reduce"):
            raise UnsupportedOperation(f"sharing is 'auto', 'expand' or 'reduce', got {self.sharing!r}")
        if self.bias not in ("joint", "separate"):
            raise UnsupportedOperation(f"bias is 'joint' or 'separate', got {self.bias!r}")

    def bytes(self, plan: Plan, itemsize: int) -> int:
        return sum(bytes_of(block, itemsize) for block in plan.blocks)

    def estimate(self, problem: Problem) -> Estimate:
        accumulator = sums_of(problem, self.sharing, bias=self.bias)
        return _estimate(accumulator, accumulator.fill(problem))

    def continues(self, matrix: PSD, problem: Problem) -> bool:
        return kept_alike(problem, matrix)

    def extend(self, problem: Problem, matrix: PSD, state: dict[str, Tensor]) -> Estimate:
        """Merge the sums of both data sets: Kronecker products themselves do not add."""
        accumulator = sums_of(problem, self.sharing, bias=self.bias)
        before = accumulator.sums_behind(cast(BlockDiagonal, matrix), state)
        new = accumulator.tensors.keys() - before.keys()
        if before.keys() - accumulator.tensors.keys() or any(name.rsplit(".")[-1] not in COUNTS for name in new):
            raise UnsupportedOperation(OTHER_OPERATIONS)
        totals = accumulator.fill(problem)
        for name in new:  # older files do not count them
            accumulator.tensors[name] = torch.full_like(accumulator.tensors[name], torch.inf)
        for name, value in before.items():
            accumulator.tensors[name] += value.to(accumulator.tensors[name])
        return _estimate(accumulator, totals)


def _estimate(sums: KroneckerSums, totals: Totals) -> Estimate:
    return Estimate(sums.finish(), totals, sums.tensors, (sums.note,))


class MomentAccumulator(Accumulator):
    """Second moments E_ij = Σ_{n,r} (U_Gᵀ (Σ_t g aᵀ) U_A)²_ij of Kronecker blocks in a given basis; sums of others."""

    def __init__(self, problem: Problem, basis: BlockDiagonal) -> None:
        params = problem.network.params
        self.basis, self.blocks = basis, problem.plan.blocks
        self.tensors = {}
        for k, block in enumerate(self.blocks):
            shape = (block.size, block.size) if kept_as(block) == "dense" else (block.size,)
            dtype = torch.float64 if kept_as(block) == "kron" else params.dtype
            self.tensors[str(k)] = torch.zeros(shape, dtype=dtype, device=params.device)

    def fill(self, problem: Problem, label: str) -> Totals:
        """Pass over the data once."""
        return pass_over(problem, self.update, label=label, together=True, state=self.tensors, closed=self.closed)

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
    """A Kronecker eigenbasis with the exact diagonal of the curvature in it (George et al. 2018).

    With the eigenvectors U_G and U_A of the factors of `Kron` and the gradient matrices D of each sample and direction,
    the diagonal is E_ij = Σ ((U_Gᵀ D U_A)_ij)². The trace of the curvature is exact, and the evidence is a lower bound
    of the evidence with the block-diagonal curvature.

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
        totals = moments.fill(problem, "fit (moments)")
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
        totals = moments.fill(problem, "update (moments)")
        note = "updated in the eigenbasis of the first fit (a new fit on all data would find another)"
        return Estimate(matrix + moments.finish(), totals, notes=(note,))
