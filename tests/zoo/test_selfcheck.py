"""The self-check: each rule is broken on purpose, and the fit must notice, fall back and say so."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lapwing
from lapwing.model.rules import RULES, MatrixRule

from . import oracle
from .architectures.registry import Net, weight
from .cases import Snapshot, assert_same

T = torch.Tensor
VECTOR, SERIES, IMAGE, VOLUME = (3,), (2, 4), (2, 3, 3), (2, 2, 2, 2)


def use(function, shape, **parts):
    """A network with that one operation, then tanh, then a raw product that no rule under test touches."""
    return function, shape, parts


def product(f):
    return use(lambda s, x: f(x, s.w), VECTOR, w=(3, 3))


def shift(f):
    return use(lambda s, x: f(x * 1.0, s.w), VECTOR, w=(3,))


def convolution(f, shape, groups=1):
    kernel = (2,) * (len(shape) - 1)
    return use(lambda s, x: f(x, s.w, s.b, padding=1), shape, w=(2, 2, *kernel), b=(2,))


def running(f):
    return use(lambda s, x: f(x, s.mean, s.var, s.w, s.b), IMAGE, w=(2,), b=(2,))


USES = {
    F.linear: use(lambda s, x: F.linear(x, s.w, s.b), VECTOR, w=(3, 3), b=(3,)),
    torch.matmul: product(torch.matmul),
    torch.mm: product(torch.mm),
    T.matmul: product(T.matmul),
    T.mm: product(T.mm),
    T.__matmul__: product(T.__matmul__),
    torch.addmm: use(lambda s, x: torch.addmm(s.b, x, s.w), VECTOR, w=(3, 3), b=(3,)),
    T.addmm: use(lambda s, x: s.b.addmm(x, s.w), VECTOR, w=(3, 3), b=(3,)),
    F.conv1d: convolution(F.conv1d, SERIES),
    F.conv2d: convolution(F.conv2d, IMAGE),
    F.conv3d: convolution(F.conv3d, VOLUME),
    F.conv_transpose1d: convolution(F.conv_transpose1d, SERIES),
    F.conv_transpose2d: convolution(F.conv_transpose2d, IMAGE),
    F.conv_transpose3d: convolution(F.conv_transpose3d, VOLUME),
    F.embedding: use(lambda s, x: F.embedding((x > 0).long(), s.w), VECTOR, w=(2, 3)),
    F.layer_norm: use(lambda s, x: F.layer_norm(x, (3,), s.w, s.b), VECTOR, w=(3,), b=(3,)),
    F.rms_norm: use(lambda s, x: F.rms_norm(x, (3,), s.w, 1e-5), VECTOR, w=(3,)),
    F.group_norm: use(lambda s, x: F.group_norm(x, 1, s.w, s.b), IMAGE, w=(2,), b=(2,)),
    F.batch_norm: running(F.batch_norm),
    F.instance_norm: use(lambda s, x: F.instance_norm(x, None, None, s.w, s.b), IMAGE, w=(2,), b=(2,)),
    F.prelu: use(lambda s, x: F.prelu(x, s.w), IMAGE, w=(2,)),
    torch.prelu: use(lambda s, x: torch.prelu(x, s.w), IMAGE, w=(2,)),
    T.prelu: use(lambda s, x: x.prelu(s.w), IMAGE, w=(2,)),
    torch.add: shift(torch.add),
    torch.sub: shift(torch.sub),
    torch.mul: shift(torch.mul),
    T.add: shift(T.add),
    T.add_: shift(T.add_),
    T.__add__: shift(T.__add__),
    T.__radd__: shift(T.__radd__),
    T.__iadd__: shift(T.__iadd__),
    T.sub: shift(T.sub),
    T.sub_: shift(T.sub_),
    T.__sub__: shift(T.__sub__),
    T.__isub__: shift(T.__isub__),
    T.mul: shift(T.mul),
    T.__mul__: shift(T.__mul__),
    T.__rmul__: shift(T.__rmul__),
}


def name_of(function):
    return f"{getattr(function, '__module__', '') or 'Tensor'}.{function.__name__}"


def test_every_rule_has_a_network():
    ours = [f for f, rule in RULES.items() if type(rule).__module__.startswith("lapwing.")]  # not those of a test
    missing = [name_of(f) for f in ours if f not in USES]
    assert not missing, f"add a network to USES for {missing}"


def build(function, dtype=torch.float64):
    call, shape, parts = USES[function]

    def forward(s, x):
        h = torch.tanh(call(s, x)).flatten(1)
        return torch.einsum("bi,io->bo", h, s.head[: h.shape[1]])

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        statistics = {"mean": torch.tensor([0.1, -0.2]), "var": torch.tensor([0.7, 1.5])}
        module = Net(forward, **{k: weight(*v) for k, v in parts.items()}, head=weight(64, 2), **statistics).double()
        x = torch.randn(5, *shape, dtype=torch.float64)
    return module.to(dtype).eval(), x.to(dtype)


def in_pairs(rows):
    """(J₀, J₁) → (2 J₁, J₀ / 2): what weights of 1 and 2 would not see."""
    even = len(rows) // 2 * 2
    first, second = rows[0:even:2], rows[1:even:2]
    return torch.cat([torch.stack([2 * second, first / 2], 1).flatten(0, 1), rows[even:]])


class Spoiled:
    """A copy of a rule, one of whose answers is wrong; counts how often it was asked."""

    def __init__(self, rule, how):
        self.rule, self.asked = copy.copy(rule), 0
        names = ("left", "right") if isinstance(rule, MatrixRule) else ("weight_rows", "bias_rows")
        spoil = {
            "scaled": lambda rows: rows * 1.02,
            "scaled by half": lambda rows: rows * 1.5,
            "zero": torch.zeros_like,
            "samples rolled": lambda rows: rows.roll(1, 0),
            "samples in pairs": in_pairs,
            "samples averaged": lambda rows: rows.mean(0, keepdim=True).expand_as(rows),
            "last entries flipped": lambda rows: rows.flip(-1),
            "raises": self.fail,
        }[how]
        # scaling the left factor reaches weight and bias; rolling or flipping one factor alone is enough
        for name in names[:1] if isinstance(rule, MatrixRule) else names:
            setattr(self.rule, name, self.wrap(getattr(rule, name), spoil))
        if not isinstance(rule, MatrixRule):
            self.rule.rows = self.wrap(rule.rows, lambda pair: tuple(spoil(rows) for rows in pair))

    def wrap(self, method, spoil):
        def spoiled(*args, **kwargs):
            self.asked += 1
            return spoil(method(*args, **kwargs))

        return spoiled

    @staticmethod
    def fail(rows):
        raise RuntimeError("broken on purpose")


def truth(module, x):
    f, j = oracle.outputs(module, x), oracle.jacobian(module, x)
    return oracle.ggn(j, oracle.hessian_gaussian(f))


HOWS = ["scaled", "zero", "samples rolled", "samples in pairs", "samples averaged", "last entries flipped", "raises"]
FIRST = {id(rule): function for function, rule in reversed(RULES.items())}  # one function a rule meets every fault
FAULTS = [
    (function, how)
    for function, rule in RULES.items()
    for how in HOWS[: len(HOWS) if FIRST[id(rule)] == function else 1]
]


@pytest.mark.parametrize(("function", "how"), FAULTS, ids=lambda v: v if isinstance(v, str) else name_of(v))
def test_broken_rule_is_noticed(function, how, monkeypatch):
    module, x = build(function)
    spoiled = Spoiled(RULES[function], how)
    batches = [(x[:3], x.flatten(1)[:3, :2]), (x[3:], x.flatten(1)[3:, :2])]
    exact = truth(module, x)
    sound = lapwing.fit(module, batches, lapwing.Gaussian(1.0), structure="full")
    assert_same(sound.curvature.dense(), exact)
    monkeypatch.setitem(RULES, function, spoiled.rule)
    before = Snapshot(module)
    la = lapwing.fit(module, batches, lapwing.Gaussian(1.0), structure="full")
    before.check(module)
    if spoiled.asked == 0:
        pytest.skip("torch calls this function by another name")
    assert_same(la.curvature.dense(), exact, what=f"{how} rule for {name_of(function)}")
    assert set(la.curvature.notes) - set(sound.curvature.notes), "the fit does not say that it fell back"


@pytest.mark.parametrize(
    "function", [F.linear, F.conv2d, F.embedding, F.layer_norm, F.batch_norm, torch.mul], ids=name_of
)
def test_broken_rule_is_noticed_in_float32(function, monkeypatch):
    module, x = build(function, torch.float32)
    exact = truth(*build(function))
    monkeypatch.setitem(RULES, function, Spoiled(RULES[function], "scaled").rule)
    la = lapwing.fit(module, [(x, x.flatten(1)[:, :2])], lapwing.Gaussian(1.0), structure="full")
    assert_same(la.curvature.dense().double(), exact, 1e-4)
    assert la.curvature.notes


def noisy(s, x):
    return s.fc(x + 0.1 * torch.randn_like(x))


def alternating(s, x):
    s.flips.append(None)
    return s.fc(x) if len(s.flips) % 2 else -s.fc(x)


@pytest.mark.parametrize("forward", [noisy, alternating])
def test_models_that_are_not_functions_are_refused(forward):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Net(forward, fc=nn.Linear(3, 2), flips=[]).double()
        x = torch.randn(4, 3, dtype=torch.float64)
        with pytest.raises(lapwing.UnsupportedModel):
            lapwing.fit(module, [(x, x[:, :2])], lapwing.Gaussian(1.0), structure="full")


def test_uses_that_the_tape_cannot_see_are_named():
    from .architectures import ZOO

    for name, parameters in {
        "custom_function_with_parameters": ("w", "b"),
        "scripted_submodule": ("body.0.weight", "body.0.bias"),
    }.items():
        module, x = ZOO[name].build(), ZOO[name].inputs(4)
        la = lapwing.fit(module, [(x, torch.zeros(4, 2).double())], lapwing.Gaussian(1.0), structure="diag")
        said = " ".join(la.curvature.notes)
        assert all(p in said for p in parameters), f"{name}: {said!r} does not name {parameters}"


@pytest.mark.parametrize("scale", [1.0, 1e4, 2e4])
def test_broken_rule_is_noticed_where_gradients_overflow(scale, monkeypatch):
    """Sums over samples leave the range of float16 before the gradients of any one of them do."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).half()
    net = Net(lambda s, x: s.body(x) * scale, body=module)
    x = 0.5 * torch.randn(4, 3).half()
    monkeypatch.setitem(RULES, F.linear, Spoiled(RULES[F.linear], "scaled by half").rule)
    la = lapwing.fit(net, [(x, torch.zeros(4, 2).half())], lapwing.Gaussian(1.0), structure="diag")
    assert any("disagreed with autograd" in note for note in la.curvature.notes)
