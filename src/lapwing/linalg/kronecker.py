"""Kronecker products G ⊗ A, and the matrices that they become with a prior: diagonal in a Kronecker-factored basis.

    Kronecker              c · G ⊗ A + shift · I, decomposed when it is needed; the factor-wise damping of Ritter et al.
    EigenKronecker         diagonal in an orthogonal basis U_G ⊗ U_A: EKFAC, and KFAC with a row-and-column prior
    SimultaneousKronecker  the sum of two of these, in a basis that need not be orthogonal (`commonbasis.py`)

All three answer through their basis, by the methods of `KroneckerBasis`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import IncompatiblePrior, NotPositiveDefinite, UnsupportedOperation, brief
from lapwing.linalg.commonbasis import SAME, Expansion, common_basis, log_of_basis, moments, neglected_share
from lapwing.linalg.psd import PSD, Diagonal, Scalar, nonnegative, require_positive, require_shifts
from lapwing.linalg.rows import DenseRows, Rows, added, chunks
from lapwing.linalg.spectrum import PIECE, Spectrum, sum_log1p, tangent
from lapwing.storage import (
    first_flaw,
    flaw_of_basis,
    flaw_of_ranks,
    flaw_of_scalar,
    flaw_of_symmetric,
    flaw_of_values,
    register,
)


class KroneckerBasis(PSD):
    """A = (B_l ⊗ B_r) diag(values) (B_l ⊗ B_r)ᵀ for each of q groups, with values (q, o, i)."""

    left: Tensor
    right: Tensor
    values: Tensor
    factored = True

    @property
    @abstractmethod
    def _basis(self) -> tuple[Tensor, Tensor]:
        """B_l and B_r."""

    @property
    @abstractmethod
    def _dual(self) -> tuple[Tensor, Tensor]:
        """The inverse transposes of B_l and B_r, so that A⁻¹ is diagonal in them."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(q, o, i)."""
        return self.left.shape[0], self.left.shape[-1], self.right.shape[-1]

    @property
    def size(self) -> int:
        return self.values.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    @property
    def device(self) -> torch.device:
        return self.left.device

    @property
    def _positive(self) -> Tensor:
        self.require_positive_definite()
        return self.values

    def require_positive_definite(self) -> None:
        if not bool((self.values > 0).all()):
            require_positive(self.values)

    def diagonal(self) -> Tensor:
        return self._weigh(*self._basis, self.values)

    def inverse_diagonal(self) -> Tensor:
        return self._weigh(*self._dual, 1 / self._positive)

    def _weigh(self, left: Tensor, right: Tensor, values: Tensor) -> Tensor:
        """Return the diagonal of (left ⊗ right) diag(values) (left ⊗ right)ᵀ."""
        return (left.square() @ values.to(self.dtype) @ right.square().mT).reshape(-1)

    def matvec(self, v: Tensor) -> Tensor:
        return self._sandwich(v, *self._basis, self.values)

    def solve(self, v: Tensor) -> Tensor:
        return self._sandwich(v, *self._dual, 1 / self._positive)

    def _sandwich(self, v: Tensor, left: Tensor, right: Tensor, values: Tensor) -> Tensor:
        grid = left.mT @ self._vector(v).unflatten(-1, self.shape) @ right
        return (left @ (grid * values.to(self.dtype)) @ right.mT).flatten(-3)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.colored(torch.randn(n, *self.shape, dtype=self.dtype, device=self.device, generator=generator))

    def colored(self, z: Tensor) -> Tensor:
        """Turn noise z (n, q, o, i) into draws (n, P) from N(0, A⁻¹)."""
        left, right = self._dual
        return (left @ (z * self._positive.rsqrt().to(self.dtype)) @ right.mT).flatten(-3)

    def in_kronecker_basis(self) -> Expansion | None:
        return Expansion(*self._basis, *self._dual, self.values)

    def whiten(self, rows: Rows) -> Tensor:
        return self._rotated(rows).dense() * self._positive.rsqrt().to(self.dtype).reshape(-1)

    def quadratic(self, rows: Rows) -> Tensor:
        return self._rotated(rows).weighted_gram((1 / self._positive).reshape(-1))

    def variance(self, rows: Rows) -> Tensor:
        return self._rotated(rows).weighted_norm((1 / self._positive).reshape(-1))

    def joint(self, rows: Rows) -> Tensor:
        return self._rotated(rows).joint_gram((1 / self._positive).reshape(-1))

    def _rotated(self, rows: Rows) -> Rows:
        """Return the rows in the dual basis, factored if they are."""
        return rows.of_size(self.size, self.dtype).rotate(*self._dual)

    def output_factors(self, o: int, i: int, bias: bool = False) -> tuple[Tensor, Tensor | None, Tensor] | None:
        if self.shape != (1, o, i):
            return None
        left, right = self._dual
        return left[0], right[0], (1 / self._positive)[0].to(self.dtype)


@register
@dataclass(frozen=True, eq=False)
class Kronecker(KroneckerBasis):
    """factor · (G ⊗ A) + shift · I for each of q groups: left G (q, o, o), right A (q, i, i), vectors as (q, o, i).

    A prior that is constant over the block adds to the shift: its q·o·i eigenvalues are written out when they are
    needed, and not kept. One that is a product over rows and columns gives an `EigenKronecker`. The two small
    decompositions are made once and shared by all scaled and shifted views.

        Kronecker(g[None], a[None]).scale(2.0) + Diagonal(torch.full((o * i,), 0.1))
    """

    __repr__ = brief

    left: Tensor
    right: Tensor
    factor: Scalar = 1.0
    ranks: tuple[int | None, int | None] = field(default=(None, None), metadata={"later": True})  # see `Spectrum.rank`
    shift: Tensor | None = None
    left_spectrum: Spectrum = field(default=None, repr=False, metadata={"cache": True})  # type: ignore[assignment]
    right_spectrum: Spectrum = field(default=None, repr=False, metadata={"cache": True})  # type: ignore[assignment]
    damps = True

    def __post_init__(self) -> None:
        for name, factor, rank in (("left", self.left, self.ranks[0]), ("right", self.right, self.ranks[1])):
            if factor.ndim != 3 or factor.shape[1] != factor.shape[2] or factor.shape[0] != self.left.shape[0]:
                raise ValueError(
                    "expected left (q, o, o) and right (q, i, i), got "
                    f"{tuple(self.left.shape)} and {tuple(self.right.shape)}"
                )
            if factor.requires_grad:
                raise UnsupportedOperation(
                    f"the {name} Kronecker factor carries a graph, but eigenbases are not differentiated. Detach it "
                    "(gradients reach scale, prior and rows), or use structure='full', which differentiates its matrix."
                )
            if getattr(self, f"{name}_spectrum") is None:
                object.__setattr__(self, f"{name}_spectrum", Spectrum(factor, factor.dtype, rank))

    @property
    def size(self) -> int:
        q, o, i = self.shape
        return q * o * i

    def flaw(self, signed: bool = False) -> str:
        return first_flaw(
            flaw_of_ranks(self.ranks),
            flaw_of_scalar("its factor", self._factor),
            "" if self.shift is None else flaw_of_scalar("its shift", self.shift),
            flaw_of_symmetric("its left factor", self.left),
            flaw_of_symmetric("its right factor", self.right),
        )

    @property
    def _factor(self) -> Tensor:
        return torch.as_tensor(self.factor, dtype=torch.float64, device=self.device)

    @property
    def factor_eigenvalues(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of G (q, o) and A (q, i), float64, clamped at zero."""
        self._require_definite()
        return self.left_spectrum.clamped, self.right_spectrum.clamped

    def _require_definite(self) -> None:
        for spectrum, side in ((self.left_spectrum, "left (output)"), (self.right_spectrum, "right (input)")):
            _require_definite(spectrum, side)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """All eigenvalues, (q, o, i), from those of the factors without negative ones; not kept."""
        return _grid(self._factor, *self.factor_eigenvalues, self.shift)

    @property
    def _basis(self) -> tuple[Tensor, Tensor]:
        return self.left_spectrum.vectors, self.right_spectrum.vectors

    @property
    def _dual(self) -> tuple[Tensor, Tensor]:
        return self._basis

    def _sum_log1p(self, over: Scalar = 1.0) -> Tensor:
        """Σ log(1 + λ / over) over all eigenvalues λ."""
        return added([sum_log1p(few) for few in self._pieces(over)])

    def _pieces(self, over: Scalar = 1.0) -> Iterator[Tensor]:
        """Yield all eigenvalues λ / over, a few at a time, so that they stay in the cache."""
        left, right = self.factor_eigenvalues
        factor, shift = self._factor / over, None if self.shift is None else self.shift / over
        for part in left.split(max(1, PIECE // max(1, right.numel())), 1):
            yield _grid(factor, part, right, shift)

    def _smallest(self) -> Tensor:
        """The smallest eigenvalue of each group, (q, 1, 1); eigenvalues of the factors are ascending."""
        left, right = self.factor_eigenvalues
        return _grid(self._factor, left[:, :1], right[:, :1], self.shift)

    def _eigen(self, values: Tensor) -> EigenKronecker:
        return EigenKronecker(*self._basis, values)

    @property
    def _positive(self) -> Tensor:
        """All eigenvalues for an inverse. Without a shift, those of rounding size are zero, and this raises."""
        if self.shift is not None:
            found = self.values
        else:
            self._require_definite()
            left, right = self.left_spectrum.significant.clamp(min=0), self.right_spectrum.significant.clamp(min=0)
            found = _grid(self._factor, left, right, None)
        if not bool((found > 0).all()):
            require_positive(found)
        return found

    def matvec(self, v: Tensor) -> Tensor:
        v = self._vector(v)
        moved = (self.left @ v.unflatten(-1, self.shape) @ self.right).flatten(-3) * self._factor.to(self.dtype)
        return moved if self.shift is None else moved + v * self.shift.to(self.dtype)

    def require_positive_definite(self) -> None:
        if self.shift is None:
            _ = self._positive
        else:
            require_positive(self._smallest())

    def logdet(self) -> Tensor:
        if self.shift is None:
            return self._positive.log().sum()
        require_positive(self._smallest())
        return added([few.log().sum() for few in self._pieces()])

    def diagonal(self) -> Tensor:
        left, right = self.left.diagonal(dim1=1, dim2=2), self.right.diagonal(dim1=1, dim2=2)
        shift = None if self.shift is None else self.shift.to(self.dtype)
        return _grid(self._factor.to(self.dtype), left, right, shift).reshape(-1)

    def smallest_eigenvalue(self) -> Tensor:
        return self._smallest().min()

    def scale(self, c: Scalar) -> Kronecker:
        shift = None if self.shift is None else self.shift * c
        return replace(self, factor=self._factor * nonnegative(c), shift=shift)

    def dense(self) -> Tensor:
        blocks = torch.einsum("qop,qij->qoipj", self.left, self.right).flatten(3, 4).flatten(1, 2)
        whole = torch.block_diag(*blocks) * self._factor.to(self.dtype)
        if self.shift is None:
            return whole
        return whole + self.shift.to(self.dtype) * torch.eye(self.size, dtype=self.dtype, device=self.device)

    def __add__(self, other: PSD) -> Kronecker | EigenKronecker | SimultaneousKronecker:
        self._matches(other)
        if isinstance(other, Kronecker) and self.left is other.left and self.right is other.right:
            shifts = [each.shift for each in (self, other) if each.shift is not None]
            return replace(self, factor=self._factor + other._factor, shift=added(shifts) if shifts else None)
        if other.factored:
            return add(self, other)
        if not isinstance(other, Diagonal):
            raise self._refuse(other, "a prior that is constant over the block or a product over its rows and columns")
        constant = other.constant()
        if constant is not None:
            self._require_definite()
            return replace(self, shift=constant if self.shift is None else self.shift + constant)
        if other.common() is not None:  # equal numbers, each with a graph of its own
            return self._eigen(self.values) + other
        whitened, rows, columns = self._whitened(other)
        delta = tangent(other.values).reshape(self.shape) if other.values.requires_grad else None
        roots = rows.sqrt().to(self.dtype), columns.sqrt().to(self.dtype)
        return EigenKronecker(*whitened._basis, whitened.values + 1, *roots, delta)

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        if not isinstance(prior, Diagonal):
            return _sum_ratio(self, prior) if prior.factored else super().logdet_ratio(prior)
        require_positive(prior.values)
        constant = prior.constant()
        if constant is not None:
            return self._sum_log1p(constant)
        common = prior.common()
        ratio = self._whitened(prior)[0]._sum_log1p() if common is None else self._sum_log1p(common)
        return ratio + _first_order(self, prior) if prior.values.requires_grad else ratio

    def known_eigenvalues(self) -> Tensor | None:
        tracked = any(isinstance(each, Tensor) and each.requires_grad for each in (self.factor, self.shift))
        return None if tracked else self.values.flatten()

    def eigenvalues(self) -> Tensor | None:
        return self.values.reshape(-1)

    def in_eigenbasis(self, rows: Rows) -> tuple[Tensor, Rows] | None:
        return self._eigen(self.values).in_eigenbasis(rows)

    def shifted_products(self, rows: Rows, shifts: Tensor, pairs: Tensor, split: float | None = None) -> Tensor:
        if split is None:
            return super().shifted_products(rows, shifts, pairs)
        each = [self._damped(1.0, rho, split).quadratic(rows) for rho in shifts]
        return torch.stack([gram[:, pairs[0], pairs[1]] for gram in each])

    def shifted_draws(
        self, n: int, shifts: Tensor, generator: torch.Generator | None = None, split: float | None = None
    ) -> Tensor | None:
        if split is None:
            return self._eigen(self.values).shifted_draws(n, shifts, generator)
        z = torch.randn(n, *self.shape, generator=generator, dtype=self.dtype, device=self.device)
        return torch.stack([self._damped(1.0, rho, split).colored(z) for rho in shifts])

    def largest_damped(self, split: float) -> float:
        left, right = (side.max().item() * math.sqrt(float(self.factor)) for side in self.factor_eigenvalues)
        return max(left / split, right * split)

    def damped(self, c: Scalar, prior: PSD, *, split: float = 1.0) -> EigenKronecker:
        """(√c/s · G + √τ I) ⊗ (√c·s · A + √τ I): factor-wise regularization, Ritter et al. (2018), Eq. 9.

        With A a mean and G a sum over n data, `split=√n` gives both factors the paper's scaling √n·E[·]. It is never
        below c·G ⊗ A + τ I, so its log-determinant is not part of an evidence.
        """
        tau = prior.constant()
        if tau is None:
            raise IncompatiblePrior(
                "factored damping needs one prior precision per block, and this one varies inside it. Use a scalar or "
                "layerwise prior, or damping='exact'."
            )
        return self._damped(c, tau, split)

    def _damped(self, c: Scalar, tau: Tensor, split: float) -> EigenKronecker:
        if self.shift is not None:
            raise UnsupportedOperation("factor-wise damping is for a Kronecker product without a prior")
        tau = tau.to(torch.float64)
        left, right = self.factor_eigenvalues
        root = (self._factor * nonnegative(c)).sqrt()
        left, right = root / split * left + tau.sqrt(), root * split * right + tau.sqrt()
        return self._eigen(left[:, :, None] * right[:, None, :])

    def _whitened(self, prior: Diagonal) -> tuple[Kronecker, Tensor, Tensor]:
        """R^-½ G R^-½ ⊗ K^-½ A K^-½ for a prior R ⊗ K, with rows R (q, o) and columns K (q, i); constants."""
        if self.shift is not None:
            raise IncompatiblePrior(
                "a Kronecker product that has a prior takes only one more that is constant over the block. Add the "
                "priors first, or use structure='diag', 'blockdiag' or 'full'."
            )
        rows, columns = self._split(prior.values.detach().double().reshape(self.shape), torch.finfo(prior.dtype).eps)
        left, right = rows.rsqrt(), columns.rsqrt()
        sides = (
            self.left.double() * left[:, :, None] * left[:, None, :],
            self.right.double() * right[:, :, None] * right[:, None, :],
        )
        spectra = (Spectrum(side, self.dtype) for side in sides)
        return Kronecker(*sides, self.factor, (None, None), None, *spectra), rows, columns

    def _split(self, grid: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """rows (q, o) and columns (q, i) with grid = rows ⊗ columns; refuses any other grid."""
        if bool((grid > 0).all()):
            logs = grid.log()
            rows = logs.mean(2)
            columns = logs.mean(1) - rows.mean(1, keepdim=True)
            error = (rows[:, :, None] + columns[:, None, :] - logs).abs()
            if bool((error <= 16 * eps * (1 + logs.abs())).all()):
                return rows.exp(), columns.exp()
        raise IncompatiblePrior(
            "a Kronecker posterior has no eigenbasis for a prior that varies inside a weight matrix other than as a "
            "positive product over its rows and columns. Use a layerwise prior, or structure='diag', 'blockdiag' or "
            "'full'."
        )


@register
@dataclass(frozen=True, eq=False)
class EigenKronecker(KroneckerBasis):
    """S (U_G ⊗ U_A) diag(values) (U_G ⊗ U_A)ᵀ S for each of q groups, S = diag(left_scale ⊗ right_scale).

    left U_G (q, o, o) and right U_A (q, i, i) orthogonal, values (q, o, i) kept in float64, left_scale (q, o) and
    right_scale (q, i) the roots of a row-and-column prior that whitened the factors, or None for S = I.

    Bases and scales are constants. Where a prior carries a graph of its own for each weight, `tangent` (q, o, i) is its
    deviation δ from the value the decomposition was made with: zero, but with a gradient. Then
    A⁻¹ ≈ A₀⁻¹ − A₀⁻¹ diag(δ) A₀⁻¹ and similar formulas give exact first derivatives without differentiating an
    eigenbasis; second derivatives raise.
    """

    __repr__ = brief

    left: Tensor
    right: Tensor
    values: Tensor
    left_scale: Tensor | None = None
    right_scale: Tensor | None = None
    tangent: Tensor | None = field(default=None, repr=False, metadata={"cache": True})

    def __post_init__(self) -> None:
        q, o, i = self.shape
        if self.left.shape != (q, o, o) or self.right.shape != (q, i, i) or self.values.shape != (q, o, i):
            raise ValueError(
                "expected left (q, o, o), right (q, i, i) and values (q, o, i), got "
                f"{tuple(self.left.shape)}, {tuple(self.right.shape)} and {tuple(self.values.shape)}"
            )
        if (self.left_scale is None) != (self.right_scale is None):
            raise ValueError("give both left_scale (q, o) and right_scale (q, i), or neither")
        object.__setattr__(self, "values", self.values.double())

    def flaw(self, signed: bool = False) -> str:
        q, o, i = self.shape
        for name, scale, shape in (("left", self.left_scale, (q, o)), ("right", self.right_scale, (q, i))):
            if scale is not None and tuple(scale.shape) != shape:
                return f"its {name} scale has shape {tuple(scale.shape)}, not {shape}"
        scales = (scale for scale in (self.left_scale, self.right_scale) if scale is not None)
        return first_flaw(
            flaw_of_values("its list of eigenvalues", self.values, signed=signed),
            flaw_of_basis("its left basis", self.left),
            flaw_of_basis("its right basis", self.right),
            *(flaw_of_values("its scale", scale) for scale in scales),
        )

    @property
    def _basis(self) -> tuple[Tensor, Tensor]:
        """B with A = (B_l ⊗ B_r) diag(values) (B_l ⊗ B_r)ᵀ."""
        if self.left_scale is None or self.right_scale is None:
            return self.left, self.right
        return self.left * self.left_scale[:, :, None], self.right * self.right_scale[:, :, None]

    @property
    def _dual(self) -> tuple[Tensor, Tensor]:
        """B with A⁻¹ = (B_l ⊗ B_r) diag(1 / values) (B_l ⊗ B_r)ᵀ."""
        if self.left_scale is None or self.right_scale is None:
            return self.left, self.right
        return self.left / self.left_scale[:, :, None], self.right / self.right_scale[:, :, None]

    def matvec(self, v: Tensor) -> Tensor:
        result = super().matvec(v)
        return result if self._delta is None else result + self._vector(v) * self._delta

    def solve(self, v: Tensor) -> Tensor:
        return self._corrected(super().solve(v), 1.0)

    def _corrected(self, x: Tensor, power: float) -> Tensor:
        """x − power · A₀⁻¹ (δ ∘ x)."""
        return x if self._delta is None else x - power * super().solve(x * self._delta)

    @property
    def _delta(self) -> Tensor | None:
        return None if self.tangent is None else self.tangent.to(self.dtype).reshape(-1)

    def logdet(self) -> Tensor:
        total = self._positive.log().sum()
        if self.left_scale is not None and self.right_scale is not None:
            _, o, i = self.shape
            total = total + 2 * (i * self.left_scale.double().log().sum() + o * self.right_scale.double().log().sum())
        if self._delta is None:
            return total
        return total + (self._delta * self._weigh(*self._dual, 1 / self._positive)).double().sum()

    def diagonal(self) -> Tensor:
        result = super().diagonal()
        return result if self._delta is None else result + self._delta

    def inverse_diagonal(self) -> Tensor:
        result = super().inverse_diagonal()
        if self._delta is None:
            return result
        corrections = []  # −diag(A₀⁻¹ diag(δ) A₀⁻¹), a few columns of A₀⁻¹ at a time
        for start, length in chunks(self.size, self.size * self.dtype.itemsize):
            unit = torch.zeros(length, self.size, dtype=self.dtype, device=self.device)
            unit[:, start : start + length] = torch.eye(length, dtype=self.dtype, device=self.device)
            corrections.append(super().solve(unit).square() @ self._delta)
        return result - torch.cat(corrections)

    def smallest_eigenvalue(self) -> Tensor:
        smallest = self.values.min()
        if self.left_scale is None or self.right_scale is None:
            return smallest
        roots = self.left_scale.double()[:, :, None] * self.right_scale.double()[:, None, :]
        return smallest * roots.square().min()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self._corrected(super().sample(n, generator), 0.5)

    def shifted_draws(
        self, n: int, shifts: Tensor, generator: torch.Generator | None = None, split: float | None = None
    ) -> Tensor | None:
        if self.left_scale is not None or self.tangent is not None:
            return None
        require_shifts(self.values, shifts)
        z = torch.randn(n, *self.shape, generator=generator, dtype=self.dtype, device=self.device)
        return torch.stack([replace(self, values=self.values + rho).colored(z) for rho in shifts.double()])

    def scale(self, c: Scalar) -> EigenKronecker:
        delta = None if self.tangent is None else self.tangent * c
        return replace(self, values=self.values * nonnegative(c), tangent=delta)

    def __add__(self, other: PSD) -> EigenKronecker | SimultaneousKronecker:
        self._matches(other)
        if isinstance(other, EigenKronecker) and self._shares_basis(other):
            return replace(self, values=self.values + other.values)
        if other.factored:
            return add(self, other)
        if not isinstance(other, Diagonal):
            raise self._refuse(other, "a prior that is constant over the block, or a matrix in the very same basis")
        constant, delta = self._constant(other)
        if delta is not None and self.tangent is not None:
            delta = delta + self.tangent
        return replace(self, values=self.values + constant, tangent=self.tangent if delta is None else delta)

    def _shares_basis(self, other: EigenKronecker) -> bool:
        names = ("left", "right", "left_scale", "right_scale", "tangent")
        return all(getattr(self, name) is getattr(other, name) for name in names)

    def _constant(self, prior: Diagonal) -> tuple[Tensor, Tensor | None]:
        """The value of a constant prior, and the deviations of its entries where each has a graph of its own."""
        constant, delta = prior.constant(), None
        if constant is None:
            constant, delta = prior.common(), tangent(prior.values).reshape(self.shape)
        if constant is None or self.left_scale is not None:
            raise IncompatiblePrior(
                "a matrix in a fixed Kronecker eigenbasis (EKFAC, or KFAC with a prior) takes only a prior that is "
                "constant over the block. Use a layerwise prior, structure='kron' for one that is a product over rows "
                "and columns, or 'diag', 'blockdiag' or 'full' for any other."
            )
        return constant, delta

    def in_kronecker_basis(self) -> Expansion | None:
        if self.tangent is not None:  # a prior with a graph for each weight has no fixed basis
            return None
        return super().in_kronecker_basis()

    def eigenvalues(self) -> Tensor | None:
        return self.values.reshape(-1) if self.left_scale is None else None

    def in_eigenbasis(self, rows: Rows) -> tuple[Tensor, Rows] | None:
        values = self.eigenvalues()
        return None if values is None else (values, self._rotated(rows))

    def known_eigenvalues(self) -> Tensor | None:
        constant = self.left_scale is None and self.tangent is None and not self.values.requires_grad
        return self.values.flatten() if constant and bool((self.values >= 0).all()) else None

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        if not isinstance(prior, Diagonal):
            known = prior.factored and self.tangent is None
            return _sum_ratio(self, prior) if known else super().logdet_ratio(prior)
        require_positive(prior.values)
        if self.tangent is not None:
            return super().logdet_ratio(prior)
        constant, delta = self._constant(prior)
        ratio = sum_log1p(self.values / constant)
        return ratio if delta is None else ratio + _first_order(self, prior)

    def output_factors(self, o: int, i: int, bias: bool = False) -> tuple[Tensor, Tensor | None, Tensor] | None:
        return super().output_factors(o, i, bias) if self._delta is None else None

    def _rotated(self, rows: Rows) -> Rows:
        """Return (J − ½ J A₀⁻¹ diag(δ)) in the dual basis, factored if the rows J are."""
        if self._delta is not None:
            dense = rows.of_size(self.size, self.dtype).dense()
            rows = DenseRows(dense - 0.5 * super().solve(dense) * self._delta)
        return super()._rotated(rows)


@register
@dataclass(frozen=True, eq=False)
class SimultaneousKronecker(KroneckerBasis):
    """(B_l ⊗ B_r) diag(values) (B_l ⊗ B_r)ᵀ for each of q groups, in bases that need not be orthogonal.

    left B_l (q, o, o) and right B_r (q, i, i), their inverse transposes `left_dual` and `right_dual`, and values
    (q, o, i) in float64: the result of `Kronecker + Kronecker`. Where no basis makes both summands diagonal, the sum
    keeps only its diagonal in the best basis (`add`). `neglected` is then the share of the Frobenius norm, in these
    coordinates, that is outside the diagonal, and every answer is that of the matrix that was kept.

        (Kronecker(l[None], r[None]) + Kronecker(g[None], a[None]).scale(2.0)).solve(v)
    """

    __repr__ = brief

    left: Tensor
    right: Tensor
    left_dual: Tensor
    right_dual: Tensor
    values: Tensor
    neglected: float = 0.0

    def __post_init__(self) -> None:
        q, o, i = self.shape
        found = [tuple(t.shape) for t in (self.left, self.right, self.left_dual, self.right_dual, self.values)]
        if found != [(q, o, o), (q, i, i), (q, o, o), (q, i, i), (q, o, i)]:
            raise ValueError(f"expected left (q, o, o), right (q, i, i), their duals and values (q, o, i), got {found}")
        object.__setattr__(self, "values", self.values.double())

    @property
    def _basis(self) -> tuple[Tensor, Tensor]:
        return self.left, self.right

    @property
    def _dual(self) -> tuple[Tensor, Tensor]:
        return self.left_dual, self.right_dual

    def flaw(self, signed: bool = False) -> str:
        sides = ("left", self.left, self.left_dual), ("right", self.right, self.right_dual)
        return first_flaw(
            flaw_of_values("its list of eigenvalues", self.values, signed=signed),
            *(flaw_of_values(f"its {name} basis", side, signed=True) for name, *both in sides for side in both),
            *(_flaw_of_dual(name, basis, dual) for name, basis, dual in sides),
        )

    def logdet(self) -> Tensor:
        return self._positive.log().sum() + log_of_basis(self.left, self.right)

    def _weigh(self, left: Tensor, right: Tensor, values: Tensor) -> Tensor:
        return moments(left.mT, right.mT, values).to(self.dtype).reshape(-1)

    def smallest_eigenvalue(self) -> Tensor:
        """Return a lower bound of the smallest eigenvalue, a float64 scalar."""
        left, right = (torch.linalg.matrix_norm(d.double(), 2) for d in (self.left_dual, self.right_dual))
        return (self.values.flatten(1).min(1).values / (left * right).square()).min()

    def scale(self, c: Scalar) -> SimultaneousKronecker:
        return replace(self, values=self.values * nonnegative(c))

    def __add__(self, other: PSD) -> SimultaneousKronecker:
        self._matches(other)
        return add(self, other)

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        return _sum_ratio(self, prior) if prior.factored else super().logdet_ratio(prior)


def add(data: PSD, prior: PSD) -> SimultaneousKronecker:
    """Return data + prior, exact where one Kronecker basis makes both diagonal, and its diagonal in a basis elsewhere.

    Exact are L ⊗ R + c G ⊗ A, whatever the four factors, and two matrices that share their eigenbasis. A third summand,
    a shift by δI, or eigenvalues that were estimated one by one (EKFAC) have no common basis; then `common_basis`
    chooses one. As in EKFAC, the trace in these coordinates is right and the log-determinant never too small, so that
    an evidence stays a lower bound.
    """
    first, second = _both(data, prior)
    common, of_prior, of_data = common_basis(first, second)
    values = of_prior + of_data
    neglected = neglected_share(common, first, second, values.detach())
    return SimultaneousKronecker(*common.to(data.dtype)[:4], values, neglected)


def _sum_ratio(data: PSD, prior: PSD) -> Tensor:
    """Return log |data + prior| − log |prior| for the sum that `add` gives, without a difference of large numbers."""
    prior.require_positive_definite()
    first, second = _both(data, prior)
    common, of_prior, of_data = common_basis(first, second)
    projected = of_prior.log().sum() + log_of_basis(common.left, common.right)
    exact = first.values.log().sum() + log_of_basis(first.left, first.right)
    gap = projected - exact  # zero where the prior is diagonal in the common basis
    ratio = sum_log1p(of_data / of_prior)
    rounding = SAME * (abs(float(projected.detach())) + first.values.numel())
    return ratio if float(gap.detach()) <= rounding else ratio + gap


def _both(data: PSD, prior: PSD) -> tuple[Expansion, Expansion]:
    """Return prior and data in their own bases, in float64; first the one of them that has an inverse."""
    found, other = data.in_kronecker_basis(), prior.in_kronecker_basis()
    if found is None or other is None or found[-1].shape != other[-1].shape:
        raise data._refuse(prior, "a prior that is a Kronecker product, or diagonal in a Kronecker eigenbasis")
    first, second = (Expansion(*each).to(torch.float64) for each in (other, found))
    if not bool((first.values > 0).all()):
        first, second = second, first
    if not bool((first.values > 0).all()):
        raise NotPositiveDefinite(
            "neither of the two Kronecker matrices that are added is positive definite, so their sum has no basis in "
            "which both are diagonal. Add a prior with positive precision to one of them first."
        )
    return first, second


def _first_order(matrix: PSD, prior: Diagonal) -> Tensor:
    """Return zero with the gradient (A + Π)⁻¹_pp − 1/π_p of log |A + Π| − log |Π| in the entries π_p of the prior."""
    fixed = Diagonal(prior.values.detach())
    gradient = (matrix + fixed).inverse_diagonal().double() - fixed.inverse_diagonal().double()
    return (tangent(prior.values).double() * gradient).sum()


def _grid(factor: Tensor, left: Tensor, right: Tensor, shift: Tensor | None) -> Tensor:
    """factor · left (q, o) ⊗ right (q, i) + shift, (q, o, i)."""
    grid = (factor * left)[:, :, None] * right[:, None, :]
    return grid if shift is None else grid.add_(shift)


def sharing_factors(blocks: Iterable[PSD]) -> tuple[PSD, ...]:
    """Return the same blocks, in which equal factors share their memory and their decomposition.

    Layers that read the same inputs (query, key and value of an attention) have equal factors.
    """
    known: dict[Any, list[tuple[Tensor, Spectrum]]] = {}

    def shared(factor: Tensor, spectrum: Spectrum) -> tuple[Tensor, Spectrum]:
        trace = float(factor.diagonal(dim1=1, dim2=2).sum())
        alike = known.setdefault((trace, factor.shape, factor.dtype, factor.device), [])
        for own in alike:
            if torch.equal(own[0], factor):
                return own
        alike.append((factor, spectrum))
        return factor, spectrum

    found: list[PSD] = []
    for block in blocks:
        if isinstance(block, Kronecker):
            (left, of_left), (right, of_right) = (
                shared(block.left, block.left_spectrum),
                shared(block.right, block.right_spectrum),
            )
            block = Kronecker(left, right, block.factor, block.ranks, block.shift, of_left, of_right)
        found.append(block)
    return tuple(found)


def _require_definite(spectrum: Spectrum, side: str) -> None:
    """Refuse negative eigenvalues beyond rounding: the product of two indefinite factors could hide them."""
    if spectrum.indefinite:
        smallest = float(spectrum.values.min())
        raise NotPositiveDefinite(
            f"the {side} Kronecker factor is indefinite: its smallest eigenvalue is {smallest:.3g}. "
            "Estimate the factors from the GGN or the Fisher, which are never indefinite."
        )


def _flaw_of_dual(name: str, basis: Tensor, dual: Tensor) -> str:
    off = basis.double().mT @ dual.double() - torch.eye(basis.shape[-1], dtype=torch.float64, device=basis.device)
    wrong = bool((off.abs() > torch.finfo(basis.dtype).eps ** 0.5).any())
    return f"its {name} dual is not the inverse of its {name} basis" if wrong else ""
