"""Rows of Jacobians: n samples × r output directions × size parameters, kept in the cheapest form that is exact.

A layer with weight W (o × i) contributes J[n, r] = Σ_t g[n, r, t] ⊗ a[n, t]. `MatrixRows` keeps the pairs (g, a);
the (n, r, o·i) array is formed only where weight sharing makes that unavoidable, and then for a few samples at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lapwing.linalg.layout import Layout

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

    @property
    def deferred(self) -> bool:
        """Whether the rows are made when they are read, a few samples at a time."""
        return False

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
            raise ValueError(f"expected vectors of length {self.size} in the last dimension, got {tuple(v.shape)}")
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


class FormedRows(Protocol):
    """A sequence of `Rows`, one per block, that forms each when it is asked for."""

    @property
    def n(self) -> int: ...
    @property
    def r(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __getitem__(self, k: int, /) -> Rows: ...
    def __iter__(self) -> Iterator[Rows]: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Jacobian(Rows):
    """Rows with respect to all parameters: one `Rows` per block, placed in the flat vector by a layout.

    `rows` is a tuple, or a sequence that forms each block when it is asked for and knows n, r, dtype and device itself.
    """

    rows: tuple[Rows, ...] | FormedRows
    layout: Layout

    def __post_init__(self) -> None:
        if not isinstance(self.rows, tuple):
            return  # checking sizes would form every block
        sizes = self.layout.sizes
        got = tuple(rows.size for rows in self.rows)
        if got != sizes:
            raise ValueError(f"rows of sizes {got} do not fit a layout of blocks of sizes {sizes}")
        if len({(rows.n, rows.r) for rows in self.rows}) != 1:
            raise ValueError(
                "all blocks need the same samples and directions, got (n, r) = "
                f"{sorted({(rows.n, rows.r) for rows in self.rows})}"
            )

    @property
    def _any(self) -> Rows | FormedRows:
        return self.rows[0] if isinstance(self.rows, tuple) else self.rows

    @property
    def n(self) -> int:
        return self._any.n

    @property
    def r(self) -> int:
        return self._any.r

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self._any.dtype

    @property
    def device(self) -> torch.device:
        return self._any.device

    def dense(self) -> Tensor:
        return self.layout.scatter([rows.dense() for rows in self.rows])

    def narrow(self, start: int, length: int) -> Jacobian:
        return Jacobian(tuple(rows.narrow(start, length) for rows in self.rows), self.layout)

    def to(self, dtype: torch.dtype) -> Jacobian:
        return Jacobian(tuple(rows.to(dtype) for rows in self.rows), self.layout)

    def matvec(self, v: Tensor) -> Tensor:
        parts = self.layout.gather(self._check(v))
        return added([rows.matvec(part) for rows, part in zip(self.rows, parts, strict=True)])

    def times(self, matrix: Tensor) -> DenseRows:
        parts = self.layout.gather(matrix.mT)
        return DenseRows(added([rows.times(part.mT).values for rows, part in zip(self.rows, parts, strict=True)]))

    def square_sum(self) -> Tensor:
        return self.layout.scatter([rows.square_sum() for rows in self.rows])

    def weighted_gram(self, w: Tensor) -> Tensor:
        parts = self.layout.gather(self._check(w))
        return added([rows.weighted_gram(part) for rows, part in zip(self.rows, parts, strict=True)])

    def weighted_norm(self, w: Tensor) -> Tensor:
        parts = self.layout.gather(self._check(w))
        return added([rows.weighted_norm(part) for rows, part in zip(self.rows, parts, strict=True)])

    def joint_gram(self, w: Tensor) -> Tensor:
        parts = self.layout.gather(self._check(w))
        return added([rows.joint_gram(part) for rows, part in zip(self.rows, parts, strict=True)])


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
