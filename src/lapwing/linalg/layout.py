"""Where each block's own vector sits in the flat parameter vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """A partition of range(size): entry j of block k is entry index[k][j] of the flat vector.

    Contiguous blocks are read and written as slices, the others by index.
    """

    size: int
    index: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        seen = torch.zeros(self.size, dtype=torch.bool)
        total = sum(len(index) for index in self.index)
        for k, index in enumerate(self.index):
            if index.dtype != torch.long or index.ndim != 1:
                raise ValueError(f"block {k}: expected a vector of int64, got {index.dtype} of {tuple(index.shape)}")
            if len(index) and not (0 <= int(index.min()) and int(index.max()) < self.size):
                raise ValueError(f"block {k}: entries must lie in 0 … {self.size - 1}")
            seen[index.cpu()] = True
        if total != self.size or not bool(seen.all()):
            raise ValueError(
                f"blocks must cover range({self.size}) once: got {total} entries, {int(seen.sum())} of them distinct"
            )

    @classmethod
    def contiguous(cls, sizes: Sequence[int]) -> Layout:
        """Blocks of the given sizes, one after the other."""
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        index = tuple(torch.arange(a, a + s) for a, s in zip(starts, sizes, strict=True))
        return cls(sum(sizes), index)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int] | None, ...]:
        """(start, stop) of each block that is a contiguous range, else None."""
        return tuple(_range(index) for index in self.index)

    @cached_property
    def _order(self) -> tuple[int, ...] | None:
        """Blocks by start, if all are ranges."""
        starts = [span[0] for span in self.ranges if span is not None]
        if len(starts) < len(self.index):
            return None
        return tuple(sorted(range(len(starts)), key=lambda k: (starts[k], len(self.index[k]))))

    @cached_property
    def _inverse(self) -> Tensor:
        """Position of every flat entry in the concatenation of the blocks."""
        flat = torch.cat(self.index)
        return torch.empty_like(flat).scatter_(0, flat, torch.arange(self.size, device=flat.device))

    def gather(self, v: Tensor) -> tuple[Tensor, ...]:
        """Each block's part of flat vectors: (*b, size) → ((*b, p_k), …)."""
        if v.shape[-1:] != (self.size,):
            raise ValueError(f"expected vectors of length {self.size} in the last dimension, got {tuple(v.shape)}")
        if v.stride(-1) == 0:  # one number, expanded
            return tuple(v[..., :1].expand(*v.shape[:-1], len(index)) for index in self.index)
        return tuple(
            v[..., span[0] : span[1]] if span is not None else _take(v, index)
            for index, span in zip(self.index, self.ranges, strict=True)
        )

    def scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Flat vectors from each block's part: ((*b, p_k), …) → (*b, size). The inverse of `gather`."""
        got = [part.shape[-1] for part in parts]
        if got != [len(index) for index in self.index]:
            raise ValueError(f"expected parts of sizes {[len(index) for index in self.index]}, got {got}")
        if self._order is not None:
            return torch.cat([parts[k] for k in self._order], -1)
        joined = torch.cat(tuple(parts), -1)
        return _take(joined, self._inverse)

    def same_as(self, other: Layout) -> bool:
        """Whether both place the same blocks at the same entries."""
        if self is other:
            return True
        if self.size != other.size or len(self.index) != len(other.index):
            return False
        return all(
            len(a) == len(b) and torch.equal(a, b.to(a.device)) for a, b in zip(self.index, other.index, strict=True)
        )


def _range(index: Tensor) -> tuple[int, int] | None:
    if not len(index):
        return 0, 0
    start, stop = int(index[0]), int(index[-1]) + 1
    if stop - start == len(index) and bool((index[1:] - index[:-1] == 1).all()):
        return start, stop
    return None


def _take(v: Tensor, index: Tensor) -> Tensor:
    """v[..., index]; `index_select` along a last dimension takes up to ten times as long."""
    index = index.to(v.device)
    return v.gather(-1, index.expand(*v.shape[:-1], len(index)))
