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

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, k: Any) -> Any:
        return _joined(self.found[k])

    def narrow(self, k: int, start: int, length: int) -> Tensor:
        """Those of one record for the samples start … start + length − 1, where they are its first axis."""
        return _joined(tuple(g.narrow(1, start, length) for g in self.found[k]))

    def passes(self, k: int) -> Iterator[Tensor]:
        """Those of one record as they came, (r', *out.shape) each."""
        yield from self.found[k]


def _joined(passes: tuple[Tensor, ...]) -> Tensor:
    """The directions of a sample side by side, as products like it."""
    if len(passes) == 1:
        return passes[0]
    if passes[0].ndim == 1:
        return torch.cat(passes)
    return torch.cat([g.transpose(0, 1) for g in passes], 1).transpose(0, 1)
