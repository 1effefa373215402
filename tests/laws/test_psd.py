"""Laws of matrices: whatever the structure, every answer is the one dense algebra gives, and so is its gradient."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lapwing.linalg import (
    PSD,
    BlockDiagonal,
    Dense,
    DenseRows,
    Diagonal,
    EigenKronecker,
    Jacobian,
    Kronecker,
    Layout,
    LowRank,
    MatrixRows,
    Rows,
    Term,
    pack,
    unpack,
)

Q, O, I = 2, 3, 4
P = Q * O * I
DTYPES = [torch.float32, torch.float64]


@dataclass(frozen=True)
class Draw:
    """Random tensors from one generator, in one dtype."""

    generator: torch.Generator
    dtype: torch.dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def full(self, value: float) -> Tensor:
        return torch.full((P,), value, dtype=self.dtype)

    def psd(self, *batch: int, size: int, rank: int | None = None) -> Tensor:
        half = self(*batch, size, rank or size + 3)
        return half @ half.mT / half.shape[-1]

    def orthogonal(self, *batch: int, size: int) -> Tensor:
        return torch.linalg.qr(self(*batch, size, size).double())[0].to(self.dtype)


def kronecker(draw: Draw) -> Kronecker:
    return Kronecker(draw.psd(Q, size=O), draw.psd(Q, size=I))


def eigen_kronecker(draw: Draw) -> EigenKronecker:
    return EigenKronecker(draw.orthogonal(Q, size=O), draw.orthogonal(Q, size=I), draw(Q, O, I).square() + 0.1)


def low_rank(draw: Draw) -> LowRank:
    values = draw(5).square()
    values[2] = 0
    return LowRank(draw(5, P), values, torch.zeros(P, dtype=draw.dtype))


def blocks(draw: Draw) -> BlockDiagonal:
    parts: tuple[PSD, ...] = (
        kronecker(draw),
        Dense(draw.psd(size=7, rank=3)),
        eigen_kronecker(draw),
        Diagonal(draw(5).square()),
        low_rank(draw),
    )
    order = torch.randperm(3 * P + 12, generator=torch.Generator().manual_seed(3))
    return BlockDiagonal(Layout(3 * P + 12, tuple(order.split([p.size for p in parts]))), parts)


CURVATURES: dict[str, Callable[[Draw], PSD]] = {
    "diagonal": lambda draw: Diagonal(draw(P).square() + 0.1),
    "dense": lambda draw: Dense(draw.psd(size=P)),
    "dense of rank 5": lambda draw: Dense(draw.psd(size=P, rank=5)),
    "dense zero": lambda draw: Dense(torch.zeros(P, P, dtype=draw.dtype)),
    "kronecker": kronecker,
    "kronecker of low rank": lambda draw: Kronecker(draw.psd(Q, size=O, rank=1), draw.psd(Q, size=I, rank=2)),
    "kronecker zero": lambda draw: Kronecker(0 * draw(Q, O, O), 0 * draw(Q, I, I)),
    "kronecker with a prior": lambda draw: kronecker(draw) + Diagonal(draw.full(0.3)),
    "kronecker of low rank with a prior": lambda draw: (
        Kronecker(draw.psd(Q, size=O, rank=1), draw.psd(Q, size=I, rank=2)) + Diagonal(draw.full(0.3))
    ),
    "eigenkronecker": eigen_kronecker,
    "lowrank": low_rank,
    "blocks": blocks,
}

PRIORS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {  # number of parameters, and the precisions they give
    "constant": (1, lambda theta: theta.expand(P)),
    "general": (P, lambda theta: theta),
    "product": (
        Q * (O + I),
        lambda theta: (theta[: Q * O].reshape(Q, O, 1) * theta[Q * O :].reshape(Q, 1, I)).reshape(P),
    ),
}

CASES: list[tuple[str, str]] = [
    ("diagonal", "constant"),
    ("diagonal", "general"),
    ("dense", "constant"),
    ("dense of rank 5", "constant"),
    ("dense of rank 5", "general"),
    ("dense zero", "constant"),
    ("dense zero", "general"),
    ("kronecker", "constant"),
    ("kronecker", "product"),
    ("kronecker of low rank", "constant"),
    ("kronecker of low rank", "product"),
    ("kronecker zero", "constant"),
    ("kronecker zero", "product"),
    ("kronecker with a prior", "constant"),
    ("kronecker of low rank with a prior", "constant"),
    ("eigenkronecker", "constant"),
    ("lowrank", "constant"),
    ("lowrank", "general"),
    ("blocks", "layerwise"),
    *(  # a number for each weight, which only happen to be equal
        (name, "equal")
        for name in ("diagonal", "dense", "kronecker", "kronecker of low rank with a prior", "eigenkronecker", "blocks")
    ),
]
# positive definite without a prior
ALONE = ["diagonal", "dense", "kronecker", "kronecker of low rank with a prior", "eigenkronecker"]


def prior_of(curvature: PSD, kind: str) -> tuple[int, Callable[[Tensor], Diagonal]]:
    if kind == "equal":
        return curvature.size, Diagonal
    if kind != "layerwise":
        count, values = PRIORS[kind]
        return count, lambda theta: Diagonal(values(theta))
    assert isinstance(curvature, BlockDiagonal)
    layout = curvature.layout
    group = layout.scatter([torch.full((size,), k) for k, size in enumerate(layout.sizes)])
    return len(layout.sizes), lambda theta: Diagonal.by_group(theta, group)


@dataclass(frozen=True)
class Case:
    """c · curvature + diag(prior(θ)), in lapwing and in dense float64."""

    curvature: PSD
    prior: Callable[[Tensor], Diagonal]
    c: Tensor
    theta: Tensor
    rows: Rows

    def matrix(self) -> PSD:
        return self.curvature.scale(self.c) + self.prior(self.theta)

    def explicit(self) -> Tensor:
        return self.c.double() * self.curvature.dense().double() + torch.diag(self.prior(self.theta).values.double())


def rows_of(size: int, curvature: PSD, draw: Draw) -> Rows:
    def matrix_rows(t: int) -> MatrixRows:
        return MatrixRows((Term(draw(4, 2, t, Q, O), draw(4, 1, t, Q, I)),))

    if isinstance(curvature, BlockDiagonal):
        sizes = [block.size for block in curvature.blocks]
        parts = [matrix_rows(1), DenseRows(draw(4, 2, sizes[1])), matrix_rows(3), DenseRows(draw(4, 2, sizes[3]))]
        return Jacobian((*parts, matrix_rows(1)), curvature.layout)
    return matrix_rows(1) if isinstance(curvature, (Kronecker, Diagonal)) else DenseRows(draw(4, 2, size))


def make(name: str, kind: str, dtype: torch.dtype) -> Case:
    draw = Draw(torch.Generator().manual_seed(7), dtype)
    curvature = CURVATURES[name](draw)
    count, prior = prior_of(curvature, kind)
    theta = 0.5 + draw(count).square()
    theta = (torch.full_like(theta, 0.7) if kind == "equal" else theta).requires_grad_()
    c = torch.tensor(1.7, dtype=dtype, requires_grad=True)
    return Case(curvature, prior, c, theta, rows_of(curvature.size, curvature, draw))


def close(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    tolerance = factor * (2e-5 if dtype == torch.float32 else 1e-11)
    want = want.detach()
    torch.testing.assert_close(got.detach().double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


def law(matrix: PSD, dense: Tensor, rows: Rows, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_answers_are_those_of_dense_algebra(name: str, kind: str, dtype: torch.dtype) -> None:
    case = make(name, kind, dtype)
    law(case.matrix(), case.explicit(), case.rows, dtype)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_answers_do_not_depend_on_chunks(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.linalg.rows.CHUNK_BYTES", 1)
    case = make(name, kind, torch.float64)
    law(case.matrix(), case.explicit(), case.rows, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALONE)
def test_full_rank_needs_no_prior(name: str, dtype: torch.dtype) -> None:
    case = make(name, "constant", dtype)
    law(case.curvature, case.curvature.dense().double(), case.rows, dtype)
    law(case.curvature.scale(3.0), 3 * case.curvature.dense().double(), case.rows, dtype)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_scaling_commutes_with_a_prior(name: str, kind: str) -> None:
    case = make(name, kind, torch.float64)
    law(case.matrix().scale(0.3), 0.3 * case.explicit(), case.rows, torch.float64)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_float32_on_the_way_in_float64(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(name, kind, torch.float64)
    monkeypatch.setattr(Tensor, "float", None)
    matrix = case.matrix()
    close(matrix.solve(matrix.matvec(case.rows.dense())), case.rows.dense(), torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_smallest_eigenvalue(name: str, kind: str, dtype: torch.dtype) -> None:
    case = make(name, kind, dtype)
    got, want = case.matrix().smallest_eigenvalue().detach(), torch.linalg.eigvalsh(case.explicit().detach()).min()
    assert got.dtype == torch.float64
    if name in ("lowrank", "blocks") or kind == "product":
        assert 0 < float(got) <= float(want) * (1 + 1e-5)
    else:
        close(got, want, dtype, factor=100)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logdet_ratio(name: str, kind: str, dtype: torch.dtype) -> None:
    case = make(name, kind, dtype)
    prior = case.prior(case.theta)
    want = torch.logdet(case.explicit()) - prior.values.double().log().sum()
    close(case.curvature.scale(case.c).logdet_ratio(prior), want, dtype)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logdet_ratio_keeps_digits_under_a_strong_prior(name: str, kind: str) -> None:
    case = make(name, kind, torch.float64)
    strong = case.prior(case.theta).scale(1e11)
    got = case.curvature.scale(case.c).logdet_ratio(strong)
    first_order = case.c * (case.curvature.diagonal() / strong.values).sum()  # log|I + Π^-½ A Π^-½| = tr(Π⁻¹ A) + …
    varies = kind == "general" or (kind == "equal" and name == "dense")
    determinant = varies and name != "diagonal"  # without an eigenbasis: of a matrix near I, to 1e-16 of 1
    exact = not (determinant or name in ("lowrank", "blocks"))
    torch.testing.assert_close(got, first_order, rtol=1e-8 if exact else 1e-3, atol=0.0)


class Identity:
    """Stands in for `torch.randn`: unit vectors, so that n draws are the columns of the linear map that sampling is."""

    def __init__(self, n: int) -> None:
        self.eye = torch.eye(n, dtype=torch.float64)
        self.used = 0

    def __call__(self, n: int, *shape: int, dtype: torch.dtype, device: torch.device, generator: object) -> Tensor:
        width = torch.Size(shape).numel()
        self.used += width
        assert self.used <= len(self.eye)
        return self.eye[:n, self.used - width : self.used].reshape(n, *shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_sampling_is_a_root_of_the_inverse(
    name: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(name, kind, dtype)
    matrix, inverse = case.matrix(), torch.linalg.inv(case.explicit())
    monkeypatch.setattr(torch, "randn", Identity(120))
    draws = matrix.sample(120)
    assert draws.shape == (120, matrix.size)
    assert draws.dtype == dtype
    close(draws.T @ draws, inverse, dtype)


@pytest.mark.parametrize(("name", "kind"), [("kronecker", "constant"), ("lowrank", "general"), ("blocks", "layerwise")])
def test_samples_have_the_covariance(name: str, kind: str) -> None:
    case = make(name, kind, torch.float64)
    n = 20_000
    draws = case.matrix().sample(n, torch.Generator().manual_seed(0)).detach()
    inverse = torch.linalg.inv(case.explicit()).detach()
    spread = inverse.diagonal().sqrt()
    error = (draws.T @ draws / n - inverse) / (spread[:, None] * spread)
    assert float(error.abs().max()) < 6 * (2 / n) ** 0.5
    assert float((draws.mean(0) / spread).abs().max()) < 6 / n**0.5


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_sampling_follows_its_generator(name: str, kind: str) -> None:
    matrix = make(name, kind, torch.float32).matrix()
    state = torch.get_rng_state()
    first, second = (matrix.sample(3, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, matrix.sample(3, torch.Generator().manual_seed(6)))


def functions(case: Case) -> dict[str, tuple[Callable[[PSD], Tensor], Callable[[Tensor], Tensor]]]:
    """Scalars of a matrix that between them use every method, in lapwing and in dense algebra."""
    draw = Draw(torch.Generator().manual_seed(11), torch.float64)
    size, rows = case.curvature.size, case.rows
    j = rows.dense()
    v, weight, square = draw(3, size), draw(size), draw(size, size)
    cov = draw(rows.n, rows.r, rows.r)
    solved = draw(3, size)

    def sampled(matrix: PSD) -> Tensor:
        original, torch.randn = torch.randn, Identity(120)  # type: ignore[assignment]
        try:
            draws = matrix.sample(120)
        finally:
            torch.randn = original
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


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_gradients_in_scale_and_prior(name: str, kind: str) -> None:
    case = make(name, kind, torch.float64)
    parameters = (case.c, case.theta)
    for label, (ours, dense) in functions(case).items():
        got = torch.autograd.grad(ours(case.matrix()), parameters, materialize_grads=True, allow_unused=True)
        want = torch.autograd.grad(dense(case.explicit()), parameters, materialize_grads=True, allow_unused=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda m, n=label: f"{n}: {m}")


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_gradients_of_the_logdet_ratio(name: str, kind: str) -> None:
    case = make(name, kind, torch.float64)
    parameters = (case.c, case.theta)
    want = torch.logdet(case.explicit()) - case.prior(case.theta).values.log().sum()
    expected = torch.autograd.grad(want, parameters)
    got = case.curvature.scale(case.c).logdet_ratio(case.prior(case.theta))
    for a, b in zip(torch.autograd.grad(got, parameters), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("ratio", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [case for case in CASES if case[1] != "product" and (case[1] != "equal" or case[0] in ("diagonal", "dense"))],
)
def test_second_derivatives_for_newton(name: str, kind: str, ratio: bool) -> None:
    case = make(name, kind, torch.float64)

    def hessian(value: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        rows = torch.autograd.functional.hessian(value, (case.c.detach(), case.theta.detach().log()))
        return [entry for row in rows for entry in row]

    def ours(c: Tensor, log_theta: Tensor) -> Tensor:
        prior = case.prior(log_theta.exp())
        scaled = case.curvature.scale(c)
        return scaled.logdet_ratio(prior) if ratio else (scaled + prior).logdet()

    def dense(c: Tensor, log_theta: Tensor) -> Tensor:
        prior = case.prior(log_theta.exp()).values
        total = torch.logdet(c * case.curvature.dense() + torch.diag(prior))
        return total - prior.log().sum() if ratio else total

    for a, b in zip(hessian(ours), hessian(dense), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_second_derivatives_raise_where_they_would_be_wrong() -> None:
    for name, kind in (("kronecker", "product"), ("kronecker", "equal"), ("eigenkronecker", "equal")):
        case = make(name, kind, torch.float64)
        prior = case.prior(case.theta)
        for value in (
            case.matrix().logdet(),
            case.curvature.logdet_ratio(prior),
            case.curvature.scale(2.0).logdet_ratio(prior),
        ):
            (first,) = torch.autograd.grad(value, case.theta, create_graph=True)
            with pytest.raises(RuntimeError, match="first derivatives only"):
                first.sum().backward()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_gradients_reach_the_rows(name: str, kind: str) -> None:
    case = make(name, kind, torch.float64)
    matrix, inverse = case.matrix(), torch.linalg.inv(case.explicit())
    values = case.rows.dense().clone().requires_grad_()
    (got,) = torch.autograd.grad(matrix.quadratic(DenseRows(values)).sin().sum(), values)
    (want,) = torch.autograd.grad((values @ inverse @ values.mT).sin().sum(), values)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_caches_neither_keep_nor_lose_the_graph(name: str, kind: str) -> None:
    case = make(name, kind, torch.float64)
    matrix = case.matrix()
    with torch.no_grad():
        matrix.sample(1)
        matrix.logdet()
    (want,) = torch.autograd.grad(torch.logdet(case.explicit()), case.c)
    for _ in range(2):
        (got,) = torch.autograd.grad(matrix.logdet(), case.c, retain_graph=True)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kind"), [*CASES, *((name, "none") for name in CURVATURES)])
def test_storage_is_exact(name: str, kind: str, dtype: torch.dtype, scaled: bool) -> None:
    case = make(name, "layerwise" if name == "blocks" else "constant" if kind == "none" else kind, dtype)
    matrix = case.curvature if kind == "none" else case.matrix()
    matrix = matrix.scale(0.7) if scaled else matrix
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
    if kind != "none":
        assert torch.equal(copy.solve(case.rows.dense()), matrix.solve(case.rows.dense()))
