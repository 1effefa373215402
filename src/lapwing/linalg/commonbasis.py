"""A Kronecker basis in which two matrices are both diagonal, exactly or as nearly as possible: tensors in, tensors out.

With the generalized eigenvectors of (L, G) and (R, A), L ⊗ R + c G ⊗ A = (B_l ⊗ B_r) diag(1 + c λ ⊗ μ) (B_l ⊗ B_r)ᵀ
exactly. Other pairs have no such basis, and the best of three is taken (`common_basis`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 50  # steps of the alternation that finds the nearest product; it converges linearly
SAME = 1e-7  # relative difference up to which a share of the sum, or of a logarithm, is rounding


class Expansion(NamedTuple):
    """(B_l ⊗ B_r) diag(values) (B_l ⊗ B_r)ᵀ for each of q groups.

    left B_l (q, o, o), right B_r (q, i, i), their inverse transposes, and values (q, o, i).
    """

    left: Tensor
    right: Tensor
    left_dual: Tensor
    right_dual: Tensor
    values: Tensor

    def to(self, dtype: torch.dtype) -> Expansion:
        """Return the same with all tensors in this dtype."""
        return Expansion(*(each.to(dtype) for each in self))


def common_basis(prior: Expansion, data: Expansion) -> tuple[Expansion, Tensor, Tensor]:
    """Return the best of three bases for prior + data, and the diagonals of both in it; bases are constants.

    The three are the basis of the prior, that of the data, and the generalized eigenvectors of the prior's nearest
    product and the data seen by it. Keeping the diagonal of the sum in a basis gives the Gaussian q with the smallest
    KL(q ‖ exact) among those that are diagonal there; the basis in which this KL is smallest is returned.
    """
    best, lowest = None, float("inf")
    for basis in (_generalized(prior, data), prior, data):
        pair = diagonal_in(basis, prior), diagonal_in(basis, data)
        score = float(((pair[0] + pair[1]).detach().log().sum() + log_of_basis(basis.left, basis.right)).detach())
        if best is None or score < lowest - SAME * (abs(lowest) + prior.values.numel()):
            best, lowest = (basis, *pair), score
    assert best is not None
    return best


def log_of_basis(left: Tensor, right: Tensor) -> Tensor:
    """Return log |(B_l ⊗ B_r) (B_l ⊗ B_r)ᵀ|."""
    logs_left, logs_right = (torch.linalg.slogdet(side.double()).logabsdet.sum() for side in (left, right))
    return 2 * (right.shape[-1] * logs_left + left.shape[-1] * logs_right)


def _generalized(prior: Expansion, data: Expansion) -> Expansion:
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
    return Expansion(*turned, torch.ones_like(values))


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


def diagonal_in(basis: Expansion, matrix: Expansion) -> Tensor:
    """Return the diagonal of B⁻¹ A B⁻ᵀ for a basis B, (q, o, i); gradients reach the values of A."""
    if basis.left is matrix.left and basis.right is matrix.right:
        return matrix.values
    return moments(matrix.left.mT @ basis.left_dual, matrix.right.mT @ basis.right_dual, matrix.values)


def moments(left: Tensor, right: Tensor, values: Tensor) -> Tensor:
    """Return the diagonal of (left ⊗ right)ᵀ diag(values) (left ⊗ right), (q, o, i), in float64."""
    return left.double().square().mT @ values.double() @ right.double().square()


def neglected_share(basis: Expansion, first: Expansion, second: Expansion, kept: Tensor) -> float:
    """Return the share of the Frobenius norm of B⁻¹ (A₁ + A₂) B⁻ᵀ that is outside its diagonal `kept`."""
    both = [(basis.left_dual.mT @ m.left, basis.right_dual.mT @ m.right, m.values.detach()) for m in (first, second)]
    whole = sum(
        float((v * ((left.mT @ l).square() @ w @ (right.mT @ r).square().mT)).sum())
        for left, right, v in both
        for l, r, w in both
    )
    share = max(0.0, 1 - float(kept.square().sum()) / whole) if whole > 0 else 0.0
    return share**0.5 if share > SAME else 0.0
