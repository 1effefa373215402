"""What backward passes bring to the outputs of the records of a tape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Gradients(Sequence[Tensor]):
    """∂(v·f)/∂out of every record, (r, *out.shape).

    Directions that came by passes of their own are brought together when a record is asked for, one record at a time:
    all of them at once would be as large as the passes themselves, and most of what a fit copies.
    """

    found: tuple[tuple[Tensor, ...], ...]  # of each record, (r', *out.shape) for each pass
    scales: tuple[Tensor | None, ...] = ()  # of each record, what its first pass is still to be multiplied with

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, k: Any) -> Any:
        return _joined(list(self.passes(k)))

    def passes(self, k: int) -> Iterator[Tensor]:
        """Those of one record as they came, (r', *out.shape) each."""
        first, *rest = self.found[k]
        scale = self.scales[k] if self.scales else None
        yield first if scale is None else first * scale
        yield from rest

    def narrow(self, k: int, start: int, length: int) -> Tensor:
        """Those of one record for the samples start … start + length − 1, where they are its first axis."""
        scales = (None if s is None else s.narrow(0, start, length) for s in self.scales[k : k + 1])
        return Gradients((tuple(g.narrow(1, start, length) for g in self.found[k]),), tuple(scales))[0]


def _joined(passes: list[Tensor]) -> Tensor:
    """The directions of a sample side by side, as products like it."""
    if len(passes) == 1:
        return passes[0]
    if passes[0].ndim == 1:
        return torch.cat(passes)
    return torch.cat([g.transpose(0, 1) for g in passes], 1).transpose(0, 1)
