"""Directions that are small in output space and large for a weight, in float32 against float64 dense algebra."""

import copy

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import GGN
from lapwing.likelihoods import Categorical
from tests import dense

N = 128


def exact(net: nn.Module, x: Tensor) -> Tensor:
    wide, x = copy.deepcopy(net).double(), x.double()
    p = dense.outputs(wide, x).softmax(-1)
    # p₀p₁ for two classes, of which 1 − p would cancel
    information = p.prod(-1)[:, None, None] * torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    return dense.ggn(dense.jacobian(wide, x), information)


@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_feature_of_one_confident_sample(structure: str, hidden: bool) -> None:
    """Only one sample tells of the weights of its feature, and it is sure of its class to 1e-10."""
    x = dense.randn(N, 4).float()
    x[:, 3] = 0
    x[7, 3] = 3000.0
    layers = [nn.Linear(4, 3), nn.Softplus(), nn.Linear(3, 2)] if hidden else [nn.Linear(4, 2)]
    net = dense.build(lambda: nn.Sequential(*layers), dtype=torch.float32)
    with torch.no_grad():
        if hidden:
            net[0].weight[:, 3] = 1.2e-3
            net[2].weight[0], net[2].weight[1] = 1.0, -1.0
        else:
            net[0].weight[:, 3] = torch.tensor([4e-3, -4e-3])
    y = torch.zeros(N, dtype=torch.long)
    la = lapwing.fit(net, [(x[:64], y[:64]), (x[64:], y[64:])], "classification", structure=structure)
    truth = exact(net, x).diagonal()
    found = la.curvature.matrix.diagonal().double()
    rare = 3  # of the first row of the first layer
    assert truth[rare] > 1e-5
    torch.testing.assert_close(found, truth, rtol=2e-3, atol=1e-6)


def test_confident_samples_with_inputs_like_others_need_no_direction() -> None:
    x = dense.randn(N, 6).float()
    f = 15 * x[:, :3]
    with_inputs, without = (GGN().choose(Categorical(), f, x[:, 0].long(), reach=reach) for reach in (x, None))
    assert torch.equal(with_inputs.needed, without.needed)
    assert int((without.needed == 0).sum()) > N // 4
