"""Kronecker products G ⊗ A with a prior or without, and the factor-wise damping of Ritter et al. (2018)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import IncompatiblePrior, NotPositiveDefinite, UnsupportedOperation, brief
from lapwing.linalg.eigenkronecker import EigenKronecker, SimultaneousKronecker, add, first_order, logdet_ratio
from lapwing.linalg.psd import PSD, Diagonal, Scalar, nonnegative, require_positive
from lapwing.linalg.rows import Rows, added
from lapwing.linalg.spectrum import PIECE, Spectrum, sum_log1p, tangent
from lapwing.storage import first_flaw, flaw_of_ranks, flaw_of_scalar, flaw_of_symmetric, register


@register
@dataclass(frozen=True, eq=False)
class Kronecker(PSD):
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
    factored = damps = True

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
    def shape(self) -> tuple[int, int, int]:
        """(q, o, i)."""
        return self.left.shape[0], self.left.shape[1], self.right.shape[1]

    @property
    def size(self) -> int:
        q, o, i = self.shape
        return q * o * i

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    @property
    def device(self) -> torch.device:
        return self.left.device

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

    def grid(self) -> Tensor:
        """All eigenvalues, (q, o, i), from those of the factors without negative ones."""
        return _grid(self._factor, *self.factor_eigenvalues, self.shift)

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
        return EigenKronecker(self.left_spectrum.vectors, self.right_spectrum.vectors, values)

    @property
    def _written(self) -> EigenKronecker:
        """The matrix in its eigenbasis. Without a shift, eigenvalues of rounding size are zero: inverses raise."""
        if self.shift is not None:
            return self._eigen(self.grid())
        self._require_definite()
        left, right = self.left_spectrum.significant.clamp(min=0), self.right_spectrum.significant.clamp(min=0)
        return self._eigen(_grid(self._factor, left, right, None))

    def matvec(self, v: Tensor) -> Tensor:
        v = self._vector(v)
        moved = (self.left @ v.unflatten(-1, self.shape) @ self.right).flatten(-3) * self._factor.to(self.dtype)
        return moved if self.shift is None else moved + v * self.shift.to(self.dtype)

    def solve(self, v: Tensor) -> Tensor:
        return self._written.solve(v)

    def require_positive_definite(self) -> None:
        if self.shift is None:
            self._written.require_positive_definite()
        else:
            require_positive(self._smallest())

    def logdet(self) -> Tensor:
        if self.shift is None:
            return self._written.logdet()
        require_positive(self._smallest())
        return added([few.log().sum() for few in self._pieces()])

    def diagonal(self) -> Tensor:
        left, right = self.left.diagonal(dim1=1, dim2=2), self.right.diagonal(dim1=1, dim2=2)
        shift = None if self.shift is None else self.shift.to(self.dtype)
        return _grid(self._factor.to(self.dtype), left, right, shift).reshape(-1)

    def inverse_diagonal(self) -> Tensor:
        return self._written.inverse_diagonal()

    def smallest_eigenvalue(self) -> Tensor:
        return self._smallest().min()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self._written.sample(n, generator)

    def scale(self, c: Scalar) -> Kronecker:
        shift = None if self.shift is None else self.shift * c
        return replace(self, factor=self._factor * nonnegative(c), shift=shift)

    def whiten(self, rows: Rows) -> Tensor:
        return self._written.whiten(rows)

    def quadratic(self, rows: Rows) -> Tensor:
        return self._written.quadratic(rows)

    def variance(self, rows: Rows) -> Tensor:
        return self._written.variance(rows)

    def joint(self, rows: Rows) -> Tensor:
        return self._written.joint(rows)

    def output_factors(self, o: int, i: int, bias: bool = False) -> tuple[Tensor, Tensor | None, Tensor] | None:
        return self._written.output_factors(o, i)

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
            return self._eigen(self.grid()) + other
        whitened, rows, columns = self._whitened(other)
        bases = whitened.left_spectrum.vectors, whitened.right_spectrum.vectors
        delta = tangent(other.values).reshape(self.shape) if other.values.requires_grad else None
        roots = rows.sqrt().to(self.dtype), columns.sqrt().to(self.dtype)
        return EigenKronecker(*bases, whitened.grid() + 1, *roots, delta)

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        if not isinstance(prior, Diagonal):
            return logdet_ratio(self, prior) if prior.factored else super().logdet_ratio(prior)
        require_positive(prior.values)
        constant = prior.constant()
        if constant is not None:
            return self._sum_log1p(constant)
        common = prior.common()
        ratio = self._whitened(prior)[0]._sum_log1p() if common is None else self._sum_log1p(common)
        return ratio + first_order(self, prior) if prior.values.requires_grad else ratio

    def known_eigenvalues(self) -> Tensor | None:
        tracked = any(isinstance(each, Tensor) and each.requires_grad for each in (self.factor, self.shift))
        return None if tracked else self.grid().flatten()

    def in_kronecker_basis(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
        bases = self.left_spectrum.vectors, self.right_spectrum.vectors
        return (*bases, *bases, self.grid())

    def eigenvalues(self) -> Tensor | None:
        return self.grid().reshape(-1)

    def in_eigenbasis(self, rows: Rows) -> tuple[Tensor, Rows] | None:
        return self._eigen(self.grid()).in_eigenbasis(rows)

    def shifted_products(self, rows: Rows, shifts: Tensor, pairs: Tensor, split: float | None = None) -> Tensor:
        if split is None:
            return super().shifted_products(rows, shifts, pairs)
        each = [self._damped(1.0, rho, split).quadratic(rows) for rho in shifts]
        return torch.stack([gram[:, pairs[0], pairs[1]] for gram in each])

    def shifted_draws(
        self, n: int, shifts: Tensor, generator: torch.Generator | None = None, split: float | None = None
    ) -> Tensor | None:
        if split is None:
            return self._eigen(self.grid()).shifted_draws(n, shifts, generator)
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
