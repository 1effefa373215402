"""What a rule is: how one torch operation turns inputs and back-propagated gradients into rows of a Jacobian."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.linalg.gram import gram
from lapwing.model.samples import Samples


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a recorded call by role: one data tensor, one weight, perhaps a bias, and options."""

    data: Tensor
    weight: Tensor | None
    bias: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)


class Rule(ABC):
    """Rules are speed, never correctness: what a rule declines goes to the generic one."""

    @abstractmethod
    def bind(self, *args: Any, **kwargs: Any) -> Call | None:
        """Read the call, or decline."""

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        """Whether the sample axis of the output (of `ndim` dimensions) is one the rule can handle."""
        return True

    @abstractmethod
    def bias_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        """g (r, *output) -> (n, r, *bias.shape)."""


class MatrixRule(Rule):
    """An operation that is linear in a weight matrix: J[n, r] = Σ_t left[n, r, t] ⊗ right[n, t]."""

    data_alone: ClassVar[bool] = False  # whether `right` depends on the data and the place of samples alone

    @abstractmethod
    def view(self, call: Call, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape as (groups, out, in)."""

    @abstractmethod
    def left(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        """g (r, *output) -> (n, r, t, groups, out)."""

    @abstractmethod
    def right(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        """(n, 1, t, groups, in), with a last column of ones if the bias is folded in."""

    def left_sum(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        """Σ_t left, (n, r, groups, out)."""
        return self.left(call, g, samples, n).sum(2)

    def right_sum(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        """Σ_t right, (n, groups, in)."""
        return self.right(call, samples, n, ones).sum(2)[:, 0]

    def left_gram(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        """Σ_{n,r,t} left leftᵀ, (groups, out, out)."""
        return gram_by_group(self.left(call, g, samples, n).flatten(0, 2))

    def right_gram(
        self, call: Call, samples: Samples, n: int, ones: bool, weights: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        """Σ_{n,t} w[n] right rightᵀ, (groups, in, in), in a type; and t."""
        right = self.right(call, samples, n, ones)[:, 0].to(dtype)
        if weights is not None:
            right = right * weights.to(right).sqrt()[:, None, None, None]
        return gram_by_group(right.flatten(0, 1)), right.shape[1]

    def positions(self, call: Call, n: int) -> int:
        """t, the number of positions a sample."""
        return call.data.shape[:-1].numel() // n

    def bias_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        assert call.bias is not None
        summed = self.left_sum(call, g, samples, n)
        return summed.reshape(*summed.shape[:2], *call.bias.shape)


def gram_by_group(rows: Tensor) -> Tensor:
    """Σ of outer products, (rows, groups, d) -> (groups, d, d)."""
    return gram(rows.transpose(0, 1))


def with_ones(x: Tensor, value: float = 1.0) -> Tensor:
    """A last column of ones (or of another value)."""
    return torch.cat([x, x.new_full((*x.shape[:-1], 1), value)], -1)


class RowsRule(Rule):
    """An operation whose parameters are few: explicit rows."""

    @abstractmethod
    def weight_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        """g (r, *output) -> (n, r, *weight.shape)."""

    def rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> tuple[Tensor, Tensor]:
        """Those of weight and bias together, where a rule can share work."""
        return self.weight_rows(call, g, samples, n), self.bias_rows(call, g, samples, n)
