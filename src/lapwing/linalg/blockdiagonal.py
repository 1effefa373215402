"""Block-diagonal matrices: one structured block a layer, placed in the flat parameter vector by a layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import LapwingError
from lapwing.linalg.kronecker import sharing_factors
from lapwing.linalg.layout import Layout
from lapwing.linalg.psd import PSD, Diagonal
from lapwing.linalg.rows import DenseRows, Jacobian, Rows, added
from lapwing.linalg.spectrum import PIECE, sum_log1p
from lapwing.linalg.validity import Scalar, require_positive
from lapwing.storage import register, unpack

KEPT = 2**20  # eigenvalues that are kept in one vector, so that the evidence at a new scalar prior is one sum


@register
@dataclass(frozen=True, eq=False)
class BlockDiagonal(PSD):
    """Blocks A_k, each acting on its own entries of the flat vector; names are for messages."""

    layout: Layout
    blocks: tuple[PSD, ...]
    names: tuple[str, ...] = ()
    origin: BlockDiagonal | None = field(default=None, repr=False, metadata={"cache": True})  # this is a multiple of it
    times: float = field(default=1.0, repr=False, metadata={"cache": True})

    def __post_init__(self) -> None:
        sizes = [block.size for block in self.blocks]
        if sizes != [*self.layout.sizes]:
            raise ValueError(f"blocks of sizes {sizes} do not fit a layout of sizes {[*self.layout.sizes]}")
        if not self.blocks:
            raise ValueError("a block-diagonal matrix needs at least one block")
        if self.names and len(self.names) != len(self.blocks):
            raise ValueError(f"expected a name for each of {len(self.blocks)} blocks, got {len(self.names)}")

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].dtype

    @property
    def device(self) -> torch.device:
        return self.blocks[0].device

    @classmethod
    def restore(cls, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> BlockDiagonal:
        """The matrix of a file; blocks with equal factors share them again."""
        blocks = sharing_factors(unpack(tensors, block, PSD) for block in description["blocks"])
        layout = Layout.restore(description["layout"], tensors)
        return cls(layout, blocks, tuple(description.get("names", ())))

    def flaw(self, signed: bool = False) -> str:
        for k, block in enumerate(self.blocks):
            if found := block.flaw(signed):
                return f"block {k}{f' ({self.names[k]})' if self.names else ''}: {found}"
        return ""

    @contextmanager
    def _named(self, k: int) -> Iterator[None]:
        """Errors of block k say so."""
        try:
            yield
        except LapwingError as error:
            label = f"block {k} ('{self.names[k]}')" if self.names else f"block {k}"
            raise type(error)(f"{label}: {error}") from error

    def matvec(self, v: Tensor) -> Tensor:
        parts = self.layout.gather(self._vector(v))
        return self.layout.scatter([block.matvec(part) for block, part in zip(self.blocks, parts, strict=True)])

    def solve(self, v: Tensor) -> Tensor:
        parts = self.layout.gather(self._vector(v))
        solved = []
        for k, block in enumerate(self.blocks):
            with self._named(k):
                solved.append(block.solve(parts[k]))
        return self.layout.scatter(solved)

    def require_positive_definite(self) -> None:
        for k, block in enumerate(self.blocks):
            with self._named(k):
                block.require_positive_definite()

    def logdet(self) -> Tensor:
        terms = []
        for k, block in enumerate(self.blocks):
            with self._named(k):
                terms.append(block.logdet())
        return torch.stack(terms).sum()

    def diagonal(self) -> Tensor:
        return self.layout.scatter([block.diagonal() for block in self.blocks])

    def inverse_diagonal(self) -> Tensor:
        parts = []
        for k, block in enumerate(self.blocks):
            with self._named(k):
                parts.append(block.inverse_diagonal())
        return self.layout.scatter(parts)

    def trace(self) -> Tensor:
        return torch.stack([block.trace() for block in self.blocks]).sum()

    def smallest_eigenvalue(self) -> Tensor:
        return torch.stack([block.smallest_eigenvalue() for block in self.blocks]).min()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        parts = []
        for k, block in enumerate(self.blocks):
            with self._named(k):
                parts.append(block.sample(n, generator))
        return self.layout.scatter(parts)

    def scale(self, c: Scalar) -> BlockDiagonal:
        blocks = tuple(block.scale(c) for block in self.blocks)
        if isinstance(c, Tensor) and c.requires_grad:
            return BlockDiagonal(self.layout, blocks, self.names)
        origin = self if self.origin is None else self.origin
        return BlockDiagonal(self.layout, blocks, self.names, origin, self.times * float(c))

    def __add__(self, other: PSD) -> BlockDiagonal:
        self._matches(other)
        total = []
        for k, part in enumerate(self._split(other)):
            with self._named(k):
                total.append(self.blocks[k] + part)
        return BlockDiagonal(self.layout, tuple(total), self.names)

    def _split(self, other: PSD) -> tuple[PSD, ...]:
        if isinstance(other, Diagonal):
            return other.split(self.layout)
        if isinstance(other, BlockDiagonal) and self.layout.same_as(other.layout):
            return other.blocks
        raise self._refuse(other, "a diagonal prior or a block-diagonal one with the same blocks")

    @property
    def damps(self) -> bool:
        return any(block.damps for block in self.blocks)

    def damped(self, c: Scalar, prior: PSD, *, split: float = 1.0) -> BlockDiagonal:
        damped = []
        for k, part in enumerate(self._split(prior)):
            with self._named(k):
                damped.append(self.blocks[k].damped(c, part, split=split))
        return BlockDiagonal(self.layout, tuple(damped), self.names)

    def diagonal_blocks(self) -> tuple[PSD, ...]:
        return self.blocks

    def blockwise(self, values: Tensor) -> tuple[tuple[PSD, Tensor], ...]:
        return tuple(zip(self.blocks, self.layout.gather(values), strict=True))

    def blockwise_rows(self, values: Tensor, rows: Rows) -> Iterable[tuple[PSD, Tensor, Rows]]:
        return zip(self.blocks, self.layout.gather(values), self._parts(rows), strict=True)

    def eigenvalues(self) -> Tensor | None:
        parts = [block.eigenvalues() for block in self.blocks]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if len(known) == len(parts) else None

    def grouped_eigenvalues(self, group: Tensor) -> tuple[Tensor, Tensor] | None:
        found = []
        for block, part in self.blockwise(group):
            pair = block.grouped_eigenvalues(part)
            if pair is None:
                return None
            found.append(pair)
        return torch.cat([values for values, _ in found]), torch.cat([owner for _, owner in found])

    def largest_eigenvalue(self) -> float:
        return max(block.largest_eigenvalue() for block in self.blocks)

    def largest_damped(self, split: float) -> float:
        return max(block.largest_damped(split) for block in self.blocks)

    def shifted_products(self, rows: Rows, shifts: Tensor, pairs: Tensor, split: float | None = None) -> Tensor:
        terms = []
        for k, part in enumerate(self._parts(rows)):
            with self._named(k):
                terms.append(self.blocks[k].shifted_products(part, shifts, pairs, split))
        return added(terms)

    def cleaned(self) -> BlockDiagonal:
        return BlockDiagonal(self.layout, tuple(block.cleaned() for block in self.blocks), self.names)

    @cached_property
    def _kept(self) -> list[Tensor | None]:
        return []

    def _eigenvalues(self) -> Tensor | None:
        """Those of all blocks, where they are known and not too many to keep."""
        if not self._kept:
            with torch.inference_mode(False), torch.no_grad():  # whoever asks first: others may want gradients
                values = self._all_eigenvalues() if self.size <= KEPT else None
            if values is not None and not _has_memory(values):
                return values
            self._kept.append(values)
        return self._kept[0]

    def _all_eigenvalues(self) -> Tensor | None:
        parts: list[Tensor] = []
        for k, block in enumerate(self.blocks):
            with self._named(k):
                values = block.known_eigenvalues()
            if values is None:
                return None
            parts.append(values)
        return torch.cat(parts)

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        if isinstance(prior, Diagonal) and prior.expanded:
            eigenvalues = (self if self.origin is None else self.origin)._eigenvalues()
            if eigenvalues is not None:
                ratio = self.times / require_positive(prior.values)[0].double()
                return added([sum_log1p(few * ratio) for few in eigenvalues.split(PIECE)])
        terms = []
        for k, part in enumerate(self._split(prior)):
            with self._named(k):
                terms.append(self.blocks[k].logdet_ratio(part))
        return torch.stack(terms).sum()

    def output_factors(self, o: int, i: int, bias: bool = False) -> tuple[Tensor, Tensor | None, Tensor] | None:
        return self.blocks[0].output_factors(o, i) if len(self.blocks) == 1 else None

    def _parts(self, rows: Rows) -> Iterable[Rows]:
        """Each block's own rows, factored where they come so."""
        rows = self._rows(rows)
        if isinstance(rows, Jacobian) and self.layout.same_as(rows.layout):
            return rows.rows
        return tuple(DenseRows(part) for part in self.layout.gather(rows.dense()))

    def whiten(self, rows: Rows) -> Tensor:
        parts = []
        for k, part in enumerate(self._parts(rows)):
            with self._named(k):
                parts.append(self.blocks[k].whiten(part))
        return torch.cat(parts, -1)

    def quadratic(self, rows: Rows) -> Tensor:
        total = torch.zeros(rows.n, rows.r, rows.r, dtype=self.dtype, device=self.device)
        for k, part in enumerate(self._parts(rows)):
            with self._named(k):
                total = total + self.blocks[k].quadratic(part)
        return total

    def variance(self, rows: Rows) -> Tensor:
        total = torch.zeros(rows.n, rows.r, dtype=self.dtype, device=self.device)
        for k, part in enumerate(self._parts(rows)):
            with self._named(k):
                total = total + self.blocks[k].variance(part)
        return total

    def joint(self, rows: Rows) -> Tensor:
        total = torch.zeros(rows.n, rows.r, rows.n, rows.r, dtype=self.dtype, device=self.device)
        for k, part in enumerate(self._parts(rows)):
            with self._named(k):
                total = total + self.blocks[k].joint(part)
        return total


def _has_memory(values: Tensor) -> bool:
    """Not so of what a transform of `torch.func` wraps, which is of no use outside of it."""
    try:
        values.untyped_storage()
    except NotImplementedError:
        return False
    return True
