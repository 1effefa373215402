"""A posterior refuses to predict once its module has changed, and allows changes that do not matter."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from tests.laplace.small import X, batches, bump, fit


def normed() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a selected weight": lambda m: bump(m[3].weight),
    "selected weights in another order": lambda m: m[3].weight.data.copy_(m[3].weight.data.flip(0).clone()),
    "a frozen weight": lambda m: bump(m[0].weight),
    "a buffer": lambda m: bump(m[1].running_mean),
    "a pass in training mode": lambda m: m.train()(X),
    "a parameter more": lambda m: m.register_parameter("more", nn.Parameter(torch.ones(2))),
    "a parameter less": lambda m: setattr(m[3], "bias", None),
    "an optimizer step": lambda m: step(m),
}


def step(model: nn.Module) -> None:
    model(X).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("select", ["all", "3.*"])
def test_a_changed_module_is_noticed(what: str, select: str) -> None:
    model = normed()
    la = fit(model, structure="kron", select=select)
    uses: list[Callable[[], object]] = [
        lambda: la.predict(X[:2]),
        lambda: la.predict(X[:2], method="sampled"),
        lambda: la.update(batches()),
        lambda: la.tune(batches()),
        lambda: next(la.predict_loader(batches())),
    ]
    uses[0]()
    CHANGES[what](model)
    for use in uses:
        with pytest.raises(lapwing.UnsupportedModel, match="changed since the fit"):
            use()


def test_harmless_changes_are_allowed() -> None:
    model = normed().eval()
    la = fit(model, structure="kron")
    probs = la.predict(X[:2]).probs
    model.train()
    model.requires_grad_(False)
    model[0].weight.grad = torch.ones(5, 3)
    assert torch.equal(la.predict(X[:2]).probs, probs)
    state = copy.deepcopy(model.state_dict())
    bump(model[0].weight)
    model.load_state_dict(state)
    assert torch.equal(la.predict(X[:2]).probs, probs)


def test_what_is_frozen_stays_frozen() -> None:
    la = fit(structure="kron")
    before = la.predict(X[:2]).probs
    la.replace(prior=100.0)
    la.tune(batches(), learn="prior", grid={"prior": [5.0]})
    la.update(batches())
    assert torch.equal(la.predict(X[:2]).probs, before)
    with pytest.raises(AttributeError):
        la.prior = 3.0  # type: ignore[misc,assignment]


class Plain(nn.Module):
    """Reads a tensor and a number that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 3)
        self.shift, self.factor, self.activation = torch.ones(5), 2.0, nn.Tanh()
        self.register_buffer("mask", torch.tensor([math.inf, -math.inf, math.nan]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.body(x) + self.shift) * self.factor)


SUBTLE: dict[str, Callable[[Plain], object]] = {
    "frozen weights in another order": lambda m: m.body.weight.data.copy_(m.body.weight.data.flip(0).clone()),
    "a plain tensor": lambda m: bump(m.shift),
    "a plain number": lambda m: setattr(m, "factor", 3.0),
    "another activation": lambda m: setattr(m, "activation", nn.ReLU()),
    "another type of the weights": lambda m: m.double(),
}


@pytest.mark.parametrize("what", SUBTLE)
def test_a_subtle_change_is_noticed(what: str, tmp_path: Any) -> None:
    model = Plain()
    la = fit(model, structure="kron", select="head.*")
    ensemble = la.ensemble(2)
    la.save(tmp_path / "before")
    la.predict(X[:2])  # a buffer of NaN and Inf is no change
    SUBTLE[what](model)
    x = X[:2].to(model.head.weight.dtype)
    uses: list[Callable[[], object]] = [
        lambda: la.predict(x),
        lambda: la.ensemble(2),
        lambda: ensemble.predict(x),
        lambda: la.save(tmp_path / "after"),
        lambda: lapwing.load(tmp_path / "before", model),
    ]
    for use in uses:
        with pytest.raises(lapwing.UnsupportedModel):
            use()
    assert not (tmp_path / "after").exists()
