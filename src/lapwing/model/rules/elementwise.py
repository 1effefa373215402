"""Operations with few parameters: sums and products with a parameter, PReLU, and norm layers.

A norm layer is y = x̂ · w + b, where the normalized input x̂ does not depend on w and b.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from lapwing.model.rules.rule import Call, RowsRule, Samples


def _reduce(g: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum (n, r, *rest) over the axes along which a tensor of this shape was broadcast, to (n, r, *shape)."""
    extra = g.ndim - 2 - len(shape)
    g = g.sum(tuple(range(2, 2 + extra))) if extra else g
    return g.sum_to_size(*g.shape[:2], *shape)


class Elementwise(RowsRule):
    """A sum data ± parameter, in which the parameter has the role of a bias, or a product data · weight."""

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        some = call.small
        axis = samples.axis - (ndim - some.ndim)  # the sample axis, seen from the weight
        return some.ndim <= ndim and (axis < 0 or some.shape[axis] == 1)

    def weight_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        return _reduce(samples.first(g * call.data, n, skip=1), tuple(call.small.shape))

    def bias_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        assert call.bias is not None
        return call.options.get("sign", 1) * _reduce(samples.first(g, n, skip=1), tuple(call.bias.shape))


class Sum(Elementwise):
    """input + alpha · other, where either may be the parameter."""

    def __init__(self, sign: int = 1) -> None:
        self.sign = sign

    def bind(self, input: Any, other: Any, *, alpha: float = 1, **kwargs: Any) -> Call | None:
        if kwargs or not isinstance(input, Tensor) or not isinstance(other, Tensor):
            return None
        swapped = Call((other,), None, input)
        return Call((input,), None, other, {"sign": self.sign * alpha}, swapped)


class Product(Elementwise):
    """input · other, where either may be the parameter."""

    def bind(self, input: Any, other: Any, **kwargs: Any) -> Call | None:
        if kwargs or not isinstance(input, Tensor) or not isinstance(other, Tensor):
            return None
        return Call((input,), other, swapped=Call((other,), input))


class PReLU(Elementwise):
    """max(0, x) + w · min(0, x), one weight or one per channel (axis 1)."""

    def bind(self, input: Tensor, weight: Tensor) -> Call | None:
        return Call((input,), weight)

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        return samples.axis == 0 or call.small.numel() == 1

    def weight_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        g = samples.first(g * call.data.clamp(max=0), n, skip=1)  # (n, r, m, channels, *space) when the axis is 0
        if call.small.numel() == 1:
            return g.flatten(2).sum(2, keepdim=True)
        return g.flatten(4).sum(-1).sum(2) if g.ndim > 4 else g.sum(2)


class Norm(RowsRule):
    """A norm of torch whose weights are per channel, or per entry of the trailing axes (layer norm, RMS norm)."""

    def __init__(self, function: Callable[..., Tensor], trailing: bool) -> None:
        self.function, self.trailing = function, trailing
        self.signature = signature(function)

    def bind(self, *args: Any, **kwargs: Any) -> Call | None:
        call = self.signature.bind(*args, **kwargs)
        call.apply_defaults()
        named = call.arguments
        data, weight, bias = named["input"], named.pop("weight"), named.pop("bias", None)
        if "momentum" in named:
            named["momentum"] = 0.0  # computing x̂ again must not move the running statistics
        statistics = None
        if not named.get("training", True) and data.is_floating_point():  # a batch norm with fixed statistics
            mean, variance, eps = (named[name] for name in ("running_mean", "running_var", "eps"))
            if mean is not None and variance is not None:
                statistics = cache(lambda n: (mean.repeat(n), variance.repeat(n), eps))
        options = {"normalized": cache(partial(self.function, **named)), "statistics": statistics}
        return Call((data,), weight, bias, options)

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        some = call.small
        return samples.axis < ndim - some.ndim if self.trailing else samples.axis == 0

    def weight_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        return self._sum(call, g * call.options["normalized"](), samples, n)

    def bias_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        return self._sum(call, g, samples, n)

    def rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> tuple[Tensor, Tensor]:
        """Read g and the inputs once for both, by torch's batch norm with one channel per sample and channel."""
        statistics = call.options["statistics"]
        if statistics is None or g.shape[1] != n or samples.axis or g.ndim < 4 or torch.is_grad_enabled():
            return super().rows(call, g, samples, n)
        mean, variance, eps = statistics(n)
        channels, space = g.shape[2], g.shape[3:]
        # contiguous, because PyTorch 2.13 misreads a batch of one with the memory layout of tokens
        own, x = (1, n * channels, *space), call.data.reshape(1, n * channels, *space).contiguous()
        pairs = []
        for one in g:
            _, weight, bias = torch.ops.aten.native_batch_norm_backward(
                one.reshape(own).contiguous(), x, None, mean, variance, None, None, False, eps, [False, True, True]
            )
            pairs.append((weight, bias))
        weights, biases = zip(*pairs, strict=True)
        shape = (len(g), n, channels)
        return (torch.stack(weights).reshape(shape).transpose(0, 1), torch.stack(biases).reshape(shape).transpose(0, 1))

    def _sum(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        some = call.small
        g = samples.first(g, n, skip=1)
        if not self.trailing:  # (n, r, m, channels, *space)
            g = g.flatten(4).sum(-1) if g.ndim > 4 else g
            return g.sum(2)
        return g.reshape(n, g.shape[1], -1, *some.shape).sum(2)
