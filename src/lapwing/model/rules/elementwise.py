"""Sums and products of data with a parameter, broadcast as torch does, and PReLU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lapwing.model.rules.rule import Call, RowsRule
from lapwing.model.samples import Samples


def _reduce(g: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(n, r, *rest) summed over the axes along which a tensor of this shape was broadcast -> (n, r, *shape)."""
    extra = g.ndim - 2 - len(shape)
    if extra:
        g = g.sum(tuple(range(2, 2 + extra)))
    ones = tuple(2 + d for d, size in enumerate(shape) if size == 1 and g.shape[2 + d] != 1)
    return g.sum(ones, keepdim=True) if ones else g


class Elementwise(RowsRule):
    """out = data ± weight (the weight is in the role of a bias) or data · weight."""

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        some = call.weight if call.weight is not None else call.bias
        assert some is not None
        axis = samples.axis - (ndim - some.ndim)  # the sample axis, seen from the weight
        return some.ndim <= ndim and (axis < 0 or some.shape[axis] == 1)

    def weight_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        assert call.weight is not None
        return _reduce(samples.first(g * self.slope(call), n, skip=1), tuple(call.weight.shape))

    def bias_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        assert call.bias is not None
        return call.options.get("sign", 1) * _reduce(samples.first(g, n, skip=1), tuple(call.bias.shape))

    def slope(self, call: Call) -> Tensor:
        """∂out/∂weight, elementwise, of the output's shape."""
        return call.data


class Sum(Elementwise):
    """input + alpha·other, either of them the parameter."""

    def __init__(self, sign: int = 1) -> None:
        self.sign = sign

    def bind(self, input: Any, other: Any, *, alpha: float = 1, **kwargs: Any) -> Call | None:
        if kwargs or not isinstance(input, Tensor) or not isinstance(other, Tensor):
            return None
        return Call(input, None, other, {"sign": self.sign * alpha, "swapped": Call(other, None, input)})


class Product(Elementwise):
    """input · other, either of them the parameter."""

    def bind(self, input: Any, other: Any, **kwargs: Any) -> Call | None:
        if kwargs or not isinstance(input, Tensor) or not isinstance(other, Tensor):
            return None
        return Call(input, other, None, {"swapped": Call(other, input, None)})


class PReLU(Elementwise):
    """max(0, x) + w · min(0, x), one weight or one per channel (axis 1)."""

    def bind(self, input: Tensor, weight: Tensor) -> Call | None:
        return Call(input, weight, None)

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        assert call.weight is not None
        return samples.axis == 0 or call.weight.numel() == 1

    def weight_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        assert call.weight is not None
        g = samples.first(g * call.data.clamp(max=0), n, skip=1)  # (n, r, m, channels, *space) when the axis is 0
        if call.weight.numel() == 1:
            return g.flatten(2).sum(2, keepdim=True)
        return g.flatten(4).sum(-1).sum(2) if g.ndim > 4 else g.sum(2)
