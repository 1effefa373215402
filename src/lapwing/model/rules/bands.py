"""Σ a aᵀ over the patches a of images, of which only rows are written out.

A patch is a stack of strips one pixel high, and a strip is part of as many patches as the kernel has rows. So each
strip is multiplied once with those that begin up to a kernel's height below it, (c kw) × (c kw · kh) numbers in place
of (c kw · kh)²; two places of the kernel then add up those products over the rows that they meet.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lapwing.linalg.rows import CHUNK_BYTES, chunks

Sides = tuple[int, int]

WORTH = 0.8  # share of the multiplications of the direct way that this one may take


def band_gram(x: Tensor, kernel: Sides, stride: Sides, dilation: int, edges: tuple[Sides, Sides]) -> Tensor:
    """Of x (n, c, h, w) with `edges` zeros around, patches dilated along the width only: (c · kh · kw, c · kh · kw)."""
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


def pays(shape: torch.Size, kernel: Sides, stride: Sides, edges: tuple[Sides, Sides]) -> bool:
    """Whether it takes fewer multiplications than whole patches, and little memory for its products."""
    (kh, kw), c = kernel, shape[1]
    height, places = _rows(shape, kh, stride[0], edges)
    return 0 < height <= WORTH * kh * places and 4 * height * kh * (c * kw) ** 2 <= CHUNK_BYTES


def multiplications(shape: torch.Size, kernel: Sides, positions: int, stride: Sides, edges: tuple[Sides, Sides]) -> int:
    """Of one image (1, c, h, w) with so many positions."""
    (kh, kw), c = kernel, shape[1]
    height, places = _rows(shape, kh, stride[0], edges)
    return height * kh * (c * kw) ** 2 * positions // places


def _rows(shape: torch.Size, kernel: int, stride: int, edges: tuple[Sides, Sides]) -> Sides:
    """Rows of the image with its edges, and those that a patch begins at."""
    height = shape[2] + sum(edges[0])
    return height, (height - kernel) // stride + 1
