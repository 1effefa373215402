"""Networks whose forward pass edits its inputs in place: numbers are right and the user's data stay as they are."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing

from ..zoo.cases import assert_same


def zero_first(x):
    x[:, 0] = 0
    return x


EDITS = {"mul_": lambda x: x.mul_(0.5), "clamp_": lambda x: x.clamp_(-1, 1), "setitem": zero_first}


class Editing(nn.Module):
    def __init__(self, edit):
        super().__init__()
        self.body, self.head, self.edit = nn.Linear(3, 4), nn.Linear(4, 3), edit

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.edit(x))))


def rows(model, x):
    weights = list(model.parameters())
    found = [[torch.autograd.grad(v, weights, retain_graph=True) for v in model(one[None].clone())[0]] for one in x]
    return torch.stack([torch.stack([torch.cat([g.flatten() for g in row]) for row in each]) for each in found])


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", ["tensors", "list", "loader"])
@pytest.mark.parametrize("structure", ["full", "matrixfree"])
def test_edits_in_place(edit, kind, structure):
    torch.manual_seed(0)
    model, x, y = Editing(EDITS[edit]).double().eval(), torch.randn(10, 3).double(), torch.zeros(10, 3).double()
    j, before = rows(model, x), x.clone()
    data = {
        "tensors": (x, y),
        "list": [(x[:5], y[:5]), (x[5:], y[5:])],
        "loader": DataLoader(TensorDataset(x, y), batch_size=5),
    }[kind]
    la = lapwing.fit(model, data, lapwing.Gaussian(1.0), structure=structure)
    sigma = torch.linalg.inv(torch.einsum("nop,noq->pq", j, j) + torch.eye(la.params.size).double())
    assert_same(la.predict(x).function.covariance, j @ sigma @ j.mT, 1e-6, "covariance")
    la.predict(x, method="sampled")
    assert torch.equal(x, before)


def test_copies_only_where_needed():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(10, 3).double()
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].data_ptr()))
    la = lapwing.fit(model, [(x, torch.zeros(10, 2).double())], lapwing.Gaussian(1.0), structure="diag")
    seen.clear()
    la.network.forward(x)
    assert x.data_ptr() in seen


def test_writes_later_are_refused():
    torch.manual_seed(0)
    model, x = Editing(lambda x: x.mul_(0.5) if len(x) > 8 else x).double(), torch.randn(10, 3).double()
    with pytest.raises(lapwing.UnsupportedModel, match="wrote to its inputs"):
        lapwing.fit(model, [(x, torch.zeros(10, 3).double())], lapwing.Gaussian(1.0), structure="diag")
