"""Where the entries of a block sit in the flat parameter vector, without a number for each where a few tell it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

RUNS = 4  # in a row, at most: a weight matrix and its bias have two


@dataclass(frozen=True, eq=False)
class Places:
    """Entries of a block in the order of its own vector: `rows` rows of runs of neighbors, or an explicit index.

    Run (start, width) of row r are the entries start + r·width … of the flat vector. A weight (o, i) at s with its bias
    at b is o rows of the runs (s, i) and (b, 1); what lies in one piece is one row with one run.
    """

    rows: int = 1
    runs: tuple[tuple[int, int], ...] = ()
    explicit: Tensor | None = None

    @classmethod
    def of(cls, index: Tensor) -> Places:
        """From the positions of all entries, int64 (p,)."""
        if index.dtype != torch.long or index.ndim != 1:
            raise ValueError(f"expected a vector of int64, got {index.dtype} of {tuple(index.shape)}")
        if not len(index):
            return cls()
        found = _read(index)
        return found if found is not None and torch.equal(found.index, index.cpu()) else cls(explicit=index)

    @classmethod
    def range(cls, start: int, stop: int) -> Places:
        """One piece."""
        return cls(1, ((start, stop - start),)) if stop > start else cls()

    def __len__(self) -> int:
        return self.rows * self._width if self.explicit is None else len(self.explicit)

    @property
    def _width(self) -> int:
        return sum(width for _, width in self.runs)

    @property
    def span(self) -> tuple[int, int] | None:
        """(start, stop) of what lies in one piece, else None."""
        if self.explicit is not None or len(self.runs) > 1:
            return None
        return (self.runs[0][0], self.runs[0][0] + len(self)) if self.runs else (0, 0)

    @property
    def index(self) -> Tensor:
        """The position of every entry, (p,): written out each time."""
        if self.explicit is not None:
            return self.explicit
        return torch.cat([torch.arange(s, s + self.rows * w).view(self.rows, w) for s, w in self._columns], 1).flatten()

    @property
    def _columns(self) -> tuple[tuple[int, int], ...]:
        return self.runs or ((0, 0),)

    def within(self, size: int) -> bool:
        """Whether all entries lie in a vector of this size."""
        if self.explicit is not None:
            return 0 <= int(self.explicit.min()) and int(self.explicit.max()) < size
        return all(0 <= start and start + self.rows * width <= size for start, width in self.runs)

    def take(self, v: Tensor) -> Tensor:
        """The block's part of flat vectors, (*b, size) → (*b, p)."""
        if self.explicit is not None:
            index = self.explicit.to(v.device)  # `index_select` along a last dimension takes up to ten times as long
            return v.gather(-1, index.expand(*v.shape[:-1], len(index)))
        parts = [v[..., start : start + self.rows * width] for start, width in self._columns]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(-1, (self.rows, -1)) for part in parts], -1).flatten(-2)

    def put(self, v: Tensor, part: Tensor) -> None:
        """Write the block's part (*b, p) into flat vectors (*b, size)."""
        if self.explicit is not None:
            index = self.explicit.to(v.device)
            v.scatter_(-1, index.expand(part.shape), part)
            return
        begin, grid = 0, part.unflatten(-1, (self.rows, self._width))
        for start, width in self.runs:
            target = v[..., start : start + self.rows * width].unflatten(-1, (self.rows, width))
            target.copy_(grid[..., begin : begin + width])
            begin += width

    def same_as(self, other: Places) -> bool:
        """Whether both name the same entries in the same order."""
        if self.explicit is None or other.explicit is None:
            return self.explicit is other.explicit and (self.rows, self.runs) == (other.rows, other.runs)
        return torch.equal(self.explicit, other.explicit.to(self.explicit.device))

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
        return cls(int(spec["rows"]), tuple((int(start), int(width)) for start, width in spec["runs"]))


def _read(index: Tensor) -> Places | None:
    """Rows and runs as the first row suggests; whether they hold is to be seen."""
    ends = (index[1:] - index[:-1] != 1).nonzero().flatten()[: RUNS + 1].tolist()
    begins = [0, *(end + 1 for end in ends)]
    starts, n = index[begins].tolist(), len(index)
    following = starts[0] + (begins[1] if ends else n)  # where the first run of a second row begins
    if following in starts[1:]:
        begins = begins[: starts.index(following, 1) + 1]
    elif len(begins) <= RUNS:  # a single row
        begins.append(n)
    width = begins[-1]
    runs = tuple((start, b - a) for start, (a, b) in zip(starts, pairwise(begins), strict=False))
    return None if n % width else Places(n // width, runs)
