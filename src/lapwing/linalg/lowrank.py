"""A diagonal plus a matrix of low rank, inverted by Woodbury's identity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import NotPositiveDefinite, brief
from lapwing.linalg.psd import PSD, Diagonal, Scalar, nonnegative, require_positive, require_shifts
from lapwing.linalg.rows import Rows, chunks
from lapwing.storage import first_flaw, flaw_of_values, register

NEXT_TO_NOTHING = 1e-100


@register
@dataclass(frozen=True, eq=False)
class LowRank(PSD):
    """A = D + Uᵀ diag(d) U: basis U (k, P), values d (k,) ≥ 0, shift the diagonal of D (P,).

    The rows of U need not be orthonormal, nor fewer than P. With C = I + d^½ U D⁻¹ Uᵀ d^½ and M = d^½ C⁻¹ d^½,
    A⁻¹ = D⁻¹ − D⁻¹ Uᵀ M U D⁻¹ and |A| = |D| |C|. Inverses subtract nearly equal numbers where d ≫ D, so they are
    computed in float64, by the Cholesky factor of C and without M, which is large where the rows of U are dependent.

        LowRank(rows, torch.ones(len(rows)), torch.zeros(rows.shape[1])) + Diagonal(prior)
    """

    __repr__ = brief

    basis: Tensor
    values: Tensor
    shift: Tensor

    def __post_init__(self) -> None:
        k, p = self.basis.shape if self.basis.ndim == 2 else (-1, -1)
        if self.values.shape != (k,) or self.shift.shape != (p,):
            raise ValueError(
                "expected basis (k, P), values (k,) and diagonal (P,), got "
                f"{tuple(self.basis.shape)}, {tuple(self.values.shape)} and {tuple(self.shift.shape)}"
            )
        if bool((self.values < 0).any()):
            raise ValueError(f"values must be ≥ 0, got {float(self.values.min()):.3g}; drop such directions")

    @property
    def size(self) -> int:
        return self.basis.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.basis.dtype

    @property
    def device(self) -> torch.device:
        return self.basis.device

    def flaw(self, signed: bool = False) -> str:
        return first_flaw(
            flaw_of_values("its basis", self.basis, signed=True),
            flaw_of_values("its list of eigenvalues", self.values),
            flaw_of_values("its shift", self.shift),
        )

    @property
    def _precision(self) -> Tensor:
        """D, positive, float64."""
        return require_positive(self.shift).double()

    @property
    def _roots(self) -> Tensor:
        """d^½, float64, with a tiny number in place of zero, whose square root has no finite gradient."""
        weights = self.values.double()
        return torch.where(weights > 0, weights, weights + NEXT_TO_NOTHING).sqrt()

    @property
    def _capacitance(self) -> Tensor:
        """L with L Lᵀ = C, (k, k) float64. It is cached only without a graph, which could be used only once."""
        tracked = any(tensor.requires_grad for tensor in (self.basis, self.values, self.shift))
        return self._form() if tracked and torch.is_grad_enabled() else self._constant_capacitance

    @cached_property
    def _constant_capacitance(self) -> Tensor:
        with torch.no_grad():
            return self._form()

    def _form(self) -> Tensor:
        kernel = torch.zeros(len(self.values), len(self.values), dtype=torch.float64, device=self.device)
        precision = self._precision
        for span, basis in self._pieces():
            kernel = kernel + (basis / precision[span]) @ basis.T
        eye = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
        lower, info = torch.linalg.cholesky_ex(eye + self._roots[:, None] * kernel * self._roots)
        if int(info):
            raise NotPositiveDefinite(
                "the curvature is so much larger than the prior precision that float64 does not tell their sum from a "
                "singular matrix. Raise the prior precision, or lower the temperature's T."
            )
        return lower

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield a few columns of U at a time in float64: all of it may be too large to hold twice."""
        for start, length in chunks(self.size, 8 * len(self.values)):
            yield slice(start, start + length), self.basis[:, start : start + length].double()

    def _project(self, v: Tensor) -> Tensor:
        """U v: (*b, P) → (*b, k)."""
        total = v.new_zeros(*v.shape[:-1], len(self.values))
        for span, basis in self._pieces():
            total = total + v[..., span] @ basis.T
        return total

    def _combine(self, z: Tensor) -> Tensor:
        """Uᵀ z: (*b, k) → (*b, P)."""
        return torch.cat([z @ basis for _, basis in self._pieces()], -1)

    def _apply(self, rows: Rows) -> Tensor:
        """U D⁻¹ Jᵀ, (k, n, r), for float64 rows."""
        precision = self._precision
        spans = chunks(len(self.values), self.size)  # one byte per entry: larger pieces, as a few vectors cost no more
        parts = [rows.matvec(self.basis.narrow(0, *span).double() / precision) for span in spans]
        return torch.cat(parts) if parts else precision.new_zeros(0, rows.n, rows.r)

    def _half(self, z: Tensor) -> Tensor:
        """L⁻¹ d^½ z, so that its square is zᵀ M z: (k, *b) → (k, *b)."""
        flat = self._roots[:, None] * z.reshape(len(z), math.prod(z.shape[1:]))
        return torch.linalg.solve_triangular(self._capacitance, flat, upper=False).reshape(z.shape)

    def matvec(self, v: Tensor) -> Tensor:
        v = self._vector(v)
        return v * self.shift.to(self.dtype) + ((v @ self.basis.T) * self.values.to(self.dtype)) @ self.basis

    def solve(self, v: Tensor) -> Tensor:
        return self._solve(self._vector(v).double()).to(self.dtype)

    def _solve(self, v: Tensor) -> Tensor:
        precision = self._precision
        scaled = v / precision
        half = self._half(self._project(scaled).reshape(-1, len(self.values)).T)
        middle = self._roots * torch.linalg.solve_triangular(self._capacitance.T, half, upper=True).T
        return scaled - self._combine(middle).reshape(v.shape) / precision

    def logdet(self) -> Tensor:
        return self._precision.log().sum() + 2 * self._capacitance.diagonal().log().sum()

    def diagonal(self) -> Tensor:
        return self.shift.to(self.dtype) + self.values.to(self.dtype) @ self.basis.square()

    def inverse_diagonal(self) -> Tensor:
        lost = torch.cat([self._half(basis).square().sum(0) for _, basis in self._pieces()])
        return (1 / self._precision - lost / self._precision.square()).to(self.dtype)

    def smallest_eigenvalue(self) -> Tensor:
        return self.shift.double().min()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(n, self.size + len(self.values), dtype=self.dtype, device=self.device, generator=generator)
        free, bound = noise.double().split((self.size, len(self.values)), -1)
        right = free * self._precision.sqrt() + self._combine(bound * self._roots)
        return self._solve(right).to(self.dtype)  # A⁻¹ (D^½ ε₁ + Uᵀ d^½ ε₂) has covariance A⁻¹ A A⁻¹

    def scale(self, c: Scalar) -> LowRank:
        return LowRank(self.basis, self.values * nonnegative(c), self.shift * c)

    def __add__(self, other: PSD) -> LowRank:
        self._matches(other)
        if isinstance(other, Diagonal):
            return LowRank(self.basis, self.values, self.shift + other.values.to(self.shift.dtype))
        if isinstance(other, LowRank):
            return LowRank(
                torch.cat((self.basis, other.basis.to(self.dtype))),
                torch.cat((self.values, other.values.to(self.values.dtype))),
                self.shift + other.shift.to(self.shift.dtype),
            )
        raise self._refuse(other, "a diagonal prior or another LowRank matrix")

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        if not isinstance(prior, Diagonal):
            return super().logdet_ratio(prior)
        precision = require_positive(prior.values).double()
        capacitance = (self + prior)._capacitance
        return (self.shift.double() / precision).log1p().sum() + 2 * capacitance.diagonal().log().sum()

    def _half_basis(self) -> Tensor:
        """d^½ U, (k, P) float64."""
        return self.basis.double() * self._roots[:, None]

    def eigenvalues(self) -> Tensor | None:
        if bool(self.shift.any()):
            return None
        half = self._half_basis()
        return torch.linalg.eigvalsh(half @ half.T).clamp(min=0)

    def _orthonormal(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues e > 0 of Uᵀ diag(d) U and their eigenvectors as rows V (rank, P), float64."""
        half = self._half_basis()
        values, vectors = torch.linalg.eigh(half @ half.T)
        keep = values > values.max() * len(values) * torch.finfo(torch.float64).eps
        return values[keep], (vectors[:, keep].T @ half) / values[keep].sqrt()[:, None]

    def shifted_draws(
        self, n: int, shifts: Tensor, generator: torch.Generator | None = None, split: float | None = None
    ) -> Tensor | None:
        """ρ^-½ z + Vᵀ ((e + ρ)^-½ − ρ^-½) V z: outside the span of U there is nothing but the shift."""
        if bool(self.shift.any()):
            return super().shifted_draws(n, shifts, generator)
        values, basis = self._orthonormal()
        shifts = shifts.double()
        require_shifts(values.new_zeros(1), shifts)
        z = torch.randn(n, self.size, generator=generator, dtype=self.dtype, device=self.device).double()
        change = (values + shifts[:, None]).rsqrt() - shifts.rsqrt()[:, None]  # (m, rank)
        moved = ((z @ basis.T) * change[:, None]) @ basis
        return (moved + z * shifts.rsqrt()[:, None, None]).to(self.dtype)

    def in_eigenbasis(self, rows: Rows) -> tuple[Tensor, Rows] | None:
        return None  # `shifted_products` works within the span of U instead

    def shifted_products(self, rows: Rows, shifts: Tensor, pairs: Tensor, split: float | None = None) -> Tensor:
        """J Jᵀ/ρ − (J V) diag(e/(ρ(e + ρ))) (J V)ᵀ for A = V diag(e) Vᵀ, in float64."""
        if bool(self.shift.any()):
            return super().shifted_products(rows, shifts, pairs)
        values, basis = self._orthonormal()
        require_shifts(values.new_zeros(1), shifts)
        wide = rows.of_size(self.size, self.dtype).to(torch.float64)
        inside = wide.matvec(basis)  # (rank, n, r)
        whole = wide.weighted_gram(torch.ones(self.size, dtype=torch.float64, device=self.device))
        shifts = shifts.double()
        weights = values / (shifts[:, None] * (values + shifts[:, None]))
        cut = torch.einsum("mj,jnk->mnk", weights, inside[..., pairs[0]] * inside[..., pairs[1]])
        return (whole[:, pairs[0], pairs[1]] / shifts[:, None, None] - cut).to(self.dtype)

    def whiten(self, rows: Rows) -> Tensor:
        """J A⁻¹ [D^½, Uᵀ d^½], (n, r, P + k): W Wᵀ = J A⁻¹ A A⁻¹ Jᵀ."""
        solved = self._solve(rows.of_size(self.size, self.dtype).dense().double())
        parts = solved * self._precision.sqrt(), self._project(solved) * self._roots
        return torch.cat(parts, -1).to(self.dtype)

    def quadratic(self, rows: Rows) -> Tensor:
        rows = rows.of_size(self.size, self.dtype).to(torch.float64)
        half = self._half(self._apply(rows))
        correction = torch.einsum("anr,ans->nrs", half, half)
        return (rows.weighted_gram(1 / self._precision) - correction).to(self.dtype)

    def variance(self, rows: Rows) -> Tensor:
        rows = rows.of_size(self.size, self.dtype).to(torch.float64)
        correction = self._half(self._apply(rows)).square().sum(0)
        return (rows.weighted_norm(1 / self._precision) - correction).to(self.dtype)

    def joint(self, rows: Rows) -> Tensor:
        rows = rows.of_size(self.size, self.dtype).to(torch.float64)
        half = self._half(self._apply(rows))
        correction = torch.einsum("anr,ams->nrms", half, half)
        return (rows.joint_gram(1 / self._precision) - correction).to(self.dtype)
