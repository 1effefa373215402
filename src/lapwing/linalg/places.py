"""Where the entries of a block sit in the flat parameter vector, without a number for each where a few tell it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST = 4  # runs in a row that are looked for: a weight matrix and its bias have two


class Run(NamedTuple):
    """Entries of `rows` rows: those of row r are start + r·width + c, or start + c·rows + r of a `turned` matrix."""

    start: int
    width: int
    turned: bool = False

    def view(self, v: Tensor, rows: int) -> Tensor:
        """Its part of flat vectors, (*b, size) → (*b, rows, width)."""
        part = v[..., self.start : self.start + rows * self.width]
        if self.turned:
            return part.unflatten(-1, (self.width, rows)).transpose(-1, -2)
        return part.unflatten(-1, (rows, self.width))


@dataclass(frozen=True, eq=False)
class Places:
    """Entries of a block in the order of its own vector: rows of runs one after the other, or an explicit index.

    A weight (o, i) at s with its bias at b is o rows of the runs (s, i) and (b, 1); what lies in one piece is one row
    with one run, and nothing is a row without.
    """

    rows: int = 1
    runs: tuple[Run, ...] = ()
    explicit: Tensor | None = None

    @classmethod
    def of(cls, index: Tensor) -> Places:
        """From the positions of all entries, int64 (p,)."""
        if index.dtype != torch.long or index.ndim != 1:
            raise ValueError(f"expected a vector of int64, got {index.dtype} of {tuple(index.shape)}")
        if not len(index):
            return cls()
        found = _read(index) if int(index.min()) >= 0 else None  # `within` will refuse it
        return found if found is not None and torch.equal(found.index, index.cpu()) else cls(explicit=index)

    @classmethod
    def range(cls, start: int, stop: int) -> Places:
        """One piece."""
        return cls(1, (Run(start, stop - start),)) if stop > start else cls()

    def __len__(self) -> int:
        return self.rows * self._width if self.explicit is None else len(self.explicit)

    @property
    def _width(self) -> int:
        return sum(run.width for run in self.runs)

    @property
    def span(self) -> tuple[int, int] | None:
        """(start, stop) of what lies in one piece, in order; else None."""
        if self.explicit is not None or len(self.runs) > 1 or any(run.turned for run in self.runs):
            return None
        return (self.runs[0].start, self.runs[0].start + len(self)) if self.runs else (0, 0)

    @property
    def index(self) -> Tensor:
        """The position of every entry, (p,): written out each time."""
        if self.explicit is not None:
            return self.explicit
        stop = max((run.start + self.rows * run.width for run in self.runs), default=0)
        return self.take(torch.arange(stop))

    def within(self, size: int) -> bool:
        """Whether all entries lie in a vector of this size."""
        if self.explicit is not None:
            return 0 <= int(self.explicit.min()) and int(self.explicit.max()) < size
        return all(run.start >= 0 and run.start + self.rows * run.width <= size for run in self.runs)

    def take(self, v: Tensor) -> Tensor:
        """The block's part of flat vectors, (*b, size) → (*b, p)."""
        if self.explicit is not None:
            index = self.explicit.to(v.device)  # `index_select` along a last dimension takes up to ten times as long
            return v.gather(-1, index.expand(*v.shape[:-1], len(index)))
        if self.span is not None:
            return v[..., self.span[0] : self.span[1]]
        return torch.cat([run.view(v, self.rows) for run in self.runs], -1).flatten(-2)

    def put(self, v: Tensor, part: Tensor) -> None:
        """Write the block's part (*b, p) into flat vectors (*b, size)."""
        if self.explicit is not None:
            v.scatter_(-1, self.explicit.to(v.device).expand(part.shape), part)
            return
        for run, own in zip(self.runs, self._cut(part), strict=True):
            run.view(v, self.rows).copy_(own)

    def _cut(self, part: Tensor) -> Iterator[Tensor]:
        widths = [run.width for run in self.runs]
        return iter(part.unflatten(-1, (self.rows, self._width)).split(widths, -1) if widths else ())

    def same_as(self, other: Places) -> bool:
        """Whether both name the same entries in the same order."""
        if len(self) != len(other):
            return False
        if self.explicit is None and other.explicit is None and (self.rows, self.runs) == (other.rows, other.runs):
            return True
        return torch.equal(self.index.cpu(), other.index.cpu())

    def spec(self) -> Any:
        """JSON-able; None for an explicit index."""
        if self.explicit is not None:
            return None
        return {"rows": self.rows, "runs": [list(run) for run in self.runs]}

    @classmethod
    def from_spec(cls, spec: Any) -> Places:
        """The inverse of `spec`, and what files of an earlier format hold: [start, stop]."""
        if isinstance(spec, list):
            return cls.range(*map(int, spec))
        return cls(int(spec["rows"]), tuple(Run(int(s), int(w), bool(turned)) for s, w, turned in spec["runs"]))


def _read(index: Tensor) -> Places | None:
    """Rows and runs as the first row suggests; whether they hold is to be seen."""
    ends = (index[1:] - index[:-1] != 1).nonzero().flatten()[: MOST + 1].tolist()
    begins = [0, *(end + 1 for end in ends)]
    starts, n = index[begins].tolist(), len(index)
    following = starts[0] + (begins[1] if ends else n)  # where the first run of a second row begins
    if following in starts[1:]:
        begins = begins[: starts.index(following, 1) + 1]
    elif len(begins) <= MOST:  # a single row
        begins.append(n)
    width = begins[-1]
    runs = tuple(Run(start, b - a) for start, (a, b) in zip(starts, pairwise(begins), strict=False))
    return None if n % width else Places(n // width, runs)
