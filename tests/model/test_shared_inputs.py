"""Inputs that all samples share, with as many entries as there are samples: they are not cut like samples."""

import pytest
import torch
from torch import nn

import lapwing
from lapwing import Gaussian
from lapwing.model import take

from ..zoo.cases import assert_same


class Unseen(torch.autograd.Function):
    """x Wᵀ that the tape cannot see: rows of W come from a loop over samples."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


class Scaled(nn.Module):
    """`scale` has one number per feature, and `own` one row per sample."""

    def __init__(self, hidden):
        super().__init__()
        self.w, self.head, self.hidden = nn.Parameter(torch.randn(4, 5)), nn.Linear(4, 3), hidden

    def forward(self, x, scale, own=None):
        x = x * scale if own is None else x * scale + own
        return self.head(torch.tanh(Unseen.apply(x, self.w) if self.hidden else x @ self.w.T))


def rows(model, inputs):
    """Rows of the Jacobian, sample by sample with the scale whole."""
    weights, found = list(model.parameters()), []
    for k in range(len(inputs["x"])):
        cut = {name: t if name == "scale" else t[k : k + 1] for name, t in inputs.items()}
        each = [torch.autograd.grad(v, weights, retain_graph=True) for v in model(**cut)[0]]
        found.append(torch.stack([torch.cat([g.flatten() for g in row]) for row in each]))
    return torch.stack(found)


def batch(n, scale, own):
    inputs = {"x": torch.randn(n, 5).double(), "scale": scale}
    return inputs | ({"own": torch.randn(n, 5).double()} if own else {})


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("sizes", [(7, 5), (5, 7), (5, 5), (5,), (2, 5)])
def test_fits_and_predictions(hidden, own, sizes, tmp_path):
    torch.manual_seed(0)
    model, scale = Scaled(hidden).double().eval(), torch.rand(5).double() + 0.5
    inputs = [batch(n, scale, own) for n in sizes]
    data = [x | {"labels": torch.zeros(len(x["x"]), 3).double()} for x in inputs]
    la = lapwing.fit(model, data, Gaussian(1.0), structure="full")
    exact = sum(torch.einsum("nop,noq->pq", j, j) for j in (rows(model, x) for x in inputs))
    assert_same(la.curvature.dense(), exact, 1e-9, "full")
    sigma = torch.linalg.inv(exact + torch.eye(len(exact)).double())
    la.save(tmp_path / "la")
    loaded = lapwing.load(tmp_path / "la", model)
    for n in (5, 6, 1):
        x = batch(n, scale, own)
        j = rows(model, x)
        for posterior in (la, loaded):
            assert_same(posterior.predict(x).function.covariance, j @ sigma @ j.mT, 1e-8, f"{n} samples")


def test_chunks_as_long_as_a_shared_tensor():
    torch.manual_seed(0)
    model, scale = Scaled(True).double().eval(), torch.rand(5).double() + 0.5
    inputs = batch(10, scale, False)
    la = lapwing.fit(model, [inputs | {"labels": torch.zeros(10, 3).double()}], Gaussian(1.0), structure="full")
    plan = la.plan
    with la.network.borrow():
        part = take(inputs, slice(0, 5), 10)
        found = la.network.linearize(plan, part).jacobian(torch.eye(3)[:, None].expand(3, 5, 3).double()).dense()
    assert_same(found, rows(model, part), 1e-9, "a piece of five samples")


class Tempered(nn.Module):
    """A temperature of shape (1,), and a shift that is one for all samples or one per sample."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x, temperature, shift):
        return self.head(torch.tanh(self.body(x + shift))) / torch.outer(torch.ones(len(x)).double(), temperature)


def test_batches_of_one():
    torch.manual_seed(0)
    model, temperature = Tempered().double().eval(), torch.tensor([2.0]).double()
    inputs = [
        (torch.randn(n, 5).double(), temperature, torch.randn(m, 5).double()) for n, m in ((1, 1), (4, 1), (3, 3))
    ]
    weights, found = list(model.parameters()), []
    for x, _, shift in inputs:
        for k in range(len(x)):
            f = model(x[k : k + 1], temperature, shift[k : k + 1] if len(shift) > 1 else shift)[0]
            each = [torch.autograd.grad(v, weights, retain_graph=True) for v in f]
            found += [torch.cat([g.flatten() for g in row]) for row in each]
    j = torch.stack(found)
    for order in (inputs, inputs[::-1], inputs[:1] + inputs[2:] + inputs[1:2]):
        data = [(x, torch.zeros(len(x[0]), 3).double()) for x in order]
        la = lapwing.fit(model, data, Gaussian(1.0), structure="full")
        assert_same(la.curvature.dense(), j.T @ j, 1e-9, "full")


def test_neither_fits():
    torch.manual_seed(0)

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x, other):
            return self.head(x + other.cumsum(0))

    x, other = torch.randn(6, 5).double(), torch.randn(6, 5).double()
    with pytest.raises(lapwing.UnsupportedModel, match=r"'1'.*cut into samples or shared"):
        lapwing.fit(Mixing().double(), [((x, other), torch.zeros(6, 3).double())], Gaussian(1.0), structure="diag")
