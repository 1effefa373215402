"""Diagonal matrices: curvature without correlations, and every prior that is not itself a posterior."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg.logs import sum_log1p
from lapwing.linalg.psd import PSD, Scalar, nonnegative, require_positive
from lapwing.linalg.rows import Rows


@dataclass(frozen=True, eq=False)
class Diagonal(PSD):
    """A = diag(values), values (P,)."""

    values: Tensor

    def __post_init__(self) -> None:
        if self.values.ndim != 1:
            raise ValueError(f"expected a vector of diagonal entries, got shape {tuple(self.values.shape)}")

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
        """The common value of all entries as a float64 scalar (gradients spread evenly), or None if they differ.

        A few units of rounding count as equal: a vectorized `exp` of equal numbers need not be.
        """
        if self.expanded:
            return self.values[0].double()
        if not self.size:
            return torch.ones((), dtype=torch.float64, device=self.device)
        low, high = self.values.detach().aminmax()
        if not bool(high - low <= 8 * torch.finfo(self.dtype).eps * high.abs()):
            return None
        return self.values.double().mean()

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
