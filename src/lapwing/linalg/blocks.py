"""Blocks at places of the flat parameter vector: layouts, and the rows and matrices that consist of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from lapwing.errors import BadData, LapwingError, brief
from lapwing.linalg.kronecker import sharing_factors
from lapwing.linalg.psd import PSD, Diagonal, Scalar, require_positive
from lapwing.linalg.rows import DenseRows, Rows, added
from lapwing.linalg.spectrum import PIECE, sum_log1p
from lapwing.storage import register, tensor_of, unpack

A = TypeVar("A")
MOST = 4  # runs in a row that are looked for: a weight matrix and its bias have two
KEPT = 2**20  # as many eigenvalues are cached in one vector, so that the evidence at a new scalar prior is one sum


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
            raise BadData(f"expected vectors of length {self.size} in the last dimension, got {tuple(v.shape)}")
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


class FormedRows(Protocol):
    """A sequence of `Rows`, one per block, that forms each when it is asked for."""

    @property
    def n(self) -> int: ...
    @property
    def r(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __getitem__(self, k: int, /) -> Rows: ...
    def __iter__(self) -> Iterator[Rows]: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Jacobian(Rows):
    """Rows with respect to all parameters: one `Rows` per block, placed in the flat vector by a layout.

    `rows` is a tuple, or a sequence that forms each block when it is asked for and knows n, r, dtype and device itself.
    """

    rows: tuple[Rows, ...] | FormedRows
    layout: Layout

    def __post_init__(self) -> None:
        if not isinstance(self.rows, tuple):
            return  # checking sizes would form every block
        sizes = self.layout.sizes
        got = tuple(rows.size for rows in self.rows)
        if got != sizes:
            raise ValueError(f"rows of sizes {got} do not fit a layout of blocks of sizes {sizes}")
        if len({(rows.n, rows.r) for rows in self.rows}) != 1:
            raise ValueError(
                "all blocks need the same samples and directions, got (n, r) = "
                f"{sorted({(rows.n, rows.r) for rows in self.rows})}"
            )

    @property
    def _any(self) -> Rows | FormedRows:
        return self.rows[0] if isinstance(self.rows, tuple) else self.rows

    @property
    def n(self) -> int:
        return self._any.n

    @property
    def r(self) -> int:
        return self._any.r

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self._any.dtype

    @property
    def device(self) -> torch.device:
        return self._any.device

    def blockwise(self, *flat: Tensor) -> Iterable[tuple[Any, ...]]:
        return zip(self.rows, *map(self.layout.gather, flat), strict=True)

    def dense(self) -> Tensor:
        return self.layout.scatter([rows.dense() for rows in self.rows])

    def narrow(self, start: int, length: int) -> Jacobian:
        return Jacobian(tuple(rows.narrow(start, length) for rows in self.rows), self.layout)

    def to(self, dtype: torch.dtype) -> Jacobian:
        return Jacobian(tuple(rows.to(dtype) for rows in self.rows), self.layout)

    def matvec(self, v: Tensor) -> Tensor:
        parts = self.layout.gather(self._check(v))
        return added([rows.matvec(part) for rows, part in zip(self.rows, parts, strict=True)])

    def times(self, matrix: Tensor) -> DenseRows:
        parts = self.layout.gather(matrix.mT)
        return DenseRows(added([rows.times(part.mT).values for rows, part in zip(self.rows, parts, strict=True)]))

    def square_sum(self) -> Tensor:
        return self.layout.scatter([rows.square_sum() for rows in self.rows])

    def weighted_gram(self, w: Tensor) -> Tensor:
        parts = self.layout.gather(self._check(w))
        return added([rows.weighted_gram(part) for rows, part in zip(self.rows, parts, strict=True)])

    def weighted_norm(self, w: Tensor) -> Tensor:
        parts = self.layout.gather(self._check(w))
        return added([rows.weighted_norm(part) for rows, part in zip(self.rows, parts, strict=True)])

    def joint_gram(self, w: Tensor) -> Tensor:
        parts = self.layout.gather(self._check(w))
        return added([rows.joint_gram(part) for rows, part in zip(self.rows, parts, strict=True)])


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
            return diagonal_parts(other, self.layout)
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
        rows = rows.of_size(self.size, self.dtype)
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


def diagonal_parts(matrix: Diagonal, layout: Layout) -> tuple[Diagonal, ...]:
    """Split a diagonal into the blocks of a layout; a block whose entries share a number stores that number."""
    levels, group = matrix.levels, matrix.group
    if levels is None or group is None:
        return tuple(Diagonal(part) for part in layout.gather(matrix.values))
    return tuple(
        Diagonal(levels[part[0]].expand(len(part)))
        if len(part) and bool((part == part[0]).all())
        else Diagonal.by_group(levels, part)
        for part in layout.gather(group)
    )
