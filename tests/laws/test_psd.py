"""Laws of matrices: whatever the structure, every answer is the one dense algebra gives, and so is its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

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
    SimultaneousKronecker,
    Term,
)
from lapwing.storage import named
from lapwing.testing import MatrixLaws
from lapwing.testing.matrices import Draw

Q, O, I = 2, 3, 4
P = Q * O * I


def kronecker(draw: Draw) -> Kronecker:
    return Kronecker(draw.psd(Q, size=O), draw.psd(Q, size=I))


def low_kronecker(draw: Draw) -> Kronecker:
    return Kronecker(draw.psd(Q, size=O, rank=1), draw.psd(Q, size=I, rank=2))


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


def matrix_rows(draw: Draw, t: int = 1) -> MatrixRows:
    return MatrixRows((Term(draw(4, 2, t, Q, O), draw(4, 1, t, Q, I)),))


def block_rows(curvature: BlockDiagonal, draw: Draw) -> Jacobian:
    sizes = curvature.layout.sizes
    parts = [matrix_rows(draw), DenseRows(draw(4, 2, sizes[1])), matrix_rows(draw, 3), DenseRows(draw(4, 2, sizes[3]))]
    return Jacobian((*parts, matrix_rows(draw)), curvature.layout)


@dataclass(frozen=True)
class Kind:
    """A kind of prior: how many numbers θ it has, and what matrix they make."""

    parameters: Callable[[PSD], int]
    prior: Callable[[Any, Tensor], PSD]
    first: Callable[[Tensor], Tensor] = lambda theta: theta


CONSTANT = Kind(lambda _: 1, lambda matrix, theta: Diagonal(theta.expand(matrix.size)))
GENERAL = Kind(lambda matrix: matrix.size, lambda _, theta: Diagonal(theta))
EQUAL = Kind(GENERAL.parameters, GENERAL.prior, lambda theta: torch.full_like(theta, 0.7))  # which only happen to be so
PRODUCT = Kind(
    lambda _: Q * (O + I),
    lambda _, theta: Diagonal((theta[: Q * O].reshape(Q, O, 1) * theta[Q * O :].reshape(Q, 1, I)).reshape(P)),
)


def another_product(matrix: PSD, theta: Tensor) -> PSD:
    draw = Draw(torch.Generator().manual_seed(9), matrix.dtype)
    return Kronecker(draw.psd(Q, size=O), draw.psd(Q, size=I)).scale(theta[0])


def in_the_same_basis(matrix: SimultaneousKronecker, theta: Tensor) -> PSD:
    draw = Draw(torch.Generator().manual_seed(9), torch.float64)
    return replace(matrix, values=0.2 + draw(Q, O, I).square()).scale(theta[0])


FACTORED, SAME_BASIS = Kind(lambda _: 1, another_product), Kind(lambda _: 1, in_the_same_basis)


def by_layer(matrix: BlockDiagonal, theta: Tensor) -> Diagonal:
    group = matrix.layout.scatter([torch.full((size,), k) for k, size in enumerate(matrix.layout.sizes)])
    return Diagonal.by_group(theta, group)


LAYERWISE = Kind(lambda matrix: len(matrix.diagonal_blocks()), by_layer)


@dataclass(frozen=True)
class Example:
    """A curvature, the priors it takes, and what it can do besides."""

    make: Callable[[Draw], PSD]
    kinds: dict[str, Kind]
    rows: Callable[[Any, Draw], Rows] = lambda matrix, draw: DenseRows(draw(4, 2, matrix.size))
    able: dict[str, Any] = field(default_factory=dict)
    less: dict[str, dict[str, Any]] = field(default_factory=dict)  # what it cannot do under a kind of prior


def of_weight(_: PSD, draw: Draw) -> Rows:
    return matrix_rows(draw)


EXACT, SINGULAR, BOUND = {"digits": 1e-8}, {"definite": False}, {"exact_smallest": False}
ROUGH, ONCE = {"digits": 1e-3}, {"second_derivatives": False}
WHITENED = {"product": ONCE | BOUND, "equal": ONCE}
EXAMPLES: dict[str, Example] = {
    "diagonal": Example(
        lambda draw: Diagonal(draw(P).square() + 0.1),
        {"constant": CONSTANT, "general": GENERAL, "equal": EQUAL}, of_weight, EXACT,
    ),
    "dense": Example(
        lambda draw: Dense(draw.psd(size=P)), {"constant": CONSTANT, "equal": EQUAL}, able=EXACT, less={"equal": ROUGH}
    ),
    "dense of rank 5": Example(
        lambda draw: Dense(draw.psd(size=P, rank=5)), {"constant": CONSTANT, "general": GENERAL},
        able=EXACT | SINGULAR, less={"general": ROUGH},
    ),
    "dense zero": Example(
        lambda draw: Dense(torch.zeros(P, P, dtype=draw.dtype)), {"constant": CONSTANT, "general": GENERAL},
        able=EXACT | SINGULAR,
    ),
    "kronecker": Example(
        kronecker, {"constant": CONSTANT, "product": PRODUCT, "equal": EQUAL, "factored": FACTORED}, of_weight, EXACT,
        WHITENED | {"factored": BOUND},
    ),
    "kronecker of low rank": Example(
        low_kronecker, {"constant": CONSTANT, "product": PRODUCT, "factored": FACTORED}, of_weight, EXACT | SINGULAR,
        WHITENED | {"factored": BOUND},
    ),
    "kronecker zero": Example(
        lambda draw: Kronecker(0 * draw(Q, O, O), 0 * draw(Q, I, I)), {"constant": CONSTANT, "product": PRODUCT},
        of_weight, EXACT | SINGULAR, WHITENED,
    ),
    "kronecker with a prior": Example(
        lambda draw: kronecker(draw) + Diagonal(draw.full(P, 0.3)), {"constant": CONSTANT}, of_weight, EXACT
    ),
    "kronecker of low rank with a prior": Example(
        lambda draw: low_kronecker(draw) + Diagonal(draw.full(P, 0.3)), {"constant": CONSTANT, "equal": EQUAL},
        of_weight, EXACT, WHITENED,
    ),
    "eigenkronecker": Example(eigen_kronecker, {"constant": CONSTANT, "equal": EQUAL}, able=EXACT, less=WHITENED),
    "simultaneous": Example(
        lambda draw: kronecker(draw) + kronecker(draw), {"same basis": SAME_BASIS}, of_weight, EXACT | BOUND
    ),
    "lowrank": Example(low_rank, {"constant": CONSTANT, "general": GENERAL}, able=SINGULAR | BOUND),
    "blocks": Example(
        blocks, {"layerwise": LAYERWISE, "equal": EQUAL}, block_rows, SINGULAR | BOUND, {"equal": ONCE}
    ),
}  # fmt: skip


def laws(example: Example, kind: str) -> type[MatrixLaws]:
    prior = example.kinds[kind]
    own = {
        "curvature": lambda _, draw: example.make(draw),
        "parameters": lambda _, matrix: prior.parameters(matrix),
        "prior": lambda _, matrix, theta: prior.prior(matrix, theta),
        "first": lambda _, theta: prior.first(theta),
        "rows": lambda _, matrix, draw: example.rows(matrix, draw),
    }
    return type("Laws", (MatrixLaws,), {**example.able, **example.less.get(kind, {}), **own})


CASES = {f"{name}, {kind}": laws(example, kind) for name, example in EXAMPLES.items() for kind in example.kinds}
LAWS = [name for name in dir(MatrixLaws) if name.startswith("test_")]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("case", CASES)
def test_laws(case: str, law: str) -> None:
    getattr(CASES[case](), law)()


def test_every_matrix_has_an_example() -> None:
    draw = Draw(torch.Generator().manual_seed(0), torch.float64)
    made = {type(example.make(draw)) for example in EXAMPLES.values()}
    ours = {cls for cls in named(PSD).values() if cls.__module__.startswith("lapwing.")}
    assert ours <= made


@pytest.mark.parametrize("case", ["kronecker, constant", "lowrank, general", "blocks, layerwise"])
def test_samples_have_the_covariance(case: str) -> None:
    made = CASES[case]().case()
    n = 20_000
    draws = made.matrix().sample(n, torch.Generator().manual_seed(0)).detach()
    inverse = torch.linalg.inv(made.explicit()).detach()
    spread = inverse.diagonal().sqrt()
    error = (draws.T @ draws / n - inverse) / (spread[:, None] * spread)
    assert float(error.abs().max()) < 6 * (2 / n) ** 0.5
    assert float((draws.mean(0) / spread).abs().max()) < 6 / n**0.5


@pytest.mark.parametrize("case", [name for name in CASES if not CASES[name].second_derivatives])
def test_second_derivatives_raise_where_they_would_be_wrong(case: str) -> None:
    made = CASES[case]().case()
    prior = made.prior(made.theta)
    for value in (
        made.matrix().logdet(),
        made.curvature.logdet_ratio(prior),
        made.curvature.scale(2.0).logdet_ratio(prior),
    ):
        (first,) = torch.autograd.grad(value, made.theta, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            first.sum().backward()
