"""Kronecker factors of recurrent layers, whose number of calls follows the length of the sequences."""

import pytest
import torch
from torch import nn

import lapwing
from lapwing import Gaussian
from lapwing.curvature import Kron

from ..zoo.cases import assert_same


class Recurrent(nn.Module):
    """Two recurrent layers of one size, whose records could be taken for each other's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTM(2, 2, batch_first=True), nn.LSTM(2, 2, batch_first=True)
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.second(self.first(x)[0])[0].mean(1))


@pytest.mark.parametrize("lengths", [(1, 2), (3, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("sharing", ["reduce", "expand"])
def test_factors_add_up(lengths, sharing):
    """Gradient factors are sums, input factors means over samples (or positions), of those of each length alone."""
    torch.manual_seed(0)
    model = Recurrent().double().eval()
    batches = [(torch.randn(3, t, 2).double(), torch.zeros(3, 2).double()) for t in lengths]
    fitted = [lapwing.fit(model, data, Gaussian(1.0), structure=Kron(sharing)) for data in (batches, *zip(batches))]
    for both, one, two in zip(*(la.curvature.matrix.blocks for la in fitted), strict=True):
        if not hasattr(both, "left"):
            assert_same(both.dense(), one.dense() + two.dense(), 1e-9, "a dense block")
            continue
        parts = (1, 1) if sharing == "reduce" or one is fitted[1].curvature.matrix.blocks[-1] else lengths
        right = sum(w * block.right for w, block in zip(parts, (one, two), strict=True)) / sum(parts)
        assert_same(both.left, one.left + two.left, 1e-9, "gradients")
        assert_same(both.right, right, 1e-9, "inputs")


@pytest.mark.parametrize("lengths", [(1, 2), (3, 1)])
def test_ekfac_keeps_the_trace(lengths):
    torch.manual_seed(0)
    model = Recurrent().double().eval()
    batches = [(torch.randn(3, t, 2).double(), torch.zeros(3, 2).double()) for t in lengths]
    weights, total = list(model.parameters()), 0.0
    for x, _ in batches:
        for one in x:
            for v in model(one[None])[0]:
                total += sum(float(g.square().sum()) for g in torch.autograd.grad(v, weights, retain_graph=True))
    la = lapwing.fit(model, batches, Gaussian(1.0), structure="ekfac")
    assert_same(la.curvature.dense().trace(), torch.tensor(total, dtype=torch.float64), 1e-9, "trace")
