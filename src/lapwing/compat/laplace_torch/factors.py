"""Kronecker factors per parameter tensor, read from the curvature of a fit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lapwing.compat.laplace_torch.matrix import Kron
from lapwing.curvature import Curvature
from lapwing.errors import UnsupportedOperation
from lapwing.linalg import PSD

LARGEST = 4096  # weights of a block that is written out as one dense matrix


def factors_of(curvature: Curvature, dtype: torch.dtype) -> Kron:
    """Return [G, A] for each weight and [G] for each bias, in the order of the parameters.

    A block that is not a single Kronecker product (a convolution with groups, a norm with its scale and shift) is one
    dense matrix over all its parameters.
    """
    assert curvature.params is not None
    sizes = dict(zip(curvature.params.names, curvature.params.sizes, strict=True))
    order = {name: k for k, name in enumerate(sizes)}
    found: list[tuple[int, list[Tensor]]] = []
    blocks = zip(curvature.matrix.diagonal_blocks(), curvature.names, curvature.layout.places, strict=True)
    for block, names, places in blocks:
        plain = _plain(block)
        if plain is not None and len(names) <= 2 and _in_order(places.index, [sizes[name] for name in names]):
            G, A = plain
            i = A.shape[0] - (len(names) == 2)
            found.append((order[names[0]], [G, A[:i, :i]]))
            if len(names) == 2:
                found.append((order[names[1]], [G * A[i, i]]))
        else:
            for start, matrix in _dense(block, names, places.index, order):
                found.append((start, [matrix]))
    return Kron([[factor.to(dtype) for factor in factors] for _, factors in sorted(found, key=lambda pair: pair[0])])


def _plain(block: PSD) -> tuple[Tensor, Tensor] | None:
    """G (o, o) and A (i, i) of a block that is one Kronecker product."""
    if not block.factored:
        return None
    left, right = getattr(block, "left", None), getattr(block, "right", None)
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or len(left) != 1:
        return None
    return left[0] * float(getattr(block, "factor", 1.0)), right[0]


def _in_order(index: Tensor, sizes: list[int]) -> bool:
    """Whether a block lists its weight row by row, with each row followed by its bias."""
    if len(sizes) == 1:
        return bool((index[1:] - index[:-1] == 1).all())
    rows = index.reshape(sizes[1], -1)
    weight, bias = rows[:, :-1].reshape(-1), rows[:, -1]
    return all(bool((part[1:] - part[:-1] == 1).all()) for part in (weight, bias))


def _dense(block: PSD, names: tuple[str, ...], index: Tensor, order: dict[str, int]) -> Iterator[tuple[int, Tensor]]:
    """Yield (position, matrix) of a block that has no factors, in the flat order of its parameters."""
    if block.size > LARGEST and not block.is_diagonal:
        raise UnsupportedOperation(
            f"the curvature of {', '.join(names)} ({block.size:,} weights) is not a single Kronecker product, and too "
            "large to be written out. Predictions and samples do not need it; H and posterior_precision do."
        )
    positions = [order[name] for name in names]
    if positions != list(range(positions[0], positions[0] + len(positions))):
        raise UnsupportedOperation(f"the curvature of {', '.join(names)} joins parameters that are not neighbors")
    inside = index.argsort()
    if block.is_diagonal:
        yield positions[0], block.diagonal()[inside]
    else:
        yield positions[0], block.dense()[inside][:, inside]
