"""The interface of symmetric positive semi-definite matrices, and diagonal ones, which can be added to every other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.errors import BadData, CorruptFile, IncompatiblePrior, NotPositiveDefinite, brief
from lapwing.linalg.rows import Rows, chunks
from lapwing.linalg.spectrum import Spectrum, sum_log1p
from lapwing.storage import flaw_of_values, move, nbytes, register, unpack

Scalar = float | Tensor
"""A number or a tensor without dimensions; gradients flow through the latter."""

WRITTEN_OUT = 2048  # weights up to which a matrix without an eigenbasis of its own is decomposed as a dense one


class PSD(ABC):
    """A symmetric positive semi-definite matrix A of size P × P, in a structure that keeps its operations cheap.

    Vectors are rows with any leading batch shape. Decompositions are computed in float64 whatever the dtype, cached,
    and treated as constants of the matrix; every result is differentiable in `scale`, in the prior that was added and
    in the vectors or rows it is applied to. What needs A⁻¹ raises `NotPositiveDefinite` where A is singular.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of weights P."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type in which results come back."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    # Questions that other rooms ask instead of looking at the class of a matrix.

    iterative: ClassVar[bool] = False
    """Whether each solve takes many products with A."""

    is_diagonal: ClassVar[bool] = False
    """Whether A has no entry outside its diagonal by construction, so that `diagonal()` is all of it."""

    @property
    def expanded(self) -> bool:
        """Whether A = c I is stored as the number c alone."""
        return False

    factored: ClassVar[bool] = False
    """Whether A keeps the two sides of a weight matrix apart, as a Kronecker product and its eigenbasis do."""

    @property
    def damps(self) -> bool:
        """Whether `damped` differs from the exact sum."""
        return False

    def constant(self) -> Tensor | None:
        """The c of A = c I, a float64 scalar with its graph; None for any other matrix."""
        return None

    def in_kronecker_basis(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
        """B_l, B_r, their inverse transposes, and values v with A = (B_l ⊗ B_r) diag(v) (B_l ⊗ B_r)ᵀ in q groups.

        Shapes are (q, o, o), (q, i, i), the same again, and (q, o, i). None where A is not of this kind.
        """
        return None

    def diagonal_blocks(self) -> tuple[PSD, ...]:
        """The blocks that A consists of; A itself where it has none."""
        return (self,)

    def blockwise(self, values: Tensor) -> tuple[tuple[PSD, Tensor], ...]:
        """Each diagonal block with its part of a flat vector (P,)."""
        return ((self, values),)

    def blockwise_rows(self, values: Tensor, rows: Rows) -> Iterable[tuple[PSD, Tensor, Rows]]:
        """Each diagonal block with its part of a flat vector (P,) and with its own rows, one block at a time."""
        return ((self, values, rows),)

    def eigenvalues(self) -> Tensor | None:
        """The eigenvalues, float64, without some or all that are zero; None where they are not known.

        Those of a diagonal matrix are in the order of its entries. Negative ones (an exact Hessian) are not hidden. By
        default those of the dense matrix, up to `WRITTEN_OUT` weights.
        """
        return None if self._decomposed is None else self._decomposed.values

    @cached_property
    def _decomposed(self) -> Spectrum | None:
        """The decomposition of the dense matrix, where it is small enough."""
        if self.iterative or self.size > WRITTEN_OUT or self.diagonal().requires_grad:
            return None
        return Spectrum(self.dense(), self.dtype)

    def grouped_eigenvalues(self, group: Tensor) -> tuple[Tensor, Tensor] | None:
        """The eigenvalues and the group that each belongs to, for weights that are in groups (P,).

        None where eigenvalues are not known, or where an eigenvector may reach into two groups.
        """
        values = self.eigenvalues()
        if values is None or self.is_diagonal:
            return None if values is None else (values, group)
        return (values, group[:1].expand(values.numel())) if bool((group == group[0]).all()) else None

    def largest_eigenvalue(self) -> float:
        """A number that no eigenvalue exceeds."""
        values = self.eigenvalues()
        return self.trace().item() if values is None else values.max().item()

    def least_shift(self) -> float:
        """The smallest ρ at which A + ρ I can be solved; 0 where a factorization serves every ρ."""
        return 0.0

    def largest_damped(self, split: float) -> float:
        """A number that no eigenvalue of a factor of `damped` exceeds; 0 where nothing is damped by factors."""
        return 0.0

    def in_eigenbasis(self, rows: Rows) -> tuple[Tensor, Rows] | None:
        """The eigenvalues and J in the basis of their eigenvectors; None where A has no eigenbasis at hand."""
        if self._decomposed is None:
            return None
        return self._decomposed.values, rows.of_size(self.size, self.dtype).times(self._decomposed.vectors)

    def shifted_products(self, rows: Rows, shifts: Tensor, pairs: Tensor, split: float | None = None) -> Tensor:
        """J_a (A + ρ I)⁻¹ J_bᵀ of each sample, for shifts ρ (m,) and pairs of directions (a, b) (2, k): (m, n, k).

        J is brought to the eigenbasis once, whatever the number of shifts; without one, every shift is added and
        solved for. With a `split`, blocks that damp by factors use `damped` in place of the sum.
        """
        found = self.in_eigenbasis(rows)
        if found is None:
            each = [(self + Diagonal(rho.expand(self.size))).quadratic(rows) for rho in shifts.double().to(self.device)]
            return torch.stack([gram[:, pairs[0], pairs[1]] for gram in each])
        values, rotated = found
        require_shifts(values, shifts)
        return rotated.weighted_products(1 / (values.to(rotated.dtype) + shifts.to(rotated.dtype)[:, None]), pairs)

    def shifted_draws(
        self, n: int, shifts: Tensor, generator: torch.Generator | None = None, split: float | None = None
    ) -> Tensor | None:
        """U (e + ρ)^-½ z for shifts ρ (m,) and n standard normal z, (m, n, P): draws from N(0, (A + ρ I)⁻¹).

        The same z serve every shift, in one eigenbasis A = U diag(e) Uᵀ, so that a draw is a smooth function of ρ. With
        a `split`, blocks that damp by factors use `damped` in place of the sum. None where A has no eigenbasis at hand.
        """
        if self._decomposed is None:
            return None
        require_shifts(self._decomposed.values, shifts)
        z = torch.randn(n, self.size, generator=generator, dtype=self.dtype, device=self.device)
        roots = (self._decomposed.values + shifts.double()[:, None]).rsqrt().to(self.dtype)
        return (z * roots[:, None]) @ self._decomposed.vectors.to(self.dtype).mT

    def damped(self, c: Scalar, prior: PSD, *, split: float = 1.0) -> PSD:
        """c A + Π; a Kronecker product damps its factors one by one instead (Ritter et al. 2018, Eq. 9)."""
        return self.scale(c) + prior

    def cleaned(self) -> PSD:
        """A without negative eigenvalues that are rounding; true ones (of an exact Hessian) stay."""
        return self

    def effective_directions(self, c: Scalar, prior: PSD) -> Tensor:
        """tr(c A (c A + Π)⁻¹), a float64 scalar: how many directions A determines, and not the prior Π.

        Computed as the derivative of log |c A + Π| in log c, which needs no difference of nearly equal numbers.
        """
        with torch.enable_grad():
            log_scale = torch.as_tensor(c).detach().double().log().requires_grad_()
            (found,) = torch.autograd.grad(self.scale(log_scale.exp()).logdet_ratio(prior), log_scale)
        return found

    def determined_shares(self, prior: PSD, samples: int | None = None) -> Tensor:
        """1 − π_p (A + Π)⁻¹_pp for a diagonal prior Π, (P,) float64: the share of every weight that A determines.

        With `samples`, an iterative matrix takes the mean over so many posterior draws instead of over its probes.
        """
        return 1 - prior.diagonal().double() * (self + prior).inverse_diagonal().double()

    def logdet_error(self) -> float:
        """The standard error of `logdet`; 0 where it is not an estimate."""
        return 0.0

    @property
    def logdet_products(self) -> int:
        """How many products with A the log-determinant will take; 0 where it takes none or is known already."""
        return 0

    @property
    def nbytes(self) -> int | None:
        """The bytes that A takes; None where A is known by its products alone."""
        return nbytes(self)

    def to(self, device: torch.device | str) -> PSD:
        """A on another device, without graph and caches."""
        return move(self, device)

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

    def inverse_diagonal(self) -> Tensor:
        """diag A⁻¹, (P,): marginal variances when A is a precision."""
        return self.solve(torch.eye(self.size, dtype=self.dtype, device=self.device)).diagonal()

    def smallest_eigenvalue(self) -> Tensor:
        """The smallest eigenvalue, a float64 scalar.

        A lower bound for `LowRank`, `SimultaneousKronecker` and a Kronecker product with a row-and-column prior.
        """
        return torch.linalg.eigvalsh(self.dense().double()).min()

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
        """Raise `NotPositiveDefinite` if A is singular or indefinite; by default, by computing `logdet`."""
        self.logdet()

    def flaw(self, signed: bool = False) -> str:
        """Say why this matrix, read from a file, cannot be right; return an empty text if it can.

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

    def cross_factors(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """U and V, (n, r, k) each, with U(J) V(J′)ᵀ = J A⁻¹ J′ᵀ for any two sets of rows, also of different calls.

        By default both are `whiten(J)`, which is linear in J.
        """
        white = self.whiten(rows)
        return white, white

    def logdet_ratio(self, prior: PSD) -> Tensor:
        """log |A + Π| − log |Π|, a float64 scalar."""
        return (self + prior).logdet() - prior.logdet()

    def known_eigenvalues(self) -> Tensor | None:
        """All eigenvalues (P,) as float64 constants, none below zero; None where they are not at hand."""
        return None

    def _vector(self, v: Tensor) -> Tensor:
        if v.shape[-1:] != (self.size,):
            raise BadData(f"expected vectors of length {self.size} in the last dimension, got {tuple(v.shape)}")
        return v.to(self.dtype)

    def output_factors(self, o: int, i: int, bias: bool = False) -> tuple[Tensor, Tensor | None, Tensor] | None:
        """L (o, o), R (i, i) or None for the identity, and E (o, i) with J A⁻¹ Jᵀ = L diag(E (Rᵀa)²) Lᵀ for every a.

        J = I ⊗ a are the rows of a weight matrix (o, i), and A is its precision, row by row. With a `bias`, the last
        input is 1 and its weights come after all others. None where no such factors exist.
        """
        return None

    def _matches(self, other: PSD) -> None:
        if not isinstance(other, PSD):
            raise TypeError(f"expected a PSD matrix to add, got {type(other).__name__}")
        if other.size != self.size:
            raise ValueError(f"cannot add a matrix of size {other.size} to one of size {self.size}")

    def _refuse(self, other: PSD, allowed: str) -> IncompatiblePrior:
        return IncompatiblePrior(
            f"the sum of {type(self).__name__} and {type(other).__name__} has no form of its own: to "
            f"{type(self).__name__} can be added {allowed}. Use that, or structure='diag', 'blockdiag' or 'full', "
            "which take any such sum."
        )


@register
@dataclass(frozen=True, eq=False)
class Diagonal(PSD):
    """A = diag(values), values (P,).

    `levels` (G,) and `group` (P,), set by `by_group`, tell which entries are the same number. That matters for
    gradients: entries that are equal but do not share a number have gradients of their own.

        Diagonal(torch.tensor(0.5).expand(10))  # 0.5 I, stored as one number
    """

    __repr__ = brief

    values: Tensor
    levels: Tensor | None = field(default=None, repr=False, metadata={"cache": True})
    group: Tensor | None = field(default=None, repr=False, metadata={"cache": True})
    is_diagonal = True

    def __post_init__(self) -> None:
        if self.values.ndim != 1:
            raise ValueError(f"expected a vector of diagonal entries, got shape {tuple(self.values.shape)}")
        if self.expanded and self.values.requires_grad and self.values.is_leaf:  # autograd would see P numbers
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
        return self.size > 0 and self.values.stride(0) == 0

    @property
    def _positive(self) -> Tensor:
        return require_positive(self.values)

    def require_positive_definite(self) -> None:
        require_positive(self.values)

    def constant(self) -> Tensor | None:
        """The number that all entries are, a float64 scalar with its graph; None if entries differ.

        Without a graph, entries that are equal up to rounding count as one number (see `common`).
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
        return rows.of_size(self.size, self.dtype).dense() * self._positive.rsqrt()

    def quadratic(self, rows: Rows) -> Tensor:
        return rows.of_size(self.size, self.dtype).weighted_gram(1 / self._positive)

    def variance(self, rows: Rows) -> Tensor:
        return rows.of_size(self.size, self.dtype).weighted_norm(1 / self._positive)

    def joint(self, rows: Rows) -> Tensor:
        return rows.of_size(self.size, self.dtype).joint_gram(1 / self._positive)

    def output_factors(self, o: int, i: int, bias: bool = False) -> tuple[Tensor, Tensor | None, Tensor] | None:
        if self.size != o * i:
            return None
        variances = 1 / self._positive
        eye, first = torch.eye(o, dtype=self.dtype, device=self.device), o * (i - bias)
        weight, rest = variances[:first].reshape(o, i - bias), variances[first:].reshape(o, -1)
        return eye, None, torch.cat([weight, rest], 1) if bias else weight

    def blockwise_rows(self, values: Tensor, rows: Rows) -> Iterable[tuple[PSD, Tensor, Rows]]:
        return ((Diagonal(own), part, block) for block, own, part in rows.blockwise(self.values, values))

    def eigenvalues(self) -> Tensor | None:
        return self.values.double()

    def in_eigenbasis(self, rows: Rows) -> tuple[Tensor, Rows] | None:
        return self.values.double(), rows.of_size(self.size, self.dtype)

    def shifted_draws(
        self, n: int, shifts: Tensor, generator: torch.Generator | None = None, split: float | None = None
    ) -> Tensor | None:
        require_shifts(self.values, shifts)
        z = torch.randn(n, self.size, generator=generator, dtype=self.dtype, device=self.device)
        return z * (self.values.double() + shifts.double()[:, None]).rsqrt().to(self.dtype)[:, None]

    def known_eigenvalues(self) -> Tensor | None:
        fixed = not self.values.requires_grad and bool((self.values >= 0).all())
        return self.values.double() if fixed else None

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        if isinstance(prior, Diagonal):
            require_positive(self.values.double() + prior.values.double())  # a Hessian's diagonal may be negative
            return sum_log1p(self.values.double() / require_positive(prior.values).double())
        return super().logdet_ratio(prior)


def require_shifts(eigenvalues: Tensor, shifts: Tensor) -> None:
    """Refuse shifts ρ at which A + ρI is not positive definite, and say what to do."""
    lowest, smallest = eigenvalues.min().item(), shifts.min().item()
    if lowest + smallest > 0:
        return
    raise NotPositiveDefinite(
        f"the curvature is indefinite: its smallest eigenvalue is {lowest:.3g}, so there is no posterior under a prior "
        f"precision of {smallest:.3g} (relative to the likelihood's scale). Tuning on data, leave-one-out and "
        "temperature curves try such precisions. Fit with factor='ggn', which is never indefinite, or choose the prior "
        "yourself: la.replace(prior=...)."
    )


def unpack_sound(tensors: Mapping[str, Tensor], description: Any, size: int, *, signed: bool = False) -> PSD:
    """Make the matrix of a file, of this size; `CorruptFile` if its numbers or shapes are impossible (`PSD.flaw`)."""
    layout = description.get("layout", {"size": size}) if isinstance(description, Mapping) else {}
    if not isinstance(layout, Mapping) or layout.get("size") != size:  # before anything of that size is made
        raise CorruptFile(f"the stored matrix is not one of {size:,} weights. Save it again.")
    matrix = unpack(tensors, description, PSD)
    if matrix.size != size:
        raise CorruptFile(f"the stored matrix is of {matrix.size:,} weights, and there are {size:,}. Save it again.")
    if found := matrix.flaw(signed):
        raise CorruptFile(f"the stored {type(matrix).__name__} is impossible: {found}. Save it again.")
    return matrix


def nonnegative(c: Scalar) -> Scalar:
    """Return c, or refuse one that is negative: a semi-definite matrix would not stay so."""
    value = float(c.detach()) if isinstance(c, Tensor) else float(c)
    if not value >= 0:
        raise ValueError(f"a positive semi-definite matrix can be scaled by a number ≥ 0 only, got {value}")
    return c


def require_positive(eigenvalues: Tensor, remedy: str = "") -> Tensor:
    """Return eigenvalues that are all positive; raise `NotPositiveDefinite` with the remedy otherwise."""
    found = eigenvalues.detach()
    found = found[:1] if found.ndim == 1 and found.stride(0) == 0 else found  # one number, expanded
    smallest = float(found.min()) if found.numel() else 1.0
    if not smallest > 0:
        raise NotPositiveDefinite(not_positive(smallest, remedy))
    return eigenvalues


def not_positive(smallest: float, remedy: str = "") -> str:
    """Return the message for a matrix whose smallest eigenvalue is not positive."""
    if smallest != smallest:
        return "the matrix holds NaN. Look for overflow in the network's outputs, bad inputs or a NaN prior."
    if smallest < 0:
        remedy = remedy or (
            f"raise the prior precision by more than {-smallest:.3g}, or use the GGN, which is never indefinite"
        )
        return f"the matrix is indefinite: its smallest eigenvalue is {smallest:.3g}. To go on, {remedy}."
    remedy = remedy or "add a prior with positive precision (curvature alone is singular in directions without data)"
    return f"the matrix is singular: its smallest eigenvalue is {smallest:.3g}. To go on, {remedy}."
