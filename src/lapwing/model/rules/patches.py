"""Σ a aᵀ over the patches a of images, without writing all patches out. Two ways, each with what it costs.

*Correlation.* Two entries of a patch that lie d apart multiply the same pairs of pixels wherever they sit in it, so
over all positions of an unbounded image the sum depends on d alone: kh (2 kw − 1) products of images instead of
(kh kw)². What positions outside the convolution's own add to it is then subtracted: strips at the edges, most rows of
which are zero.

*Bands.* A patch is a stack of strips one pixel high, and a strip is part of as many patches as the kernel has rows. So
each strip is multiplied once with those that begin up to a kernel's height below it, (c kw) × (c kw · kh) numbers
instead of (c kw · kh)²; two places of the kernel then add up those products over the rows that they meet.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from lapwing.linalg.rows import CHUNK_BYTES, added, chunks

Sides = tuple[int, int]
Part = tuple[int, int, int]  # the first entry of the image that a strip of patches sees, and its places in the kernel

CHANNELS = 8  # with fewer, torch's kernels for correlations are slower than the patches
CORRELATION_WORTH = 0.6  # share of the multiplications of written-out patches that correlations may take
BAND_WORTH = 0.8  # share of these multiplications that bands may take
PIXELS = 2**13  # pixels that torch's kernel sums in a row: more lose digits (these: to 1e-7 of the norm)


def correlation_gram(x: Tensor, kernel: Sides, edges: tuple[Sides, Sides]) -> Tensor:
    """Return Σ a aᵀ, (c · kh · kw, c · kh · kw), by correlations: x (n, c, h, w), `edges` zeros around, stride 1."""
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


def correlation_pays(shape: torch.Size, kernel: Sides, edges: tuple[Sides, Sides]) -> bool:
    """Whether correlations take far fewer multiplications than patches that are written out."""
    (kh, kw), (_, c, h, w) = kernel, shape
    if c < CHANNELS or not h * w:
        return False
    places = (h + sum(edges[0]) - kh + 1) * (w + sum(edges[1]) - kw + 1)
    return correlation_cost(shape, kernel, edges) < CORRELATION_WORTH * (kh * kw * c) ** 2 * places


def correlation_cost(shape: torch.Size, kernel: Sides, edges: tuple[Sides, Sides]) -> int:
    """Count the multiplications of `correlation_gram` for one image (1, c, h, w)."""
    (kh, kw), (_, c, h, w) = kernel, shape
    taken = kh * (2 * kw - 1) * h * w
    taken += sum((kw * (last - first)) ** 2 * (w + kw - 1) for _, first, last in _outside(h, kh, edges[0]))
    taken += sum((kh * (last - first)) ** 2 * (h + sum(edges[0])) for _, first, last in _outside(w, kw, edges[1]))
    return c**2 * taken


def _outside(size: int, kernel: int, edges: Sides) -> Iterator[Part]:
    """Yield the positions along an axis that are not the convolution's own and still see the image."""
    before, after = edges
    places = size + before + after - kernel + 1
    for position in (*range(before - kernel + 1, 0), *range(places, size + before)):
        first = max(0, before - position)
        yield position + first - before, first, min(kernel, size + before - position)


def _correlations(x: Tensor, kh: int, kw: int) -> Tensor:
    """Return Σ_u x_i[u] x_j[u + d] for offsets d that do not point up, (c, c, kh, 2 kw − 1)."""
    c = x.shape[1]
    below = pad(x, (0, 0, 0, kh - 1))
    like = x.new_empty(()).expand(c, c, kh, 2 * kw - 1)
    # the weights' gradient of a convolution of x, with x arriving
    _, found, _ = torch.ops.aten.convolution_backward(
        x, below, like, None, [1, 1], [0, kw - 1], [1, 1], False, [0, 0], 1, [False, True, False]
    )
    return found


def _unbounded(half: Tensor, kh: int, kw: int) -> Tensor:
    """Return Σ a aᵀ over all positions that see the image at all, (c, kh, kw, c, kh, kw)."""
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
    """Sum outer products of x (c, a, b, n, positions) over the last two axes, (c · a · b, c · a · b)."""
    rows = x.reshape(x.shape[:3].numel(), -1)
    return rows @ rows.T


def band_gram(x: Tensor, kernel: Sides, stride: Sides, dilation: int, edges: tuple[Sides, Sides]) -> Tensor:
    """Return Σ a aᵀ, (c · kh · kw, c · kh · kw), by bands.

    x is (n, c, h, w) with `edges` zeros around; patches are dilated along the width only.
    """
    (kh, kw), c, down = kernel, x.shape[1], stride[0]
    height, places = _rows(x.shape, kh, down, edges)
    products = x.new_zeros(height, c * kw, kh * c * kw)
    width = x.shape[3] + sum(edges[1])
    for start, length in chunks(len(x), (height + kh) * c * kw * width * x.element_size()):
        # rows of zeros below the last complete the products, and no place of the kernel adds those up
        padded = pad(x.narrow(0, start, length), (*edges[1], edges[0][0], edges[0][1] + kh - 1))
        windows = padded.unfold(3, dilation * (kw - 1) + 1, stride[1])[..., ::dilation]  # (n, c, rows, positions, kw)
        strips = windows.permute(2, 1, 4, 0, 3).reshape(height + kh - 1, c * kw, -1)
        products += torch.bmm(strips[:height], strips.flatten(0, 1).unfold(0, kh * c * kw, c * kw))
    found = products.unflatten(2, (kh, c * kw))
    total = x.new_empty(kh, c * kw, kh, c * kw)
    for k in range(kh):  # a place k rows down meets the rows k, k + stride, …
        part = found[k : k + down * (places - 1) + 1 : down, :, : kh - k].sum(0)
        total[k, :, k:] = part
        total[k:, :, k] = part.permute(1, 2, 0)
    return total.reshape(kh, c, kw, kh, c, kw).permute(1, 0, 2, 4, 3, 5).reshape(c * kh * kw, -1)


def band_pays(shape: torch.Size, kernel: Sides, stride: Sides, edges: tuple[Sides, Sides]) -> bool:
    """Whether bands take fewer multiplications than whole patches, and little memory for their products."""
    (kh, kw), c = kernel, shape[1]
    height, places = _rows(shape, kh, stride[0], edges)
    return 0 < height <= BAND_WORTH * kh * places and 4 * height * kh * (c * kw) ** 2 <= CHUNK_BYTES


def band_cost(shape: torch.Size, kernel: Sides, positions: int, stride: Sides, edges: tuple[Sides, Sides]) -> int:
    """Count the multiplications of `band_gram` for one image (1, c, h, w) with so many positions."""
    (kh, kw), c = kernel, shape[1]
    height, places = _rows(shape, kh, stride[0], edges)
    return height * kh * (c * kw) ** 2 * positions // places


def _rows(shape: torch.Size, kernel: int, stride: int, edges: tuple[Sides, Sides]) -> Sides:
    """Return the number of rows of the image with its edges, and of rows at which a patch begins."""
    height = shape[2] + sum(edges[0])
    return height, (height - kernel) // stride + 1
