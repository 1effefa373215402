"""Convolutions: linear maps of patches, in one, two and three dimensions, with groups, and transposed.

Their input factor is Σ a aᵀ over the patches a of images. Two ways do without writing the patches out; each has a
function that says whether it pays:

*Correlation.* Two entries of a patch that lie d apart multiply the same pairs of pixels wherever they sit in it, so
over all positions of an unbounded image the sum depends on d alone: kh (2 kw − 1) products of images instead of
(kh kw)². What positions outside the convolution's own add to it is then subtracted: strips at the edges, most rows of
which are zero.

*Bands.* A patch is a stack of strips one pixel high, and a strip is part of as many patches as the kernel has rows. So
each strip is multiplied once with those that begin up to a kernel's height below it, (c kw) × (c kw · kh) numbers
instead of (c kw · kh)²; two places of the kernel then add up those products over the rows that they meet.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lapwing.linalg.rows import CHUNK_BYTES, added, chunks
from lapwing.model.rules.rule import Call, MatrixRule, Samples, with_ones

Sides = tuple[int, int]
Part = tuple[int, int, int]  # the first entry of the image that a strip of patches sees, and its places in the kernel
CHANNELS = 8  # with fewer, torch's kernels for correlations are slower than the patches
CORRELATION_WORTH = 0.6  # share of the multiplications of written-out patches that correlations may take
BAND_WORTH = 0.8  # share of these multiplications that bands may take
PIXELS = 2**13  # pixels that torch's kernel sums in a row: more lose digits (these: to 1e-7 of the norm)


class PatchRule(MatrixRule):
    """A linear map of patches: y[o, p] = Σ_{i,k} W[o, i, k] patch[p][i, k] + b[o], with groups."""

    def __init__(self, dims: int) -> None:
        self.dims = dims

    @abstractmethod
    def windows(self, call: Call) -> Tensor:
        """Return the patches, (n·m, channels, *positions, *kernel)."""

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        return samples.axis == 0

    def left(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        r, channels = g.shape[0], g.shape[2]
        groups = call.options["groups"]
        g = g.flatten(3).transpose(2, 3)  # (r, n·m, positions, channels)
        g = samples.first(g, n, skip=1)  # (n, r, m, positions, channels)
        return g.reshape(n, r, -1, groups, channels // groups)

    def left_sum(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        groups = call.options["groups"]
        summed = samples.first(g.flatten(3).sum(-1), n, skip=1).sum(2)  # (n, r, m, channels) -> (n, r, channels)
        return summed.reshape(*summed.shape[:2], groups, -1)

    def left_gram(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        channels, groups = g.shape[2], call.options["groups"]
        x = g.flatten(0, 1).reshape(-1, groups, channels // groups, g.shape[3:].numel())
        return _gram(x) if x.shape[3] > x.shape[2] else super().left_gram(call, g, samples, n)

    def right(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        x = self._columns(self.windows(call), call.options["groups"], ones)  # (n·m, groups, in, positions)
        x = samples.first(x, n)  # (n, m, groups, in, positions)
        return x.permute(0, 1, 4, 2, 3).reshape(n, 1, -1, *x.shape[2:4])

    def right_sum(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        positions = tuple(range(2, 2 + self.dims))
        return self._gathered(call, self.windows(call).sum(positions), samples, n, ones)

    def right_gram(
        self, call: Call, samples: Samples, n: int, ones: bool, weights: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        windows = self.windows(call)
        places, kernel = windows.shape[2 : 2 + self.dims].numel(), windows.shape[2 + self.dims :].numel()
        if weights is not None or places <= windows.shape[1] // call.options["groups"] * kernel:
            return super().right_gram(call, samples, n, ones, weights, dtype)
        x = self._columns(windows, call.options["groups"], ones)
        return _gram(x.to(dtype)), len(x) // n * places

    def positions(self, call: Call, n: int) -> int:
        windows = self.windows(call)
        return windows.shape[0] // n * windows.shape[2 : 2 + self.dims].numel()

    def _gathered(self, call: Call, summed: Tensor, samples: Samples, n: int, ones: bool) -> Tensor:
        """Bring sums of patches (n·m, channels, *kernel) to (n, groups, in)."""
        x = samples.first(summed.reshape(summed.shape[0], call.options["groups"], -1), n).sum(1)
        return with_ones(x, self.positions(call, n)) if ones else x

    def _columns(self, windows: Tensor, groups: int, ones: bool) -> Tensor:
        """Write patches out as (count, groups, in, positions), with a row of ones for the bias."""
        dims = self.dims
        count, channels = windows.shape[:2]
        kernel, places = windows.shape[2 + dims :].numel(), windows.shape[2 : 2 + dims].numel()
        order = (0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))  # runs of positions copy fastest
        rows = (channels // groups) * kernel
        if not ones:
            return windows.permute(order).reshape(count, groups, rows, places)
        if windows.requires_grad and torch.is_grad_enabled():
            x = windows.permute(order).reshape(count, groups, rows, places)
            return torch.cat([x, x.new_ones(count, groups, 1, places)], 2)
        out = windows.new_empty(count, groups, rows + 1, places)
        for g in range(groups):
            own = windows[:, g * (channels // groups) : (g + 1) * (channels // groups)].permute(order)
            out[:, g, :rows].unflatten(1, own.shape[1 : 2 + dims]).unflatten(-1, own.shape[2 + dims :]).copy_(own)
        out[:, :, rows] = 1
        return out


class Convolution(PatchRule):
    """y[o, p] = Σ_{i,k} W[o, i, k] x[i, s·p + d·k] + b[o]."""

    def bind(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Call | None:
        if input.ndim != self.dims + 2:
            return None
        kernel = tuple(weight.shape[2:])
        stride, dilation = _each(stride, self.dims), _each(dilation, self.dims)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            edges = [(t // 2, t - t // 2) for t in total]
        else:
            edges = [(p, p) for p in _each(0 if padding == "valid" else padding, self.dims)]
        return Call((input,), weight, bias, {"stride": stride, "dilation": dilation, "edges": edges, "groups": groups})

    def view(self, call: Call, weight: Tensor) -> Tensor:
        groups = call.options["groups"]
        return weight.reshape(groups, weight.shape[0] // groups, -1)

    def windows(self, call: Call) -> Tensor:
        options = call.options
        return patches(
            _padded(call.data, options["edges"]), call.small.shape[2:], options["stride"], options["dilation"]
        )

    def right_sum(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        """Sum along one axis after the other, once per place of the kernel: patches are never written out."""
        x = call.data
        for axis in self._axes(call):
            x = torch.stack([x[:, :, part].sum(2) for part in axis.parts()], -1)
        return self._gathered(call, x, samples, n, ones)

    def right_gram(
        self, call: Call, samples: Samples, n: int, ones: bool, weights: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        if weights is None and dtype in (torch.float32, torch.float64):
            found = self._without_patches(call, dtype)
            if found is not None:
                return self._with_sums(call, found, samples, n, ones)[None], self.positions(call, n)
        return super().right_gram(call, samples, n, ones, weights, dtype)

    def positions(self, call: Call, n: int) -> int:
        return call.data.shape[0] // n * prod(axis.places for axis in self._axes(call))

    def kernel_shares(self, call: Call) -> Tensor | None:
        if call.options["groups"] != 1:
            return None
        shares = torch.ones(1)
        for axis in self._axes(call):
            shares = (shares[:, None] * axis.shares()).flatten()
        return shares

    def _without_patches(self, call: Call, dtype: torch.dtype) -> Tensor | None:
        """Return Σ a aᵀ from products of the image, or of its rows, where those are cheaper than patches."""
        options = call.options
        if self.correlates(call):
            return correlation_gram(call.data.to(dtype), _sides(call), options["edges"])
        if self.banded(call):
            across = options["dilation"][1]
            return band_gram(call.data.to(dtype), _sides(call), options["stride"], across, options["edges"])
        return None

    def _with_sums(self, call: Call, found: Tensor, samples: Samples, n: int, ones: bool) -> Tensor:
        """Append a row and a column of sums of patches, where the bias has a one."""
        if not ones:
            return found
        total = self.right_sum(call, samples, n, True)[:, 0].to(found.dtype).sum(0)  # its last entry counts patches
        return torch.cat([torch.cat([found, total[:-1, None]], 1), total[None]])

    def _is_image(self, call: Call) -> bool:
        return self.dims == 2 and call.options["groups"] == 1 and bool(len(call.data)) and not call.data.is_complex()

    def correlates(self, call: Call) -> bool:
        """Whether products of the image with itself are cheaper than patches."""
        options = call.options
        if not self._is_image(call) or {*options["stride"], *options["dilation"]} != {1}:
            return False
        return correlation_pays(call.data.shape, _sides(call), options["edges"])

    def banded(self, call: Call) -> bool:
        """Whether products of the image's rows are cheaper than patches."""
        options = call.options
        if not self._is_image(call) or options["dilation"][0] != 1:
            return False
        return band_pays(call.data.shape, _sides(call), options["stride"], options["edges"])

    def _axes(self, call: Call) -> list[Axis]:
        options = call.options
        sizes = zip(call.data.shape[2:], call.small.shape[2:], options["stride"], options["dilation"], strict=True)
        return [Axis(*size, *edges) for size, edges in zip(sizes, options["edges"], strict=True)]


class TransposedConvolution(PatchRule):
    """A convolution with the flipped kernel over the input with stride − 1 zeros between its entries."""

    def bind(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Call | None:
        if input.ndim != self.dims + 2:
            return None
        stride, dilation = _each(stride, self.dims), _each(dilation, self.dims)
        padding, extra = _each(padding, self.dims), _each(output_padding, self.dims)
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        edges = [(t - p, t - p + e) for t, p, e in zip(reach, padding, extra, strict=True)]
        return Call((input,), weight, bias, {"stride": stride, "dilation": dilation, "edges": edges, "groups": groups})

    def view(self, call: Call, weight: Tensor) -> Tensor:
        groups = call.options["groups"]
        per_group = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)  # (q, in, out, kernel)
        return per_group.transpose(1, 2).flatten(2)

    def windows(self, call: Call) -> Tensor:
        options, x = call.options, call.data
        for d, s in enumerate(options["stride"]):
            if s > 1:
                x = torch.stack([x, *[torch.zeros_like(x)] * (s - 1)], dim=3 + d).flatten(2 + d, 3 + d)
                x = x.narrow(2 + d, 0, x.shape[2 + d] - s + 1)
        x = _padded(x, options["edges"])
        windows = patches(x, call.small.shape[2:], (1,) * self.dims, options["dilation"])
        return windows.flip(tuple(range(2 + self.dims, 2 + 2 * self.dims)))


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution."""

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int  # zeros that padding adds
    after: int

    @property
    def places(self) -> int:
        return (self.size + self.before + self.after - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def shares(self) -> Tensor:
        """Return the share of positions at which each place of the kernel lies on data and not on padding."""
        at = torch.arange(self.places) * self.stride - self.before + torch.arange(self.kernel)[:, None] * self.dilation
        return ((at >= 0) & (at < self.size)).double().mean(1)

    def parts(self) -> list[slice]:
        """Return the entries that each place in the kernel meets."""
        found = []
        for k in range(self.kernel):
            offset = self.dilation * k - self.before  # position p meets entry stride · p + offset
            first = max(0, -(offset // self.stride))
            last = min(self.places - 1, (self.size - 1 - offset) // self.stride)
            start = self.stride * first + offset
            found.append(slice(start, self.stride * last + offset + 1, self.stride) if last >= first else slice(0, 0))
        return found


def patches(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """View (n, c, *space) as (n, c, *positions, *kernel), one window per position, without copying."""
    dims = len(kernel)
    for d, (k, s, step) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + d, step * (k - 1) + 1, s)
        x = x[..., ::step]
    assert x.ndim == 2 + 2 * dims
    return x


def _gram(x: Tensor) -> Tensor:
    """Sum x xᵀ over items of x (items, groups, d, positions), without transposing it first."""
    total = x.new_zeros(x.shape[1], x.shape[2], x.shape[2])
    for start, length in chunks(len(x), total.numel() * x.element_size()):
        part = x.narrow(0, start, length)
        total += (part @ part.mT).sum(0)
    return total


def _each(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    value = tuple(value)
    return value * dims if len(value) == 1 else value


def _padded(x: Tensor, edges: list[tuple[int, int]]) -> Tensor:
    flat = [e for pair in reversed(edges) for e in pair]
    return pad(x, flat) if any(flat) else x


def _sides(call: Call) -> tuple[int, int]:
    """Return height and width of the kernel."""
    height, width = call.small.shape[2:]
    return height, width


def correlation_gram(x: Tensor, kernel: Sides, edges: tuple[Sides, Sides]) -> Tensor:
    """Return Σ a aᵀ, (c · kh · kw, c · kh · kw), by correlations: x (n, c, h, w), `edges` zeros around, stride 1."""
    (kh, kw), c = kernel, x.shape[1]
    few = max(1, PIXELS // x.shape[2:].numel())
    total = _unbounded(added([_correlations(part, kh, kw) for part in x.split(few)]), kh, kw)
    wide = pad(x, (kw - 1, kw - 1))  # strips above and below, over all columns that see the image
    for row, first, last in _outside(x.shape[2], kh, edges[0]):
        strip = wide[:, :, row : row + last - first].unfold(3, kw, 1)  # (n, c, rows, positions, kw)
        own = total[:, first:last, :, :, first:last]
        own -= _strip_gram(strip.permute(1, 2, 4, 0, 3)).reshape(own.shape)
    high = pad(x, (0, 0, *edges[0]))  # strips left and right, over the convolution's own rows
    for column, first, last in _outside(x.shape[3], kw, edges[1]):
        strip = high[..., column : column + last - first].unfold(2, kh, 1)  # (n, c, positions, columns, kh)
        own = total[:, :, first:last, :, :, first:last]
        own -= _strip_gram(strip.permute(1, 4, 3, 0, 2)).reshape(own.shape)
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


def _strip_gram(x: Tensor) -> Tensor:
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
