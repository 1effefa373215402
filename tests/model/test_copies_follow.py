"""What a private copy must follow or carry: collections, keys, closures, proxies, parameters of the user's own kind."""

import enum
import types
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lapwing

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(6) % 3


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.setup()

    def setup(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class ListOfAHook(Base):
    """A hook fills a list that the module reads: the hook is met before the list is."""

    def setup(self) -> None:
        self.features = features = []
        self.a.register_forward_hook(lambda _, __, out: features.append(out))

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        self.a(x)
        return self.b(self.features[-1].tanh())


class Recorder:
    def __init__(self, into: dict) -> None:
        self.into = into

    def __call__(self, _: nn.Module, __: tuple, out: Tensor) -> None:
        self.into["a"] = out


class DictOfARecorder(Base):
    def setup(self) -> None:
        self.features: dict = {}
        self.a.register_forward_hook(Recorder(self.features))

    def forward(self, x: Tensor) -> Tensor:
        self.a(x)
        return self.b(self.features["a"].tanh())


class BoundAppend(Base):
    def setup(self) -> None:
        self.features: list = []
        self.put = self.features.append

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        self.put(self.a(x))
        return self.b(self.features[0].tanh())


class KeyedByModules(Base):
    def setup(self) -> None:
        gains = {self.a: 2.0, self.b: 1.0}
        self.b.register_forward_hook(lambda module, _, out: out * gains[module])
        self.gains, self.weak = gains, weakref.WeakKeyDictionary({self.a: 3.0})

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh() * self.gains[self.a] * self.weak[self.a])


class Attributes(dict):
    __getattr__ = dict.__getitem__


class Many(list):
    pass


class OwnCollections(Base):
    def setup(self) -> None:
        self.table, self.many, self.calls = Attributes(a=self.a), Many([self.b]), Counter()
        self.space, self.frozen = types.SimpleNamespace(a=self.a), frozenset([self.b])
        self.view = types.MappingProxyType({"a": self.a})

    def forward(self, x: Tensor) -> Tensor:
        self.calls["n"] += 1
        (last,) = self.frozen
        return last((self.table.a(x) + self.space.a(x) * self.view["a"](x)).tanh()) + self.many[0](x)


class WeakReferences(Base):
    def setup(self) -> None:
        self.a.__dict__["parent"] = weakref.proxy(self)
        self.method, self.values = weakref.WeakMethod(self.first), weakref.WeakValueDictionary(b=self.b)

    def first(self, x: Tensor) -> Tensor:
        return self.a(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.a.parent.b(self.method()(x)) + self.values["b"](x)


class Scaled(nn.Parameter):
    def doubled(self) -> Tensor:
        return 2 * self


class OwnParameters(Base):
    """Parameters, buffers and tensors with methods and attributes of the user's own."""

    def setup(self) -> None:
        self.gain = Scaled(torch.ones(4, dtype=torch.float64))
        self.register_buffer("mean", torch.ones(4, dtype=torch.float64))
        self.a.weight.width, self.mean.width = 2.0, 3.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh() * self.gain.doubled() * self.a.weight.width * self.mean.width)


class Sequences(Base):
    """What torch.linalg.eigh returns is a tuple of a kind that is made in C."""

    def setup(self) -> None:
        self.eigen = torch.linalg.eigh(2 * torch.eye(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh() * self.eigen.eigenvalues)


class Slotted:
    __slots__ = ("__layer",)

    def __init__(self, layer: nn.Module) -> None:
        self.__layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.__layer(x)


class PrivateSlots(Base):
    def setup(self) -> None:
        self.first = Slotted(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.first(x).tanh())


class Activation(enum.Enum):
    TANH = nn.Tanh()
    RELU = nn.ReLU()


class Choice(Base):
    """A member of an enumeration is compared by identity."""

    def setup(self) -> None:
        self.activation = Activation.TANH

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh() if self.activation is Activation.TANH else self.a(x))


class Wrapper(nn.Module):
    """Hands on attributes that it has not to a compiled module inside, and doubles its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(Base(), backend="eager")

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def compiled_in_place() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    module.compile(backend="eager")
    return nn.Sequential(module)


class CompiledFunction(Base):
    def setup(self) -> None:
        self.again = torch.compile(self.plain, backend="eager", fullgraph=True)

    def plain(self, x: Tensor) -> Tensor:
        return Base.forward(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(x)


class Scripted(nn.Module):
    """A scripted part that shares a weight with another."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 4)
        self.last.weight, self.head = dict(self.body.named_parameters())["0.weight"], nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.body(x)).tanh())


def nested() -> nn.Module:
    module: nn.Module = Base()
    for _ in range(230):
        module = nn.Sequential(module)
    return module


CASES: dict[str, Callable[[], nn.Module]] = {
    "a list that a hook fills": ListOfAHook,
    "a dict that an object fills": DictOfARecorder,
    "a bound method of a list": BoundAppend,
    "keyed by modules": KeyedByModules,
    "collections of its own": OwnCollections,
    "weak references": WeakReferences,
    "parameters of its own": OwnParameters,
    "tuples made in C": Sequences,
    "private slots": PrivateSlots,
    "an enumeration": Choice,
    "wrapper of a compiled module": Wrapper,
    "compiled in place": compiled_in_place,
    "compiled function": CompiledFunction,
    "scripted": Scripted,
    "deep": nested,
}


def make(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CASES[name]().double()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_curvature_and_predictions_are_those_of_autograd(name: str) -> None:
    """The diagonal of Σ JᵀΛJ from per-sample gradients of another module of the same weights."""
    module, reference = make(name), make(name).eval()
    la = lapwing.fit(module, (X, Y), "classification", structure="diag")
    total = torch.zeros(la.params.size, dtype=torch.float64)
    for k in range(len(X)):
        f = reference(X[k : k + 1])[0]
        p = f.softmax(-1)
        found = [torch.autograd.grad(v, list(reference.parameters()), retain_graph=True) for v in f]
        rows = torch.stack([torch.cat([g.flatten() for g in one]) for one in found])
        total += torch.einsum("kp,kl,lp->p", rows, torch.diag(p) - p[:, None] * p, rows).detach()
    torch.testing.assert_close(la.curvature.matrix.diagonal(), total)
    torch.testing.assert_close(la.predict(X).function.mean, reference(X).detach())


@pytest.mark.parametrize(
    "name", ["a list that a hook fills", "a dict that an object fills", "a bound method of a list"]
)
def test_collections_of_the_module_stay_empty(name: str) -> None:
    module = make(name)
    lapwing.fit(module, (X, Y), "classification", structure="diag").predict(X)
    assert not module.features  # type: ignore[arg-type]


class Closes:
    """Closes what it holds when it is dropped."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __del__(self) -> None:
        OPENED.discard("object")


class Finalizes(Base):
    def setup(self) -> None:
        self.file = Closes(self.a)

    def __del__(self) -> None:
        OPENED.discard("module")

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.file.layer(x).tanh())


OPENED: set[str] = set()


def test_finalizers_do_not_run_when_a_copy_is_dropped() -> None:
    """A copy shares files and processes with the user's objects, which its finalizer would close."""
    module = Finalizes().double()
    OPENED.update(("object", "module"))
    lapwing.fit(module, (X, Y), "classification", structure="diag").predict(X)
    assert OPENED == {"object", "module"}
