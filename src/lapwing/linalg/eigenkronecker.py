"""Matrices that are diagonal in a Kronecker-factored basis: EKFAC, KFAC with its prior, and sums of two of them.

An orthogonal basis is that of one matrix (`EigenKronecker`). A sum of two matrices that both keep the sides of a weight
matrix apart, such as a Kronecker posterior as the next prior, needs another (`SimultaneousKronecker`, made by `add`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lapwing.errors import IncompatiblePrior, NotPositiveDefinite, brief
from lapwing.linalg.psd import PSD, Diagonal, Scalar, nonnegative, require_positive, require_shifts
from lapwing.linalg.rows import DenseRows, Rows, chunks
from lapwing.linalg.spectrum import sum_log1p, tangent
from lapwing.storage import first_flaw, flaw_of_basis, flaw_of_values, register

STEPS = 50  # steps of the alternation that finds the nearest product; it converges linearly
SAME = 1e-7  # relative difference up to which a share of the sum, or of a logarithm, is rounding


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

    def in_kronecker_basis(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
        return (*self._basis, *self._dual, self.values)

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


def first_order(matrix: PSD, prior: Diagonal) -> Tensor:
    """Return zero with the gradient (A + Π)⁻¹_pp − 1/π_p of log |A + Π| − log |Π| in the entries π_p of the prior."""
    fixed = Diagonal(prior.values.detach())
    gradient = (matrix + fixed).inverse_diagonal().double() - fixed.inverse_diagonal().double()
    return (tangent(prior.values).double() * gradient).sum()


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
            corrections.append(super().solve(unit).square() @ self._delta)
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

    def in_kronecker_basis(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
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
            return logdet_ratio(self, prior) if known else super().logdet_ratio(prior)
        require_positive(prior.values)
        if self.tangent is not None:
            return super().logdet_ratio(prior)
        constant, delta = self._constant(prior)
        ratio = sum_log1p(self.values / constant)
        return ratio if delta is None else ratio + first_order(self, prior)

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
    (q, o, i) in float64. It is what `Kronecker + Kronecker` gives: with the generalized eigenvectors of (L, G) and
    (R, A), L ⊗ R + c G ⊗ A = (B_l ⊗ B_r) diag(1 + c λ ⊗ μ) (B_l ⊗ B_r)ᵀ exactly. Where no such basis makes both
    summands diagonal, `add` keeps the diagonal alone, and `neglected` is the share of the Frobenius norm, in these
    coordinates, that is outside it. Every answer is that of the matrix that is kept.

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

    def _in(self, dtype: torch.dtype) -> SimultaneousKronecker:
        left, right, dual, dual_right = self.left, self.right, self.left_dual, self.right_dual
        return SimultaneousKronecker(
            left.to(dtype), right.to(dtype), dual.to(dtype), dual_right.to(dtype), self.values, self.neglected
        )

    def flaw(self, signed: bool = False) -> str:
        sides = ("left", self.left, self.left_dual), ("right", self.right, self.right_dual)
        return first_flaw(
            flaw_of_values("its list of eigenvalues", self.values, signed=signed),
            *(flaw_of_values(f"its {name} basis", side, signed=True) for name, *both in sides for side in both),
            *(_flaw_of_dual(name, basis, dual) for name, basis, dual in sides),
        )

    def logdet(self) -> Tensor:
        return self._positive.log().sum() + self._log_of_basis()

    def _log_of_basis(self) -> Tensor:
        """log |(B_l ⊗ B_r) (B_l ⊗ B_r)ᵀ|."""
        _, o, i = self.shape
        left, right = (torch.linalg.slogdet(side.double()).logabsdet.sum() for side in (self.left, self.right))
        return 2 * (i * left + o * right)

    def diagonal(self) -> Tensor:
        return _moments(self.left.mT, self.right.mT, self.values).to(self.dtype).reshape(-1)

    def inverse_diagonal(self) -> Tensor:
        return _moments(self.left_dual.mT, self.right_dual.mT, 1 / self._positive).to(self.dtype).reshape(-1)

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
        return logdet_ratio(self, prior) if prior.factored else super().logdet_ratio(prior)


def add(data: PSD, prior: PSD) -> SimultaneousKronecker:
    """Return data + prior, exact where one Kronecker basis makes both diagonal, and its diagonal in a basis elsewhere.

    Exact are L ⊗ R + c G ⊗ A, whatever the four factors, and two matrices that share their eigenbasis. A third summand,
    a shift by δI, or eigenvalues that were estimated one by one (EKFAC) have no common basis. The diagonal that is
    then kept is that of the Gaussian q with the smallest KL(q ‖ exact) among those that are diagonal in the basis, as
    EKFAC's own moments are: the trace in these coordinates is right and the log-determinant never too small, so an
    evidence stays a lower bound. Of three bases, that of the prior, that of the data and that of the generalized
    eigenvectors (of the prior's nearest product, and the data seen by it), the one with the smallest KL is taken.
    """
    first, second = _both(data, prior)
    common, of_prior, of_data = _common(first, second)
    values = of_prior + of_data
    neglected = _neglected(common, first, second, values.detach())
    return replace(common._in(data.dtype), values=values, neglected=neglected)


def logdet_ratio(data: PSD, prior: PSD) -> Tensor:
    """Return log |data + prior| − log |prior| for the sum that `add` gives, without a difference of large numbers."""
    prior.require_positive_definite()
    first, second = _both(data, prior)
    common, of_prior, of_data = _common(first, second)
    projected = of_prior.log().sum() + common._log_of_basis()
    gap = projected - first.logdet()  # zero where the prior is diagonal in the common basis
    ratio = sum_log1p(of_data / of_prior)
    rounding = SAME * (abs(float(projected.detach())) + first.size)
    return ratio if float(gap.detach()) <= rounding else ratio + gap


def _both(data: PSD, prior: PSD) -> tuple[SimultaneousKronecker, SimultaneousKronecker]:
    """Return prior and data in their own bases, in float64; the prior is the one of them that has an inverse."""
    found, other = data.in_kronecker_basis(), prior.in_kronecker_basis()
    if found is None or other is None or found[-1].shape != other[-1].shape:
        raise data._refuse(prior, "a prior that is a Kronecker product, or diagonal in a Kronecker eigenbasis")
    first, second = (SimultaneousKronecker(*each)._in(torch.float64) for each in (other, found))
    if not bool((first.values > 0).all()):
        first, second = second, first
    if not bool((first.values > 0).all()):
        raise NotPositiveDefinite(
            "neither of the two Kronecker matrices that are added is positive definite, so their sum has no basis in "
            "which both are diagonal. Add a prior with positive precision to one of them first."
        )
    return first, second


def _common(prior: SimultaneousKronecker, data: SimultaneousKronecker) -> tuple[SimultaneousKronecker, Tensor, Tensor]:
    """Return the best of three bases, and the diagonals of prior and data in it; bases are constants."""
    best, lowest = None, float("inf")
    for basis in (_generalized(prior, data), prior, data):
        pair = _inside(basis, prior), _inside(basis, data)
        score = float(((pair[0] + pair[1]).detach().log().sum() + basis._log_of_basis()).detach())
        if best is None or score < lowest - SAME * (abs(lowest) + prior.size):
            best, lowest = (basis, *pair), score
    assert best is not None
    return best


def _generalized(prior: SimultaneousKronecker, data: SimultaneousKronecker) -> SimultaneousKronecker:
    """Return the generalized eigenvectors of (L, G) and (R, A): L ⊗ R is near the prior, G and A the data seen by it.

    G is the sum of the data over columns, weighted by R⁻¹, and A that over rows, weighted by L⁻¹: multiples of the
    factors where the data are a Kronecker product.
    """
    rows, columns = nearest_product(prior.values.detach())
    left, left_dual = prior.left * rows.sqrt()[:, None], prior.left_dual * rows.rsqrt()[:, None]
    right, right_dual = prior.right * columns.sqrt()[:, None], prior.right_dual * columns.rsqrt()[:, None]
    seen_left, seen_right = left_dual.mT @ data.left, right_dual.mT @ data.right
    values = data.values.detach()
    over_columns = (values @ seen_right.square().sum(1)[:, :, None])[..., 0]
    over_rows = (seen_left.square().sum(1)[:, None] @ values)[:, 0]
    turn_left = _eigenvectors(seen_left, over_columns)
    turn_right = _eigenvectors(seen_right, over_rows)
    turned = left @ turn_left, right @ turn_right, left_dual @ turn_left, right_dual @ turn_right
    return SimultaneousKronecker(*turned, torch.ones_like(values))


def nearest_product(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (q, o) and columns (q, i) whose product is nearest to positive values (q, o, i) in KL(q ‖ p).

    For precisions P = diag(values) and Q = diag(rows ⊗ columns), KL(q ‖ p) = ½ (Σ values / (rows ⊗ columns) +
    Σ log(rows ⊗ columns)) + constant, so the best rows for given columns are means of values / columns, and conversely.
    """
    columns = torch.ones_like(values[:, 0])
    rows = values.mean(2)
    for _ in range(STEPS):
        columns = (values / rows[:, :, None]).mean(1)
        before, rows = rows, (values / columns[:, None, :]).mean(2)
        if bool(((rows - before).abs() <= 1e-12 * rows).all()):
            break
    return rows, columns


def _eigenvectors(half: Tensor, weights: Tensor) -> Tensor:
    """Return the eigenvectors of half diag(weights) halfᵀ."""
    matrix = (half * weights[:, None]) @ half.mT
    return torch.linalg.eigh(0.5 * (matrix + matrix.mT)).eigenvectors


def _inside(basis: SimultaneousKronecker, matrix: SimultaneousKronecker) -> Tensor:
    """Return the diagonal of B⁻¹ A B⁻ᵀ, (q, o, i); gradients reach the values of A."""
    if basis.left is matrix.left and basis.right is matrix.right:
        return matrix.values
    return _moments(matrix.left.mT @ basis.left_dual, matrix.right.mT @ basis.right_dual, matrix.values)


def _moments(left: Tensor, right: Tensor, values: Tensor) -> Tensor:
    """Return the diagonal of (left ⊗ right)ᵀ diag(values) (left ⊗ right), (q, o, i)."""
    return left.double().square().mT @ values @ right.double().square()


def _neglected(
    basis: SimultaneousKronecker, first: SimultaneousKronecker, second: SimultaneousKronecker, kept: Tensor
) -> float:
    """Return the share of the Frobenius norm of B⁻¹ (A₁ + A₂) B⁻ᵀ that is outside its diagonal."""
    both = [(basis.left_dual.mT @ m.left, basis.right_dual.mT @ m.right, m.values.detach()) for m in (first, second)]
    whole = sum(
        float((v * ((left.mT @ l).square() @ w @ (right.mT @ r).square().mT)).sum())
        for left, right, v in both
        for l, r, w in both
    )
    share = max(0.0, 1 - float(kept.square().sum()) / whole) if whole > 0 else 0.0
    return share**0.5 if share > SAME else 0.0


def _flaw_of_dual(name: str, basis: Tensor, dual: Tensor) -> str:
    off = basis.double().mT @ dual.double() - torch.eye(basis.shape[-1], dtype=torch.float64, device=basis.device)
    wrong = bool((off.abs() > torch.finfo(basis.dtype).eps ** 0.5).any())
    return f"its {name} dual is not the inverse of its {name} basis" if wrong else ""
