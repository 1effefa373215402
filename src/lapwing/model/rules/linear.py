"""Linear maps of vectors: linear, matmul with a weight, addmm, and embeddings as linear maps of one-hot vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
