"""Sequences of length 1 come first: they cannot tell how samples and positions are ordered in longer ones."""

import pytest
import torch
from torch import nn

import lapwing

from ..zoo import oracle
from ..zoo.cases import assert_same


class Flattened(nn.Module):
    """A linear layer on positions × samples as one axis, in either order, with a parameter that is expanded."""

    def __init__(self, minor):
        super().__init__()
        self.body, self.shift, self.head = nn.Linear(2, 3), nn.Parameter(torch.randn(3)), nn.Linear(3, 2)
        self.minor = minor

    def forward(self, x):  # (n, t, 2)
        n, t = x.shape[:2]
        x = x.transpose(0, 1) if self.minor else x
        z = self.body(x.reshape(n * t, 2)) * self.shift.cumsum(0)
        z = torch.tanh(z).reshape(*x.shape[:2], 3)
        return self.head((z.transpose(0, 1) if self.minor else z).mean(1))


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        layer = nn.TransformerEncoderLayer(2, 1, 3, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head, self.batch_first = nn.Linear(2, 2), batch_first

    def forward(self, x):
        if self.batch_first:
            return self.head(self.encoder(x).mean(1))
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


MODELS = {
    "major": lambda: Flattened(False),
    "minor": lambda: Flattened(True),
    "encoder": lambda: Encoder(True),
    "encoder, time first": lambda: Encoder(False),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 5])
def test_first_batch(name, size):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    batches = [(torch.randn(size, t, 2).double(), torch.zeros(size, 2).double()) for t in (1, 1, 3, 2)]
    rows = [oracle.jacobian(model, x) for x, _ in batches]
    exact = sum(torch.einsum("nop,noq->pq", j, j) for j in rows)
    la = lapwing.fit(model, batches, lapwing.Gaussian(1.0), structure="full")
    assert_same(la.curvature.dense(), exact, 1e-9, "full")
    diag = lapwing.fit(model, batches, lapwing.Gaussian(1.0), structure="diag")
    assert_same(diag.curvature.matrix.diagonal(), exact.diagonal(), 1e-9, "diag")


@pytest.mark.parametrize("name", MODELS)
def test_first_prediction_after_load(name, tmp_path):
    torch.manual_seed(0)
    model, x = MODELS[name]().double().eval(), torch.randn(5, 3, 2).double()
    lapwing.fit(model, (x, torch.zeros(5, 2).double()), lapwing.Gaussian(1.0), structure="full").save(tmp_path / "la")
    la = lapwing.load(tmp_path / "la", model)
    for length in (1, 3, 2):
        x = torch.randn(4, length, 2).double()
        j = oracle.jacobian(model, x)
        sigma = torch.linalg.inv(la.curvature.dense() + torch.eye(la.params.size).double())
        assert_same(la.predict(x).function.covariance, j @ sigma @ j.mT, 1e-8, f"length {length}")


def test_later_lengths_share_one_plan(monkeypatch):
    torch.manual_seed(0)
    model, made = Flattened(True).double(), []
    plan = lapwing.model.Network.plan
    monkeypatch.setattr(lapwing.model.Network, "plan", lambda self, x: made.append(x.shape) or plan(self, x))
    batches = [(torch.randn(4, t, 2).double(), torch.zeros(4, 2).double()) for t in (1, 2, 3, 4, 5)]
    lapwing.fit(model, batches, lapwing.Gaussian(1.0), structure="diag")
    assert len(made) == 2
