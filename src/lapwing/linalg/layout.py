"""Where each block's own vector sits in the flat parameter vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from lapwing.linalg.places import Places
from lapwing.storage import tensor_of


class Layout:
    """A partition of range(size): entry j of block k is entry index[k][j] of the flat vector.

    `places` says so in few numbers where a block is a range, or a weight matrix with its bias.
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
        """p_k."""
        return tuple(len(place) for place in self.places)

    @cached_property
    def _order(self) -> tuple[int, ...] | None:
        """Blocks by start, if all are ranges."""
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
        """What a file holds, in JSON; indices that cannot be told in few numbers go to the tensors."""
        blocks: list[Any] = []
        for k, place in enumerate(self.places):
            if place.explicit is not None:
                tensors[f"{key}.{k}"] = place.explicit
            blocks.append({"tensor": f"{key}.{k}"} if place.explicit is not None else place.spec())
        return {"size": self.size, "blocks": blocks}

    @classmethod
    def restore(cls, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Layout:
        """The layout that `describe` told of."""
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
