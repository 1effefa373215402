"""Laws of rows: every method against the array that `dense` writes out, and `dense` against the definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lapwing.linalg import DeferredRows, DenseRows, Extent, Jacobian, Layout, MatrixRows, Rows, Term
from lapwing.linalg import rows as rows_module
from lapwing.linalg.rows import rotated

N, R, Q, O, I = 5, 3, 2, 3, 4
Draw = Callable[..., Tensor]

TERMS: dict[str, list[tuple[int, int, int]]] = {  # (directions left, directions right, positions) of each term
    "one use": [(R, 1, 1)],
    "one use, roles swapped": [(1, R, 1)],
    "directions on both sides": [(R, R, 1)],
    "one direction": [(1, 1, 1)],
    "shared": [(R, 1, 6)],
    "shared, swapped": [(1, R, 6)],
    "shared, one direction": [(1, 1, 6)],
    "used twice": [(R, 1, 1), (R, 1, 1)],
    "tied": [(R, 1, 6), (1, R, 2)],
    "tied, with a constant term": [(R, 1, 1), (1, R, 3), (1, 1, 2)],
}


@pytest.fixture
def draw() -> Draw:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float64: torch.randn(*shape, generator=generator, dtype=dtype)


def matrix_rows(kind: str, draw: Draw, dtype: torch.dtype = torch.float64) -> MatrixRows:
    return MatrixRows(
        tuple(
            Term(draw(N, left, t, Q, O, dtype=dtype), draw(N, right, t, Q, I, dtype=dtype))
            for left, right, t in TERMS[kind]
        )
    )


def deferred(rows: MatrixRows) -> DeferredRows:
    """The same rows, made a few samples at a time."""
    positions = sum(term.left.shape[2] for term in rows.terms)
    extent = Extent(rows.n, rows.r, rows.q, rows.o, rows.i, positions)
    return DeferredRows(lambda start, length: rows.narrow(start, length).terms, extent, rows.dtype, rows.device)


def every_rows(draw: Draw, dtype: torch.dtype = torch.float64) -> dict[str, Rows]:
    made: dict[str, Rows] = {kind: matrix_rows(kind, draw, dtype) for kind in TERMS}
    made |= {f"deferred, {kind}": deferred(matrix_rows(kind, draw, dtype)) for kind in ("shared", "tied")}
    made["dense"] = DenseRows(draw(N, R, 7, dtype=dtype))
    blocks = (made["one use"], DenseRows(draw(N, R, 5, dtype=dtype)), made["tied"])
    order = torch.randperm(53, generator=torch.Generator().manual_seed(1))
    made["jacobian"] = Jacobian(blocks, Layout(53, tuple(order.split([24, 5, 24]))))
    made["jacobian in order"] = Jacobian(blocks, Layout.contiguous([24, 5, 24]))
    return made


KINDS = [*TERMS, "deferred, shared", "deferred, tied", "dense", "jacobian", "jacobian in order"]


@pytest.fixture(params=[None, 1], ids=["one chunk", "one sample a chunk"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(rows_module, "CHUNK_BYTES", request.param)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_methods_agree_with_dense(kind: str, dtype: torch.dtype, draw: Draw) -> None:
    rows = every_rows(draw, dtype)[kind]
    j = rows.dense().double()
    w = draw(rows.size).square().to(dtype)
    basis = draw(rows.size, 6).to(dtype)
    pairs = torch.tensor([[0, 1, 1, 2, 0], [0, 0, 1, 0, 2]]).clamp(max=rows.r - 1)
    answers = {
        "square_sum": (rows.square_sum(), j.square().sum((0, 1))),
        "gram": (rows.gram(), torch.einsum("nrp,nrq->pq", j, j)),
        "weighted_gram": (rows.weighted_gram(w), torch.einsum("nrp,p,nsp->nrs", j, w.double(), j)),
        "weighted_norm": (rows.weighted_norm(w), torch.einsum("nrp,p->nr", j.square(), w.double())),
        "joint_gram": (rows.joint_gram(w), torch.einsum("nrp,p,msp->nrms", j, w.double(), j)),
        "times": (rows.times(basis).dense(), torch.einsum("nrp,pk->nrk", j, basis.double())),
        "weighted_products": (
            rows.weighted_products(basis.mT, pairs),
            torch.einsum("nkp,nkp,pm->mnk", j[:, pairs[0]], j[:, pairs[1]], basis.double()),
        ),
        "narrow": (rows.narrow(1, 3).dense(), j[1:4]),
        "to": (rows.to(torch.float64).dense(), j),
    }
    for batch in [(), (1,), (2, 3), (40,), (0,)]:
        v = draw(*batch, rows.size, dtype=dtype)
        answers[f"matvec {batch}"] = rows.matvec(v), torch.einsum("...p,nrp->...nr", v.double(), j)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for name, (got, want) in answers.items():
        assert got.shape == want.shape, name
        assert name == "to" or got.dtype == dtype, name
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * 30, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("kind", TERMS)
def test_dense_is_the_sum_of_outer_products(kind: str, draw: Draw) -> None:
    rows = matrix_rows(kind, draw)
    for n in range(rows.n):
        for r in range(rows.r):
            for q in range(Q):
                want = torch.zeros(O, I, dtype=torch.float64)
                for term in rows.terms:
                    left, right = term.left.expand(-1, rows.r, -1, -1, -1), term.right.expand(-1, rows.r, -1, -1, -1)
                    for t in range(left.shape[2]):
                        want += torch.outer(left[n, r, t, q], right[n, r, t, q])
                torch.testing.assert_close(rows.matrix()[n, r, q], want)
    assert torch.equal(rows.dense(), rows.matrix().reshape(rows.n, rows.r, -1))


@pytest.mark.parametrize("kind", TERMS)
def test_rotation_multiplies_from_the_right(kind: str, draw: Draw) -> None:
    rows = matrix_rows(kind, draw)
    left, right = draw(Q, O, 2), draw(Q, I, 5)
    want = torch.einsum("nrqoi,qop,qij->nrqpj", rows.matrix(), left, right)
    torch.testing.assert_close(rows.rotate(left, right).matrix(), want)


@pytest.mark.parametrize("expanded", [False, True])
def test_rotation_where_positions_are_neighbors(expanded: bool, draw: Draw) -> None:
    """As a convolution has them, (n, r, channels, positions): they stay neighbors."""
    left = draw(N, R, 1, O, 6).permute(0, 1, 4, 2, 3)
    right = draw(1 if expanded else N, 1, 1, I, 6).permute(0, 1, 4, 2, 3).expand(N, -1, -1, -1, -1)
    bases = draw(1, O, O), draw(1, I, I)
    (term,) = rotated((Term(left, right),), *bases)
    assert term.left.stride(2) == term.right.stride(2) == 1
    torch.testing.assert_close(term.left, torch.einsum("nrtqo,qop->nrtqp", left, bases[0]))
    torch.testing.assert_close(term.right, torch.einsum("nrtqi,qij->nrtqj", right, bases[1]))


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", ["shared", "tied", "deferred, shared"])
def test_weights_of_both_signs_and_with_a_gradient(kind: str, draw: Draw) -> None:
    rows = every_rows(draw)[kind]
    w = draw(rows.size).requires_grad_()
    j, cotangent = rows.dense(), draw(N, R, R)
    want = torch.einsum("nrp,p,nsp->nrs", j, w, j)
    torch.testing.assert_close(rows.weighted_gram(w.detach()), want)
    (found,) = torch.autograd.grad(rows.weighted_gram(w), w, cotangent)
    torch.testing.assert_close(found, torch.autograd.grad(want, w, cotangent)[0])


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("positions", [2, 40])
@pytest.mark.parametrize("twice", [False, True])
def test_rotation_of_deferred_rows(positions: int, twice: bool, draw: Draw) -> None:
    """Before the sum over few positions, after the sum over many."""
    plain = MatrixRows((Term(draw(N, R, positions, Q, O), draw(N, 1, positions, Q, I)),))
    left, right, w = draw(Q, O, O), draw(Q, I, I), draw(Q * O * I).square()
    rows, want = deferred(plain).rotate(left, right), torch.einsum("nrqoi,qop,qij->nrqpj", plain.matrix(), left, right)
    assert (rows.basis is None) == (positions == 2)
    if twice:
        rows, want = rows.rotate(left, right), torch.einsum("nrqoi,qop,qij->nrqpj", want, left, right)
    flat = want.flatten(2)
    torch.testing.assert_close(rows.weighted_gram(w), (flat * w) @ flat.mT)
    torch.testing.assert_close(rows.square_sum(), flat.square().sum((0, 1)))
    torch.testing.assert_close(rows.weighted_norm(w), flat.square() @ w)
    assert "terms" not in vars(rows), "all samples were made at once"
    torch.testing.assert_close(rows.matrix(), want)
    torch.testing.assert_close(rows.matvec(w), flat @ w)


def test_rotation_of_a_side_expanded_over_samples(draw: Draw) -> None:
    rows = MatrixRows((Term(draw(1, R, 1, Q, O).expand(N, -1, -1, -1, -1), draw(N, 1, 1, Q, I)),))
    left, right = draw(Q, O, O), draw(Q, I, I)
    want = torch.einsum("nrqoi,qop,qij->nrqpj", rows.matrix(), left, right)
    rotated = rows.rotate(left, right)
    torch.testing.assert_close(rotated.matrix(), want)
    assert rotated.terms[0].left.stride(0) == 0


def test_jacobian_places_blocks_by_layout(draw: Draw) -> None:
    parts = [DenseRows(draw(N, R, size)) for size in (2, 3)]
    index = (torch.tensor([4, 0]), torch.tensor([1, 3, 2]))
    dense = Jacobian(tuple(parts), Layout(5, index)).dense()
    for part, where in zip(parts, index, strict=True):
        assert torch.equal(dense[..., where], part.values)


@pytest.mark.parametrize("kind", ["one use", "one use, roles swapped", "shared", "tied", "jacobian"])
def test_gradients_reach_the_rows(kind: str, draw: Draw) -> None:
    w = draw(every_rows(draw)[kind].size).square()
    leaves: list[Tensor] = []

    def remember(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        leaves.append(draw(*shape, dtype=dtype).requires_grad_())
        return leaves[-1]

    rows = every_rows(remember)[kind]

    def gradients(value: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))

    got = gradients(rows.weighted_gram(w).sin().sum() + rows.square_sum().sin().sum() + rows.matvec(w).sin().sum())
    j = rows.dense()
    want = gradients(
        torch.einsum("nrp,p,nsp->nrs", j, w, j).sin().sum() + j.square().sum((0, 1)).sin().sum() + (j @ w).sin().sum()
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert any(bool(a.abs().sum() > 0) for a in got)


@pytest.mark.parametrize("method", ["square_sum", "weighted_gram", "weighted_norm", "matvec", "gram"])
def test_one_use_never_forms_a_block(method: str, draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = matrix_rows("one use", draw)
    want = getattr(DenseRows(rows.dense()), method)

    def refuse(self: MatrixRows) -> Tensor:
        raise AssertionError("formed (n, r, q, o, i)")

    monkeypatch.setattr(MatrixRows, "matrix", refuse)
    arguments = () if method in ("square_sum", "gram") else (draw(rows.size).square(),)
    torch.testing.assert_close(getattr(rows, method)(*arguments), want(*arguments))


@pytest.mark.parametrize("ordered", [True, False])
def test_layout_scatter_inverts_gather(ordered: bool, draw: Draw) -> None:
    sizes = [3, 0, 4, 1]
    layout = Layout.contiguous(sizes)
    if not ordered:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
        layout = Layout(8, tuple(order.split(sizes)))
    v = draw(2, 3, 8)
    parts = layout.gather(v)
    for part, index in zip(parts, layout.index, strict=True):
        assert torch.equal(part, v[..., index])
    assert torch.equal(layout.scatter(parts), v)


def test_layout_reads_ranges_as_views(draw: Draw) -> None:
    layout = Layout(6, (torch.arange(4, 6), torch.arange(4)))
    v = draw(6)
    first, second = layout.gather(v)
    assert first.data_ptr() == v[4:].data_ptr()
    assert second.data_ptr() == v.data_ptr()
    assert torch.equal(layout.scatter([first, second]), v)


@pytest.mark.parametrize(
    ("size", "index"),
    [
        (3, [[0, 1]]),
        (3, [[0, 1, 2], [2]]),
        (3, [[0, 1], [1]]),
        (2, [[0, 2]]),
        (2, [[0, -1]]),
    ],
)
def test_layout_refuses_what_is_no_partition(size: int, index: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="must"):
        Layout(size, tuple(torch.tensor(part) for part in index))


def test_shapes_are_checked(draw: Draw) -> None:
    with pytest.raises(ValueError, match="expected left"):
        Term(draw(N, 2, 1, Q, O), draw(N, 3, 1, Q, I))
    with pytest.raises(ValueError, match="expected left"):
        Term(draw(N, 1, 2, Q, O), draw(N, 1, 1, Q, I))
    with pytest.raises(ValueError, match="all terms"):
        MatrixRows((Term(draw(N, 2, 1, Q, O), draw(N, 1, 1, Q, I)), Term(draw(N, 3, 1, Q, O), draw(N, 1, 1, Q, I))))
    with pytest.raises(ValueError, match="length 24"):
        matrix_rows("shared", draw).matvec(draw(23))
    with pytest.raises(ValueError, match="sizes"):
        Jacobian((DenseRows(draw(N, R, 2)),), Layout.contiguous([3]))
    with pytest.raises(ValueError, match="same samples"):
        Jacobian((DenseRows(draw(N, R, 2)), DenseRows(draw(N, 1, 2))), Layout.contiguous([2, 2]))
