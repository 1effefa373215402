"""Alternating projections and the sketched score against dense algebra."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experiments._nullspace import project_to_nullspace
from experiments._sketched import CountSketch, sketched_score
from tests.curvature.test_matrixfree import problem

import lapwing
from lapwing.curvature import GGN, pose
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.likelihoods import resolve_likelihood
from lapwing.model import Batches, Network, Params


def posed(name: str, n: int):
    model, (x, y), likelihood = problem(name)
    family = resolve_likelihood(likelihood)
    names = tuple(k for k, _ in model.named_parameters())
    network = Network(model, Params.of(model, names), family.outputs)
    batches = Batches([(x[: n // 2], y[: n // 2]), (x[n // 2 : n], y[n // 2 : n])], model, torch.device("cpu"))
    return pose(network, batches, family, GGN()), x[:n]


@pytest.mark.parametrize("name", ["mlp regression", "conv classification"])
def test_projection_onto_the_null_space(name: str) -> None:
    found, x = posed(name, 6)
    size = found.network.params.size
    v = torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = found.network.jvp(x, torch.eye(size, dtype=torch.float64))[1].reshape(size, -1).T  # (m, P)
    exact = v - v @ torch.linalg.pinv(rows) @ rows
    result = project_to_nullspace(found, v, samples=3, tolerance=1e-4, passes=80, unconverged="accept")
    moved = (result.x @ rows.T).norm(dim=-1) / (v @ rows.T).norm(dim=-1)
    assert float(moved.max()) < 0.05
    torch.testing.assert_close(result.x, exact, rtol=0, atol=0.1)
    assert bool((result.residuals >= 0.1 * moved).all())


def test_one_batch_is_exact_and_failure_is_not_silent() -> None:
    found, x = posed("mlp regression", 8)
    single = Batches([(x, torch.zeros(8, 2, dtype=torch.float64))], found.network.module, torch.device("cpu"))
    whole = replace(found, batches=single)
    v = torch.randn(2, found.network.params.size, dtype=torch.float64)
    result = project_to_nullspace(whole, v, samples=100, tolerance=1e-8)
    assert result.iterations == 1
    torch.testing.assert_close(
        found.network.jvp(x, result.x)[1], torch.zeros(2, 8, 2, dtype=torch.float64), atol=1e-9, rtol=0
    )
    with pytest.raises(lapwing.NotConverged, match="alternating projections"):
        project_to_nullspace(found, v, samples=1, tolerance=1e-14, passes=1)
    with pytest.raises(ValueError, match="expected rows of length"):
        project_to_nullspace(found, v[:, 1:])


def test_a_count_sketch_keeps_inner_products_on_average() -> None:
    v = torch.randn(2, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for seed in range(200):
        sketch = CountSketch.draw(500, 64, torch.Generator().manual_seed(seed))
        found.append(sketch(v) @ sketch(v).T)
    spread = torch.stack(found).std(0) / 200**0.5
    assert bool(((torch.stack(found).mean(0) - v @ v.T).abs() < 4 * spread).all())


def test_the_score_is_the_distance_from_the_subspace() -> None:
    model, data, likelihood = problem("conv classification")
    la = lapwing.fit(model, data, likelihood, structure=MatrixFree(probes=1, steps=1))
    matvec = la.curvature.matrix.product.matvec
    score = sketched_score(la.network, la.plan, matvec, rank=8, size=50_000)
    x = data[0][:6]
    _, vectors = torch.linalg.eigh(lapwing.fit(model, data, likelihood, structure="full").curvature.dense())
    rows = la.network.jvp(x, torch.eye(la.params.size, dtype=torch.float64))[1].permute(1, 2, 0)  # (n, c, P)
    norm = rows.square().sum((-2, -1))
    best = norm - (rows @ vectors[:, -8:]).square().sum((-2, -1))
    found = score(x, samples=4)
    assert found.shape == (6,)
    assert bool((found <= 1.05 * norm).all())
    assert bool(
        (found >= 0.9 * best).all()
    )  # no subspace of that rank leaves less of the training data, up to the sketch
    assert float(found.sum()) < 0.6 * float(norm.sum())
