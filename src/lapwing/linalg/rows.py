"""Rows of Jacobians: n samples × r output directions × size parameters, kept in the cheapest form that is exact.

A layer with weight W (o × i) contributes J[n, r] = Σ_t g[n, r, t] ⊗ a[n, t]. `MatrixRows` keeps the pairs (g, a);
the (n, r, o·i) array is formed only where weight sharing makes that unavoidable, and then for a few samples at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import BadData

CHUNK_BYTES = 8 * 2**20
"""Temporaries that hold per-sample blocks stay below this size (or at one sample)."""

PANEL = 128  # columns per product of `gram`; smaller matrices and sums of fewer rows gain nothing


def chunks(n: int, bytes_per_sample: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of pieces of range(n) that hold at most `CHUNK_BYTES`, or one sample."""
    length = max(1, CHUNK_BYTES // max(1, bytes_per_sample))
    for start in range(0, n, length):
        yield start, min(length, n - start)


def runs(pairs: Tensor) -> list[tuple[int, slice]]:
    """Split pairs (a, b) (2, k) into runs of one a with consecutive b, so that rows are sliced and not copied."""
    found: list[tuple[int, slice]] = []
    for a, b in pairs.T.tolist():
        if found and found[-1][0] == a and found[-1][1].stop == b:
            found[-1] = (a, slice(found[-1][1].start, b + 1))
        else:
            found.append((a, slice(b, b + 1)))
    return found


class Rows(ABC):
    """A batch of Jacobian rows J: n samples × r directions × size parameters."""

    @property
    @abstractmethod
    def n(self) -> int:
        """Number of samples."""

    @property
    @abstractmethod
    def r(self) -> int:
        """Number of output directions per sample."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of parameters."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def dense(self) -> Tensor:
        """J itself, (n, r, size)."""

    @abstractmethod
    def narrow(self, start: int, length: int) -> Rows:
        """The rows of samples start … start + length − 1."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Rows:
        """The same rows in another floating-point type."""

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """J v: (*b, size) → (*b, n, r)."""

    @abstractmethod
    def square_sum(self) -> Tensor:
        """Σ_{n,r} J², (size,)."""

    @abstractmethod
    def weighted_gram(self, w: Tensor) -> Tensor:
        """J diag(w) Jᵀ of each sample: w (size,) → (n, r, r)."""

    @abstractmethod
    def weighted_norm(self, w: Tensor) -> Tensor:
        """The diagonal of `weighted_gram`, w (size,) → (n, r), without the rest."""

    @abstractmethod
    def joint_gram(self, w: Tensor) -> Tensor:
        """J diag(w) Jᵀ across samples: w (size,) → (n, r, n, r)."""

    def of_size(self, size: int, dtype: torch.dtype) -> Rows:
        """Return the rows in this type for a matrix of this size; refuse them where their own size is another."""
        if self.size != size:
            raise ValueError(f"expected Jacobian rows of {size} parameters, got {self.size}")
        return self if self.dtype == dtype else self.to(dtype)

    @property
    def deferred(self) -> bool:
        """Whether the rows are made when they are read, a few samples at a time."""
        return False

    def blockwise(self, *flat: Tensor) -> Iterable[tuple[Any, ...]]:
        """The rows of each block, with its part of each flat vector (size,); J itself where it has no blocks."""
        return ((self, *flat),)

    def rotate(self, left: Tensor, right: Tensor) -> Rows:
        """J (left ⊗ right) for the rows of a weight (q, o, i), with left (q, o, o) and right (q, i, i)."""
        dense = self.dense().unflatten(-1, (left.shape[0], left.shape[1], right.shape[1]))
        return DenseRows((left.mT @ dense @ right).flatten(-3))

    def weighted_products(self, weights: Tensor, pairs: Tensor) -> Tensor:
        """J_a diag(w) J_bᵀ of each sample, for weights w (m, size) and pairs of directions (a, b) (2, k): (m, n, k)."""
        pieces = []
        for start, length in chunks(self.n, pairs.shape[1] * self.size * self.dtype.itemsize):
            block = self.narrow(start, length).dense()
            products = [(block[:, a : a + 1] * block[:, b]) @ weights.T for a, b in runs(pairs)]  # (n, few, m)
            pieces.append(torch.cat(products, 1))
        return torch.cat(pieces).movedim(-1, 0)

    def times(self, matrix: Tensor) -> DenseRows:
        """J A for a matrix A (size, k)."""
        return DenseRows(self.dense() @ matrix.to(self.dtype))

    def gram(self) -> Tensor:
        """Σ_{n,r} of the outer products of rows, (size, size)."""
        total = torch.zeros(self.size, self.size, dtype=self.dtype, device=self.device)
        for start, length in chunks(self.n, self.r * self.size * self.dtype.itemsize):
            flat = self.narrow(start, length).dense().flatten(0, 1)
            total = total + gram(flat)
        return total

    def _check(self, v: Tensor) -> Tensor:
        if v.shape[-1:] != (self.size,):
            raise BadData(f"expected vectors of length {self.size} in the last dimension, got {tuple(v.shape)}")
        return v.to(self.dtype)


@dataclass(frozen=True, eq=False)
class DenseRows(Rows):
    """Rows written out: values (n, r, size)."""

    values: Tensor

    def __post_init__(self) -> None:
        if self.values.ndim != 3:
            raise ValueError(f"expected values (samples, directions, parameters), got {tuple(self.values.shape)}")

    @property
    def n(self) -> int:
        return self.values.shape[0]

    @property
    def r(self) -> int:
        return self.values.shape[1]

    @property
    def size(self) -> int:
        return self.values.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dense(self) -> Tensor:
        return self.values

    def narrow(self, start: int, length: int) -> DenseRows:
        return DenseRows(self.values.narrow(0, start, length))

    def to(self, dtype: torch.dtype) -> DenseRows:
        return DenseRows(self.values.to(dtype))

    def matvec(self, v: Tensor) -> Tensor:
        return (self._check(v) @ self.values.reshape(-1, self.size).T).unflatten(-1, (self.n, self.r))

    def square_sum(self) -> Tensor:
        return self.values.square().sum((0, 1))

    def weighted_gram(self, w: Tensor) -> Tensor:
        return (self.values * self._check(w)) @ self.values.mT

    def weighted_norm(self, w: Tensor) -> Tensor:
        return self.values.square() @ self._check(w)

    def joint_gram(self, w: Tensor) -> Tensor:
        flat = self.values.reshape(-1, self.size)
        return ((flat * self._check(w)) @ flat.T).reshape(self.n, self.r, self.n, self.r)


@dataclass(frozen=True, eq=False)
class Term:
    """One use of a weight matrix: a pair of vectors for each sample, direction and position t.

    left (n, r|1, t, q, o), usually the back-propagated gradient; right (n, r|1, t, q, i), usually the input with a
    last column of ones when the bias is folded in. q counts groups. A direction axis of 1 holds for all r; in tied
    weights (embedding and head) it may be the left one.
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        a, b = self.left.shape, self.right.shape
        fits = len(a) == len(b) == 5 and a[0] == b[0] and a[2:4] == b[2:4] and (a[1] == b[1] or 1 in (a[1], b[1]))
        if not fits:
            raise ValueError(
                f"expected left (n, r or 1, t, q, o) and right (n, r or 1, t, q, i), got {tuple(a)} and {tuple(b)}"
            )

    @property
    def width(self) -> int:
        """How many vectors per sample the side with fewer directions has."""
        return self.left.shape[2] * min(self.left.shape[1], self.right.shape[1])

    def matrix(self) -> Tensor:
        """Σ_t left ⊗ right, (n, r|1, q, o, i), by one product per sample where only one side has directions."""
        if self.right.shape[1] == 1:
            return _products(self.left, self.right)
        if self.left.shape[1] == 1:
            return _products(self.right, self.left).transpose(3, 4)
        return torch.einsum("nrtqo,nrtqi->nrqoi", self.left, self.right)

    def matvec(self, v: Tensor) -> Tensor:
        """v (b, q, o, i) → (b, n, r|1), through the side that does not depend on the direction."""
        if self.right.shape[1] <= self.left.shape[1]:
            half = torch.einsum("bqoi,nrtqi->bnrtqo", v, self.right)
            return torch.einsum("bnrtqo,nrtqo->bnr", half, self.left)
        half = torch.einsum("bqoi,nrtqo->bnrtqi", v, self.left)
        return torch.einsum("bnrtqi,nrtqi->bnr", half, self.right)


def _products(many: Tensor, one: Tensor) -> Tensor:
    """Σ_t many ⊗ one for many (n, r, t, q, a) and one (n, 1, t, q, b): (n, r, q, a, b)."""
    n, r, t, q, a = many.shape
    left = many.permute(0, 3, 1, 4, 2).reshape(n * q, r * a, t)
    right = one[:, 0].transpose(1, 2).reshape(n * q, t, one.shape[-1])
    return torch.bmm(left, right).reshape(n, q, r, a, -1).transpose(1, 2)


@dataclass(frozen=True)
class Extent:
    """Sizes of rows: samples, directions, groups, outputs, inputs and positions."""

    n: int
    r: int
    q: int
    o: int
    i: int
    t: int

    @property
    def elements(self) -> int:
        """How many numbers a sample needs: gradients and inputs at all positions, and twice its blocks."""
        return self.q * (self.t * (self.r * self.o + self.i) + 2 * self.r * self.o * self.i)


Make = Callable[[int, int], tuple[Term, ...]]
"""The terms of samples start … start + length − 1."""


class FactoredRows(Rows):
    """Rows J[n, r] = Σ_terms Σ_t left ⊗ right of a weight (q, o, i), flattened row-major.

    `basis` holds matrices (q, o, o) and (q, i, i) that each block is still to be multiplied with: a rotation that is
    cheaper after the sum over t than before it.
    """

    terms: tuple[Term, ...]
    basis: tuple[Tensor, Tensor] | None
    extent: Extent

    @property
    @abstractmethod
    def _outer(self) -> bool:
        """Whether each row is a single outer product with the directions on one side: squares then factor."""

    @property
    @abstractmethod
    def _block_chunks(self) -> Iterator[tuple[int, int]]:
        """(start, length) of samples whose blocks, and one array of their size, fit into a chunk."""

    @abstractmethod
    def narrow(self, start: int, length: int) -> MatrixRows: ...

    @property
    def n(self) -> int:
        return self.extent.n

    @property
    def r(self) -> int:
        return self.extent.r

    @property
    def q(self) -> int:
        return self.extent.q

    @property
    def o(self) -> int:
        return self.extent.o

    @property
    def i(self) -> int:
        return self.extent.i

    @property
    def size(self) -> int:
        return self.q * self.o * self.i

    @property
    def _sides(self) -> tuple[Tensor, Tensor]:
        """left (n, r|1, q, o) and right (n, r|1, q, i) of the only term at its only position."""
        return self.terms[0].left[:, :, 0], self.terms[0].right[:, :, 0]

    @property
    def _block_bytes(self) -> int:
        return self.r * self.size * self.dtype.itemsize

    def matrix(self) -> Tensor:
        """J as (n, r, q, o, i)."""
        total = self.terms[0].matrix()
        for term in self.terms[1:]:
            total = total + term.matrix()
        if self.basis is None:
            return total
        left, right = self.basis
        return left.mT @ (total @ right)

    def dense(self) -> Tensor:
        return self.matrix().reshape(self.n, self.r, self.size)

    def matvec(self, v: Tensor) -> Tensor:
        v = self._check(v)
        batch = v.shape[:-1]
        v = v.reshape(math.prod(batch), self.q, self.o, self.i)
        if self.basis is not None:
            left, right = self.basis
            return MatrixRows(self.terms).matvec((left @ v @ right.mT).reshape(*batch, self.size))
        positions = self.extent.t
        if self.r * (positions + len(v)) < len(v) * positions:  # many vectors: forming each block once is cheaper
            pieces = [self._through_blocks(v, a, k) for a, k in self._block_chunks]
        else:
            width = len(v) * self.q * max(self.o, self.i) * sum(term.width for term in self.terms)
            pieces = [self._through_terms(v, a, k) for a, k in chunks(self.n, width * self.dtype.itemsize)]
        result = torch.cat(pieces, 1) if pieces else v.new_zeros(len(v), self.n, self.r)
        return result.reshape(*batch, self.n, self.r)

    def _through_blocks(self, v: Tensor, start: int, length: int) -> Tensor:
        return torch.einsum("bp,nrp->bnr", v.flatten(1), self.narrow(start, length).dense())

    def _through_terms(self, v: Tensor, start: int, length: int) -> Tensor:
        part = self.narrow(start, length)
        total = part.terms[0].matvec(v)
        for term in part.terms[1:]:
            total = total + term.matvec(v)
        return total

    def square_sum(self) -> Tensor:
        if self._outer:
            left, right = (side.square().sum(1) for side in self._sides)  # one of them has a single direction
            return torch.einsum("nqo,nqi->qoi", left, right).reshape(-1)
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for start, length in self._block_chunks:
            blocks = self.narrow(start, length).dense().flatten(0, 1)
            total = total + (blocks.square() if blocks.requires_grad else blocks.square_()).sum(0)
        return total

    def weighted_gram(self, w: Tensor) -> Tensor:
        w = self._check(w)
        if self._outer:
            side, shared = self._weighed(w)
            return (side * shared[:, None]).flatten(2) @ side.flatten(2).mT
        root = None if w.requires_grad or bool((w < 0).any()) else w.sqrt()
        pieces = []
        for start, length in self._block_chunks:
            block = self.narrow(start, length).dense()
            if root is None or block.requires_grad:
                pieces.append((block * w) @ block.mT)
            else:  # in place: a second array of this size would cost as much again
                block *= root
                pieces.append(block @ block.mT)
        return torch.cat(pieces) if pieces else w.new_zeros(0, self.r, self.r)

    def weighted_norm(self, w: Tensor) -> Tensor:
        w = self._check(w)
        if self._outer:
            side, shared = self._weighed(w)
            return (side.square() * shared[:, None]).sum((2, 3))
        pieces = [self.narrow(start, length).dense().square() @ w for start, length in self._block_chunks]
        return torch.cat(pieces) if pieces else w.new_zeros(0, self.r)

    def _weighed(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """The side with directions, (n, r, q, ·), and w summed against the squares of the other, (n, q, ·)."""
        left, right = self._sides
        grid = w.reshape(self.q, self.o, self.i)
        if right.shape[1] == 1:
            return left, torch.einsum("qoi,nqi->nqo", grid, right[:, 0].square())
        return right, torch.einsum("qoi,nqo->nqi", grid, left[:, 0].square())

    def times(self, matrix: Tensor) -> DenseRows:
        if not self._outer or self.basis is not None or self._sides[1].shape[1] > 1:
            return super().times(matrix)
        left, right = self._sides  # the side without directions meets the matrix first
        blocks = matrix.to(self.dtype).reshape(self.q, self.o, self.i, -1)
        half = torch.einsum("nqi,qoik->nqok", right[:, 0], blocks).flatten(1, 2)
        return DenseRows(left.expand(-1, self.r, -1, -1).flatten(2) @ half)

    def weighted_products(self, weights: Tensor, pairs: Tensor) -> Tensor:
        if not self._outer:
            return super().weighted_products(weights, pairs)
        left, right = self._sides  # the squared side without directions meets the weights first
        grid = weights.reshape(len(weights), self.q, self.o, self.i)
        if right.shape[1] == 1:
            shared = torch.einsum("mqoi,nqi->nqom", grid, right[:, 0].square()).flatten(1, 2)
            side = left.expand(-1, self.r, -1, -1).flatten(2)
        else:
            shared = torch.einsum("mqoi,nqo->nqim", grid, left[:, 0].square()).flatten(1, 2)
            side = right.flatten(2)
        return ((side[:, pairs[0]] * side[:, pairs[1]]) @ shared).movedim(-1, 0)

    def joint_gram(self, w: Tensor) -> Tensor:
        if self.basis is not None:
            block = self.dense().reshape(self.n * self.r, self.size)
            return ((block * self._check(w)) @ block.T).reshape(self.n, self.r, self.n, self.r)
        grid = self._check(w).reshape(self.q, self.o, self.i)
        total = torch.zeros(self.n * self.r, self.n * self.r, dtype=self.dtype, device=self.device)
        for start, length in chunks(self.o, 2 * self.n * self._block_bytes // max(1, self.o)):
            terms = tuple(Term(t.left.narrow(-1, start, length), t.right) for t in self.terms)
            block = MatrixRows(terms).matrix().reshape(self.n * self.r, -1)
            total = total + (block * grid.narrow(1, start, length).reshape(-1)) @ block.T
        return total.reshape(self.n, self.r, self.n, self.r)

    def gram(self) -> Tensor:
        if not self._outer or self.r == 1:
            return super().gram()
        left, right = self._sides
        total = torch.zeros(self.size, self.size, dtype=self.dtype, device=self.device)
        width = self.q**2 * (self.o**2 + self.i**2) * self.dtype.itemsize
        for start, length in chunks(self.n, width):  # Σ_n (Σ_r l lᵀ) ⊗ (a aᵀ): r times cheaper than outer products
            l, a = left.narrow(0, start, length), right.narrow(0, start, length)
            ll, aa = torch.einsum("nrqo,nrup->nqoup", l, l), torch.einsum("nrqi,nruj->nqiuj", a, a)
            total = total + torch.einsum("nqoup,nqiuj->qoiupj", ll, aa).reshape(self.size, self.size)
        return total


@dataclass(frozen=True, eq=False)
class MatrixRows(FactoredRows):
    """Factored rows whose terms are held in memory.

    rows = MatrixRows((Term(torch.randn(8, 3, 1, 1, 5), torch.randn(8, 1, 1, 1, 4)),))  # a weight (5, 4)
    rows.square_sum()  # (20,)
    """

    terms: tuple[Term, ...]
    basis: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("rows of a weight matrix need at least one term")
        kinds = {(t.left.shape[0], *t.left.shape[3:], t.right.shape[4]) for t in self.terms}
        directions = {side.shape[1] for t in self.terms for side in (t.left, t.right)} - {1}
        if len(kinds) > 1 or len(directions) > 1:
            raise ValueError(
                f"all terms need the same (n, q, o, i) and directions, got {sorted(kinds)} and {sorted(directions)}"
            )

    @cached_property
    def extent(self) -> Extent:  # type: ignore[override]
        (n, _, _, q, o), i = self.terms[0].left.shape, self.terms[0].right.shape[4]
        r = max(side.shape[1] for term in self.terms for side in (term.left, term.right))
        return Extent(n, r, q, o, i, sum(term.left.shape[2] for term in self.terms))

    @property
    def dtype(self) -> torch.dtype:
        return self.terms[0].left.dtype

    @property
    def device(self) -> torch.device:
        return self.terms[0].left.device

    @property
    def _outer(self) -> bool:
        if self.basis is not None or len(self.terms) > 1 or self.terms[0].left.shape[2] != 1:
            return False
        return 1 in (self.terms[0].left.shape[1], self.terms[0].right.shape[1])

    @property
    def _block_chunks(self) -> Iterator[tuple[int, int]]:
        return chunks(self.n, 2 * self._block_bytes)

    def narrow(self, start: int, length: int) -> MatrixRows:
        return MatrixRows(
            tuple(Term(t.left.narrow(0, start, length), t.right.narrow(0, start, length)) for t in self.terms),
            self.basis,
        )

    def to(self, dtype: torch.dtype) -> MatrixRows:
        basis = None if self.basis is None else (self.basis[0].to(dtype), self.basis[1].to(dtype))
        return MatrixRows(tuple(Term(t.left.to(dtype), t.right.to(dtype)) for t in self.terms), basis)

    def rotate(self, left: Tensor, right: Tensor) -> Rows:
        """J (left ⊗ right) for square left (q, o, o), right (q, i, i): the two sides of every term times the matrices.

        With many positions, the blocks are multiplied once the positions are summed.
        """
        if (left.shape[0], left.shape[1], right.shape[1]) != (self.q, self.o, self.i):
            return super().rotate(left, right)
        if self.basis is not None:
            return MatrixRows(self.terms, (self.basis[0] @ left, self.basis[1] @ right))
        before = sum(
            t.left[0, :, :, 0, 0].numel() * self.o**2 + t.right[0, :, :, 0, 0].numel() * self.i**2 for t in self.terms
        )
        after = self.r * self.o * self.i * (self.o + self.i)
        if after < before and self.extent.t > 1:
            return MatrixRows(self.terms, (left, right))
        return MatrixRows(rotated(self.terms, left, right))


class DeferredRows(FactoredRows):
    """Factored rows whose terms a function makes for a few samples at a time.

    Patches and gradients at many positions are then written, read and forgotten while they are in the cache. What needs
    all samples at once makes all of them.
    """

    deferred = True
    _outer = False

    def __init__(
        self,
        make: Make,
        extent: Extent,
        dtype: torch.dtype,
        device: torch.device,
        basis: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        vars(self).update(make=make, extent=extent, type=dtype, place=device, basis=basis)

    make: Make
    type: torch.dtype
    place: torch.device

    @cached_property
    def terms(self) -> tuple[Term, ...]:  # type: ignore[override]
        return self.make(0, self.n)

    @property
    def dtype(self) -> torch.dtype:
        return self.type

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def _block_chunks(self) -> Iterator[tuple[int, int]]:
        return chunks(self.n, self.extent.elements * self.dtype.itemsize)

    def narrow(self, start: int, length: int) -> MatrixRows:
        if "terms" in vars(self):
            return MatrixRows(self.terms, self.basis).narrow(start, length)
        return MatrixRows(self.make(start, length), self.basis)

    def to(self, dtype: torch.dtype) -> FactoredRows:
        return self if dtype == self.dtype else MatrixRows(self.terms, self.basis).to(dtype)

    def rotate(self, left: Tensor, right: Tensor) -> Rows:
        if (left.shape[0], left.shape[1], right.shape[1]) != (self.q, self.o, self.i):
            return super().rotate(left, right)
        e, make, basis = self.extent, self.make, self.basis
        if basis is not None:
            return self._with(make, (basis[0] @ left, basis[1] @ right))
        if e.r * e.o * e.i * (e.o + e.i) < e.t * (e.r * e.o**2 + e.i**2):
            return self._with(make, (left, right))
        return self._with(lambda start, length: rotated(make(start, length), left, right), None)

    def _with(self, make: Make, basis: tuple[Tensor, Tensor] | None) -> DeferredRows:
        return DeferredRows(make, self.extent, self.dtype, self.device, basis)


def rotated(terms: tuple[Term, ...], left: Tensor, right: Tensor) -> tuple[Term, ...]:
    """Multiply the sides of every term by left (q, o, o) and right (q, i, i)."""
    return tuple(Term(_times(t.left, left), _times(t.right, right)) for t in terms)


def _times(side: Tensor, matrix: Tensor) -> Tensor:
    """Multiply side (n, r, t, q, a) by matrix (q, a, b) in each group.

    A side that is one tensor, expanded over samples, is multiplied once. Positions that are adjacent in memory (as of a
    convolution) stay so: nothing is transposed by copying.
    """
    if side.shape[0] > 1 and side.stride(0) == 0:
        return _times(side[:1], matrix).expand(side.shape[0], -1, -1, -1, -1)
    if side.shape[3] == 1 and side.shape[2] > 1 and side.stride(2) == 1:
        return (matrix.mT @ side.permute(0, 1, 3, 4, 2)).permute(0, 1, 4, 2, 3)
    return torch.einsum("nrtqa,qab->nrtqb", side, matrix)


def added(parts: list[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def gram(rows: Tensor) -> Tensor:
    """Multiply rowsᵀ rows, (*b, m, d) → (*b, d, d). For large d only the upper half is computed, and mirrored."""
    m, d = rows.shape[-2:]
    if rows.requires_grad or d < 2 * PANEL or m < PANEL:
        return rows.mT @ rows
    total = rows.new_empty(*rows.shape[:-2], d, d)
    for start in range(0, d, PANEL):
        stop = min(start + PANEL, d)
        panel = rows[..., start:stop].mT @ rows[..., start:]
        total[..., start:stop, start:] = panel
        total[..., stop:, start:stop] = panel[..., stop - start :].mT
    return total
