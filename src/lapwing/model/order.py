"""The order in which a block holds the entries of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg.places import Places, Run
from lapwing.model.params import Params

View = Callable[[Tensor], Tensor]
"""A tensor of a weight's shape as a rule sees it, (groups, out, in)."""


@dataclass(frozen=True, eq=False)
class Order:
    """A weight as a rule sees it, (q, o, i): a view of memory whose strides tell the order, or the positions of all
    entries in the whole flat vector."""

    seen: Tensor
    written: bool  # whether the entries are positions

    @property
    def shape(self) -> tuple[int, int, int]:
        q, o, i = self.seen.shape
        return q, o, i

    @property
    def _steps(self) -> list[int]:
        return [step for step, size in zip(self.seen.stride(), self.shape, strict=True) if size > 1]

    def swapped(self) -> Order:
        """With rows for columns."""
        return Order(self.seen.transpose(1, 2), self.written)

    def same_as(self, other: Order) -> bool:
        """Whether both have the same entries at the same places."""
        if self.shape != other.shape:
            return False
        return torch.equal(self.seen, other.seen) if self.written else self._steps == other._steps

    def places(self, params: Params, name: str, bias: str | None = None) -> Places:
        """Of the parameter of that name, with its bias as a last column."""
        q, o, i = self.shape
        starts = dict(zip(params.names, params.offsets, strict=True))
        plain, turned = self.seen.is_contiguous(), q == 1 and self.seen.mT.is_contiguous()
        if self.written or not (plain or turned) or q * o == 1:
            index = self.seen if self.written else positions(params, name).as_strided(self.shape, self.seen.stride())
            if bias is not None:
                index = torch.cat([index, positions(params, bias).reshape(q, o, 1)], dim=2)
            return Places.of(index.reshape(-1))
        if bias is None and plain:
            return Places.range(starts[name], starts[name] + q * o * i)
        return Places(q * o, (Run(starts[name], i, not plain), *([] if bias is None else [Run(starts[bias], 1)])))


def orders(params: Params, name: str, views: Sequence[View]) -> list[Order]:
    """How rules see a weight. Memory that is never written to tells, where all of them see it by views."""
    blank = torch.empty(params.shapes[params.names.index(name)], dtype=torch.uint8)
    seen = [view(blank) for view in views]
    memory = blank.untyped_storage().data_ptr()
    if all(s.untyped_storage().data_ptr() == memory and s.numel() == blank.numel() for s in seen):
        return [Order(each, False) for each in seen]
    return [Order(view(positions(params, name)), True) for view in views]


def positions(params: Params, name: str) -> Tensor:
    """Where the entries of a parameter are in the whole flat vector, in its shape."""
    k = params.names.index(name)
    start, shape = params.offsets[k], params.shapes[k]
    return torch.arange(start, start + params.sizes[k], device=params.device).reshape(shape)


def places_of(params: Params, names: Sequence[str]) -> Places:
    """Of parameters one after the other."""
    return Places.of(torch.cat([positions(params, name).reshape(-1) for name in names]))
