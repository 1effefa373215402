"""A weight matrix with a side beyond LARGEST_FACTOR, as of a large vocabulary, keeps its exact diagonal."""

import pytest
import torch
from torch import nn

import lapwing
from lapwing.curvature import kron
from tests.dense import assert_same, build, ggn, jacobian, outputs, randn, softmax_hessian

LIMIT = 6


def network() -> nn.Module:
    return build(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))


def exact(module: nn.Module, x: torch.Tensor, names: list[str] | None = None) -> torch.Tensor:
    return ggn(jacobian(module, x, names), softmax_hessian(outputs(module, x)))


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_a_large_block_is_the_diagonal_of_the_exact_one(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, y = network(), randn(12, 4), torch.arange(12) % 3
    whole = lapwing.fit(module, (x, y), "classification", structure=structure).curvature.dense()
    monkeypatch.setattr(kron, "LARGEST_FACTOR", LIMIT)
    la = lapwing.fit(module, (x, y), "classification", structure=structure)
    found, truth = la.curvature.dense(), exact(module, x)
    small = slice(0, 25)  # 5 outputs, 4 inputs and a bias
    assert_same(found[small, small], whole[small, small], 1e-10)  # the small block is a Kronecker product as before
    assert_same(found[25:, 25:], truth[25:, 25:].diagonal().diag(), 1e-6)
    covariance = torch.linalg.inv(found + torch.eye(len(found), dtype=found.dtype))
    J = jacobian(module, x[:3])
    assert_same(la.predict(x[:3]).function.covariance, J @ covariance @ J.mT, 1e-6)
    back = la.update((x, y)).curvature.dense()
    assert_same(back[25:, 25:], 2 * found[25:, 25:], 1e-6)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_a_large_last_layer_from_features(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kron, "LARGEST_FACTOR", LIMIT)
    module, x, y = network(), randn(12, 4), torch.arange(12) % 3
    la = lapwing.fit(module, (x, y), "classification", structure=structure, select="last_layer")
    truth = exact(module, x, ["4.weight", "4.bias"])
    assert_same(la.curvature.dense(), truth.diagonal().diag(), 1e-6)
