"""Products J v where forward mode, double backward or both follow other code than the backward pass."""

import pytest
import torch
from torch import nn

import lapwing
from lapwing.curvature import MatrixFree
from lapwing.model import products

from .. import dense
from ..zoo import oracle
from ..zoo.cases import assert_same


class OnceOnly(torch.autograd.Function):
    """x Wᵀ without a forward-mode and without a second derivative."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


class Once(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.body, self.w, self.head = nn.Linear(2, 3), nn.Parameter(torch.randn(3, 3)), nn.Linear(3, outputs)

    def forward(self, x):
        return self.head(torch.tanh(OnceOnly.apply(torch.tanh(self.body(x)), self.w)))


class NoGrad(nn.Module):
    """A body whose parameters autograd does not reach; with `tied`, one that it reaches on another way."""

    def __init__(self, outputs, tied=False):
        super().__init__()
        self.body, self.head, self.tied = nn.Linear(2, 3), nn.Linear(3, outputs), tied

    def forward(self, x):
        with torch.no_grad():
            z = torch.tanh(self.body(x))
        return self.head(torch.tanh(self.body(z[:, :2])) if self.tied else z)


class Bag(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(5, 3, mode="mean"), nn.Linear(3, outputs)

    def forward(self, x):
        return self.head(torch.tanh(self.bag((x > 0).long())))


CASES = {"once": Once, "no_grad": NoGrad, "tied": lambda k: NoGrad(k, tied=True), "bag": Bag}


def case(name, outputs):
    torch.manual_seed(0)
    model, x = CASES[name](outputs).double().eval(), torch.randn(8, 2).double()
    return model, x, torch.randint(outputs, (8,)), oracle.outputs(model, x), oracle.jacobian(model, x)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("select", ["all", "head"])
def test_products(name, select):
    model, x, y, _, j = case(name, 3)
    names = [n for n, _ in model.named_parameters() if select == "all" or n.startswith("head")]
    j = oracle.jacobian(model, x, names=names)
    la = lapwing.fit(model, (x, y), "classification", structure="diag", select=names)
    for count in (1, 3):
        v = torch.randn(count, la.params.size).double()
        assert_same(la.network.jvp(x, v)[1], torch.einsum("nop,sp->sno", j, v), 1e-9, "J v")


@pytest.mark.parametrize("name", CASES)
def test_many_outputs(name):
    model, x, y, _, j = case(name, 70)
    la = lapwing.fit(model, (x[:3], y[:3]), "classification", structure="diag")
    draws = la.predict(x[:3], link="jvp").function.sample(2, torch.Generator().manual_seed(5))
    steps = la.posterior.sample(2, torch.Generator().manual_seed(5)) - la.params.flat
    with torch.no_grad():
        assert_same(draws, model(x[:3]) + torch.einsum("nop,sp->sno", j[:3], steps), 1e-8, "draws of f")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("structure", ["nystrom", "matrixfree"])
def test_structures(name, structure):
    model, x, y, f, j = case(name, 3)
    chosen = MatrixFree(rank=4) if structure == "matrixfree" else structure
    la = lapwing.fit(model, (x, y), "classification", structure=chosen)
    exact = oracle.ggn(j, oracle.hessian_categorical(f))
    sigma = torch.linalg.inv(exact + torch.eye(len(exact)).double())
    assert_same(la.predict(x).function.covariance, j @ sigma @ j.mT, 1e-6, structure)


def test_forward_mode_is_kept_where_it_is_right():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(6, 2).double()
    la = lapwing.fit(model, (x, torch.zeros(6, 3).double()), lapwing.Gaussian(1.0), structure="diag")
    la.network.jvp(x, torch.randn(2, la.params.size).double())
    assert la.network._trusted == {"forward mode": True}


def test_blocks_of_vectors_through_attention_take_both_directions_from_one_graph(monkeypatch):
    """Networks with attention and more than SMALL weights take Jᵀ Λ J v from the graph of the gradient."""
    monkeypatch.setattr(products, "SMALL", 0)
    taken = []
    plain = products.Products._by_one_graph
    monkeypatch.setattr(products.Products, "_by_one_graph", lambda *args: taken.append(1) or plain(*args))

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            seen = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), x)
            return self.head(seen.mean(1))

    torch.manual_seed(0)
    model, x = Attends().double(), torch.randn(9, 5, 4, dtype=torch.float64)
    y = torch.arange(9) % 3
    batches = [(x[k : k + 3], y[k : k + 3]) for k in (0, 3, 6)]
    la = lapwing.fit(model, batches, "classification", structure=MatrixFree(rank=5), factor=lapwing.GGN(tolerance=0))
    found = la.curvature.dense()
    assert len(taken) == 2  # all batches but the first, which finds out that there is attention
    J = dense.jacobian(model, x)
    assert_same(found, dense.ggn(J, dense.softmax_hessian(dense.outputs(model, x))), 1e-8)
