"""Low-rank approximations from products, and the preconditioner they give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.linalg.krylov.lanczos import _orthonormal_rows
from lapwing.linalg.krylov.results import Matvec, dots
from lapwing.linalg.validity import flaw_of_basis, flaw_of_values


@dataclass(frozen=True, eq=False)
class Sketch:
    """A ≈ Uᵀ diag(λ) U: orthonormal rows U (k, P), values λ (k,) ≥ 0 in float64, descending."""

    basis: Tensor
    values: Tensor
    products: int = 0

    def flaw(self) -> str:
        """Say what makes the numbers of a file impossible; empty where they are sound."""
        if self.basis.ndim != 2 or self.values.shape != self.basis.shape[:1]:
            return f"it has vectors of shape {tuple(self.basis.shape)} and values of {tuple(self.values.shape)}"
        return flaw_of_values("its list of eigenvalues", self.values) or flaw_of_basis(
            "its basis", self.basis, self.values
        )

    @property
    def rank(self) -> int:
        return len(self.values)

    @classmethod
    def of_rows(cls, rows: Tensor, floor: float = 1e-14) -> Sketch:
        """The eigenpairs of RᵀR for rows R (k, P)."""
        values, vectors = torch.linalg.eigh(dots(rows, rows)) if len(rows) else (rows.double()[:, 0], rows.double())
        keep = values.argsort(descending=True)
        keep = keep[values[keep] > floor * values.max().clamp(min=0)] if len(values) else keep
        values = values[keep]
        basis = ((vectors[:, keep] / values.sqrt()).T).to(rows) @ rows if len(keep) else rows[:0]
        return cls(basis, values)

    @classmethod
    def empty(cls, like: Tensor) -> Sketch:
        """The zero matrix."""
        return cls(like.new_zeros(0, like.shape[-1]), torch.zeros(0, dtype=torch.float64, device=like.device))

    def matvec(self, v: Tensor) -> Tensor:
        inner = dots(v.to(self.basis), self.basis) * self.values
        return (inner.to(self.basis) @ self.basis).to(v)


def nystrom(matvec: Matvec, like: Tensor, rank: int, generator: torch.Generator | None = None) -> Sketch:
    """A ≈ (A Ω)ᵀ (Ωᵀ A Ω)⁺ (A Ω) for a random orthonormal Ω (rank, P), computed stably.

    Tropp, Yurtsever, Udell, Cevher 2017, Algorithm 3: a small shift ν keeps the core positive definite and is taken
    off the eigenvalues at the end. Never above A; exact once `rank` reaches that of A.
    """
    rank = min(rank, like.shape[-1])
    omega = _orthonormal_rows(
        torch.randn(rank, like.shape[-1], generator=generator, dtype=like.dtype, device=like.device)
    )
    y = matvec(omega)
    shift = float(y.double().norm()) * torch.finfo(y.dtype).eps
    y = y + shift * omega
    core = dots(omega, y)
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    keep = values > max(shift * 1e-3, float(values.max()) * 1e-15)
    half = ((vectors[:, keep] / values[keep].sqrt()).T).to(y) @ y  # A ≈ halfᵀ half
    sketch = Sketch.of_rows(half)
    return Sketch(sketch.basis, (sketch.values - shift).clamp(min=0), rank)


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """M = Uᵀ diag(λ) U + D for a sketch and a positive diagonal D (P,): solves and roots, without data.

    In coordinates whitened by D, M is I + Qᵀ diag(e) Q with Q orthonormal. For D = τI (Frangella, Tropp, Udell 2023)
    Q is U itself; otherwise one k × k eigen-decomposition makes it.
    """

    sketch: Sketch
    diagonal: Tensor  # (P,) or 0-d

    @cached_property
    def _whitened(self) -> tuple[Tensor, Tensor]:
        """Q (k, P) and e (k,)."""
        basis, values = self.sketch.basis, self.sketch.values
        if self.diagonal.ndim == 0 or not len(values):
            return basis, values / self.diagonal.double().mean()
        rows = basis * values.sqrt().to(basis)[:, None] * self.diagonal.rsqrt().to(basis)
        white = Sketch.of_rows(rows)
        return white.basis, white.values

    def power(self, v: Tensor, exponent: float) -> Tensor:
        """(I + Qᵀ diag(e) Q)^exponent v in whitened coordinates, (k, P)."""
        basis, values = self._whitened
        if not len(values):
            return v
        weights = (1 + values) ** exponent - 1
        inner = v.to(basis.dtype) @ basis.T * weights.to(basis.dtype)
        return v + (inner @ basis).to(v.dtype)

    def solve(self, v: Tensor) -> Tensor:
        """M⁻¹ v."""
        root = self.diagonal.rsqrt().to(v.dtype)
        return root * self.power(root * v, -1.0)

    def logdet_ratio(self) -> Tensor:
        """log |M| − log |D|."""
        return self._whitened[1].log1p().sum()

    def shares(self) -> Tensor:
        """e / (1 + e), (k,): how much of each direction the data determine."""
        values = self._whitened[1]
        return values / (1 + values)

    def inverse_diagonal(self) -> Tensor:
        """diag M⁻¹, (P,) float64."""
        basis, _ = self._whitened
        lost = (basis.square() * self.shares().to(basis)[:, None]).sum(0).double()
        return (1 - lost) / self.diagonal.double()
