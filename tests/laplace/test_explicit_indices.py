"""Single weights by their positions or a mask, against dense algebra."""

import numpy as np
import pytest
import torch
from torch import nn

import lapwing
from tests.dense import assert_same, build, ggn, jacobian, outputs, randn, seeded, softmax_hessian

INDEX = [40, 3, 17, 0, 28]  # in no order


def problem():
    module = build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)))
    x = randn(9, 3)
    return module, x, torch.randint(5, (9,), generator=seeded(1))


@pytest.mark.parametrize("structure", ["full", "diag", "lowrank"])
@pytest.mark.parametrize(
    "select",
    [lapwing.subnetwork(indices=INDEX), torch.tensor(INDEX), torch.tensor(INDEX, dtype=torch.int32)],
    ids=["object", "tensor", "int32"],
)
def test_positions_keep_their_order(structure, select):
    module, x, y = problem()
    la = lapwing.fit(module, (x, y), "classification", structure=structure, select=select, prior=0.4)
    J = jacobian(module, x)[..., INDEX]
    H = ggn(J, softmax_hessian(outputs(module, x)))
    H = torch.diag(H.diagonal()) if structure == "diag" else H
    assert_same(la.curvature.dense(), H, 1e-9)
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert torch.equal(la.posterior.mean, flat[INDEX])
    new = randn(4, 3, seed=3)
    Jn = jacobian(module, new)[..., INDEX]
    covariance = Jn @ torch.linalg.inv(H + 0.4 * torch.eye(5, dtype=torch.float64)) @ Jn.mT
    assert_same(la.predict(new).function.covariance, covariance, 1e-8)


def test_a_mask_and_a_selection_within(tmp_path):
    module, x, y = problem()
    mask = torch.zeros(25, dtype=torch.bool)
    mask[[2, 7, 24]] = True
    la = lapwing.fit(
        module, (x, y), "classification", structure="full", select=lapwing.subnetwork(indices=mask, within="2.*")
    )
    J = jacobian(module, x, ("2.weight", "2.bias"))[..., [2, 7, 24]]
    assert_same(la.curvature.dense(), ggn(J, softmax_hessian(outputs(module, x))), 1e-9)
    la.save(tmp_path / "la.lapwing")
    again = lapwing.load(tmp_path / "la.lapwing", module)
    assert torch.equal(again.params.index, torch.tensor([2, 7, 24]))
    assert torch.equal(again.predict(x).probs, la.predict(x).probs)
    moved = la.posterior.sample(3, seeded(1))
    weights = la.params.unflatten(moved)["2.weight"].flatten(1)
    assert torch.equal(weights[:, [0, 1, 3]], module[2].weight.detach().flatten()[[0, 1, 3]].expand(3, 3))
    assert torch.equal(weights[:, 2], moved[:, 0])


def test_numpy_positions():
    module, x, y = problem()
    la = lapwing.fit(module, (x, y), "classification", select=lapwing.subnetwork(indices=np.array([1, 4])))
    assert la.params.size == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "empty"),
        ([1, 1], "more than once"),
        ([0, 45], r"lie in 0 … 40.*got 0 … 45"),
        ([-1, 3], "lie in 0"),
        ([0.5], "whole numbers"),
        ([[1]], "vector"),
        ([True, False], "mask of a subnetwork has 2 entries, but 41"),
    ],
)
def test_positions_that_cannot_be_used(given, message):
    module, x, y = problem()
    with pytest.raises(lapwing.BadData, match=message):
        lapwing.fit(module, (x, y), "classification", select=lapwing.subnetwork(indices=given))


def test_either_a_number_or_positions():
    with pytest.raises(lapwing.BadData, match="not both"):
        lapwing.subnetwork(3, indices=[1])
    with pytest.raises(lapwing.BadData, match="needs a number of weights"):
        lapwing.subnetwork()
