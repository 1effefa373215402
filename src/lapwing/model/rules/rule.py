"""What a rule is: how one torch operation turns inputs and back-propagated gradients into rows of a Jacobian.

The plainest ones stand here as well: products with a weight matrix (`Linear`) and its rows (`Embedding`).

A rule of your own is one class and one registration, `register(MyRule(), torch.my_operation)`; docs/extending.md shows
one. Rules make a fit fast, never right or wrong: what a rule declines is read by replaying the recorded call for one
sample after the other, and the self-check of every fit compares the rows of a rule with autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.linalg.rows import gram

RULES: dict[Callable, Rule] = {}
"""The rule of each torch function that has one; see `register`."""


def register(rule: Rule, *functions: Callable) -> None:
    """Let a rule read the calls of some torch functions, in place of the rule they had.

    Examples:
        >>> from lapwing.model.rules import RULES, register
        >>> register(RULES[nn.functional.linear], nn.functional.linear)  # in practice a rule of your own
    """
    RULES.update(dict.fromkeys(functions, rule))


@dataclass(frozen=True)
class Samples:
    """Which axis of a tensor holds the samples of a batch.

    The axis may hold n samples times m positions, flattened as (n, m), or as (m, n) when `minor`. `told` is False where
    m was 1 (sequences of length 1), which says nothing about the order for larger m.
    """

    axis: int
    minor: bool = False
    told: bool = True

    def first(self, x: Tensor, n: int, skip: int = 0) -> Tensor:
        """Move the samples to the front: (skip dims, ..., n·m, ...) -> (n, skip dims, ..., m, ...)."""
        axis = self.axis + skip
        m = x.shape[axis] // n
        if not self.minor:
            return x.unflatten(axis, (n, m)).movedim(axis, 0)
        return x.unflatten(axis, (m, n)).movedim(axis + 1, 0)

    def spread(self, values: Tensor, x: Tensor, n: int) -> Tensor:
        """Shape one number per sample, (n,), so that it multiplies a tensor x with samples on this axis."""
        m = x.shape[self.axis] // n
        values = values.repeat(m) if self.minor else values.repeat_interleave(m)
        return values.reshape(-1, *(1,) * (x.ndim - 1 - self.axis)).to(x.dtype)

    def fits(self, shape: torch.Size, n: int) -> bool:
        """Whether a tensor of this shape can hold n samples so."""
        return self.axis < len(shape) and (shape[self.axis] % n == 0 if self.told or n == 1 else shape[self.axis] == n)


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a recorded call by role: data tensors, a weight, perhaps a bias, and options.

    Where either of two arguments may be the weight (a sum, a product), `swapped` is the call with both exchanged.
    """

    inputs: tuple[Tensor, ...]  # every tensor that depends on the data, samples where the output has them
    weight: Tensor | None
    bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    swapped: Call | None = None

    @property
    def data(self) -> Tensor:
        """The first data tensor, which is the only one of most operations."""
        return self.inputs[0]

    @property
    def small(self) -> Tensor:
        """The weight, or the bias where there is no weight."""
        found = self.bias if self.weight is None else self.weight
        assert found is not None
        return found


class Rule(ABC):
    """How the calls of one operation are read. Subclass `MatrixRule` or `RowsRule`."""

    @abstractmethod
    def bind(self, *args: Any, **kwargs: Any) -> Call | None:
        """Sort the arguments of a call into roles, with the operation's own signature; None declines the call."""

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        """Whether the rule can handle an output of `ndim` dimensions whose samples are on this axis."""
        return True

    @abstractmethod
    def bias_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        """Return the rows of the bias: g (r, *output) -> (n, r, *bias.shape)."""


class MatrixRule(Rule):
    """An operation that is linear in a weight matrix: J[n, r] = Σ_t left[n, r, t] ⊗ right[n, t].

    Required are `bind`, `view`, `left` and `right`. The others have defaults in terms of these; a rule may replace them
    by a cheaper way to the same numbers. The self-check of a fit sees `left` and `right` only: check the others with
    `lapwing.testing.RuleLaws`.
    """

    plain: ClassVar[bool] = False  # whether `right` holds the data as they are, one vector per position

    @abstractmethod
    def view(self, call: Call, weight: Tensor) -> Tensor:
        """Reshape a tensor of the weight's shape to (groups, out, in)."""

    @abstractmethod
    def left(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        """Return the gradients per position: g (r, *output) -> (n, r, t, groups, out)."""

    @abstractmethod
    def right(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        """Return what the weight multiplies, (n, 1, t, groups, in); `ones` appends a 1 for the bias."""

    def left_sum(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        """Return Σ_t left, (n, r, groups, out)."""
        return self.left(call, g, samples, n).sum(2)

    def right_sum(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        """Return Σ_t right, (n, groups, in)."""
        return self.right(call, samples, n, ones).sum(2)[:, 0]

    def left_gram(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        """Return Σ_{n,r,t} left leftᵀ, (groups, out, out)."""
        return gram_by_group(self.left(call, g, samples, n).flatten(0, 2))

    def right_gram(
        self, call: Call, samples: Samples, n: int, ones: bool, weights: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        """Return Σ_{n,t} w[n] right rightᵀ, (groups, in, in), in the given dtype, and t."""
        right = self.right(call, samples, n, ones)[:, 0].to(dtype)
        if weights is not None:
            right = right * weights.to(right).sqrt()[:, None, None, None]
        return gram_by_group(right.flatten(0, 1)), right.shape[1]

    def positions(self, call: Call, n: int) -> int:
        """Return t, the number of positions per sample."""
        return call.data.shape[:-1].numel() // n

    def kernel_shares(self, call: Call) -> Tensor | None:
        """Return, for each of K places of a kernel, at which share of positions it lies on data and not on padding.

        The weight (1, out, in) is then (out, channels, K): a sum over places of maps of channels. None for any other
        operation, and for several groups.
        """
        return torch.ones(1) if self.plain else None

    def bias_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        assert call.bias is not None
        summed = self.left_sum(call, g, samples, n)
        return summed.reshape(*summed.shape[:2], *call.bias.shape)


class RowsRule(Rule):
    """An operation with few parameters: their rows are written out."""

    @abstractmethod
    def weight_rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        """Return the rows of the weight: g (r, *output) -> (n, r, *weight.shape)."""

    def rows(self, call: Call, g: Tensor, samples: Samples, n: int) -> tuple[Tensor, Tensor]:
        """Return the rows of weight and bias together, for rules that can share work between them."""
        return self.weight_rows(call, g, samples, n), self.bias_rows(call, g, samples, n)


def gram_by_group(rows: Tensor) -> Tensor:
    """Sum outer products: (rows, groups, d) -> (groups, d, d)."""
    return gram(rows.transpose(0, 1))


def with_ones(x: Tensor, value: float = 1.0) -> Tensor:
    """Append a last column of ones (or of another value)."""
    return torch.cat([x, x.new_full((*x.shape[:-1], 1), value)], -1)


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

    def bind(self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> Call | None:
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
