"""Operations that are linear in a weight matrix: maps of vectors, of one-hot vectors (embeddings) and of patches.

Convolutions and transposed convolutions in one, two and three dimensions, with groups, are linear maps of patches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lapwing.linalg.rows import chunks
from lapwing.model.rules.patches import band_gram, band_pays, correlation_gram, correlation_pays
from lapwing.model.rules.rule import Call, MatrixRule, Samples, with_ones


def _positions_first(g: Tensor, samples: Samples, n: int) -> Tensor:
    """Shape gradients (r, *output) with features last as (n, r, t, 1, out)."""
    g = samples.first(g, n, skip=1)
    return g.reshape(n, g.shape[1], -1, 1, g.shape[-1])


class Linear(MatrixRule):
    """y = x Wᵀ + b with W (out, in), or y = x W + b with W (in, out) when `transposed`."""

    plain = True

    def __init__(self, read: Callable[..., Call | None], transposed: bool = False) -> None:
        self.read, self.transposed = read, transposed

    def bind(self, *args: Any, **kwargs: Any) -> Call | None:
        return self.read(*args, **kwargs)

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        return samples.axis < ndim - 1

    def view(self, call: Call, weight: Tensor) -> Tensor:
        return (weight.T if self.transposed else weight).unsqueeze(0)

    def left(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        return _positions_first(g, samples, n)

    def right(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        x = samples.first(call.data, n).reshape(n, 1, -1, 1, call.data.shape[-1])
        return with_ones(x) if ones else x


def read_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
    return Call((input,), weight, bias) if weight.ndim == 2 and input.ndim > 1 else None


def read_matmul(input: Tensor, other: Tensor, **kwargs: Any) -> Call | None:
    return Call((input,), other) if other.ndim == 2 and input.ndim > 1 and not kwargs else None


def read_addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **kwargs: Any
) -> Call | None:
    """Read b + x W, as GPT-2's Conv1D computes it."""
    return Call((mat1,), mat2, input) if beta == alpha == 1 and not kwargs and input.numel() == mat2.shape[-1] else None


class Embedding(MatrixRule):
    """y = Wᵀ onehot(x), W (vocabulary, features); the row of `padding_idx` gets no gradient."""

    def bind(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Call | None:
        if padding_idx is not None and padding_idx < 0:
            padding_idx += weight.shape[0]
        return Call((input,), weight, options={"padding": padding_idx})

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        return samples.axis < ndim - 1

    def view(self, call: Call, weight: Tensor) -> Tensor:
        return weight.T.unsqueeze(0)

    def left(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        return _positions_first(g, samples, n)

    def right(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        weight, padding = call.small, call.options["padding"]
        index = samples.first(call.data, n).reshape(n, -1)
        hot = torch.zeros(*index.shape, weight.shape[0], dtype=weight.dtype, device=weight.device)
        hot.scatter_(-1, index.long().unsqueeze(-1), 1.0)
        if padding is not None:
            hot[..., padding] = 0.0
        return hot.reshape(n, 1, index.shape[1], 1, -1)

    def positions(self, call: Call, n: int) -> int:
        return call.data.numel() // n


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
