"""Σ a aᵀ over the patches a of images, without writing patches out.

Two entries of a patch that lie d apart multiply the same pairs of pixels wherever they sit in it, so over all positions
of an unbounded image the sum depends on d alone: kh (2 kw − 1) products of images instead of (kh kw)². What positions
outside the convolution's own added to it is then taken off: strips at the edges, of which most rows are zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from lapwing.linalg.rows import added

Sides = tuple[int, int]
Part = tuple[int, int, int]  # the first entry of the image that a strip of patches sees, and its places in the kernel

CHANNELS = 8  # below, torch's kernels for so few are slower than the patches
WORTH = 0.6  # share of the multiplications of the direct way that this one may take
PIXELS = 2**13  # that torch's kernel sums in a row: it loses digits with their number (to 1e-7 of the norm for these)


def patch_gram(x: Tensor, kernel: Sides, edges: tuple[Sides, Sides]) -> Tensor:
    """Of x (n, c, h, w) with `edges` zeros around, stride 1: (c · kh · kw, c · kh · kw)."""
    (kh, kw), c = kernel, x.shape[1]
    few = max(1, PIXELS // x.shape[2:].numel())
    total = _unbounded(added([_correlations(part, kh, kw) for part in x.split(few)]), kh, kw)
    wide = pad(x, (kw - 1, kw - 1))  # strips above and below, over all columns that see the image
    for row, first, last in _outside(x.shape[2], kh, edges[0]):
        strip = wide[:, :, row : row + last - first].unfold(3, kw, 1)  # (n, c, rows, positions, kw)
        own = total[:, first:last, :, :, first:last]
        own -= _gram(strip.permute(1, 2, 4, 0, 3)).reshape(own.shape)
    high = pad(x, (0, 0, *edges[0]))  # strips left and right, over the convolution's own rows
    for column, first, last in _outside(x.shape[3], kw, edges[1]):
        strip = high[..., column : column + last - first].unfold(2, kh, 1)  # (n, c, positions, columns, kh)
        own = total[:, :, first:last, :, :, first:last]
        own -= _gram(strip.permute(1, 4, 3, 0, 2)).reshape(own.shape)
    return total.reshape(c * kh * kw, -1)


def pays(shape: torch.Size, kernel: Sides, edges: tuple[Sides, Sides]) -> bool:
    """Whether it takes far fewer multiplications than patches that are written out."""
    (kh, kw), (_, c, h, w) = kernel, shape
    if c < CHANNELS or not h * w:
        return False
    places = (h + sum(edges[0]) - kh + 1) * (w + sum(edges[1]) - kw + 1)
    return multiplications(shape, kernel, edges) < WORTH * (kh * kw * c) ** 2 * places


def multiplications(shape: torch.Size, kernel: Sides, edges: tuple[Sides, Sides]) -> int:
    """Of one image (1, c, h, w)."""
    (kh, kw), (_, c, h, w) = kernel, shape
    taken = kh * (2 * kw - 1) * h * w
    taken += sum((kw * (last - first)) ** 2 * (w + kw - 1) for _, first, last in _outside(h, kh, edges[0]))
    taken += sum((kh * (last - first)) ** 2 * (h + sum(edges[0])) for _, first, last in _outside(w, kw, edges[1]))
    return c**2 * taken


def _outside(size: int, kernel: int, edges: Sides) -> Iterator[Part]:
    """Positions along an axis that are not the convolution's own and still see the image."""
    before, after = edges
    places = size + before + after - kernel + 1
    for position in (*range(before - kernel + 1, 0), *range(places, size + before)):
        first = max(0, before - position)
        yield position + first - before, first, min(kernel, size + before - position)


def _correlations(x: Tensor, kh: int, kw: int) -> Tensor:
    """Σ_u x_i[u] x_j[u + d] for the places d that are not above, (c, c, kh, 2 kw − 1)."""
    c = x.shape[1]
    below = pad(x, (0, 0, 0, kh - 1))
    like = x.new_empty(()).expand(c, c, kh, 2 * kw - 1)
    # the weights' gradient of a convolution of x, with x arriving
    _, found, _ = torch.ops.aten.convolution_backward(
        x, below, like, None, [1, 1], [0, kw - 1], [1, 1], False, [0, 0], 1, [False, True, False]
    )
    return found


def _unbounded(half: Tensor, kh: int, kw: int) -> Tensor:
    """Over all positions that see the image at all, (c, kh, kw, c, kh, kw)."""
    c = len(half)
    total = half.new_empty(c, kh, kw, c, kh, kw)
    for k in range(kh):
        for l in range(kh):
            for m in range(kw):
                part = half[:, :, abs(l - k)]
                if l >= k:
                    total[:, k, m, :, l] = part[..., kw - 1 - m : 2 * kw - 1 - m]
                else:
                    total[:, k, m, :, l] = part.flip(-1)[..., kw - 1 - m : 2 * kw - 1 - m].transpose(0, 1)
    return total


def _gram(x: Tensor) -> Tensor:
    """x (c, a, b, n, positions): over the last two, (c · a · b, c · a · b)."""
    rows = x.reshape(x.shape[:3].numel(), -1)
    return rows @ rows.T
