"""linear, matmul with a weight, addmm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lapwing.model.rules.rule import Call, MatrixRule, with_ones
from lapwing.model.samples import Samples


class Linear(MatrixRule):
    """y = x Wᵀ + b, W (out, in)."""

    data_alone = True

    def bind(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
        return Call(input, weight, bias) if weight.ndim == 2 and input.ndim > 1 else None

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        return samples.axis < ndim - 1

    def view(self, call: Call, weight: Tensor) -> Tensor:
        return weight.unsqueeze(0)

    def left(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        g = samples.first(g, n, skip=1)
        return g.reshape(n, g.shape[1], -1, 1, g.shape[-1])

    def right(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        x = samples.first(call.data, n).reshape(n, 1, -1, 1, call.data.shape[-1])
        return with_ones(x) if ones else x


class Matmul(Linear):
    """y = x W, W (in, out)."""

    def bind(self, input: Tensor, other: Tensor, **kwargs: Any) -> Call | None:  # type: ignore[override]
        return Call(input, other, None) if other.ndim == 2 and input.ndim > 1 and not kwargs else None

    def view(self, call: Call, weight: Tensor) -> Tensor:
        return weight.T.unsqueeze(0)


class Addmm(Matmul):
    """y = b + x W, W (in, out), as GPT-2's Conv1D has it."""

    def bind(self, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Call | None:  # type: ignore[override]
        if beta != 1 or alpha != 1 or input.numel() != mat2.shape[-1]:
            return None
        return Call(mat1, mat2, input)
