"""Where the entries of each block sit in the flat parameter vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapwing.storage import register, tensor_of

MOST = 4  # runs in a row that are looked for: a weight matrix and its bias have two


class Run(NamedTuple):
    """A run of entries in each of `rows` rows: start + r·width + c in row r, or start + c·rows + r if `turned`."""

    start: int
    width: int
    turned: bool = False

    def view(self, v: Tensor, rows: int) -> Tensor:
        """View the entries of the run in flat vectors, (*b, size) → (*b, rows, width)."""
        part = v[..., self.start : self.start + rows * self.width]
        if self.turned:
            return part.unflatten(-1, (self.width, rows)).transpose(-1, -2)
        return part.unflatten(-1, (rows, self.width))


@dataclass(frozen=True, eq=False)
class Places:
    """Entries of a block in the order of its own vector: rows of runs one after the other, or an explicit index.

    A weight (o, i) at position s with its bias at position b is o rows of the runs (s, i) and (b, 1). A block in one
    piece is one row with one run; an empty block has no run.

        Places.range(3, 7).take(torch.arange(10))  # tensor([3, 4, 5, 6])
    """

    rows: int = 1
    runs: tuple[Run, ...] = ()
    explicit: Tensor | None = None

    @classmethod
    def of(cls, index: Tensor) -> Places:
        """Make places from the positions of all entries, int64 (p,)."""
        if index.dtype != torch.long or index.ndim != 1:
            raise ValueError(f"expected a vector of int64, got {index.dtype} of {tuple(index.shape)}")
        if not len(index):
            return cls()
        found = _read(index) if int(index.min()) >= 0 else None  # `within` will refuse it
        return found if found is not None and torch.equal(found.index, index.cpu()) else cls(explicit=index)

    @classmethod
    def range(cls, start: int, stop: int) -> Places:
        """Make places of one piece, start … stop − 1."""
        return cls(1, (Run(start, stop - start),)) if stop > start else cls()

    def __len__(self) -> int:
        return self.rows * self._width if self.explicit is None else len(self.explicit)

    @property
    def _width(self) -> int:
        return sum(run.width for run in self.runs)

    @property
    def span(self) -> tuple[int, int] | None:
        """(start, stop) of a block that lies in one piece, in order; None for any other."""
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
        """Describe the places in JSON; None for an explicit index, which is stored as a tensor."""
        if self.explicit is not None:
            return None
        return {"rows": self.rows, "runs": [list(run) for run in self.runs]}

    @classmethod
    def from_spec(cls, spec: Any) -> Places:
        """Read what `spec` wrote, or the [start, stop] of files of an earlier format."""
        if isinstance(spec, list):
            return cls.range(*map(int, spec))
        return cls(int(spec["rows"]), tuple(Run(int(s), int(w), bool(turned)) for s, w, turned in spec["runs"]))


def _read(index: Tensor) -> Places | None:
    """Guess rows and runs from the first row of an index; the caller checks whether they give the index."""
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


@register
class Layout:
    """A partition of range(size): entry j of block k is entry index[k][j] of the flat vector.

    `places` holds the same in a few numbers per block where a block is a range, or a weight matrix with its bias.

        layout = Layout.contiguous([2, 3])
        layout.gather(torch.arange(5))  # (tensor([0, 1]), tensor([2, 3, 4]))
    """

    def __init__(self, size: int, index: Sequence[Tensor | Places]) -> None:
        self.size = size
        self.places = tuple(_place(k, item) for k, item in enumerate(index))
        seen, total = torch.zeros(size, dtype=torch.bool), sum(self.sizes)
        for k, place in enumerate(self.places):
            if not place.within(size):
                raise ValueError(f"block {k}: entries must lie in 0 … {size - 1}")
            place.put(seen, torch.ones(len(place), dtype=torch.bool))
        if total != size or not bool(seen.all()):
            raise ValueError(
                f"blocks must cover range({size}) once: got {total} entries, {int(seen.sum())} of them distinct"
            )

    @classmethod
    def contiguous(cls, sizes: Sequence[int]) -> Layout:
        """Blocks of the given sizes, one after the other."""
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        return cls(sum(sizes), [Places.range(a, a + s) for a, s in zip(starts, sizes, strict=True)])

    @property
    def index(self) -> tuple[Tensor, ...]:
        """The position of every entry of each block, (p_k,): written out each time."""
        return tuple(place.index for place in self.places)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each block."""
        return tuple(len(place) for place in self.places)

    @cached_property
    def _order(self) -> tuple[int, ...] | None:
        """The order of blocks in the flat vector if all are ranges, else None."""
        starts = [place.span[0] for place in self.places if place.span is not None]
        if len(starts) < len(self.places):
            return None
        return tuple(sorted(range(len(starts)), key=lambda k: (starts[k], self.sizes[k])))

    def gather(self, v: Tensor) -> tuple[Tensor, ...]:
        """Each block's part of flat vectors: (*b, size) → ((*b, p_k), …)."""
        if v.shape[-1:] != (self.size,):
            raise ValueError(f"expected vectors of length {self.size} in the last dimension, got {tuple(v.shape)}")
        if v.stride(-1) == 0 and not (v.requires_grad and v.is_leaf):  # one number, expanded
            return tuple(v[..., :1].expand(*v.shape[:-1], p) for p in self.sizes)
        return tuple(place.take(v) for place in self.places)

    def scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Flat vectors from each block's part: ((*b, p_k), …) → (*b, size). The inverse of `gather`."""
        got = tuple(part.shape[-1] for part in parts)
        if got != self.sizes:
            raise ValueError(f"expected parts of sizes {list(self.sizes)}, got {list(got)}")
        if self._order is not None:
            return torch.cat([parts[k] for k in self._order], -1)
        dtype = reduce(torch.promote_types, (part.dtype for part in parts))
        whole = parts[0].new_empty(*parts[0].shape[:-1], self.size, dtype=dtype)
        for place, part in zip(self.places, parts, strict=True):
            place.put(whole, part.to(dtype))
        return whole

    def same_as(self, other: Layout) -> bool:
        """Whether both place the same blocks at the same entries."""
        if self is other:
            return True
        if self.size != other.size or len(self.places) != len(other.places):
            return False
        return all(a.same_as(b) for a, b in zip(self.places, other.places, strict=True))

    def describe(self, tensors: dict[str, Tensor], key: str) -> dict[str, Any]:
        """Describe the layout in JSON, for files; explicit indices go to the tensors."""
        blocks: list[Any] = []
        for k, place in enumerate(self.places):
            if place.explicit is not None:
                tensors[f"{key}.{k}"] = place.explicit
            blocks.append({"tensor": f"{key}.{k}"} if place.explicit is not None else place.spec())
        return {"type": "Layout", "size": self.size, "blocks": blocks}

    @classmethod
    def restore(cls, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Layout:
        """Make the layout that `describe` described."""
        explicit = [isinstance(item, Mapping) and "tensor" in item for item in description["blocks"]]
        pairs = zip(description["blocks"], explicit, strict=True)
        places = [tensor_of(tensors, item) if written else Places.from_spec(item) for item, written in pairs]
        return cls(description["size"], places)

    def __repr__(self) -> str:
        return f"Layout({self.size}, {len(self.places)} blocks)"


def _place(k: int, item: Tensor | Places) -> Places:
    try:
        return item if isinstance(item, Places) else Places.of(item)
    except ValueError as error:
        raise ValueError(f"block {k}: {error}") from None
