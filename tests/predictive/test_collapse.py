"""Sampled weights that have lost what the network knows are told from those that have not."""

import pytest
import torch
from tests import dense
from torch import Tensor, nn

import lapwing


def data() -> tuple[Tensor, Tensor]:
    x = dense.randn(200, 10, seed=1)
    return x, x[:, :4].argmax(-1)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).double()
    x, y = data()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def fitted(net: nn.Module, prior: float) -> lapwing.Laplace:
    return lapwing.fit(net, data(), "classification", structure="diag", prior=prior)


def test_a_wide_posterior_warns(trained: nn.Module) -> None:
    x, y = data()
    la = fitted(trained, 1e-2)
    with pytest.warns(UserWarning, match="have lost what the network knows"):
        p = la.predict(x, method="sampled", samples=20)
    assert (p.label == y).double().mean() < 0.7 < 0.95 < (trained(x).argmax(-1) == y).double().mean()
    with pytest.warns(UserWarning, match="linearized predictive"):
        la.ensemble(10).predict(x)


def test_a_narrow_posterior_an_untrained_network_and_few_items_do_not(trained: nn.Module) -> None:
    x, y = data()
    p = fitted(trained, 1e3).predict(x, method="sampled", samples=20)
    assert (p.label == y).double().mean() > 0.95
    fitted(trained, 1e-2).predict(x[:4], method="sampled", samples=20)
    untrained = dense.build(lambda: nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 4)))
    fitted(untrained, 1e-2).predict(x, method="sampled", samples=20)


def test_the_default_predictive_does_not_collapse(trained: nn.Module) -> None:
    x, y = data()
    assert (fitted(trained, 1e-2).predict(x).label == y).double().mean() > 0.8


def test_regression_is_left_alone(trained: nn.Module) -> None:
    x, _ = data()
    la = lapwing.fit(trained, (x, dense.randn(200, 4)), lapwing.Gaussian(0.3), structure="diag", prior=1e-2)
    la.predict(x, method="sampled", samples=10)
