"""A matrix that is known by its products alone: solves, samples, log-determinants and variances by iteration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapwing.errors import UnsupportedOperation, brief
from lapwing.linalg.dense import Dense
from lapwing.linalg.krylov import Estimate, Policy, slq_logdet, spheres
from lapwing.linalg.psd import PSD, Diagonal, Scalar, nonnegative, require_positive
from lapwing.linalg.rows import Rows, chunks
from lapwing.linalg.solvers import Preconditioner, Sketch, Solution, conjugate_gradients, differentiable_solve

FORMED = 2048  # weights up to which many shifts are served by the matrix itself
RESOLVED = 0.05  # the smallest shift that solves are trusted with, in parts of ε·λ/tolerance; they fail near 0.005


class Product(ABC):
    """A positive semi-definite matrix G that is known by its products and by draws from N(0, G)."""

    size: int
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """G v, (s, P) → (s, P) float64, without gradients."""

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws from N(0, G), (n, P) float64."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """diag G, (P,) float64."""

    def white_solution(self, c: Tensor, shift: Tensor, v: Tensor, options: Solver) -> Solution:
        """Solve (I + c D^{-½} G D^{-½}) x = v without products over all data, where G has such a way."""
        raise UnsupportedOperation("method='batches' needs a curvature of one fit; use method='cg' after update()")


@dataclass(frozen=True, eq=False)
class SumProduct(Product):
    """Σ_k c_k G_k."""

    __repr__ = brief

    parts: tuple[tuple[float, Product], ...]

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.parts[0][1].size

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.parts[0][1].dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.parts[0][1].device

    def matvec(self, v: Tensor) -> Tensor:
        return torch.stack([c * part.matvec(v) for c, part in self.parts]).sum(0)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.stack([c**0.5 * part.draw(n, generator) for c, part in self.parts]).sum(0)

    def diagonal(self) -> Tensor:
        return torch.stack([c * part.diagonal() for c, part in self.parts]).sum(0)


@dataclass(frozen=True, eq=False)
class Solver:
    """How far iterations go. `columns` vectors are solved at a time; `probes` carry log-determinants and variances.

    `sampling`: "solve" perturbs and solves, exact to the tolerance; "sketch" draws from the sketch plus the prior, the
    two-part sample, without products. `predictive`: J A⁻¹ Jᵀ by "solve", by fixed `samples`, or by the "sketch".
    `method="batches"` leaves solves to the product, which then takes at most `iterations` passes.
    """

    __repr__ = brief

    tolerance: float = 1e-6
    iterations: int = 500
    columns: int = 16
    probes: int = 8
    steps: int = 20
    samples: int = 64
    sampling: Literal["solve", "sketch"] = "solve"
    predictive: Literal["solve", "samples", "sketch"] = "solve"
    unconverged: Policy = "raise"
    seed: int = 0
    method: Literal["cg", "batches"] = "cg"


@dataclass(frozen=True, eq=False)
class Operator(PSD):
    """A = factor · G + diag(shift), with G behind a `Product` and a sketch G ≈ Uᵀ diag(λ) U.

    Everything happens in coordinates whitened by the shift, A_w = I + c D^{-½} G D^{-½}, preconditioned by
    M = I + c D^{-½} Uᵀ diag(λ) U D^{-½}:

        log|A| = log|D| + log|M| + E zᵀ log(M^{-½} A_w M^{-½}) z       (unbiased for any sketch)
        diag A_w⁻¹ = diag M⁻¹ + E[(A_w⁻¹ M y − y) ∘ y],  y = M^{-½} z   (the same probes; gives every gradient)

    The better the sketch, the fewer products: with an exact one nothing is left to iterate. First derivatives in
    factor, shift and vectors; second derivatives raise.
    """

    __repr__ = brief

    product: Product
    sketch: Sketch
    factor: Scalar = 1.0
    shift: Scalar = 0.0
    solver: Solver = field(default_factory=Solver)
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, metadata={"cache": True})
    iterative = True
    nbytes = None

    @property
    def size(self) -> int:
        return self.product.size

    @property
    def dtype(self) -> torch.dtype:
        return self.product.dtype

    @property
    def device(self) -> torch.device:
        return self.product.device

    @property
    def _factor(self) -> Tensor:
        return torch.as_tensor(self.factor, dtype=torch.float64, device=self.device)

    @property
    def _shift(self) -> Tensor:
        return torch.as_tensor(self.shift, dtype=torch.float64, device=self.device)

    @property
    def _constants(self) -> tuple[Tensor, Tensor]:
        """c and D without gradients, D positive."""
        shift = self._shift.detach()
        require_positive(shift.reshape(-1))
        return self._factor.detach(), shift

    def require_positive_definite(self) -> None:
        self._constants  # noqa: B018 (G is never indefinite: a positive diagonal suffices)

    @cached_property
    def preconditioner(self) -> Preconditioner:
        """M, from the sketch."""
        c, shift = self._constants
        return Preconditioner(Sketch(self.sketch.basis, self.sketch.values * c), shift)

    def matvec(self, v: Tensor) -> Tensor:
        v = self._vector(v)
        return self._apply(v.reshape(-1, self.size).double()).reshape(v.shape).to(self.dtype)

    def _apply(self, v: Tensor) -> Tensor:
        """A v for (s, P) float64; gradients flow into factor, shift and v."""
        with torch.no_grad():
            image = self.product.matvec(v.detach())
        if v.requires_grad:  # G is constant and symmetric
            image = _Linear.apply(v, image, self.product.matvec)
        return self._factor * image + self._shift * v

    def _white(self, v: Tensor) -> Tensor:
        """A_w v."""
        if self._white_matrix is not None:
            return v @ self._white_matrix[0]
        c, shift = self._constants
        root = shift.rsqrt()
        return v + c * root * self.product.matvec(root * v)

    def solution(self, v: Tensor, start: Tensor | None = None) -> Solution:
        """A⁻¹ v for (s, P), with the residual (of the whitened system) that every column reached."""
        _, shift = self._constants
        root = shift.rsqrt()
        found = self._white_solution(root * v.double())
        return replace(found, x=root * found.x)

    def _white_solution(self, v: Tensor) -> Solution:
        options = self.solver
        if self._white_matrix is not None:
            x = torch.cholesky_solve(v.double().T, self._white_matrix[1]).T
            return Solution(x, v.new_zeros(len(v)), options.tolerance, 0, 0)
        if options.method == "batches":
            return self.product.white_solution(*self._constants, v, options)
        parts = [
            conjugate_gradients(
                self._white,
                part,
                precondition=lambda u: self.preconditioner.power(u, -1.0),
                tolerance=options.tolerance,
                iterations=options.iterations,
                unconverged=options.unconverged,
            )
            for part in v.split(options.columns)
        ]
        if len(parts) == 1:
            return parts[0]
        return Solution(
            torch.cat([p.x for p in parts]) if parts else v,
            torch.cat([p.residuals for p in parts]) if parts else v.new_zeros(0),
            options.tolerance,
            max((p.iterations for p in parts), default=0),
            sum(p.products for p in parts),
            sum(p.restarts for p in parts),
        )

    def solve(self, v: Tensor) -> Tensor:
        v = self._vector(v)
        flat = v.reshape(-1, self.size).double()
        found = differentiable_solve(self._apply, flat, lambda b: self.solution(b).x)
        return found.reshape(v.shape).to(self.dtype)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        c, shift = self._constants
        root = shift.rsqrt()
        with torch.no_grad():
            noise = torch.randn(n, self.size, dtype=self.dtype, device=self.device, generator=generator).double()
            if self.solver.sampling == "sketch":
                return (root * self.preconditioner.power(noise, -0.5)).to(self.dtype)
            right = noise + c.sqrt() * root * self.product.draw(n, generator)  # covariance A_w
            return (root * self._white_solution(right).x).to(self.dtype)

    @property
    def _key(self) -> tuple:
        c, shift = self._constants
        if shift.ndim == 0:
            return float(c), float(shift)
        return float(c), blake2b(shift.cpu().contiguous().numpy().data).digest()

    def _remember(self, name: str, compute: Any) -> Any:
        key = (name, self._key)
        if key not in self.memo:
            with torch.no_grad():
                self.memo[key] = compute()
        return self.memo[key]

    def _probes(self) -> Tensor:
        like = torch.empty(0, self.size, dtype=torch.float64, device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.solver.seed)
        return spheres(self.solver.probes, like, generator)

    def ratio_estimate(self) -> Estimate:
        """log |A| − log |D| with its standard error."""
        return self._remember("ratio", self._ratio)

    def logdet_error(self) -> float:
        return float(self.ratio_estimate().error)

    @property
    def logdet_products(self) -> int:
        return 0 if ("ratio", self._key) in self.memo else self.solver.probes * self.solver.steps

    def _ratio(self) -> Estimate:
        m, options = self.preconditioner, self.solver
        if self._white_matrix is not None:
            value = 2 * self._white_matrix[1].diagonal().log().sum()
            return Estimate(value, torch.zeros_like(value), options.probes, 0)
        like = torch.empty(0, self.size, dtype=torch.float64, device=self.device)
        generator = torch.Generator(self.device).manual_seed(options.seed)
        found = slq_logdet(
            lambda v: m.power(self._white(m.power(v, -0.5)), -0.5),
            like,
            probes=options.probes,
            steps=options.steps,
            generator=generator,
        )
        return replace(found, value=m.logdet_ratio() + found.value)

    def corrections(self) -> Tensor:
        """(A_w⁻¹ M y − y) ∘ y of every probe, (probes, P): diag A_w⁻¹ is diag M_w⁻¹ plus their mean."""
        return self._remember("corrections", self._corrections)

    def _corrections(self) -> Tensor:
        if self._white_matrix is not None:
            known = torch.cholesky_inverse(self._white_matrix[1]).diagonal()
            return (known - self.preconditioner.inverse_diagonal() * self._constants[1]).expand(self.solver.probes, -1)
        z = self._probes()
        y = self.preconditioner.power(z, -0.5)
        x = self._white_solution(self.preconditioner.power(z, 0.5)).x
        return (x - y) * y

    def determined(self) -> Tensor:
        """1 − d_p (A⁻¹)_pp, (P,) float64: how much of every weight G determines, without subtracting from 1."""
        basis, _ = self.preconditioner._whitened
        share = (basis.square() * self.preconditioner.shares().to(basis)[:, None]).sum(0).double()
        return share - self.corrections().mean(0)

    def effective(self) -> Estimate:
        """tr(c G A⁻¹), the number of directions that G determines, with its standard error."""
        each = -self.corrections().sum(-1)
        error = each.std() / len(each) ** 0.5
        return Estimate(self.preconditioner.shares().sum() + each.mean(), error, len(each), 0)

    def effective_directions(self, c: Scalar, prior: PSD) -> Tensor:
        if not isinstance(prior, Operator):
            return super().effective_directions(c, prior)
        own = self.scale(c)
        return (own + prior).determined_by(own).value

    def determined_shares(self, prior: PSD, samples: int | None = None) -> Tensor:
        whole = self + prior
        if samples is None:
            return whole.determined()
        generator = torch.Generator(self.device).manual_seed(self.solver.seed)
        z = whole.sample(samples, generator).double()
        return (z * (whole._constants[0] * self.product.matvec(z))).mean(0)

    def determined_by(self, part: Operator) -> Estimate:
        """tr(B A⁻¹) of a part B of the sum A, with its standard error: exact where both sketches are."""
        with torch.no_grad():
            _, shift = self._constants
            root, z = shift.rsqrt(), self._probes()
            basis, values = part.sketch.basis.double(), part._factor * part.sketch.values
            known = (values[:, None] * basis * self.preconditioner.solve(basis)).sum()
            right = z / root
            found = (
                part._apply(self.solution(right).x) - ((self.preconditioner.solve(right) @ basis.T) * values) @ basis
            )
            each = (root * z * found).sum(-1)
        return Estimate(known + each.mean(), each.std() / len(each) ** 0.5, len(each), 0)

    def _ratio_scalar(self) -> Tensor:
        value: Tensor = _Ratio.apply(self._factor, self._shift, self)
        return value

    def logdet(self) -> Tensor:
        self.require_positive_definite()
        shift = self._shift
        logs = shift.log() * self.size if shift.ndim == 0 else shift.log().sum()
        return logs + self._ratio_scalar()

    def logdet_ratio(self, prior: PSD) -> Tensor:
        self._matches(prior)
        if not isinstance(prior, Diagonal) or bool((self._shift != 0).any()):
            return super().logdet_ratio(prior)
        return (self + prior)._ratio_scalar()

    def diagonal(self) -> Tensor:
        if "diagonal" not in self.memo:
            self.memo["diagonal"] = self.product.diagonal()
        return (self._factor * self.memo["diagonal"] + self._shift).to(self.dtype)

    def inverse_diagonal_estimate(self) -> Estimate:
        """diag A⁻¹, (P,), with standard errors."""
        _, shift = self._constants
        each = self.corrections() / shift
        error = each.std(0) / len(each) ** 0.5
        return Estimate(self.preconditioner.inverse_diagonal() + each.mean(0), error, len(each), 0)

    def inverse_diagonal(self) -> Tensor:
        return self.inverse_diagonal_estimate().value.to(self.dtype)

    def smallest_eigenvalue(self) -> Tensor:
        return self._shift.min()

    def least_shift(self) -> float:
        """The shift below which solves do not converge: products are rounded to ε times the largest eigenvalue λ.

        In directions without curvature that is an error of ε·λ/ρ, relative to the right-hand side, which must stay
        below the tolerance. The sketch knows λ; without one the answer is 0, as where no solves are made.
        """
        return 0.0 if self._is_formed or self.solver.predictive == "sketch" else self._least_converging

    @property
    def _least_converging(self) -> float:
        """`least_shift` where every product reads the data."""
        if not len(self.sketch.values):
            return 0.0
        largest = float(self._factor.detach() * self.sketch.values.max())
        return RESOLVED * torch.finfo(self.dtype).eps * largest / self.solver.tolerance

    @property
    def _is_formed(self) -> bool:
        """Whether many shifts, and shifts that no iteration can serve, are served by the matrix itself."""
        return self.size <= FORMED and self.solver.predictive == "solve"

    @property
    def _formed(self) -> Tensor:
        """G as a matrix (P, P), float64, without the negative eigenvalues that rounding gives it."""
        if "formed" not in self.memo:
            with torch.no_grad():
                eye = torch.eye(self.size, dtype=torch.float64, device=self.device)
                found = torch.cat([self.product.matvec(part) for part in eye.split(self.solver.columns)])
                values, vectors = torch.linalg.eigh((found + found.T) / 2)
                self.memo["formed"] = (vectors * values.clamp(min=0)) @ vectors.T
        formed: Tensor = self.memo["formed"]
        return formed

    @cached_property
    def _white_matrix(self) -> tuple[Tensor, Tensor] | None:
        """A_w and its Cholesky factor, (P, P) float64, where iterations would not converge and P is small."""
        c, shift = self._constants
        if not self._is_formed or float(shift.min()) >= self._least_converging:
            return None
        root = shift.rsqrt().expand(self.size)
        white = torch.eye(self.size, dtype=torch.float64, device=self.device) + c * root[:, None] * self._formed * root
        return white, torch.linalg.cholesky(white)

    def whiten(self, rows: Rows) -> Tensor:
        """The symmetric root of the joint J A⁻¹ Jᵀ, (n, r, n·r)."""
        joint = self.joint(rows).reshape(rows.n * rows.r, -1).double()
        values, vectors = torch.linalg.eigh((joint + joint.T) / 2)
        white = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
        return white.reshape(rows.n, rows.r, -1).to(self.dtype)

    def quadratic(self, rows: Rows) -> Tensor:
        rows = rows.of_size(self.size, self.dtype)
        if self.solver.predictive == "samples":
            inside = rows.matvec(self._draws().to(rows.dtype))
            return torch.einsum("snr,snq->nrq", inside, inside) / len(inside)
        pieces = [torch.zeros(0, rows.r, rows.r, dtype=self.dtype, device=self.device)]
        for start, length in chunks(rows.n, 8 * rows.r * self.size):
            dense = rows.narrow(start, length).dense()
            pieces.append(dense.double() @ self._inverse(dense).mT)
        return torch.cat([piece.to(self.dtype) for piece in pieces])

    def variance(self, rows: Rows) -> Tensor:
        return self.quadratic(rows).diagonal(dim1=-2, dim2=-1)

    def shifted_products(self, rows: Rows, shifts: Tensor, pairs: Tensor, split: float | None = None) -> Tensor:
        """Form the matrix where it is small: that takes fewer products than one solve per shift and direction.

        It is also exact for shifts far below the rounding of the products, where no iteration converges.
        """
        if not self._is_formed:
            return super().shifted_products(rows, shifts, pairs, split)
        whole = self._factor * self._formed + torch.diag(self._shift.expand(self.size))
        return Dense(whole.to(self.dtype)).shifted_products(rows, shifts, pairs)

    def joint(self, rows: Rows) -> Tensor:
        rows = rows.of_size(self.size, self.dtype)
        if self.solver.predictive == "samples":
            inside = rows.matvec(self._draws().to(rows.dtype)).flatten(1)
            gram = inside.T @ inside / len(inside)
        else:
            dense = rows.dense()
            gram = dense.flatten(0, 1).double() @ self._inverse(dense).flatten(0, 1).T
        return gram.reshape(rows.n, rows.r, rows.n, rows.r).to(self.dtype)

    def cross_factors(self, rows: Rows) -> tuple[Tensor, Tensor]:
        rows = rows.of_size(self.size, self.dtype)
        if self.solver.predictive == "samples":
            inside = rows.matvec(self._draws().to(rows.dtype)).movedim(0, -1) / self.solver.samples**0.5
            return inside, inside
        dense = rows.dense()
        return dense.double(), self._inverse(dense)

    def _inverse(self, dense: Tensor) -> Tensor:
        flat = dense.reshape(-1, self.size).double()
        if self.solver.predictive == "sketch":
            return self.preconditioner.solve(flat).reshape(dense.shape)
        found = differentiable_solve(self._apply, flat, lambda b: self.solution(b).x)
        return found.reshape(dense.shape)

    def _draws(self) -> Tensor:
        """The fixed weight samples of predictions, (S, P)."""
        generator = torch.Generator(self.device).manual_seed(self.solver.seed + 1)
        return self._remember("draws", lambda: self.sample(self.solver.samples, generator))

    def scale(self, c: Scalar) -> Operator:
        return replace(self, factor=self._factor * nonnegative(c), shift=self._shift * c)

    def __add__(self, other: PSD) -> Operator:
        self._matches(other)
        if isinstance(other, Diagonal):
            constant = other.constant()
            return replace(self, shift=self._shift + (other.values.double() if constant is None else constant))
        if isinstance(other, Operator):
            return self._joined(other)
        raise self._refuse(other, "a diagonal prior or another matrix of its kind")

    def _joined(self, other: Operator) -> Operator:
        if self._factor.requires_grad or other._factor.requires_grad:
            raise UnsupportedOperation(
                "a matrix-free posterior with another one as its prior has no gradients in temperature and noise, "
                "which scale a part of its products. Take differences, or use structure='diag', 'lowrank' or 'full'."
            )
        mine, theirs = float(self._factor.detach()), float(other._factor.detach())
        rows = [
            c**0.5 * part.sketch.basis * part.sketch.values.sqrt().to(part.sketch.basis)[:, None]
            for c, part in ((mine, self), (theirs, other))
        ]
        product = SumProduct(((mine, self.product), (theirs, other.product)))
        return Operator(product, Sketch.of_rows(torch.cat(rows)), 1.0, self._shift + other._shift, self.solver)


class _Linear(torch.autograd.Function):
    """v ↦ G v for a product whose value is known already."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, image: Tensor, matvec: Any) -> Tensor:
        ctx.matvec = matvec
        return image.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.matvec(grads[0]), None, None


class _Ratio(torch.autograd.Function):
    """log|cG + D| − log|D|, with ∂/∂c = γ/c and ∂/∂d_p = (A⁻¹)_pp − 1/d_p from the probes of `corrections`."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, shift: Tensor, operator: Operator) -> Tensor:
        ctx.operator = operator
        return operator.ratio_estimate().value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        operator: Operator = ctx.operator
        with torch.no_grad():
            c, shift = operator._constants
            gamma = operator.effective().value
            if shift.ndim == 0:
                by_shift = -gamma / shift
            else:
                by_shift = -operator.determined() / shift
            by_factor = gamma / c if float(c) > 0 else torch.zeros_like(c)
        return grads[0] * by_factor, grads[0] * by_shift, None
