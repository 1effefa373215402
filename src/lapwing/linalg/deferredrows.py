"""Rows of a weight matrix whose factors are made where they are used, for a few samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from lapwing.linalg.matrixrows import Extent, MatrixRows, Term, rotated
from lapwing.linalg.rows import Rows, chunks

Make = Callable[[int, int], tuple[Term, ...]]
"""The terms of samples start … start + length − 1."""


class DeferredRows(MatrixRows):
    """`MatrixRows` by a function: patches and gradients at many positions are written, read and forgotten while
    they are in the cache. What needs all samples at once makes all."""

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
    def terms(self) -> tuple[Term, ...]:
        return self.make(0, self.n)

    @property
    def dtype(self) -> torch.dtype:
        return self.type

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def deferred(self) -> bool:
        return True

    @property
    def _outer(self) -> bool:
        return False

    @property
    def _block_chunks(self) -> Iterator[tuple[int, int]]:
        return chunks(self.n, self.extent.elements * self.dtype.itemsize)

    def narrow(self, start: int, length: int) -> MatrixRows:
        if "terms" in vars(self):
            return super().narrow(start, length)
        return MatrixRows(self.make(start, length), self.basis)

    def to(self, dtype: torch.dtype) -> MatrixRows:
        return self if dtype == self.dtype else super().to(dtype)

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
