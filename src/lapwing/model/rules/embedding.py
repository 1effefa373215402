"""Embeddings: a linear map of one-hot inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.model.rules.rule import Call, MatrixRule
from lapwing.model.samples import Samples


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
        return Call(input, weight, None, {"padding": padding_idx})

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        return samples.axis < ndim - 1

    def view(self, call: Call, weight: Tensor) -> Tensor:
        return weight.T.unsqueeze(0)

    def left(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        g = samples.first(g, n, skip=1)
        return g.reshape(n, g.shape[1], -1, 1, g.shape[-1])

    def right(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        weight, padding = call.weight, call.options["padding"]
        assert weight is not None
        index = samples.first(call.data, n).reshape(n, -1)
        hot = torch.zeros(*index.shape, weight.shape[0], dtype=weight.dtype, device=weight.device)
        hot.scatter_(-1, index.long().unsqueeze(-1), 1.0)
        if padding is not None:
            hot[..., padding] = 0.0
        return hot.reshape(n, 1, index.shape[1], 1, -1)

    def positions(self, call: Call, n: int) -> int:
        return call.data.numel() // n
