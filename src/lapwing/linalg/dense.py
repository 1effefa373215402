"""Dense matrices: one eigen-decomposition for every scale and constant prior, a Cholesky factor for other priors."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import NotPositiveDefinite, brief
from lapwing.linalg.psd import PSD, Diagonal, Scalar, nonnegative, not_positive, require_positive, require_shifts
from lapwing.linalg.rows import Rows
from lapwing.linalg.spectrum import Spectrum
from lapwing.storage import first_flaw, flaw_of_scalar, flaw_of_symmetric, flaw_of_values, register


@register
@dataclass(frozen=True, eq=False)
class Dense(PSD):
    """A = factor · M + diag(shift): matrix M (P, P), shift a scalar or (P,).

    `scale` and `+ Diagonal` change factor and shift and share M. With a scalar shift everything is closed-form in the
    eigenvalues of M; with a vector (or where M itself carries gradients) a float64 Cholesky factor serves. M may be
    indefinite (an exact Hessian): then A⁻¹ needs a shift large enough.

        posterior = Dense(curvature).scale(2.0) + Diagonal(torch.full((P,), 0.1))
    """

    __repr__ = brief

    matrix: Tensor
    factor: Scalar = 1.0
    shift: Scalar = 0.0
    spectrum: Spectrum = field(default=None, repr=False, metadata={"cache": True})  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.matrix.ndim != 2 or self.matrix.shape[0] != self.matrix.shape[1]:
            raise ValueError(f"expected a square matrix, got shape {tuple(self.matrix.shape)}")
        if self.spectrum is None:
            object.__setattr__(self, "spectrum", Spectrum(self.matrix, self.matrix.dtype))

    @property
    def size(self) -> int:
        return self.matrix.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @property
    def _factor(self) -> Tensor:
        return torch.as_tensor(self.factor, dtype=torch.float64, device=self.device)

    @property
    def _shift(self) -> Tensor:
        return torch.as_tensor(self.shift, dtype=torch.float64, device=self.device)

    def flaw(self, signed: bool = False) -> str:
        if self._shift.shape not in ((), (self.size,)):
            return f"its shift has shape {tuple(self._shift.shape)}"
        numbers = flaw_of_scalar("its factor", self._factor), flaw_of_values("its shift", self._shift, signed=True)
        return first_flaw(*numbers) or flaw_of_symmetric("it", self.dense(), signed=signed)

    @property
    def _spectral(self) -> bool:
        return self._shift.ndim == 0 and not self.matrix.requires_grad

    @property
    def _values(self) -> Tensor:
        """Eigenvalues of A in the order of `spectrum`, positive."""
        values = self.spectrum.values if bool(self._shift.detach() != 0) else self.spectrum.significant
        return require_positive(self._factor * values + self._shift)

    @property
    def _cholesky(self) -> Tensor:
        """L with L Lᵀ = A, float64. It is cached only without a graph, which could be used only once."""
        tracked = any(tensor.requires_grad for tensor in (self.matrix, self._factor, self._shift))
        return self._factorize() if tracked and torch.is_grad_enabled() else self._constant_cholesky

    @cached_property
    def _constant_cholesky(self) -> Tensor:
        with torch.no_grad():
            return self._factorize()

    def _factorize(self) -> Tensor:
        lower, info = torch.linalg.cholesky_ex(self._symmetric(torch.float64))
        pivots = lower.detach().diagonal().square()
        if int(info) or bool(pivots.min() <= self.size * torch.finfo(torch.float64).eps * pivots.max()):
            raise NotPositiveDefinite(not_positive(min(0.0, float(self.smallest_eigenvalue().detach()))))
        return lower

    def _symmetric(self, dtype: torch.dtype) -> Tensor:
        matrix = self.matrix.to(dtype)
        whole = (matrix + matrix.mT) * (self._factor / 2).to(dtype)
        return whole.diagonal_scatter(whole.diagonal() + self._shift.to(dtype))

    def matvec(self, v: Tensor) -> Tensor:
        v = self._vector(v)
        return v @ self.matrix * self._factor.to(self.dtype) + v * self._shift.to(self.dtype)

    def dense(self) -> Tensor:
        return self._factor * self.matrix + torch.diag(self._shift.expand(self.size)).to(self.dtype)

    def solve(self, v: Tensor) -> Tensor:
        v = self._vector(v)
        if self._spectral:
            vectors = self.spectrum.vectors
            return ((v @ vectors) / self._values.to(self.dtype)) @ vectors.T
        flat = v.reshape(-1, self.size).double()
        return torch.cholesky_solve(flat.T, self._cholesky).T.reshape(v.shape).to(self.dtype)

    def logdet(self) -> Tensor:
        if self._spectral:
            return self._values.log().sum()
        return 2 * self._cholesky.diagonal().log().sum()

    def require_positive_definite(self) -> None:
        """Ask for the eigenvalues only where Cholesky factors, a tenth of their cost, leave doubt.

        A factor in the precision of the matrix comes first, which suffices where the pivots are far above rounding.
        """
        if self._spectral and not self.spectrum.known and bool(self._shift > 0):
            for dtype in dict.fromkeys((torch.promote_types(self.dtype, torch.float32), torch.float64)):
                lower, info = torch.linalg.cholesky_ex(self._symmetric(dtype))
                pivots = lower.diagonal().square()
                if not int(info) and bool(pivots.min() > self.size * torch.finfo(dtype).eps * pivots.max()):
                    return
        self.logdet()

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal() * self._factor.to(self.dtype) + self._shift.to(self.dtype)

    def inverse_diagonal(self) -> Tensor:
        if self._spectral:
            return self.spectrum.vectors.square() @ (1 / self._values).to(self.dtype)
        eye = torch.eye(self.size, dtype=torch.float64, device=self.device)
        return torch.linalg.solve_triangular(self._cholesky, eye, upper=False).square().sum(0).to(self.dtype)

    def smallest_eigenvalue(self) -> Tensor:
        if self._shift.ndim == 0:
            return (self._factor * self.spectrum.values + self._shift).min()
        return torch.linalg.eigvalsh(self._symmetric(torch.float64)).min()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(n, self.size, dtype=self.dtype, device=self.device, generator=generator)
        if self._spectral:
            return (noise * self._values.rsqrt().to(self.dtype)) @ self.spectrum.vectors.T
        return torch.linalg.solve_triangular(self._cholesky.T, noise.double().T, upper=True).T.to(self.dtype)

    def scale(self, c: Scalar) -> Dense:
        return Dense(self.matrix, self._factor * nonnegative(c), self._shift * c, self.spectrum)

    def eigenvalues(self) -> Tensor | None:
        return self._factor * self.spectrum.values + self._shift if self._spectral else None

    def in_eigenbasis(self, rows: Rows) -> tuple[Tensor, Rows] | None:
        values = self.eigenvalues()
        return None if values is None else (values, rows.of_size(self.size, self.dtype).times(self.spectrum.vectors))

    def shifted_draws(
        self, n: int, shifts: Tensor, generator: torch.Generator | None = None, split: float | None = None
    ) -> Tensor | None:
        values = self.eigenvalues()
        if values is None:
            return None
        require_shifts(values, shifts)
        z = torch.randn(n, self.size, generator=generator, dtype=self.dtype, device=self.device)
        roots = (values + shifts.double()[:, None]).rsqrt().to(self.dtype)
        return (z * roots[:, None]) @ self.spectrum.vectors.T

    def cleaned(self) -> Dense:
        values = self.eigenvalues()
        if values is None:
            return self
        basis = self.spectrum.vectors.double()
        return Dense((basis * values) @ basis.T)

    def __add__(self, other: PSD) -> Dense:
        self._matches(other)
        if isinstance(other, Diagonal):
            constant = other.constant()
            shift = self._shift + (other.values.double() if constant is None else constant)
            return Dense(self.matrix, self.factor, shift, self.spectrum)
        if isinstance(other, Dense):
            total = self._factor * self.matrix.double() + other._factor * other.matrix.double()
            return Dense(total.to(self.dtype), 1.0, self._shift + other._shift)
        return self + Dense(other.dense())

    def whiten(self, rows: Rows) -> Tensor:
        dense = rows.of_size(self.size, self.dtype).dense()
        if self._spectral:
            return (dense @ self.spectrum.vectors) * self._values.rsqrt().to(self.dtype)
        flat = dense.flatten(0, 1).double()
        white = torch.linalg.solve_triangular(self._cholesky, flat.T, upper=False).T
        return white.reshape(dense.shape).to(self.dtype)

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        if not isinstance(prior, Diagonal) or bool((self._shift != 0).any()) or self.matrix.requires_grad:
            return super().logdet_ratio(prior)
        precision = require_positive(prior.values)
        constant = prior.constant()
        if constant is not None:
            values = self._factor * self.spectrum.values
            require_positive(values + constant)
            return (values / constant).log1p().sum()
        root = precision.double().rsqrt()
        return Dense(self._symmetric(torch.float64) * root[:, None] * root, shift=torch.ones_like(root)).logdet()
