"""Block-diagonal matrices: one structured block per layer, placed in the flat parameter vector by a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from lapwing.errors import LapwingError, brief
from lapwing.linalg.kronecker import sharing_factors
from lapwing.linalg.layout import Layout
from lapwing.linalg.psd import PSD, Diagonal, Scalar, require_positive
from lapwing.linalg.rows import DenseRows, Jacobian, Rows, added
from lapwing.linalg.spectrum import PIECE, sum_log1p
from lapwing.storage import register, unpack

A = TypeVar("A")
KEPT = 2**20  # as many eigenvalues are cached in one vector, so that the evidence at a new scalar prior is one sum


@register
@dataclass(frozen=True, eq=False)
class BlockDiagonal(PSD):
    """Blocks A_k, each acting on its own entries of the flat vector; `names` appear in messages.

    BlockDiagonal(Layout.contiguous([12, 5]), (Kronecker(g, a), Diagonal(values)))
    """

    __repr__ = brief

    layout: Layout
    blocks: tuple[PSD, ...]
    names: tuple[str, ...] = ()
    origin: BlockDiagonal | None = field(default=None, repr=False, metadata={"cache": True})
    times: float = field(default=1.0, repr=False, metadata={"cache": True})  # A = times · origin, where there is one

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
        """Make the matrix of a file, in which blocks with equal factors share them."""
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
        """Add the name of block k to errors."""
        try:
            yield
        except LapwingError as error:
            label = f"block {k} ('{self.names[k]}')" if self.names else f"block {k}"
            raise type(error)(f"{label}: {error}") from error

    def _each(self, ask: Callable[..., A], *parts: Iterable[Any]) -> Iterator[A]:
        """Yield what each block answers when it is asked with its own parts."""
        for k, arguments in enumerate(zip(self.blocks, *parts, strict=True)):
            with self._named(k):
                answer = ask(*arguments)
            yield answer

    def matvec(self, v: Tensor) -> Tensor:
        return self.layout.scatter([*self._each(lambda a, x: a.matvec(x), self.layout.gather(self._vector(v)))])

    def solve(self, v: Tensor) -> Tensor:
        return self.layout.scatter([*self._each(lambda a, x: a.solve(x), self.layout.gather(self._vector(v)))])

    def require_positive_definite(self) -> None:
        for _ in self._each(lambda a: a.require_positive_definite()):
            pass

    def logdet(self) -> Tensor:
        return torch.stack([*self._each(lambda a: a.logdet())]).sum()

    def diagonal(self) -> Tensor:
        return self.layout.scatter([block.diagonal() for block in self.blocks])

    def inverse_diagonal(self) -> Tensor:
        return self.layout.scatter([*self._each(lambda a: a.inverse_diagonal())])

    def trace(self) -> Tensor:
        return torch.stack([block.trace() for block in self.blocks]).sum()

    def smallest_eigenvalue(self) -> Tensor:
        return torch.stack([block.smallest_eigenvalue() for block in self.blocks]).min()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.layout.scatter([*self._each(lambda a: a.sample(n, generator))])

    def shifted_draws(
        self, n: int, shifts: Tensor, generator: torch.Generator | None = None, split: float | None = None
    ) -> Tensor | None:
        parts = [*self._each(lambda a: a.shifted_draws(n, shifts, generator, split))]
        known = [part for part in parts if part is not None]
        return self.layout.scatter(known) if len(known) == len(parts) else None

    def scale(self, c: Scalar) -> BlockDiagonal:
        blocks = tuple(block.scale(c) for block in self.blocks)
        if isinstance(c, Tensor) and c.requires_grad:
            return BlockDiagonal(self.layout, blocks, self.names)
        origin = self if self.origin is None else self.origin
        return BlockDiagonal(self.layout, blocks, self.names, origin, self.times * float(c))

    def __add__(self, other: PSD) -> BlockDiagonal:
        self._matches(other)
        return BlockDiagonal(self.layout, tuple(self._each(lambda a, b: a + b, self._split(other))), self.names)

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
        damped = self._each(lambda a, part: a.damped(c, part, split=split), self._split(prior))
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
        pairs = [block.grouped_eigenvalues(part) for block, part in self.blockwise(group)]
        known = [pair for pair in pairs if pair is not None]
        if len(known) < len(pairs):
            return None
        return torch.cat([values for values, _ in known]), torch.cat([owner for _, owner in known])

    def largest_eigenvalue(self) -> float:
        return max(block.largest_eigenvalue() for block in self.blocks)

    def largest_damped(self, split: float) -> float:
        return max(block.largest_damped(split) for block in self.blocks)

    def shifted_products(self, rows: Rows, shifts: Tensor, pairs: Tensor, split: float | None = None) -> Tensor:
        return _sum(self._each(lambda a, part: a.shifted_products(part, shifts, pairs, split), self._parts(rows)))

    def cleaned(self) -> BlockDiagonal:
        return BlockDiagonal(self.layout, tuple(block.cleaned() for block in self.blocks), self.names)

    @cached_property
    def _kept(self) -> list[Tensor | None]:
        return []

    def _eigenvalues(self) -> Tensor | None:
        """The eigenvalues of all blocks, where they are known and not too many to keep."""
        if not self._kept:
            with torch.inference_mode(False), torch.no_grad():  # cached, also for callers that want gradients
                values = self._all_eigenvalues() if self.size <= KEPT else None
            if values is not None and not _has_memory(values):
                return values
            self._kept.append(values)
        return self._kept[0]

    def _all_eigenvalues(self) -> Tensor | None:
        parts = [*self._each(lambda a: a.known_eigenvalues())]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if len(known) == len(parts) else None

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        if isinstance(prior, Diagonal) and prior.expanded:
            eigenvalues = (self if self.origin is None else self.origin)._eigenvalues()
            if eigenvalues is not None:
                ratio = self.times / require_positive(prior.values)[0].double()
                return added([sum_log1p(few * ratio) for few in eigenvalues.split(PIECE)])
        return torch.stack([*self._each(lambda a, part: a.logdet_ratio(part), self._split(prior))]).sum()

    def output_factors(self, o: int, i: int, bias: bool = False) -> tuple[Tensor, Tensor | None, Tensor] | None:
        return self.blocks[0].output_factors(o, i) if len(self.blocks) == 1 else None

    def _parts(self, rows: Rows) -> Iterable[Rows]:
        """Yield the rows of each block, factored where the rows are given so."""
        rows = self._rows(rows)
        if isinstance(rows, Jacobian) and self.layout.same_as(rows.layout):
            return rows.rows
        return tuple(DenseRows(part) for part in self.layout.gather(rows.dense()))

    def whiten(self, rows: Rows) -> Tensor:
        return torch.cat([*self._each(lambda a, part: a.whiten(part), self._parts(rows))], -1)

    def quadratic(self, rows: Rows) -> Tensor:
        return _sum(self._each(lambda a, part: a.quadratic(part), self._parts(rows)))

    def variance(self, rows: Rows) -> Tensor:
        return _sum(self._each(lambda a, part: a.variance(part), self._parts(rows)))

    def joint(self, rows: Rows) -> Tensor:
        return _sum(self._each(lambda a, part: a.joint(part), self._parts(rows)))


def _sum(terms: Iterator[Tensor]) -> Tensor:
    """Add up at least one tensor, each of which is made when it is added."""
    total = next(terms)
    for term in terms:
        total = total + term
    return total


def _has_memory(values: Tensor) -> bool:
    """Whether a tensor can be cached: one that a transform of `torch.func` wraps is of no use outside of it."""
    try:
        values.untyped_storage()
    except NotImplementedError:
        return False
    return True
