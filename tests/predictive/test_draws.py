"""Probabilities by forward-mode draws: against the closed-form law, and how many passes they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.curvature.test_products import dense
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lapwing
from lapwing.model import Network, Params
from lapwing.model.linearization import pull


def fitted(outputs: int = 3, likelihood: str = "classification") -> lapwing.Laplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    x = torch.randn(40, 4, dtype=torch.float64)
    y = torch.randint(outputs, (40,)) if likelihood == "classification" else torch.randn(40, outputs).double()
    return lapwing.fit(model, (x, y), likelihood, structure="full", prior=2.0, progress=False)


def test_draws_have_the_law_of_the_closed_form() -> None:
    la, x = fitted(), torch.randn(5, 4, dtype=torch.float64)
    exact, drawn = la.predict(x), la.predict(x, link="jvp", samples=4096)
    torch.testing.assert_close(drawn.probs, exact.probs, atol=0.01, rtol=0)
    torch.testing.assert_close(drawn.epistemic, exact.epistemic, atol=0.01, rtol=0)
    assert not torch.equal(drawn.probs, exact.probs)


def test_a_draw_comes_with_its_mirror_image() -> None:
    la, x = fitted(), torch.randn(5, 4, dtype=torch.float64)
    function = la.predict(x, link="jvp").function
    for n in (2, 7, 150):
        points = function.points(n)
        assert len(points) == n
        offset = points - function.mean
        assert len(torch.unique(offset.flatten(1).abs().sum(1).round(decimals=9))) == (n + 1) // 2  # ± pairs
    torch.testing.assert_close(function.points(150).mean(0), function.mean)
    covariance = torch.einsum("sbc,sbd->bcd", offset, offset) / len(offset)
    assert (covariance - function.covariance).abs().max() < 0.3 * function.covariance.abs().max()


def test_the_same_whatever_the_batch_and_the_call() -> None:
    la, x = fitted(), torch.randn(5, 4, dtype=torch.float64)
    whole = la.predict(x, link="jvp").probs
    torch.testing.assert_close(la.predict(x[3:], link="jvp").probs, whole[3:])
    torch.testing.assert_close(la.predict(x, link="jvp").probs, whole)
    other = la.predict(x, link="jvp", generator=torch.Generator().manual_seed(7)).probs
    assert not torch.allclose(other, whole)


@pytest.mark.parametrize("option", [{"joint": True}, {"differentiable": True}])
def test_what_draws_cannot_do_is_refused(option: dict[str, bool]) -> None:
    with pytest.raises(lapwing.UnsupportedOperation, match="jvp"):
        fitted().predict(torch.randn(2, 4, dtype=torch.float64), link="jvp", **option)


class Convolutions(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "convolution" in str(func)
        return func(*args, **(kwargs or {}))


def network_of(model: nn.Module) -> Network:
    return Network(model, Params.of(model, tuple(n for n, _ in model.named_parameters())), lambda raw: raw)


def test_products_share_the_values_of_one_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten()).double()
    x, s = torch.randn(2, 2, 6, 6, dtype=torch.float64), 5
    truth = dense(model, x)
    v = torch.randn(s, truth.shape[1], dtype=torch.float64)
    network = network_of(model)
    network.jvp(x, v[:1])  # the first product is compared with reverse mode
    with Convolutions() as seen:
        found = network.jvp(x, v)[1]
    torch.testing.assert_close(found.flatten(1), v @ truth.T)
    assert seen.count == 2 + s * 3  # the first convolution's inputs do not move


class Changing(nn.Module):
    """Calls one layer more at its first run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.runs = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == 1:
            F.linear(x, self.layers[0].weight)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_values_of_a_pass_with_other_calls_are_not_taken() -> None:
    torch.manual_seed(0)
    model = Changing().double()
    x = torch.randn(2, 3, dtype=torch.float64)
    truth = dense(model, x)
    model.runs = 0
    v = torch.randn(2, truth.shape[1], dtype=torch.float64)
    torch.testing.assert_close(network_of(model).jvp(x, v)[1].flatten(1), v @ truth.T)


class Order(nn.Module):
    """Two layers of one shape, in the order of `turns`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.turns = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.turns += 1
        first = self.turns % 2
        out = {k: self.layers[k](x) for k in (first, 1 - first)}
        return out[0].tanh() + out[1].tanh()


class Overwriting(nn.Module):
    """Changes a value behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        h.data.mul_(3)
        return self.two(h.tanh())


class Memory(nn.Module):
    """Keeps what it made of its weights at its first run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(3, 3), None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.layer.weight.exp()
        return F.linear(x, self.kept)


class Slope(nn.Module):
    """Outputs with a gradient inside, as of a force field."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("make", [Order, Overwriting, Slope])
@pytest.mark.parametrize("s", [1, 2, 3])
def test_products_of_odd_networks(make: type[nn.Module], s: int) -> None:
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(2, 3, dtype=torch.float64)
    truth = dense(model, x)
    v = torch.randn(s, truth.shape[1], dtype=torch.float64)
    torch.testing.assert_close(network_of(model).jvp(x, v)[1].flatten(1), v @ truth.T)


def test_one_product_runs_the_network_once() -> None:
    torch.manual_seed(0)
    model, x = Memory().double(), torch.randn(2, 3, dtype=torch.float64)
    truth = dense(model, x)
    model.kept = None
    v = torch.randn(1, truth.shape[1], dtype=torch.float64)
    torch.testing.assert_close(network_of(model).jvp(x, v)[1].flatten(1), v @ truth.T)


def test_products_are_at_the_weights_of_the_fit() -> None:
    la, x = fitted(), torch.randn(5, 4, dtype=torch.float64)
    expected = la.predict(x, link="jvp").probs
    later = la.predict(x, link="jvp")
    with torch.no_grad():
        for p in la.module.parameters():
            p.mul_(2)
    torch.testing.assert_close(later.probs, expected)


def test_products_in_parts_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    la, x = fitted(), torch.randn(5, 4, dtype=torch.float64)
    whole = la.predict(x, link="jvp").probs
    monkeypatch.setattr("lapwing.predictive.predictive.CHUNK", 2 * la.plan.graph)
    torch.testing.assert_close(la.predict(x, link="jvp").probs, whole)


def test_cotangents_of_another_shape_are_refused() -> None:
    f = torch.randn(1, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        pull(f * 2, [f], torch.randn(2, 3))


@pytest.mark.parametrize("create_graph", [False, True])
def test_cotangents_that_depend_on_the_outputs_are_constants(create_graph: bool) -> None:
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    f = w.sin()
    (found,) = pull(f, [w], f.exp(), create_graph=create_graph)
    torch.testing.assert_close(found, f.exp() * w.cos())
    assert found is not None
    if create_graph:
        (second,) = torch.autograd.grad(found.sum(), w)
        torch.testing.assert_close(second, f.exp() * w.cos() ** 2 - f.exp() * w.sin())


class Functional(nn.Module):
    """torch.func inside, which refuses hooks on what autograd keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 1), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.func.grad(lambda z: self.layer(z).tanh().sum())(x))


def test_networks_with_transforms_inside_are_fitted() -> None:
    torch.manual_seed(0)
    model, x = Functional().double(), torch.randn(6, 3, dtype=torch.float64)
    la = lapwing.fit(model, (x, torch.randn(6, 3).double()), lapwing.Gaussian(1.0), structure="full", progress=False)
    truth = dense(model, x)
    torch.testing.assert_close(la.curvature.dense(), truth.T @ truth)
