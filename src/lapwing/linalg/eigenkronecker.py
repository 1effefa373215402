"""Matrices that are diagonal in a Kronecker-factored eigenbasis: EKFAC, and KFAC with its prior."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lapwing.errors import IncompatiblePrior, brief
from lapwing.linalg.psd import PSD, Diagonal, Scalar, nonnegative, require_positive, require_shifts
from lapwing.linalg.rows import DenseRows, Rows, chunks
from lapwing.linalg.simultaneous import SimultaneousKronecker, add, logdet_ratio
from lapwing.linalg.spectrum import sum_log1p, tangent
from lapwing.storage import first_flaw, flaw_of_basis, flaw_of_values, register


def first_order(matrix: PSD, prior: Diagonal) -> Tensor:
    """Return zero with the gradient (A + Π)⁻¹_pp − 1/π_p of log |A + Π| − log |Π| in the entries π_p of the prior."""
    fixed = Diagonal(prior.values.detach())
    gradient = (matrix + fixed).inverse_diagonal().double() - fixed.inverse_diagonal().double()
    return (tangent(prior.values).double() * gradient).sum()


@register
@dataclass(frozen=True, eq=False)
class EigenKronecker(PSD):
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

    @property
    def _positive(self) -> Tensor:
        return require_positive(self.values)

    def require_positive_definite(self) -> None:
        require_positive(self.values)

    def matvec(self, v: Tensor) -> Tensor:
        result = self._sandwich(v, *self._basis, self.values)
        return result if self._delta is None else result + self._vector(v) * self._delta

    def solve(self, v: Tensor) -> Tensor:
        return self._corrected(self._solve(v), 1.0)

    def _solve(self, v: Tensor) -> Tensor:
        return self._sandwich(v, *self._dual, 1 / self._positive)

    def _corrected(self, x: Tensor, power: float) -> Tensor:
        """x − power · A₀⁻¹ (δ ∘ x)."""
        return x if self._delta is None else x - power * self._solve(x * self._delta)

    @property
    def _delta(self) -> Tensor | None:
        return None if self.tangent is None else self.tangent.to(self.dtype).reshape(-1)

    def _sandwich(self, v: Tensor, left: Tensor, right: Tensor, values: Tensor) -> Tensor:
        grid = left.mT @ self._vector(v).unflatten(-1, self.shape) @ right
        return (left @ (grid * values.to(self.dtype)) @ right.mT).flatten(-3)

    def logdet(self) -> Tensor:
        total = self._positive.log().sum()
        if self.left_scale is not None and self.right_scale is not None:
            _, o, i = self.shape
            total = total + 2 * (i * self.left_scale.double().log().sum() + o * self.right_scale.double().log().sum())
        if self._delta is None:
            return total
        return total + (self._delta * self._weigh(*self._dual, 1 / self._positive)).double().sum()

    def diagonal(self) -> Tensor:
        result = self._weigh(*self._basis, self.values)
        return result if self._delta is None else result + self._delta

    def inverse_diagonal(self) -> Tensor:
        result = self._weigh(*self._dual, 1 / self._positive)
        if self._delta is None:
            return result
        corrections = []  # −diag(A₀⁻¹ diag(δ) A₀⁻¹), a few columns of A₀⁻¹ at a time
        for start, length in chunks(self.size, self.size * self.dtype.itemsize):
            unit = torch.zeros(length, self.size, dtype=self.dtype, device=self.device)
            unit[:, start : start + length] = torch.eye(length, dtype=self.dtype, device=self.device)
            corrections.append(self._solve(unit).square() @ self._delta)
        return result - torch.cat(corrections)

    def _weigh(self, left: Tensor, right: Tensor, values: Tensor) -> Tensor:
        return (left.square() @ values.to(self.dtype) @ right.square().mT).reshape(-1)

    def smallest_eigenvalue(self) -> Tensor:
        smallest = self.values.min()
        if self.left_scale is None or self.right_scale is None:
            return smallest
        roots = self.left_scale.double()[:, :, None] * self.right_scale.double()[:, None, :]
        return smallest * roots.square().min()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(n, *self.shape, dtype=self.dtype, device=self.device, generator=generator)
        return self._corrected(self.colored(noise), 0.5)

    def colored(self, z: Tensor) -> Tensor:
        """(B_l ⊗ B_r) values^-½ z for the dual basis B and z (n, q, o, i), (n, P): draws from N(0, A₀⁻¹)."""
        left, right = self._dual
        return (left @ (z * self._positive.rsqrt().to(self.dtype)) @ right.mT).flatten(-3)

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

    def in_kronecker_basis(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
        if self.tangent is not None:  # a prior with a graph for each weight has no fixed basis
            return None
        return (*self._basis, *self._dual, self.values)

    @property
    def factored(self) -> bool:
        return True

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
            return logdet_ratio(self, prior) if known else super().logdet_ratio(prior)
        require_positive(prior.values)
        if self.tangent is not None:
            return super().logdet_ratio(prior)
        constant, delta = self._constant(prior)
        ratio = sum_log1p(self.values / constant)
        return ratio if delta is None else ratio + first_order(self, prior)

    def whiten(self, rows: Rows) -> Tensor:
        return self._rotated(rows).dense() * self._positive.rsqrt().to(self.dtype).reshape(-1)

    def quadratic(self, rows: Rows) -> Tensor:
        return self._rotated(rows).weighted_gram((1 / self._positive).reshape(-1))

    def variance(self, rows: Rows) -> Tensor:
        return self._rotated(rows).weighted_norm((1 / self._positive).reshape(-1))

    def output_factors(self, o: int, i: int, bias: bool = False) -> tuple[Tensor, Tensor | None, Tensor] | None:
        if self.shape != (1, o, i) or self._delta is not None:
            return None
        left, right = self._dual
        return left[0], right[0], (1 / self._positive)[0].to(self.dtype)

    def joint(self, rows: Rows) -> Tensor:
        return self._rotated(rows).joint_gram((1 / self._positive).reshape(-1))

    def _rotated(self, rows: Rows) -> Rows:
        """(J − ½ J A₀⁻¹ diag(δ)) (B_l ⊗ B_r) for the dual basis B, factored if the rows are."""
        rows = self._rows(rows)
        left, right = self._dual
        if self._delta is not None:
            dense = rows.dense()
            rows = DenseRows(dense - 0.5 * self._solve(dense) * self._delta)
        return rows.rotate(left, right)
