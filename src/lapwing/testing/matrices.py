"""The laws of a matrix: whatever it is kept in, every answer is that of dense algebra, and so is its gradient."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.linalg import PSD, DenseRows, Diagonal, Rows
from lapwing.linalg import rows as rows_module
from lapwing.storage import pack, unpack

DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Draw:
    """Random tensors of one generator in one dtype: `draw(3, 4)` is a (3, 4) tensor of normal numbers."""

    generator: torch.Generator
    dtype: torch.dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def full(self, size: int, value: float) -> Tensor:
        """A vector of equal numbers."""
        return torch.full((size,), value, dtype=self.dtype)

    def psd(self, *batch: int, size: int, rank: int | None = None) -> Tensor:
        """Positive semi-definite matrices (*batch, size, size)."""
        half = self(*batch, size, rank or size + 3)
        return half @ half.mT / half.shape[-1]

    def orthogonal(self, *batch: int, size: int) -> Tensor:
        """Orthogonal matrices (*batch, size, size)."""
        return torch.linalg.qr(self(*batch, size, size).double())[0].to(self.dtype)


@dataclass(frozen=True)
class Case:
    """c · curvature + prior(θ) as a matrix and as a dense tensor, with rows to put it between."""

    curvature: PSD
    prior: Callable[[Tensor], PSD]
    c: Tensor
    theta: Tensor
    rows: Rows

    def matrix(self) -> PSD:
        return self.curvature.scale(self.c) + self.prior(self.theta)

    def explicit(self) -> Tensor:
        return self.c.double() * self.curvature.dense().double() + self.prior(self.theta).dense().double()


class MatrixLaws:
    """Test case of a matrix: say how to make one, and pytest checks all its answers against dense algebra.

    The prior that is added is constant unless `prior` is replaced. The attributes below say what the matrix can do.

    Examples:
        >>> from lapwing.linalg import Diagonal
        >>> from lapwing.testing import MatrixLaws
        >>> class TestDiagonal(MatrixLaws):
        ...     def curvature(self, draw):  # about twenty weights, from draw(3, 4) or draw.psd(size=5), in draw.dtype
        ...         return Diagonal(draw(20).square())
    """

    definite: ClassVar[bool] = True  # the curvature is positive definite without a prior
    second_derivatives: ClassVar[bool] = True  # log-determinants can be differentiated twice in scale and prior
    exact_smallest: ClassVar[bool] = True  # `smallest_eigenvalue` is no mere lower bound
    digits: ClassVar[float] = 1e-3  # relative error of `logdet_ratio` under a prior 1e11 times as large

    def curvature(self, draw: Draw) -> PSD:
        """Return a matrix without a prior. Make its tensors with `draw`."""
        raise NotImplementedError

    def parameters(self, curvature: PSD) -> int:
        """Return how many numbers θ the prior has."""
        return 1

    def prior(self, curvature: PSD, theta: Tensor) -> PSD:
        """Return the prior with parameters θ > 0; by default one precision for all weights."""
        return Diagonal(theta.expand(curvature.size))

    def first(self, theta: Tensor) -> Tensor:
        """Return the parameters θ to begin with, of random ones above 0.5."""
        return theta

    def rows(self, curvature: PSD, draw: Draw) -> Rows:
        """Return rows of a Jacobian, of 4 samples and 2 outputs."""
        return DenseRows(draw(4, 2, curvature.size))

    def case(self, dtype: torch.dtype = torch.float64) -> Case:
        """A matrix with scale and prior that carry gradients."""
        draw = Draw(torch.Generator().manual_seed(7), dtype)
        curvature = self.curvature(draw)
        theta = self.first(0.5 + draw(self.parameters(curvature)).square()).requires_grad_()
        c = torch.tensor(1.7, dtype=dtype, requires_grad=True)
        return Case(curvature, lambda theta: self.prior(curvature, theta), c, theta, self.rows(curvature, draw))

    def test_answers_are_those_of_dense_algebra(self) -> None:
        for dtype in DTYPES:
            case = self.case(dtype)
            require_answers(case.matrix(), case.explicit(), case.rows, dtype)

    def test_answers_do_not_depend_on_chunks(self) -> None:
        with replaced(rows_module, "CHUNK_BYTES", 1):
            case = self.case()
            require_answers(case.matrix(), case.explicit(), case.rows, torch.float64)

    def test_full_rank_needs_no_prior(self) -> None:
        for dtype in DTYPES if self.definite else ():
            case = self.case(dtype)
            require_answers(case.curvature, case.curvature.dense().double(), case.rows, dtype)
            require_answers(case.curvature.scale(3.0), 3 * case.curvature.dense().double(), case.rows, dtype)

    def test_scaling_commutes_with_a_prior(self) -> None:
        case = self.case()
        require_answers(case.matrix().scale(0.3), 0.3 * case.explicit(), case.rows, torch.float64)

    def test_no_float32_on_the_way_in_float64(self) -> None:
        case = self.case()
        with replaced(Tensor, "float", None):
            matrix = case.matrix()
            close(matrix.solve(matrix.matvec(case.rows.dense())), case.rows.dense(), torch.float64)

    def test_smallest_eigenvalue(self) -> None:
        for dtype in DTYPES:
            case = self.case(dtype)
            got = case.matrix().smallest_eigenvalue().detach()
            want = torch.linalg.eigvalsh(case.explicit().detach()).min()
            assert got.dtype == torch.float64
            if self.exact_smallest:
                close(got, want, dtype, factor=100)
            else:
                assert 0 < float(got) <= float(want) * (1 + 1e-5)

    def test_logdet_ratio(self) -> None:
        for dtype in DTYPES:
            case = self.case(dtype)
            prior = case.prior(case.theta)
            want = torch.logdet(case.explicit()) - torch.logdet(prior.dense().double())
            close(case.curvature.scale(case.c).logdet_ratio(prior), want, dtype)

    def test_logdet_ratio_keeps_digits_under_a_strong_prior(self) -> None:
        case = self.case()
        strong = case.prior(case.theta).scale(1e11)
        got = case.curvature.scale(case.c).logdet_ratio(strong)
        share = torch.linalg.solve(strong.dense(), case.curvature.dense())
        want = case.c * share.trace()  # log|I + Π^-½ A Π^-½| = tr(Π⁻¹ A) + …
        torch.testing.assert_close(got, want, rtol=self.digits, atol=0.0)

    def test_sampling_is_a_root_of_the_inverse(self) -> None:
        for dtype in DTYPES:
            case = self.case(dtype)
            matrix, inverse = case.matrix(), torch.linalg.inv(case.explicit())
            with replaced(torch, "randn", UnitDraws(NOISE)):
                draws = matrix.sample(NOISE)
            assert draws.shape == (NOISE, matrix.size)
            assert draws.dtype == dtype
            close(draws.T @ draws, inverse, dtype)

    def test_sampling_follows_its_generator(self) -> None:
        matrix = self.case(torch.float32).matrix()
        state = torch.get_rng_state()
        first, second = (matrix.sample(3, torch.Generator().manual_seed(5)) for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(state, torch.get_rng_state())
        assert not torch.equal(first, matrix.sample(3, torch.Generator().manual_seed(6)))

    def test_eigenvalues_and_blocks(self) -> None:
        """Eigenvalues, where they are known, are all but zeros; blocks are A, cut up."""
        case = self.case()
        for matrix in (case.curvature, case.matrix()):
            dense = matrix.dense().detach()
            values, want = matrix.eigenvalues(), torch.linalg.eigvalsh(dense).sort(descending=True).values
            if values is not None:
                got = values.detach().sort(descending=True).values
                close(torch.cat([got, got.new_zeros(len(want) - len(got))]), want, torch.float64, factor=100)
            assert matrix.largest_eigenvalue() >= float(want.max()) * (1 - 1e-9)
            index = torch.arange(matrix.size)
            for block, own in matrix.blockwise(index):
                close(block.dense(), dense[own][:, own], torch.float64)
            assert torch.equal(torch.cat([own for _, own in matrix.blockwise(index)]).sort().values, index)
            if matrix.is_diagonal:
                close(torch.diag(matrix.diagonal()), dense, torch.float64)
            constant = matrix.constant()
            if constant is not None:
                close(constant * torch.eye(len(dense), dtype=torch.float64), dense, torch.float64)
            close(matrix.cleaned().dense(), dense, torch.float64, factor=100)

    def test_grouped_eigenvalues(self) -> None:
        """Σ log(1 + e/τ) over eigenvalues e with the τ of their groups is the ratio of log-determinants."""
        case = self.case()
        tau = torch.tensor([0.6, 2.5], dtype=torch.float64)
        for group in (torch.zeros(case.curvature.size).long(), torch.arange(case.curvature.size) % 2):
            found = case.curvature.grouped_eigenvalues(group)
            if found is not None:
                dense = case.curvature.dense().double()
                want = torch.logdet(dense + torch.diag(tau[group])) - tau[group].log().sum()
                close((found[0] / tau[found[1]]).log1p().sum(), want, torch.float64, factor=100)

    def test_shifts(self) -> None:
        """J_a (A + ρ I)⁻¹ J_bᵀ for several shifts and pairs of directions."""
        case = self.case()
        shifts, pairs = torch.tensor([1e-2, 0.5, 1e3], dtype=torch.float64), torch.tensor([[0, 1, 1], [0, 0, 1]])
        j, dense = case.rows.dense(), case.curvature.dense()
        got = case.curvature.shifted_products(case.rows, shifts, pairs)
        for k, shift in enumerate(shifts):
            inverse = torch.linalg.inv(dense + shift * torch.eye(len(dense), dtype=torch.float64))
            close(got[k], (j @ inverse @ j.mT)[:, pairs[0], pairs[1]], torch.float64, factor=1e3)

    def test_what_the_data_determine(self) -> None:
        case = self.case()
        c, prior = case.c.detach(), case.prior(case.theta.detach())
        dense, scaled = case.curvature.dense().double(), case.curvature.scale(c)
        share = c * dense @ torch.linalg.inv(c * dense + prior.dense())
        close(case.curvature.effective_directions(c, prior), share.trace(), torch.float64, factor=1e3)
        if not prior.is_diagonal:
            return
        inverse = torch.linalg.inv(c * dense + prior.dense())
        want = 1 - prior.diagonal() * inverse.diagonal()
        torch.testing.assert_close(scaled.determined_shares(prior), want, rtol=1e-7, atol=1e-9)

    def test_gradients_in_scale_and_prior(self) -> None:
        case = self.case()
        parameters = (case.c, case.theta)
        for label, (ours, dense) in functions(case).items():
            got = torch.autograd.grad(ours(case.matrix()), parameters, materialize_grads=True, allow_unused=True)
            want = torch.autograd.grad(dense(case.explicit()), parameters, materialize_grads=True, allow_unused=True)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=label)

    def test_gradients_of_the_logdet_ratio(self) -> None:
        case = self.case()
        parameters = (case.c, case.theta)
        want = torch.logdet(case.explicit()) - torch.logdet(case.prior(case.theta).dense())
        expected = torch.autograd.grad(want, parameters)
        got = case.curvature.scale(case.c).logdet_ratio(case.prior(case.theta))
        for a, b in zip(torch.autograd.grad(got, parameters), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)

    def test_second_derivatives(self) -> None:
        case = self.case()
        start = case.c.detach(), case.theta.detach().log()

        def ours(c: Tensor, log_theta: Tensor, ratio: bool) -> Tensor:
            prior, scaled = case.prior(log_theta.exp()), case.curvature.scale(c)
            return scaled.logdet_ratio(prior) if ratio else (scaled + prior).logdet()

        def dense(c: Tensor, log_theta: Tensor, ratio: bool) -> Tensor:
            prior = case.prior(log_theta.exp()).dense()
            total = torch.logdet(c * case.curvature.dense() + prior)
            return total - torch.logdet(prior) if ratio else total

        for ratio in (False, True) if self.second_derivatives else ():
            got, want = (torch.autograd.functional.hessian(partial(f, ratio=ratio), start) for f in (ours, dense))
            for a, b in zip((e for row in got for e in row), (e for row in want for e in row), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)

    def test_gradients_reach_the_rows(self) -> None:
        case = self.case()
        matrix, inverse = case.matrix(), torch.linalg.inv(case.explicit())
        values = case.rows.dense().clone().requires_grad_()
        (got,) = torch.autograd.grad(matrix.quadratic(DenseRows(values)).sin().sum(), values)
        (want,) = torch.autograd.grad((values @ inverse @ values.mT).sin().sum(), values)
        torch.testing.assert_close(got, want)

    def test_caches_neither_keep_nor_lose_the_graph(self) -> None:
        case = self.case()
        matrix = case.matrix()
        with torch.no_grad():
            matrix.sample(1)
            matrix.logdet()
        (want,) = torch.autograd.grad(torch.logdet(case.explicit()), case.c)
        for _ in range(2):
            (got,) = torch.autograd.grad(matrix.logdet(), case.c, retain_graph=True)
            torch.testing.assert_close(got, want)

    def test_storage_is_exact(self) -> None:
        for dtype in DTYPES:
            case = self.case(dtype)
            for whole in (case.curvature, case.matrix()):
                for matrix in (whole, whole.scale(0.7)):
                    self._require_stored(matrix, dtype)
                    moved = matrix.to("cpu")
                    assert type(moved) is type(matrix)
                    assert torch.equal(moved.dense(), matrix.dense())
                    assert matrix.nbytes
            stored = unpack(*pack(case.matrix()), PSD)
            assert torch.equal(stored.solve(case.rows.dense()), case.matrix().solve(case.rows.dense()))

    def _require_stored(self, matrix: PSD, dtype: torch.dtype) -> None:
        tensors, spec = pack(matrix)
        assert all(not tensor.requires_grad for tensor in tensors.values())
        copy = unpack({key: value.clone() for key, value in tensors.items()}, json.loads(json.dumps(spec)), PSD)
        assert type(copy) is type(matrix)
        assert copy.dtype == dtype
        assert torch.equal(copy.dense(), matrix.dense())
        again, spec_again = pack(copy)
        assert spec_again == spec
        assert tensors.keys() == again.keys()
        assert all(torch.equal(tensors[key], again[key]) and tensors[key].dtype == again[key].dtype for key in tensors)


NOISE = 120
"""Numbers that a draw of one vector may take: sampling must be a linear map of no more."""


class UnitDraws:
    """Stands in for `torch.randn`: unit vectors, so that n draws are the columns of the linear map that sampling is."""

    def __init__(self, n: int) -> None:
        self.eye = torch.eye(n, dtype=torch.float64)
        self.used = 0

    def __call__(self, n: int, *shape: int, dtype: torch.dtype, device: Any = None, generator: Any = None) -> Tensor:
        width = torch.Size(shape).numel()
        self.used += width
        assert self.used <= len(self.eye)
        return self.eye[:n, self.used - width : self.used].reshape(n, *shape).to(dtype)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def close(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Compare with a float64 result, to the rounding of a dtype relative to the largest entry."""
    tolerance = factor * (2e-5 if dtype == torch.float32 else 1e-11)
    want = want.detach()
    largest = float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.detach().double(), want.double(), rtol=tolerance, atol=tolerance * largest)


def require_answers(matrix: PSD, dense: Tensor, rows: Rows, dtype: torch.dtype) -> None:
    """Every answer of `matrix` against the (P, P) float64 tensor it stands for."""
    inverse = torch.linalg.inv(dense)
    j = rows.dense().double()
    size = len(dense)
    assert matrix.size == size
    assert matrix.dtype == dtype
    close(matrix.dense(), dense, dtype)
    generator = torch.Generator().manual_seed(0)
    for batch in [(), (1,), (2, 3), (0,)]:
        v = torch.randn(*batch, size, generator=generator, dtype=torch.float64).to(dtype)
        for got, want in ((matrix.matvec(v), v.double() @ dense), (matrix.solve(v), v.double() @ inverse)):
            assert got.dtype == dtype
            if v.numel():
                close(got, want, dtype)
            assert got.shape == v.shape
    assert matrix.logdet().dtype == matrix.trace().dtype == torch.float64
    close(matrix.logdet(), torch.logdet(dense), dtype)
    close(matrix.trace(), dense.trace(), dtype)
    close(matrix.diagonal(), dense.diagonal(), dtype)
    close(matrix.inverse_diagonal(), inverse.diagonal(), dtype)
    quadratic = torch.einsum("nrp,pq,nsq->nrs", j, inverse, j)
    white = matrix.whiten(rows)
    close(white @ white.mT, quadratic, dtype)
    for given in (rows, DenseRows(rows.dense())):
        close(matrix.quadratic(given), quadratic, dtype)
        close(matrix.variance(given), quadratic.diagonal(dim1=1, dim2=2), dtype)
        close(matrix.joint(given), torch.einsum("nrp,pq,msq->nrms", j, inverse, j), dtype)
        left, right = matrix.cross_factors(given)[0], matrix.cross_factors(DenseRows(j[:1].to(dtype)))[1]
        close(torch.einsum("nrk,msk->nrms", left, right), torch.einsum("nrp,pq,msq->nrms", j, inverse, j[:1]), dtype)


def functions(case: Case) -> dict[str, tuple[Callable[[PSD], Tensor], Callable[[Tensor], Tensor]]]:
    """Scalars of a matrix that between them use every method, of the matrix and of its dense tensor."""
    draw = Draw(torch.Generator().manual_seed(11), torch.float64)
    size, rows = case.curvature.size, case.rows
    j = rows.dense()
    v, weight, square = draw(3, size), draw(size), draw(size, size)
    cov = draw(rows.n, rows.r, rows.r)
    solved = draw(3, size)

    def sampled(matrix: PSD) -> Tensor:
        with replaced(torch, "randn", UnitDraws(NOISE)):
            draws = matrix.sample(NOISE)
        return ((draws.T @ draws) * square).sum()

    def whitened(matrix: PSD) -> Tensor:
        white = matrix.whiten(rows)
        return ((white @ white.mT) * cov).sum()

    def quadratic(a: Tensor) -> Tensor:
        return ((j @ torch.linalg.inv(a) @ j.mT) * cov).sum()

    return {
        "logdet": (lambda a: a.logdet(), torch.logdet),
        "trace": (lambda a: a.trace(), torch.trace),
        "matvec": (lambda a: (a.matvec(v) * solved).sum(), lambda a: ((v @ a) * solved).sum()),
        "dense": (lambda a: (a.dense() * square).sum(), lambda a: (a * square).sum()),
        "solve": (lambda a: (a.solve(v) * solved).sum(), lambda a: (torch.linalg.solve(a, v.T).T * solved).sum()),
        "diagonal": (lambda a: a.diagonal() @ weight, lambda a: a.diagonal() @ weight),
        "inverse_diagonal": (
            lambda a: a.inverse_diagonal() @ weight,
            lambda a: torch.linalg.inv(a).diagonal() @ weight,
        ),
        "quadratic": (lambda a: (a.quadratic(rows) * cov).sum(), quadratic),
        "whiten": (whitened, quadratic),
        "variance": (
            lambda a: (a.variance(rows) * cov[:, 0]).sum(),
            lambda a: ((j @ torch.linalg.inv(a) @ j.mT).diagonal(dim1=1, dim2=2) * cov[:, 0]).sum(),
        ),
        "joint": (
            lambda a: (a.joint(rows)[0, 0] * cov[..., 0]).sum(),
            lambda a: (torch.einsum("p,pq,msq->ms", j[0, 0], torch.linalg.inv(a), j) * cov[..., 0]).sum(),
        ),
        "sample": (sampled, lambda a: (torch.linalg.inv(a) * square).sum()),
        "scale": (lambda a: a.scale(case.c).logdet(), lambda a: torch.logdet(case.c * a)),
    }
