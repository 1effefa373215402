"""The interface of symmetric positive semi-definite matrices, and the checks that its leaves share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from lapwing.errors import IncompatiblePrior, NotPositiveDefinite
from lapwing.linalg.rows import Rows, chunks
from lapwing.linalg.validity import flaw_of_values

Scalar = float | Tensor
"""A number or a tensor without dimensions; gradients flow through the latter."""


class PSD(ABC):
    """A symmetric positive semi-definite matrix A of size P × P, in a structure that keeps its operations cheap.

    Vectors are rows with any leading batch shape. Decompositions are computed in float64 whatever the dtype, cached,
    and treated as constants of the matrix; every result is differentiable in `scale`, in the prior that was added and
    in the vectors or rows it is applied to. What needs A⁻¹ raises `NotPositiveDefinite` where A is singular.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """P."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type in which results come back."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    def iterative(self) -> bool:
        """Whether each solve takes many products with A."""
        return False

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """A v: (*b, P) → (*b, P)."""

    @abstractmethod
    def solve(self, v: Tensor) -> Tensor:
        """A⁻¹ v: (*b, P) → (*b, P)."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """log |A|, a float64 scalar."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """diag A, (P,)."""

    @abstractmethod
    def inverse_diagonal(self) -> Tensor:
        """diag A⁻¹, (P,): marginal variances when A is a precision."""

    @abstractmethod
    def smallest_eigenvalue(self) -> Tensor:
        """The smallest eigenvalue, a float64 scalar.

        A lower bound for `LowRank` and for a Kronecker product with a row-and-column prior.
        """

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws from N(0, A⁻¹), (n, P)."""

    @abstractmethod
    def scale(self, c: Scalar) -> PSD:
        """c A for c ≥ 0; decompositions already computed are kept."""

    @abstractmethod
    def __add__(self, other: PSD) -> PSD:
        """A + B in the structure and dtype of A; refuses what would leave the structure."""

    @abstractmethod
    def whiten(self, rows: Rows) -> Tensor:
        """W with W Wᵀ = J A⁻¹ Jᵀ, (n, r, k)."""

    def require_positive_definite(self) -> None:
        """Raise `NotPositiveDefinite` where A is singular or indefinite; a leaf may know without a log-determinant."""
        self.logdet()

    def flaw(self, signed: bool = False) -> str:
        """What makes the numbers of this matrix impossible, in words; empty where they are sound. For files.

        `signed` allows eigenvalues below zero, as an exact Hessian has them.
        """
        return flaw_of_values("its diagonal", self.diagonal(), signed=signed)

    def dense(self) -> Tensor:
        """A as a (P, P) tensor."""
        return self.matvec(torch.eye(self.size, dtype=self.dtype, device=self.device))

    def trace(self) -> Tensor:
        """tr A, a float64 scalar."""
        return self.diagonal().double().sum()

    def quadratic(self, rows: Rows) -> Tensor:
        """J A⁻¹ Jᵀ of each sample, (n, r, r)."""
        pieces = [white @ white.mT for white in self._white_chunks(rows)]
        return torch.cat(pieces) if pieces else self.whiten(rows).new_zeros(0, rows.r, rows.r)

    def variance(self, rows: Rows) -> Tensor:
        """The diagonal of `quadratic`, (n, r), without the rest."""
        pieces = [white.square().sum(-1) for white in self._white_chunks(rows)]
        return torch.cat(pieces) if pieces else self.whiten(rows).new_zeros(0, rows.r)

    def _white_chunks(self, rows: Rows) -> Iterator[Tensor]:
        for start, length in chunks(rows.n, 2 * rows.r * self.size * self.dtype.itemsize):
            yield self.whiten(rows.narrow(start, length))

    def joint(self, rows: Rows) -> Tensor:
        """J A⁻¹ Jᵀ across samples, (n, r, n, r)."""
        white = self.whiten(rows).flatten(0, 1)
        return (white @ white.T).reshape(rows.n, rows.r, rows.n, rows.r)

    def logdet_ratio(self, prior: PSD) -> Tensor:
        """log |A + Π| − log |Π|, a float64 scalar."""
        return (self + prior).logdet() - prior.logdet()

    def known_eigenvalues(self) -> Tensor | None:
        """All eigenvalues (P,) as float64 constants, none below zero; None where they are not at hand."""
        return None

    def _vector(self, v: Tensor) -> Tensor:
        if v.shape[-1:] != (self.size,):
            raise ValueError(f"expected vectors of length {self.size} in the last dimension, got {tuple(v.shape)}")
        return v.to(self.dtype)

    def output_root(self, inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        """R (o, o) and s (n, o) with J A⁻¹ Jᵀ = R diag(s²) Rᵀ for rows J = I ⊗ a of a weight matrix (o, i), for every a
        of inputs (n, i); None where no R serves them all."""
        return None

    def _rows(self, rows: Rows) -> Rows:
        if rows.size != self.size:
            raise ValueError(f"expected Jacobian rows of {self.size} parameters, got {rows.size}")
        return rows if rows.dtype == self.dtype else rows.to(self.dtype)

    def _matches(self, other: PSD) -> None:
        if not isinstance(other, PSD):
            raise TypeError(f"expected a PSD matrix to add, got {type(other).__name__}")
        if other.size != self.size:
            raise ValueError(f"cannot add a matrix of size {other.size} to one of size {self.size}")

    def _refuse(self, other: PSD, allowed: str) -> IncompatiblePrior:
        return IncompatiblePrior(
            f"{type(self).__name__} + {type(other).__name__} is not {type(self).__name__} any more, which can take "
            f"{allowed}. Use that, or structure='diag', 'blockdiag' or 'full', whose sums stay what they are."
        )


def nonnegative(c: Scalar) -> Scalar:
    """c, if it may scale a positive semi-definite matrix."""
    value = float(c.detach()) if isinstance(c, Tensor) else float(c)
    if not value >= 0:
        raise ValueError(f"a positive semi-definite matrix can be scaled by a number ≥ 0 only, got {value}")
    return c


def require_positive(eigenvalues: Tensor, remedy: str = "") -> Tensor:
    """The eigenvalues themselves if all exceed zero; else `NotPositiveDefinite` with the smallest and the remedy."""
    found = eigenvalues.detach()
    found = found[:1] if found.ndim == 1 and found.stride(0) == 0 else found  # one number, expanded
    smallest = float(found.min()) if found.numel() else 1.0
    if not smallest > 0:
        raise NotPositiveDefinite(not_positive(smallest, remedy))
    return eigenvalues


def not_positive(smallest: float, remedy: str = "") -> str:
    """The message for a matrix whose smallest eigenvalue is not above zero."""
    if smallest != smallest:
        return "the matrix holds NaN. Look for overflow in the network's outputs, bad inputs or a NaN prior."
    if smallest < 0:
        remedy = remedy or (
            f"raise the prior precision by more than {-smallest:.3g}, or use the GGN, which is never indefinite"
        )
        return f"the matrix is indefinite: its smallest eigenvalue is {smallest:.3g}. To go on, {remedy}."
    remedy = remedy or "add a prior with positive precision (curvature alone is singular in directions without data)"
    return f"the matrix is singular: its smallest eigenvalue is {smallest:.3g}. To go on, {remedy}."
