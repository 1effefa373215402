"""Parameters without dimensions (a gate, the logit scale of CLIP) in every way of using weights."""

import pytest
import torch
from torch import nn

import lapwing

from ..zoo import oracle
from ..zoo.cases import assert_same


class Gated(nn.Module):
    def __init__(self, outputs: int = 3):
        super().__init__()
        self.body, self.gate = nn.Linear(2, 3), nn.Parameter(torch.tensor(0.3))
        self.head = nn.Linear(3, outputs)

    def forward(self, x):
        return self.gate.exp() * self.head(torch.tanh(self.body(x)))


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model, x = Gated().double().eval(), torch.randn(9, 2).double()
    return model, x, torch.randint(3, (9,))


def exact(model, x):
    f, j = oracle.outputs(model, x), oracle.jacobian(model, x)
    return j, oracle.ggn(j, oracle.hessian_categorical(f))


@pytest.mark.parametrize("structure", ["full", "matrixfree", "nystrom", "functional", "lowrank"])
def test_structures(problem, structure):
    model, x, y = problem
    j, ggn = exact(model, x)
    la = lapwing.fit(model, (x, y), "classification", structure=structure)
    sigma = torch.linalg.inv(ggn + torch.eye(len(ggn)).double())
    assert_same(la.predict(x).function.covariance, j @ sigma @ j.mT, 1e-6, structure)


def test_products(problem):
    model, x, y = problem
    la = lapwing.fit(model, (x, y), "classification", structure="diag")
    v = torch.randn(2, la.params.size).double()
    assert_same(la.network.jvp(x, v)[1], torch.einsum("nop,sp->sno", exact(model, x)[0], v), 1e-9, "J v")


def test_sampled_weights(problem):
    model, x, y = problem
    la = lapwing.fit(model, (x, y), "classification", structure="full")
    ensemble = la.ensemble(3)
    each = [torch.func.functional_call(model, weights, (x,)).softmax(-1) for weights in ensemble]
    assert_same(ensemble.predict(x).probs, torch.stack(each).mean(0).detach(), 1e-9, "mixture")
    assert bool(la.predict(x, method="sampled").probs.isfinite().all())
    assert bool(la.linear_mode((x, y)).weights.isfinite().all())
