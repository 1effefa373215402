"""What each matrix promises beyond the common laws: definition, sums, refusals, and what it computes once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.errors import BadData, CorruptFile, IncompatiblePrior, NotPositiveDefinite, UnsupportedOperation
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
    move,
    pack,
    unpack,
)

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def psd(*batch: int, size: int, rank: int | None = None, seed: int = 0) -> Tensor:
    half = draw(*batch, size, rank or size + 3, seed=seed)
    return half @ half.mT


def constant(size: int, value: float = 0.7) -> Diagonal:
    return Diagonal(torch.full((size,), value, dtype=F64))


def kronecker(q: int = 2, o: int = 3, i: int = 4) -> Kronecker:
    return Kronecker(psd(q, size=o), psd(q, size=i, seed=1))


# Definitions


def test_kronecker_is_torch_kron_by_groups() -> None:
    matrix = kronecker()
    want = torch.block_diag(*(torch.kron(g, a) for g, a in zip(matrix.left, matrix.right, strict=True)))
    torch.testing.assert_close(matrix.dense(), want)


def test_kronecker_acts_on_a_weight_matrix_as_left_w_right() -> None:
    matrix, weight = kronecker(q=1), draw(3, 4, seed=5)
    got = matrix.matvec(weight.reshape(-1)).reshape(3, 4)
    torch.testing.assert_close(got, matrix.left[0] @ weight @ matrix.right[0].T)


def test_eigenkronecker_is_its_formula() -> None:
    left, right = (torch.linalg.qr(draw(2, size, size))[0] for size in (3, 4))
    values, scales = draw(2, 3, 4).square(), (draw(2, 3).abs() + 0.1, draw(2, 4).abs() + 0.1)
    blocks = []
    for k in range(2):
        basis = torch.kron(scales[0][k, :, None] * left[k], scales[1][k, :, None] * right[k])
        blocks.append(basis @ torch.diag(values[k].reshape(-1)) @ basis.T)
    torch.testing.assert_close(EigenKronecker(left, right, values, *scales).dense(), torch.block_diag(*blocks))


def test_lowrank_is_its_formula() -> None:
    basis, values, shift = draw(3, 8), draw(3).square(), draw(8).square()
    want = torch.diag(shift) + basis.T @ torch.diag(values) @ basis
    torch.testing.assert_close(LowRank(basis, values, shift).dense(), want)


def test_blocks_sit_where_the_layout_says() -> None:
    index = (torch.tensor([4, 0, 2]), torch.tensor([3, 1]))
    blocks = (Dense(psd(size=3)), Diagonal(draw(2).square()))
    dense = BlockDiagonal(Layout(5, index), blocks).dense()
    for k in range(2):
        torch.testing.assert_close(dense[index[k]][:, index[k]], blocks[k].dense())
    assert not dense[index[0]][:, index[1]].any()


@pytest.mark.parametrize("split", [1.0, 7.0])
def test_damping_is_by_factors(split: float) -> None:
    matrix, c, tau = kronecker().scale(2.0), 1.5, 0.3
    root = (2.0 * c) ** 0.5
    eye = torch.eye(3, dtype=F64), torch.eye(4, dtype=F64)
    want = torch.block_diag(
        *(
            torch.kron(root / split * g + tau**0.5 * eye[0], root * split * a + tau**0.5 * eye[1])
            for g, a in zip(matrix.left, matrix.right, strict=True)
        )
    )
    damped = matrix.damped(c, constant(24, tau), split=split)
    torch.testing.assert_close(damped.dense(), want)
    exact = matrix.scale(c) + constant(24, tau)
    assert float(torch.linalg.eigvalsh(damped.dense() - exact.dense()).min()) > -1e-10
    assert float(damped.logdet()) > float(exact.logdet())


# Sums


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Diagonal(draw(6).square()), Diagonal(draw(6, seed=1).square())),
        (Dense(psd(size=6)), Dense(psd(size=6, seed=1))),
        (Dense(psd(size=6)).scale(2.0) + constant(6), Dense(psd(size=6, seed=1)) + Diagonal(draw(6).square())),
        (Dense(psd(size=6)), LowRank(draw(2, 6), draw(2).square(), draw(6).square())),
        (Diagonal(draw(6).square()), Dense(psd(size=6))),
        (Dense(psd(size=24)), kronecker()),
        (kronecker() + constant(24), constant(24, 0.2)),
        (
            LowRank(draw(2, 6), draw(2).square(), draw(6).square()),
            LowRank(draw(3, 6, seed=2), draw(3) ** 2, draw(6) ** 2),
        ),
        (Dense(psd(size=6)) + Diagonal(draw(6).square()), constant(6)),
    ],
)
def test_sums(a: PSD, b: PSD) -> None:
    torch.testing.assert_close((a + b).dense(), a.dense() + b.dense())
    torch.testing.assert_close((a + b).logdet(), torch.logdet(a.dense() + b.dense()))


def test_block_diagonal_matrices_add_by_blocks() -> None:
    layout = Layout(7, (torch.tensor([6, 0, 3]), torch.tensor([1, 2, 4, 5])))
    a = BlockDiagonal(layout, (Dense(psd(size=3)), Diagonal(draw(4).square())))
    same = Layout(7, tuple(index.clone() for index in layout.index))
    b = BlockDiagonal(same, (Diagonal(draw(3).square()), Dense(psd(size=4))))
    torch.testing.assert_close((a + b).dense(), a.dense() + b.dense())
    torch.testing.assert_close(a.logdet_ratio(b), (a + b).logdet() - b.logdet())


def test_lowrank_ratio_counts_its_own_diagonal() -> None:
    matrix, prior = LowRank(draw(2, 6), draw(2).square(), draw(6).square()), Diagonal(draw(6, seed=1).square())
    torch.testing.assert_close(matrix.logdet_ratio(prior), torch.logdet((matrix + prior).dense()) - prior.logdet())


def test_rows_in_another_layout_are_sorted_first() -> None:
    matrix = BlockDiagonal(Layout.contiguous([3, 4]), (Dense(psd(size=3)), Dense(psd(size=4))))
    order = torch.tensor([6, 0, 3, 1, 2, 5, 4])
    rows = Jacobian((DenseRows(draw(2, 1, 3)), DenseRows(draw(2, 1, 4))), Layout(7, tuple(order.split([3, 4]))))
    j = rows.dense()
    torch.testing.assert_close(matrix.quadratic(rows), j @ torch.linalg.inv(matrix.dense()) @ j.mT)


def test_bases_shared_by_identity_add() -> None:
    posterior = kronecker() + constant(24)
    double = posterior + posterior.scale(0.5)
    torch.testing.assert_close(double.dense(), 1.5 * posterior.dense())


def test_a_float32_matrix_stays_float32_under_a_float64_prior() -> None:
    for curvature in (
        Diagonal(draw(6).square().float()),
        Dense(psd(size=6).float()),
        Kronecker(psd(1, size=2).float(), psd(1, size=3).float()),
        LowRank(draw(2, 6).float(), draw(2).square().float(), torch.zeros(6)),
    ):
        posterior = curvature + constant(6)
        assert posterior.dtype == torch.float32
        assert posterior.solve(torch.ones(6)).dtype == torch.float32
        assert posterior.sample(2, torch.Generator().manual_seed(0)).dtype == torch.float32
        assert posterior.quadratic(DenseRows(draw(3, 1, 6))).dtype == torch.float32


def test_a_tiny_prior_survives_beside_a_large_float32_curvature() -> None:
    # 1e4 + 1e-6 rounds to 1e4 in float32, so the sum must not be formed in it.
    curvature = Dense(1e4 * torch.ones(3, 3))
    for prior in (torch.full((3,), 1e-6), torch.tensor([1e-6, 2e-6, 3e-6])):
        want = torch.logdet(1e4 * torch.ones(3, 3, dtype=F64) + torch.diag(prior.double()))
        torch.testing.assert_close((curvature + Diagonal(prior)).logdet(), want, rtol=1e-5, atol=0.0)


def test_rank_deficient_float32_matrices_have_no_negative_eigenvalues() -> None:
    half = draw(400, 60).float()
    matrix = half @ half.T
    exact = half.double() @ half.double().T
    precision = torch.full((400,), 1e-2)
    want = (torch.linalg.eigvalsh(exact).clamp(min=0) / 1e-2).log1p().sum()
    torch.testing.assert_close(Dense(matrix).logdet_ratio(Diagonal(precision)), want, rtol=1e-3, atol=0.0)
    (Dense(matrix) + Diagonal(torch.full((400,), 1e-6))).logdet()


# Refusals


def refusing(matrix: PSD) -> list[str]:
    """The methods that raise because the matrix has no inverse."""
    rows = DenseRows(draw(2, 1, matrix.size))
    calls = {
        "solve": lambda: matrix.solve(draw(matrix.size)),
        "logdet": matrix.logdet,
        "inverse_diagonal": matrix.inverse_diagonal,
        "sample": lambda: matrix.sample(1),
        "whiten": lambda: matrix.whiten(rows),
        "quadratic": lambda: matrix.quadratic(rows),
        "variance": lambda: matrix.variance(rows),
        "joint": lambda: matrix.joint(rows),
    }
    refused = []
    for name, call in calls.items():
        try:
            call()
        except NotPositiveDefinite as error:
            message = str(error)
            refused.append(name if "smallest eigenvalue" in message and "prior" in message else message)
    assert refused in ([], list(calls))
    return refused


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_singular_matrices_refuse_what_needs_an_inverse(dtype: torch.dtype) -> None:
    zero = torch.zeros(6, dtype=dtype)
    singular: list[PSD] = [
        Diagonal(zero),
        LowRank(draw(2, 6).to(dtype), draw(2).square().to(dtype), zero),
        EigenKronecker(torch.eye(2, dtype=dtype)[None], torch.eye(3, dtype=dtype)[None], zero.reshape(1, 2, 3)),
    ]
    for seed in range(10):  # rounding decides the sign of the null eigenvalues
        singular.append(Dense(psd(size=6, rank=5, seed=seed).to(dtype)))
        singular.append(Kronecker(psd(1, size=2, seed=seed).to(dtype), psd(1, size=3, rank=2, seed=seed).to(dtype)))
    for matrix in singular:
        assert refusing(matrix)
        assert refusing(matrix.scale(3.0))
        assert not refusing(matrix + Diagonal(zero + 0.1))
        assert refusing(BlockDiagonal(Layout.contiguous([6]), (matrix,)))
        with pytest.raises(NotPositiveDefinite):
            matrix.logdet_ratio(Diagonal(zero))


def test_indefinite_matrices_say_by_how_much() -> None:
    basis = torch.linalg.qr(draw(5, 5))[0]
    hessian = Dense(basis @ torch.diag(torch.tensor([-0.25, 0.0, 1.0, 2.0, 3.0], dtype=F64)) @ basis.T)
    assert float(hessian.smallest_eigenvalue()) == pytest.approx(-0.25)
    assert float((hessian.scale(2.0) + constant(5, 0.1)).smallest_eigenvalue()) == pytest.approx(-0.4)
    with pytest.raises(NotPositiveDefinite, match=r"indefinite.*-0\.25.*more than 0\.25.*GGN"):
        hessian.logdet()
    with pytest.raises(NotPositiveDefinite, match=r"more than 0\.15"):
        (hessian + constant(5, 0.1)).solve(draw(5))
    with pytest.raises(NotPositiveDefinite, match="indefinite"):
        (hessian + Diagonal(torch.linspace(0.01, 0.02, 5, dtype=F64))).logdet()
    with pytest.raises(NotPositiveDefinite, match="indefinite"):
        hessian.logdet_ratio(constant(5, 0.1))
    enough = hessian + constant(5, 0.26)
    torch.testing.assert_close(enough.logdet(), torch.logdet(enough.dense()))


@pytest.mark.parametrize("side", ["left", "right"])
def test_indefinite_kronecker_factors_are_refused(side: str) -> None:
    good, bad = torch.eye(2)[None], -torch.eye(2)[None]
    matrix = Kronecker(bad if side == "left" else good, bad)
    with pytest.raises(NotPositiveDefinite, match=side):
        _ = matrix + Diagonal(torch.ones(4))
    with pytest.raises(NotPositiveDefinite, match=side):
        matrix.logdet()


def test_slightly_negative_kronecker_eigenvalues_count_as_zero() -> None:
    matrix = Kronecker(torch.diag(torch.tensor([1.0, -1e-10], dtype=F64))[None], torch.ones(1, 1, 1, dtype=F64))
    torch.testing.assert_close(
        (matrix + constant(2, 1e-11)).logdet(), constant(2, 1e-11).values.log()[0] + constant(1, 1 + 1e-11).logdet()
    )


def test_a_prior_that_is_almost_a_product_is_refused() -> None:
    values = draw(2, 3, 1).square() * draw(2, 1, 4).square()
    kronecker() + Diagonal(values.reshape(-1))
    values[0, 1, 2] *= 1 + 1e-6
    with pytest.raises(IncompatiblePrior):
        kronecker() + Diagonal(values.reshape(-1))


@pytest.mark.parametrize(
    ("matrix", "prior"),
    [
        (kronecker(), Diagonal(draw(24).square())),
        (kronecker() + constant(24), Diagonal(draw(24).square())),
        (kronecker() + Diagonal((draw(2, 3, 1) ** 2 * draw(2, 1, 4) ** 2).reshape(-1)), constant(24)),
        (kronecker(), Dense(psd(size=24))),
        (LowRank(draw(2, 6), draw(2).square(), draw(6).square()), Dense(psd(size=6))),
        (BlockDiagonal(Layout.contiguous([6]), (Dense(psd(size=6)),)), Dense(psd(size=6))),
    ],
)
def test_sums_that_leave_the_structure_are_refused(matrix: PSD, prior: PSD) -> None:
    for call in (lambda: matrix + prior, lambda: matrix.logdet_ratio(prior)):
        with pytest.raises(IncompatiblePrior, match=r"'diag'.*'full'"):
            call()


def test_a_product_prior_with_a_zero_cannot_be_whitened() -> None:
    prior = Diagonal((draw(2, 3, 1).square() * torch.arange(4, dtype=F64)).reshape(-1))
    with pytest.raises(IncompatiblePrior, match="positive product"):
        kronecker() + prior


def test_errors_name_the_block() -> None:
    layout = Layout.contiguous([24, 3])
    matrix = BlockDiagonal(layout, (kronecker(), Dense(psd(size=3, rank=1))), ("fc1.weight", "norm.weight"))
    with pytest.raises(IncompatiblePrior, match=r"block 0 \('fc1.weight'\): a Kronecker"):
        matrix + Diagonal(draw(27).square())
    with pytest.raises(NotPositiveDefinite, match=r"block 1 \('norm.weight'\): .*singular"):
        matrix.logdet()
    assert (matrix + constant(27)).names == matrix.names
    with pytest.raises(NotPositiveDefinite, match="block 1: "):
        BlockDiagonal(layout, matrix.blocks).solve(draw(27))


def test_what_is_not_finite_is_refused() -> None:
    broken = psd(size=4)
    broken[0, 1] = float("nan")
    with pytest.raises(BadData, match="NaN"):
        (Dense(broken) + constant(4)).logdet()
    with pytest.raises(NotPositiveDefinite, match="NaN"):
        Diagonal(broken[0]).logdet()


def test_shapes_and_scales_are_checked() -> None:
    with pytest.raises(ValueError, match="≥ 0"):
        kronecker().scale(-1.0)
    with pytest.raises(ValueError, match="length 24"):
        kronecker().solve(draw(23))
    with pytest.raises(ValueError, match="24 parameters"):
        kronecker().quadratic(DenseRows(draw(1, 1, 23)))
    with pytest.raises(ValueError, match="size 6"):
        kronecker() + constant(6)
    with pytest.raises(ValueError, match="square"):
        Dense(draw(2, 3))
    with pytest.raises(ValueError, match="expected left"):
        Kronecker(psd(2, size=3), psd(1, size=3))
    with pytest.raises(ValueError, match="do not fit"):
        BlockDiagonal(Layout.contiguous([2]), (constant(3),))
    with pytest.raises(ValueError, match="≥ 0"):
        LowRank(draw(2, 6), -torch.ones(2, dtype=F64), draw(6).square())
    with pytest.raises(UnsupportedOperation, match="Detach"):
        Kronecker(psd(1, size=2).requires_grad_(), psd(1, size=2))


def test_contiguous_blocks_are_stored_as_ranges() -> None:
    matrix = BlockDiagonal(Layout(7, (torch.arange(4, 7), torch.arange(4))), (Dense(psd(size=3)), constant(4)))
    tensors, spec = pack(matrix)
    assert not any("layout" in key for key in tensors)
    assert torch.equal(unpack(tensors, spec, PSD).dense(), matrix.dense())


def test_moving_keeps_every_part() -> None:
    matrix = BlockDiagonal(Layout.contiguous([24, 3]), (kronecker().scale(2.0), constant(3)), ("fc", "norm"))
    moved = move(matrix, "cpu")
    assert torch.equal(moved.dense(), matrix.dense())
    assert isinstance(moved, BlockDiagonal)
    assert moved.names == matrix.names


@pytest.mark.parametrize("break_it", ["type", "tensor", "field", "shape"])
def test_damaged_storage_is_named(break_it: str) -> None:
    tensors, spec = pack(BlockDiagonal(Layout.contiguous([24, 3]), (kronecker(), constant(3))))
    if break_it == "type":
        spec["blocks"][0]["type"] = "Circulant"
    elif break_it == "tensor":
        del tensors["blocks.0.left"]
    elif break_it == "field":
        del spec["blocks"][1]["values"]
    else:
        tensors["blocks.1.values"] = torch.ones(4, dtype=F64)
    with pytest.raises(CorruptFile, match="Save it again"):
        unpack(tensors, spec, PSD)


# What is computed once


@pytest.mark.parametrize(("matrix", "decompositions"), [(Dense(psd(size=6)), 1), (kronecker(), 2)])
def test_one_decomposition_serves_every_setting(
    matrix: PSD, decompositions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda a, **options: calls.append(a) or eigh(a, **options))
    for c in (0.1, 1.0, 10.0):
        for tau in (0.1, 1.0):
            prior = constant(matrix.size, tau)
            posterior = matrix.scale(c) + prior
            posterior.logdet()
            posterior.solve(draw(matrix.size))
            matrix.scale(c).logdet_ratio(prior)
    assert len(calls) == decompositions


def test_a_cholesky_factor_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda a: calls.append(a) or cholesky(a))
    posterior = Dense(psd(size=6)) + Diagonal(draw(6).square())
    posterior.logdet()
    posterior.solve(draw(6))
    posterior.sample(2)
    assert len(calls) == 1


def test_no_eigenvalues_are_computed_to_see_that_a_matrix_is_positive_definite() -> None:
    matrix = Dense(psd(size=6))
    (matrix + constant(6, 0.1)).require_positive_definite()
    assert not matrix.spectrum.known
    values = torch.linalg.eigvalsh(matrix.dense())
    indefinite = Dense(matrix.dense() - 2 * values[0] * torch.eye(6, dtype=F64))
    (indefinite + constant(6, 1.01 * values[0].item())).require_positive_definite()
    with pytest.raises(NotPositiveDefinite):
        (indefinite + constant(6, 0.99 * values[0].item())).require_positive_definite()
    with pytest.raises(NotPositiveDefinite):
        Dense(torch.diag(torch.tensor([1.0, 0.0], dtype=F64))).require_positive_definite()


def test_an_almost_constant_prior_is_constant() -> None:
    values = torch.full((24,), 0.7, dtype=F64)
    values[3] *= 1 + 4e-16
    posterior = kronecker() + Diagonal(values)
    assert isinstance(posterior, Kronecker)
    torch.testing.assert_close(posterior.shift, torch.tensor(0.7, dtype=F64))


def test_sums_of_priors_and_of_the_same_factors() -> None:
    matrix = kronecker()
    whole = matrix + constant(24, 0.7)
    twice = (whole + constant(24, 0.2)).scale(2.0) + matrix.scale(3.0)
    torch.testing.assert_close(twice.dense(), 5 * matrix.dense() + 1.8 * torch.eye(24, dtype=F64))
    for one, other in ((matrix, whole), (whole, matrix), (matrix, matrix), (whole, whole)):
        torch.testing.assert_close((one + other).dense(), one.dense() + other.dense())
    with pytest.raises(IncompatiblePrior, match="Add the priors first"):
        whole + Diagonal(torch.linspace(0.5, 0.7, 24, dtype=F64))
    with pytest.raises(IncompatiblePrior, match="constant over the block or"):
        matrix + Dense(psd(size=24))
    with pytest.raises(UnsupportedOperation, match="without a prior"):
        whole.damped(1.0, constant(24, 1.0))


def test_gradients_reach_a_dense_matrix_itself() -> None:
    matrix = psd(size=5).requires_grad_()
    (got,) = torch.autograd.grad((Dense(matrix).scale(2.0) + constant(5)).logdet(), matrix)
    (want,) = torch.autograd.grad(torch.logdet(2 * matrix + 0.7 * torch.eye(5, dtype=F64)), matrix)
    torch.testing.assert_close(got, want)


def test_ten_million_parameters() -> None:
    size = 10_000_000
    index = torch.arange(size).reshape(1000, -1).T.reshape(-1)
    layout = Layout(size, tuple(index.split(size // 4)))
    matrix = BlockDiagonal(layout, tuple(Diagonal(torch.ones(size // 4)) for _ in range(4)))
    posterior = matrix.scale(2.0) + Diagonal(torch.arange(size, dtype=torch.float32) + 1)
    torch.testing.assert_close(posterior.diagonal(), torch.arange(size, dtype=torch.float32) + 3)


@pytest.mark.parametrize(("k", "rank"), [(120, 31), (60, 8), (20, 8), (31, 31)])
@pytest.mark.parametrize(("scale", "tau"), [(1.0, 1.0), (1e5, 1e-3)])
def test_directions_that_depend_on_each_other(k: int, rank: int, scale: float, tau: float) -> None:
    """More of them than weights, or than they span: a float64 inverse is good to 1e-5 here."""
    basis = draw(k, rank) @ draw(rank, 31, seed=1) if rank < 31 else draw(k, 31)
    values = scale * draw(k, seed=2).square()
    matrix = LowRank(basis, values, torch.full((31,), tau, dtype=F64))
    e, u = torch.linalg.eigh((basis.T * values) @ basis)
    e = e.clamp(min=0) * (e > 1e-13 * e.max()) + tau
    inverse, j = (u / e) @ u.T, torch.stack([basis[0], draw(31, seed=3)])[None]
    close = {"rtol": 1e-4, "atol": 1e-6 * float(inverse.abs().max())}
    torch.testing.assert_close(matrix.inverse_diagonal(), inverse.diagonal(), **close)
    torch.testing.assert_close(matrix.solve(torch.eye(31, dtype=F64)), inverse, **close)
    torch.testing.assert_close(matrix.logdet(), e.log().sum(), rtol=1e-5, atol=0)
    for got, want in ((matrix.quadratic(DenseRows(j)), j @ inverse @ j.mT), (matrix.variance(DenseRows(j)), None)):
        want = (j @ inverse @ j.mT).diagonal(dim1=1, dim2=2) if want is None else want
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6 * float(want.abs().max()))
    white = matrix.whiten(DenseRows(j))
    torch.testing.assert_close(white @ white.mT, j @ inverse @ j.mT, rtol=1e-3, atol=1e-6 * float(want.abs().max()))


def test_a_curvature_beyond_float64_is_refused() -> None:
    matrix = LowRank(draw(9, 4), torch.full((9,), 1e20, dtype=F64), torch.full((4,), 1e-10, dtype=F64))
    with pytest.raises(NotPositiveDefinite, match="Raise the prior precision"):
        matrix.solve(torch.ones(4, dtype=F64))
