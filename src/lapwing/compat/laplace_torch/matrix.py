"""`Kron` and `KronDecomposed`: Kronecker factors per parameter tensor, and their eigendecomposition with a prior."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

Factors = Sequence[Sequence[Tensor]]
"""One entry per tensor: [G, A] for G ⊗ A, or one matrix. A vector stands for a diagonal matrix."""


class Kron:
    """A block-diagonal matrix with blocks G ⊗ A, or one dense matrix (a bias), in the order of the parameters.

    Kron([[G, A], [G]]).decompose() + prior_precision
    """

    def __init__(self, kfacs: Factors) -> None:
        self.kfacs = kfacs

    @classmethod
    def init_from_model(
        cls, model: nn.Module | Iterable[Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> Kron:
        """Return zero factors that fit the parameters of a model, or the given parameters."""
        params = model.parameters() if isinstance(model, nn.Module) else model
        sides = [(p.shape[0],) if p.ndim == 1 else (p.shape[0], p[0].numel()) for p in params]
        return cls([[torch.zeros(n, n, device=device, dtype=dtype) for n in side] for side in sides])

    def __add__(self, other: Kron) -> Kron:
        """Add factor by factor, which is how sums of statistics are merged: it is not the sum of the matrices."""
        if not isinstance(other, type(self)):
            raise ValueError(f"only a Kron can be added to a Kron, got {type(other).__name__}")
        pairs = zip(self.kfacs, other.kfacs, strict=True)
        return Kron([[a + b for a, b in zip(one, two, strict=True)] for one, two in pairs])

    def __mul__(self, scalar: float | Tensor) -> Kron:
        """Multiply the matrix by a number, spread evenly over the factors of a block."""
        _require_scalar(scalar)
        return Kron([[scalar ** (1 / len(block)) * factor for factor in block] for block in self.kfacs])

    __radd__ = __add__
    __rmul__ = __mul__

    def __len__(self) -> int:
        return len(self.kfacs)

    def decompose(self, damping: bool = False) -> KronDecomposed:
        """Return the eigendecomposition of every factor, to which a prior can be added."""
        found = [[_eigen(factor) for factor in block] for block in self.kfacs]
        vectors, values = ([[pair[k] for pair in block] for block in found] for k in (1, 0))
        return KronDecomposed(vectors, values, damping=damping)

    def bmm(self, W: Tensor, exponent: float = 1) -> Tensor:
        """Multiply vectors (..., P) by the matrix."""
        if exponent != 1:
            raise ValueError("powers other than 1 need the decomposition: kron.decompose().bmm(W, exponent)")
        done = []
        for block, part in zip(self.kfacs, W.split([_size(block) for block in self.kfacs], -1), strict=True):
            left, right = _dense(block[0]), _dense(block[1]) if len(block) == 2 else block[0].new_ones(1, 1)
            done.append((left @ part.unflatten(-1, (len(left), len(right))) @ right.mT).flatten(-2))
        return torch.cat(done, -1)

    def logdet(self) -> Tensor:
        return self.decompose().logdet()

    def diag(self) -> Tensor:
        """The diagonal of the matrix, (P,)."""
        sides = [[factor.diag() if factor.ndim > 1 else factor for factor in block] for block in self.kfacs]
        return torch.cat([side[0] if len(side) == 1 else torch.outer(*side).flatten() for side in sides])

    def to_matrix(self) -> Tensor:
        """The dense matrix (P, P)."""
        blocks = [[_dense(factor) for factor in block] for block in self.kfacs]
        return torch.block_diag(*(block[0] if len(block) == 1 else torch.kron(*block) for block in blocks))


class KronDecomposed:
    """Kronecker factors in their eigenbases, with one number per block added to the eigenvalues (`deltas`).

    `damping` adds √delta to the eigenvalues of each factor instead (Ritter et al. 2018, Eq. 9); sums and
    products keep it, unlike in laplace-torch.
    """

    def __init__(
        self, eigenvectors: Factors, eigenvalues: Factors, deltas: Tensor | None = None, damping: bool = False
    ) -> None:
        self.eigenvectors, self.eigenvalues, self.damping = eigenvectors, eigenvalues, damping
        self.deltas = eigenvectors[0][0].new_zeros(len(eigenvalues)) if deltas is None else self._checked(deltas)

    def _checked(self, deltas: Tensor) -> Tensor:
        if not isinstance(deltas, Tensor) or not (deltas.ndim == 0 or deltas.shape in ((1,), (len(self),))):
            raise ValueError(f"expected a tensor with one number or {len(self)}, one per block, got {deltas!r}")
        return deltas.expand(len(self)) if deltas.numel() == 1 else deltas

    def detach(self) -> KronDecomposed:
        self.deltas = self.deltas.detach()
        return self

    def __add__(self, deltas: Tensor) -> KronDecomposed:
        added = self.deltas + self._checked(deltas)
        return KronDecomposed(self.eigenvectors, self.eigenvalues, added, self.damping)

    def __mul__(self, scalar: float | Tensor) -> KronDecomposed:
        _require_scalar(scalar)
        values = [[scalar ** (1 / len(block)) * v for v in block] for block in self.eigenvalues]
        return KronDecomposed(self.eigenvectors, values, self.deltas, self.damping)

    __radd__ = __add__
    __rmul__ = __mul__

    def __len__(self) -> int:
        return len(self.eigenvalues)

    def _grid(self, k: int) -> Tensor:
        """The eigenvalues of block k, (o,) or (o, i)."""
        values, delta = self.eigenvalues[k], self.deltas[k]
        if len(values) == 1:
            return values[0] + delta
        if self.damping:
            return torch.outer(values[0] + delta.sqrt(), values[1] + delta.sqrt())
        return torch.outer(*values) + delta

    def logdet(self) -> Tensor:
        """The log-determinant, summed in float64."""
        total = torch.stack([self._grid(k).double().log().sum() for k in range(len(self))]).sum()
        return total.to(self.eigenvalues[0][0].dtype)

    def bmm(self, W: Tensor, exponent: float = -1) -> Tensor:
        """Multiply vectors (..., P) by a power of the matrix."""
        sizes = [self._grid(k).numel() for k in range(len(self))]
        done = []
        for k, part in enumerate(W.split(sizes, -1)):
            power, Q = self._grid(k) ** exponent, self.eigenvectors[k]
            if len(Q) == 1:
                done.append((part @ Q[0] * power) @ Q[0].mT)
            else:
                inner = Q[0].mT @ part.unflatten(-1, power.shape) @ Q[1]
                done.append((Q[0] @ (inner * power) @ Q[1].mT).flatten(-2))
        return torch.cat(done, -1)

    def inv_square_form(self, W: Tensor) -> Tensor:
        """W A⁻¹ Wᵀ of each item: (batch, rows, P) → (batch, rows, rows)."""
        return W @ self.bmm(W, exponent=-1).mT

    def diag(self, exponent: float = 1) -> Tensor:
        """The diagonal of a power of the matrix, (P,)."""
        parts = []
        for k, Q in enumerate(self.eigenvectors):
            power = self._grid(k) ** exponent
            parts.append((Q[0].square() @ (power if len(Q) == 1 else power @ Q[1].square().mT)).flatten())
        return torch.cat(parts)

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """A power of the matrix, dense (P, P)."""
        blocks = []
        for k, Q in enumerate(self.eigenvectors):
            basis = Q[0] if len(Q) == 1 else torch.kron(Q[0].contiguous(), Q[1].contiguous())
            blocks.append((basis * (self._grid(k) ** exponent).flatten()) @ basis.mT)
        return torch.block_diag(*blocks)


def _eigen(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, not below zero, and eigenvectors; a vector is a diagonal matrix."""
    if factor.ndim == 1:
        return factor, torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return symeig(factor)


def symeig(M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues (negative ones, which come from rounding, set to zero) and eigenvectors of a matrix.

    The decomposition runs in float64; a matrix that is not finite raises.
    """
    if not bool(M.isfinite().all()):
        raise ValueError("a Kronecker factor is not finite: look for NaN or infinite values in the data and weights")
    values, vectors = torch.linalg.eigh(M.double(), UPLO="U")
    return values.clamp(min=0).to(M.dtype), vectors.to(M.dtype)


def _dense(factor: Tensor) -> Tensor:
    return factor if factor.ndim > 1 else factor.diag()


def _size(block: Sequence[Tensor]) -> int:
    return len(block[0]) * (len(block[1]) if len(block) == 2 else 1)


def _require_scalar(scalar: object) -> None:
    number = isinstance(scalar, int | float) or (isinstance(scalar, Tensor) and scalar.numel() == 1 and scalar.ndim < 2)
    if not number:
        raise ValueError(f"a Kronecker matrix can be multiplied with a number only, got {scalar!r}")
