"""The private copy computes what the module computes, shares its weights, and keeps every write to itself."""

import functools
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lapwing
from lapwing.model.copies import borrowed, private

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Holder:
    """A plain object that holds a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


class Slotted:
    __slots__ = ("layer",)

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


Pair = namedtuple("Pair", "first second")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)


class InList(Base):
    """Layers by lists, dicts, tuples, plain objects, partial functions and bound methods."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [("a", self.a), ("b", self.b)]
        self.table = OrderedDict(x={"deep": (self.a, self.b)})
        self.pair, self.holder, self.slotted = Pair(self.a, self.b), Holder(self.a), Slotted(self.b)
        self.first, self.last = functools.partial(self._run, "a"), self._last

    def _run(self, name: str, x: Tensor) -> Tensor:
        return dict(self.steps)[name](x)

    def _last(self, x: Tensor) -> Tensor:
        return self.table["x"]["deep"][1](x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh() + self.pair.first(x) + self.holder.layer(x)
        return self.last(h) + self.slotted.layer(h)


class Patched(Base):
    """A forward that was replaced by a function which names the module."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda x: self.b(self.a(x).tanh())  # type: ignore[method-assign]


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        b = self.b
        self.a.register_forward_hook(lambda _, __, out: b(out))
        self.a.register_forward_pre_hook(lambda module, args: (args[0] * module.bias,))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Writes(Base):
    """Writes attributes, buffers, lists and plain tensors in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.cache, self.seen, self.calls, self.table = torch.zeros(4), [], 0, {}

    def forward(self, x: Tensor) -> Tensor:
        self.mean.add_(1)
        self.cache += 1
        self.seen.append(len(x))
        self.table[len(x)] = x
        self.calls += 1
        return self.b(self.a(x).tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 5, batch_first=True, bidirectional=True), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.reshape(-1, 2, 2))[0].mean(1))


class Renormalized(nn.Module):
    """A frozen embedding that overwrites its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 3)
        self.embed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed((x[:, 0].abs() * 2).long().clamp(max=4)) + x)


def tied() -> nn.Module:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last, nn.Tanh(), first, nn.Linear(4, 3))


def by_global_name() -> nn.Module:
    scope: dict = {"torch": torch}
    module = Base()
    exec("forward = lambda x: net.b(net.a(x).tanh())", scope)
    scope["net"] = module
    module.forward = scope["forward"]
    return module


def by_method() -> nn.Module:
    module = Base()
    module.forward = types.MethodType(lambda self, x: self.b(self.a(x).relu()), module)  # type: ignore[method-assign]
    return module


def compiled_inside() -> nn.Module:
    return nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Tanh(), nn.Linear(4, 3))


CASES: dict[str, Callable[[], nn.Module]] = {
    "lists and objects": InList,
    "patched": Patched,
    "hooked": Hooked,
    "writes": Writes,
    "recurrent": Recurrent,
    "renormalized": Renormalized,
    "tied": tied,
    "by global name": by_global_name,
    "by method": by_method,
    "compiled inside": compiled_inside,
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3)),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))),
}

ignoring = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def make(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CASES[name]().eval()


@ignoring
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_module_s(name: str) -> None:
    module, reference = make(name), make(name)
    names = [n for n, p in module.named_parameters() if p.requires_grad]
    expected = reference(X)
    wanted = torch.autograd.grad(expected.square().sum(), [dict(reference.named_parameters())[n] for n in names])
    with borrowed(module, names) as own:
        assert own is not module
        found = own(X)
        grads = torch.autograd.grad(found.square().sum(), [dict(own.named_parameters())[n] for n in names])
    torch.testing.assert_close(found, expected)
    for g, w in zip(grads, wanted, strict=True):
        torch.testing.assert_close(g, w)


@ignoring
@pytest.mark.parametrize("name", [n for n in CASES if n != "scripted"])  # which is copied whole
def test_weights_are_shared(name: str) -> None:
    module = make(name)
    with private(module) as own:
        copies = dict(own.named_parameters())
        for n, p in module.named_parameters():
            assert copies[n] is not p
            assert copies[n].data_ptr() == p.data_ptr() or name == "renormalized"
        assert list(copies) == [n for n, _ in module.named_parameters()]


@ignoring
@pytest.mark.parametrize("name", CASES)
def test_a_pass_and_other_weights_leave_the_module_alone(name: str) -> None:
    module = make(name).train()
    tensors = {n: t.clone() for n, t in (*module.named_parameters(), *module.named_buffers())}
    plain = {n: t.clone() for n, t in vars(module).items() if isinstance(t, Tensor)}
    flags = [(m.training, set(vars(m)), len(m._forward_hooks)) for m in module.modules()]
    counts = {n: len(v) for n, v in vars(module).items() if isinstance(v, list | dict)}
    names = [n for n, p in module.named_parameters() if p.requires_grad]
    with borrowed(module, names) as own:
        own(X)
        if name != "scripted":  # torch runs no scripted module at other weights
            values = {n: torch.zeros_like(p) for n, p in own.named_parameters() if n in names}
            torch.func.functional_call(own, values, (X,))
        own.train()
    assert all(torch.equal(t, tensors[n]) for n, t in (*module.named_parameters(), *module.named_buffers()))
    assert all(torch.equal(t, plain[n]) for n, t in vars(module).items() if isinstance(t, Tensor))
    assert flags == [(m.training, set(vars(m)), len(m._forward_hooks)) for m in module.modules()]
    assert counts == {n: len(v) for n, v in vars(module).items() if isinstance(v, list | dict)}
    assert all(p.grad is None for p in module.parameters())


def test_a_copy_that_a_thread_is_using_is_lent_again() -> None:
    module = make("tied")
    with private(module) as one, private(module) as two:
        assert one is two
    with private(module) as one, private(module, ["0.weight"]) as two:
        assert one is not two


@pytest.mark.parametrize("name", ["lists and objects", "patched", "hooked", "by global name", "writes", "tied"])
def test_curvature_is_that_of_autograd(name: str) -> None:
    """The diagonal of Σ JᵀΛJ from per-sample gradients of the module itself."""
    module = make(name).double()
    x, y = X.double(), torch.arange(6) % 3
    la = lapwing.fit(module, (x, y), "classification", structure="diag")
    total = torch.zeros(la.params.size, dtype=torch.float64)
    for k in range(len(x)):
        f = module(x[k : k + 1])[0]
        p = f.softmax(-1)
        found = [torch.autograd.grad(v, list(module.parameters()), retain_graph=True) for v in f]
        rows = torch.stack([torch.cat([g.flatten() for g in one]) for one in found])
        total += torch.einsum("kp,kl,lp->p", rows, torch.diag(p) - p[:, None] * p, rows).detach()
    torch.testing.assert_close(la.curvature.matrix.diagonal(), total)


OUTSIDE = nn.Linear(4, 3)


def _through_a_global(x: Tensor) -> Tensor:
    return OUTSIDE(x)


class PastTheCopy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = OUTSIDE

    def forward(self, x: Tensor) -> Tensor:
        return _through_a_global(x)


def test_a_forward_past_the_copy_is_refused() -> None:
    with pytest.raises(lapwing.UnsupportedModel, match="through `self`"):
        lapwing.fit(PastTheCopy(), (X, torch.arange(6) % 3), "classification")


SCALES: dict = {}


class ByIdentity(nn.Module):
    """Finds its scale in a table by its own identity, with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        SCALES[id(self)] = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * SCALES.get(id(self), 1.0)


def test_a_copy_that_computes_something_else_is_refused() -> None:
    with pytest.raises(lapwing.UnsupportedModel, match="belongs to this very object"):
        lapwing.fit(ByIdentity().eval(), (X, torch.arange(6) % 3), "classification")
