"""Sums of two matrices over a weight matrix that both keep its sides apart: a Kronecker posterior as the next prior."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import NotPositiveDefinite, brief
from lapwing.linalg.psd import PSD, Scalar, nonnegative, require_positive
from lapwing.linalg.rows import Rows
from lapwing.linalg.spectrum import sum_log1p
from lapwing.storage import first_flaw, flaw_of_values, register

STEPS = 50  # of the alternation that finds the nearest product, which converges linearly
SAME = 1e-7  # relative difference up to which a share of the sum, or of a logarithm, is rounding


@register
@dataclass(frozen=True, eq=False)
class SimultaneousKronecker(PSD):
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

    def _in(self, dtype: torch.dtype) -> SimultaneousKronecker:
        left, right, dual, dual_right = self.left, self.right, self.left_dual, self.right_dual
        return SimultaneousKronecker(
            left.to(dtype), right.to(dtype), dual.to(dtype), dual_right.to(dtype), self.values, self.neglected
        )

    @property
    def factored(self) -> bool:
        return True

    def flaw(self, signed: bool = False) -> str:
        sides = ("left", self.left, self.left_dual), ("right", self.right, self.right_dual)
        return first_flaw(
            flaw_of_values("its list of eigenvalues", self.values, signed=signed),
            *(flaw_of_values(f"its {name} basis", side, signed=True) for name, *both in sides for side in both),
            *(_flaw_of_dual(name, basis, dual) for name, basis, dual in sides),
        )

    @property
    def _positive(self) -> Tensor:
        return require_positive(self.values)

    def require_positive_definite(self) -> None:
        require_positive(self.values)

    def matvec(self, v: Tensor) -> Tensor:
        return self._sandwich(v, self.left, self.right, self.values)

    def solve(self, v: Tensor) -> Tensor:
        return self._sandwich(v, self.left_dual, self.right_dual, 1 / self._positive)

    def _sandwich(self, v: Tensor, left: Tensor, right: Tensor, values: Tensor) -> Tensor:
        grid = left.mT @ self._vector(v).unflatten(-1, self.shape) @ right
        return (left @ (grid * values.to(self.dtype)) @ right.mT).flatten(-3)

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

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        z = torch.randn(n, *self.shape, dtype=self.dtype, device=self.device, generator=generator)
        return (self.left_dual @ (z * self._positive.rsqrt().to(self.dtype)) @ self.right_dual.mT).flatten(-3)

    def scale(self, c: Scalar) -> SimultaneousKronecker:
        return replace(self, values=self.values * nonnegative(c))

    def __add__(self, other: PSD) -> SimultaneousKronecker:
        self._matches(other)
        return add(self, other)

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        return logdet_ratio(self, prior) if prior.factored else super().logdet_ratio(prior)

    def in_kronecker_basis(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
        return self.left, self.right, self.left_dual, self.right_dual, self.values

    def whiten(self, rows: Rows) -> Tensor:
        return self._rotated(rows).dense() * self._positive.rsqrt().to(self.dtype).reshape(-1)

    def quadratic(self, rows: Rows) -> Tensor:
        return self._rotated(rows).weighted_gram((1 / self._positive).reshape(-1))

    def variance(self, rows: Rows) -> Tensor:
        return self._rotated(rows).weighted_norm((1 / self._positive).reshape(-1))

    def joint(self, rows: Rows) -> Tensor:
        return self._rotated(rows).joint_gram((1 / self._positive).reshape(-1))

    def _rotated(self, rows: Rows) -> Rows:
        return self._rows(rows).rotate(self.left_dual, self.right_dual)

    def output_factors(self, o: int, i: int, bias: bool = False) -> tuple[Tensor, Tensor | None, Tensor] | None:
        if self.shape != (1, o, i):
            return None
        return self.left_dual[0], self.right_dual[0], (1 / self._positive)[0].to(self.dtype)


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
