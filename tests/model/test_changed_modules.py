"""A module that computes something else than at the fit is noticed, however the change was made; others are let be."""

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


class Settings:
    def __init__(self) -> None:
        self.scale, self.inner = 1.0, {"shift": 0.0}


class Net(nn.Module):
    """Reads whatever a forward pass can read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.frozen = nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(400, 3)
        self.frozen.requires_grad_(False)
        self._scale = 1.0
        self.powers, self._powers = [1.0, 1.0], [1.0]
        self.scaling, self._scaling = {"default": 1.0}, {"default": 1.0}
        self.config, self.act = Settings(), torch.tanh
        self.wide = functools.partial(torch.clamp, min=-5.0)
        self.others = [nn.Linear(5, 5)]  # not registered

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.body(x)) * self._scale * self.powers[1] * self._powers[0]
        h = h * self.scaling["default"] * self._scaling["default"] * self.config.scale + self.config.inner["shift"]
        h = h + self.others[0](h)
        return self.head(self.wide(h)) + self.frozen(x.repeat(1, 134)[:, :400])


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def patched(model: Net) -> None:
    model.forward = types.MethodType(lambda self, x: 2 * Net.forward(self, x), model)  # type: ignore[method-assign]


def by_closure(model: Net) -> None:
    model.forward = lambda x: 2 * Net.forward(model, x)  # type: ignore[method-assign]


def written_in_place(model: Net) -> None:
    with torch.no_grad():
        model.frozen.weight[1, 77] += 1.0


def written_behind(model: Net) -> None:
    model.frozen.weight.data[1, 77] += 1.0


CHANGES: dict[str, Callable[[Net], Any]] = {
    "a private number": lambda m: setattr(m, "_scale", 2.0),
    "a list": lambda m: m.powers.__setitem__(1, 2.0),
    "a private list": lambda m: m._powers.__setitem__(0, 2.0),
    "a dict": lambda m: m.scaling.update(default=2.0),
    "a private dict": lambda m: m._scaling.update(default=2.0),
    "a configuration": lambda m: setattr(m.config, "scale", 2.0),
    "a dict in a configuration": lambda m: m.config.inner.update(shift=1.0),
    "another function": lambda m: setattr(m, "act", torch.relu),
    "another partial function": lambda m: setattr(m, "wide", functools.partial(torch.clamp, min=0.0)),
    "a hook": lambda m: m.body.register_forward_hook(lambda _, __, out: 2 * out),
    "a hook before": lambda m: m.head.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
    "a patched forward": patched,
    "a patched forward that names the module": by_closure,
    "another layer of the same kind": lambda m: setattr(m, "body", nn.Linear(3, 5)),
    "another class": lambda m: setattr(m, "__class__", Twice),
    "a module that is not registered": lambda m: m.others.__setitem__(0, nn.Linear(5, 5)),
    "a frozen weight": written_in_place,
    "a frozen weight behind autograd's back": written_behind,
}


def make() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net()


@pytest.mark.parametrize("select", ["all", "head.*"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noticed_by_predictions_and_by_load(what: str, select: str, tmp_path: Path) -> None:
    model = make()
    la = lapwing.fit(model, (X, Y), "classification", structure="diag", select=select)
    la.save(tmp_path / "a.lapwing")
    before = la.predict(X[:4]).function.mean
    CHANGES[what](model)
    with torch.no_grad():
        assert not torch.allclose(model(X[:4]), before)  # the change matters
    for use in (lambda: la.predict(X[:4]), lambda: la.ensemble(2), lambda: lapwing.load(tmp_path / "a.lapwing", model)):
        with pytest.raises(lapwing.UnsupportedModel):
            use()


HARMLESS: dict[str, Callable[[Net], Any]] = {
    "nothing": lambda m: None,
    "a plain call": lambda m: m(X),
    "training mode": lambda m: m.train(),
    "frozen weights": lambda m: m.requires_grad_(False),
    "gradients": lambda m: m(X).sum().backward(),
    "a hook that looks": lambda m: m.body.register_forward_hook(lambda *_: None),
    "an attribute that is not read": lambda m: setattr(m, "_name", "a"),
    "a note in the configuration": lambda m: setattr(m.config, "note", "b"),
    "the same function by another name": lambda m: setattr(m, "act", F.tanh),
    "a weight changed and put back": lambda m: (m.head.weight.data.add_(1), m.load_state_dict(make().state_dict())),
    "the same values elsewhere in memory": lambda m: setattr(m.body.weight, "data", m.body.weight.data.clone()),
}


@pytest.mark.filterwarnings("ignore:nn.functional.tanh is deprecated")
@pytest.mark.parametrize("what", HARMLESS)
def test_what_does_not_matter_is_let_be(what: str, tmp_path: Path) -> None:
    model = make()
    la = lapwing.fit(model, (X, Y), "classification", structure="diag")
    la.save(tmp_path / "a.lapwing")
    before = la.predict(X[:4]).probs
    HARMLESS[what](model)
    for _ in range(2):
        assert torch.equal(la.predict(X[:4]).probs, before)
    torch.testing.assert_close(lapwing.load(tmp_path / "a.lapwing", make()).predict(X[:4]).probs, before)


def test_a_file_holds_no_sample_of_the_data(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    la = lapwing.fit(make(), (X, Y), "classification", structure="diag")
    la.save(tmp_path / "a.lapwing")
    stored = [t for name, t in load_file(tmp_path / "a.lapwing").items() if name.startswith("probe")]
    assert stored
    rows = [row for t in stored if t.shape[-1:] == (3,) for row in t.reshape(-1, 3)]
    assert not any(torch.equal(row, x) for row in rows for x in X)


class Ids(nn.Module):
    """Stands no ids out of order: made-up inputs fail, so that the samples themselves are kept, in memory alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self._scale = nn.Embedding(12, 4), nn.Linear(4, 3), 1.0

    def forward(self, ids: Tensor) -> Tensor:
        assert bool((ids.diff(dim=1) > 0).all()), "ids must ascend"
        return self.head(self.embed(ids).mean(1)) * self._scale


def test_a_network_that_stands_no_made_up_inputs_is_probed_by_its_data(tmp_path: Path) -> None:
    model, ids = Ids(), torch.stack([torch.arange(6) + k for k in range(6)])
    la = lapwing.fit(model, (ids, Y[:6]), "classification", structure="diag")
    la.save(tmp_path / "a.lapwing")
    assert b"probe" not in (tmp_path / "a.lapwing").read_bytes()
    model._scale = 2.0
    with pytest.raises(lapwing.UnsupportedModel):
        la.predict(ids)
