"""Diagonal matrices: curvature without correlations, and every prior that is not itself a posterior."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.linalg.layout import Layout
from lapwing.linalg.logs import sum_log1p
from lapwing.linalg.psd import PSD, Scalar, nonnegative, require_positive
from lapwing.linalg.rows import Rows


@dataclass(frozen=True, eq=False)
class Diagonal(PSD):
    """A = diag(values), values (P,).

    Where entries that carry a graph share numbers, `levels` (G,) and `group` (P,) say so, as `by_group` does: the
    gradient of equal entries that do not share one differs from entry to entry.
    """

    values: Tensor
    levels: Tensor | None = field(default=None, repr=False, metadata={"cache": True})
    group: Tensor | None = field(default=None, repr=False, metadata={"cache": True})

    def __post_init__(self) -> None:
        if self.values.ndim != 1:
            raise ValueError(f"expected a vector of diagonal entries, got shape {tuple(self.values.shape)}")
        if self.expanded and self.values.requires_grad and self.values.is_leaf:  # one number, and P of them to autograd
            object.__setattr__(self, "values", self.values.clone(memory_format=torch.contiguous_format))

    @classmethod
    def by_group(cls, levels: Tensor, group: Tensor) -> Diagonal:
        """Entry p is levels[group[p]]."""
        group = group.to(levels.device)
        return cls(levels[group], levels, group)

    @property
    def size(self) -> int:
        return self.values.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def expanded(self) -> bool:
        """Whether one number stands for all entries in memory, as of a scalar prior."""
        return self.size > 0 and self.values.stride(0) == 0

    @property
    def _positive(self) -> Tensor:
        return require_positive(self.values)

    def require_positive_definite(self) -> None:
        require_positive(self.values)

    def constant(self) -> Tensor | None:
        """The one number that all entries are, a float64 scalar with its graph; None if they are several.

        Without a graph, equal numbers are one (see `common`).
        """
        if self.expanded:
            return self.values[0].double()
        if not self.size:
            return torch.ones((), dtype=torch.float64, device=self.device)
        if not self.values.requires_grad:
            return self.common()
        if self.levels is None or self.group is None or bool((self.group != self.group[0]).any()):
            return None
        return self.levels[self.group[0]].double()

    def common(self) -> Tensor | None:
        """The common value of all entries without its graph, a float64 scalar; None if they differ.

        A few units of rounding count as equal: a vectorized `exp` of equal numbers need not be.
        """
        values = self.values.detach()
        if not self.size:
            return torch.ones((), dtype=torch.float64, device=self.device)
        low, high = values.aminmax()
        if not bool(high - low <= 8 * torch.finfo(self.dtype).eps * high.abs()):
            return None
        return values.double().mean()

    def split(self, layout: Layout) -> tuple[Diagonal, ...]:
        """The parts of the blocks of a layout; those whose entries share a number are that, expanded."""
        if self.levels is None or self.group is None:
            return tuple(Diagonal(part) for part in layout.gather(self.values))
        return tuple(self._part(group) for group in layout.gather(self.group))

    def _part(self, group: Tensor) -> Diagonal:
        assert self.levels is not None
        if len(group) and bool((group == group[0]).all()):
            return Diagonal(self.levels[group[0]].expand(len(group)))
        return Diagonal.by_group(self.levels, group)

    def matvec(self, v: Tensor) -> Tensor:
        return self._vector(v) * self.values

    def solve(self, v: Tensor) -> Tensor:
        return self._vector(v) / self._positive

    def logdet(self) -> Tensor:
        return self._positive.double().log().sum()

    def diagonal(self) -> Tensor:
        return self.values

    def inverse_diagonal(self) -> Tensor:
        return 1 / self._positive

    def smallest_eigenvalue(self) -> Tensor:
        return self.values.double().min()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(n, self.size, dtype=self.dtype, device=self.device, generator=generator)
        return noise * self._positive.rsqrt()

    def scale(self, c: Scalar) -> Diagonal:
        if self.expanded:
            return Diagonal((self.values[0] * nonnegative(c)).to(self.dtype).expand(self.size))
        if self.levels is not None and self.group is not None:
            return Diagonal.by_group(self.levels * nonnegative(c), self.group)
        return Diagonal(self.values * nonnegative(c))

    def __add__(self, other: PSD) -> PSD:
        self._matches(other)
        if isinstance(other, Diagonal):
            return Diagonal(self.values + other.values.to(self.dtype))
        return other + self

    def dense(self) -> Tensor:
        return torch.diag(self.values)

    def whiten(self, rows: Rows) -> Tensor:
        return self._rows(rows).dense() * self._positive.rsqrt()

    def quadratic(self, rows: Rows) -> Tensor:
        return self._rows(rows).weighted_gram(1 / self._positive)

    def variance(self, rows: Rows) -> Tensor:
        return self._rows(rows).weighted_norm(1 / self._positive)

    def joint(self, rows: Rows) -> Tensor:
        return self._rows(rows).joint_gram(1 / self._positive)

    def output_root(self, inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        variances = (1 / self._positive).reshape(-1, inputs.shape[-1])
        spread = (inputs.to(self.dtype).square() @ variances.mT).sqrt()
        return torch.eye(len(variances), dtype=self.dtype, device=self.device), spread

    def known_eigenvalues(self) -> Tensor | None:
        fixed = not self.values.requires_grad and bool((self.values >= 0).all())
        return self.values.double() if fixed else None

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        if isinstance(prior, Diagonal):
            require_positive(self.values.double() + prior.values.double())  # a Hessian's diagonal may be negative
            return sum_log1p(self.values.double() / require_positive(prior.values).double())
        return super().logdet_ratio(prior)
