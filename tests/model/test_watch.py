"""The quick look before a prediction sees whatever the longer look sees, and is enough where nothing was touched."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.model import watch
from lapwing.model.watch import unmoved
from tests.model.test_changed_modules import CHANGES, HARMLESS, X, Y, make


def state_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def look(model: nn.Module) -> Callable[[nn.Module], bool]:
    still = unmoved(model, state_of(model))
    assert still is not None
    assert still(model)
    return still


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_that_matters_is_seen(what: str) -> None:
    model = make()
    still = look(model)
    CHANGES[what](model)
    assert not still(model)


class Odd(nn.Module):
    """Holds tensors and values of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(4, 4)
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        self.zeros = nn.Parameter(torch.zeros(3))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        for name, value in {
            "short": torch.randn(5).bfloat16(),
            "complex": torch.randn(3, dtype=torch.complex128),
            "flags": torch.tensor([True, False, True]),
            "holes": torch.tensor([torch.nan, torch.inf, 1.0]),
            "count": torch.tensor(3),
            "none": torch.empty(0, 4),
        }.items():
            self.register_buffer(name, value)
        self.steps = nn.Sequential(nn.Tanh(), nn.ReLU())
        self.plain, self.pair, self.list = torch.ones(2), (torch.ones(2), [1, 2]), [torch.ones(2), 3.0]
        self.table, self.names, self.array = {"a": 1.0, "b": 1.0}, {"x", "y"}, np.ones(3)
        self.tree: dict[str, Any] = {"a": {"b": [{"c": 1}]}}

    def replace_table(self) -> None:
        self.__dict__ = {**self.__dict__, "table": {"a": 2.0}}

    def turn_square(self) -> None:
        self.square.weight.data = self.square.weight.data.t()  # the same memory, read in another order


def renamed(table: dict) -> None:
    value = table.pop("b")
    table["c"] = value


def reordered(table: dict) -> None:
    value = table.pop(next(iter(table)))
    table["0"] = value


ODD: dict[str, Callable[[Odd], Any]] = {
    "one value of a kernel in channels-last memory": lambda m: m.image.weight.data[1, 2, 0, 1].add_(1),
    "a matrix read in another order": Odd.turn_square,
    "all signs of float64": lambda m: m.wide.data.neg_(),
    "the sign of zero": lambda m: m.zeros.data.neg_(),
    "two rows swapped": lambda m: m.wide.data.copy_(m.wide.data.flip(0).clone()),
    "a value of a transposed parameter": lambda m: m.turned.data[4, 0].add_(1e-3),
    "a bfloat16 value": lambda m: m.short.data[4].add_(1),
    "a complex value": lambda m: m.complex.data[2].mul_(1j),
    "a flag": lambda m: m.flags.data[1].fill_(True),
    "NaN replaced": lambda m: m.holes.data[0].fill_(0),
    "a counter": lambda m: m.count.data.add_(1),
    "an empty buffer replaced": lambda m: setattr(m, "none", torch.empty(0, 5)),
    "a version of a plain tensor": lambda m: m.plain.add_(1),
    "a plain tensor in a tuple": lambda m: m.pair[0].add_(1),
    "a list in a tuple": lambda m: m.pair[1].append(3),
    "a plain tensor in a list": lambda m: m.list[0].add_(1),
    "a number in a list": lambda m: m.list.__setitem__(1, 4.0),
    "a key of a dict": lambda m: renamed(m.table),
    "a member of a set": lambda m: m.names.add("z"),
    "an array": lambda m: m.array.__setitem__(1, 2.0),
    "a dict far inside": lambda m: m.tree["a"]["b"][0].update(c=2),
    "the order of layers": lambda m: reordered(m.steps._modules),
    "all attributes at once": Odd.replace_table,
    "a new attribute": lambda m: setattr(m, "more", 1),
    "one attribute less": lambda m: delattr(m, "table"),
    "a hook": lambda m: m.steps[1].register_forward_hook(lambda *_: None),
    "another module": lambda m: m.steps.append(nn.Tanh()),
    "storage elsewhere": lambda m: setattr(m.zeros, "data", m.zeros.data.clone()),
}


@pytest.mark.parametrize("what", ODD)
def test_an_odd_change_is_seen(what: str) -> None:
    model = Odd()
    still = look(model)
    ODD[what](model)
    assert not still(model)


def test_another_module_with_the_same_values_is_another() -> None:
    assert not look(make())(make())


def test_a_large_module_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "WHOLE", 1000)
    monkeypatch.setattr(watch, "SPREAD", 8)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2).double())
    still = look(model)
    model[0].weight.data.view(-1)[:: 64 * 64 // 8][3] += 1  # one of the values that are read
    assert not still(model)
    still = look(model)
    model[1].weight.data.mul_(2)
    assert not still(model)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls, self.scale = nn.Linear(3, 3), 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        return self.body(x) * self.scale


def test_what_the_forward_pass_writes_does_not_count() -> None:
    model = Writes()
    la = lapwing.fit(model, (X, Y), "classification", structure="diag")
    still = look(model)
    model(X), model(X)
    assert still(model)
    model.scale = 2.0
    assert not still(model)
    with pytest.raises(lapwing.UnsupportedModel):
        la.predict(X)


def recurrent() -> nn.Module:
    return nn.LSTM(3, 4, num_layers=2)


def hooked() -> nn.Module:
    model = make()
    model.body.register_forward_hook(lambda *_: None)
    return model


def attention() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)


@pytest.mark.parametrize("make_one", [make, Odd, Writes, recurrent, hooked, attention])
def test_nothing_touched_is_seen_as_such(make_one: Callable[[], nn.Module]) -> None:
    model = make_one()
    still = look(model)
    model.requires_grad_(False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert still(model)


def with_inference_tensors() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 3)


UNREADABLE: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.script(nn.Linear(3, 3)),
    "of inference tensors": with_inference_tensors,
    "without memory": lambda: nn.Linear(3, 3, device="meta"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_read_quickly_is_left_to_the_longer_look(what: str) -> None:
    model = UNREADABLE[what]()
    assert unmoved(model, state_of(model)) is None


@pytest.mark.filterwarnings("ignore:nn.functional.tanh is deprecated")
@pytest.mark.parametrize("what", HARMLESS)
def test_the_longer_look_is_taken_once_after_a_harmless_change(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    la = lapwing.fit(model, (X, Y), "classification", structure="diag")
    HARMLESS[what](model)
    before = la.predict(X[:4]).probs

    def refused(_: nn.Module) -> list:
        raise AssertionError("the longer look was taken")

    monkeypatch.setattr(watch, "glance", refused)
    assert torch.equal(la.predict(X[:4]).probs, before)
    model.head.weight.data[0, 0] += 1.0
    with pytest.raises(AssertionError, match="the longer look"):
        la.predict(X[:4])
