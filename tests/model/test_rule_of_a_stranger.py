"""A rule for an operation that the library has none for: one class and one registration, then everything works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.model.rules import RULES, Call, MatrixRule, Samples, register, with_ones
from lapwing.testing import RuleLaws
from lapwing.testing.rules import normal


class Bilinear(MatrixRule):
    """y[o] = Σ_ij W[o, i, j] a[i] b[j] + bias[o]: linear in the products of two inputs."""

    def bind(self, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
        return Call((input1, input2), weight, bias)

    def accepts(self, call: Call, samples: Samples, ndim: int) -> bool:
        return samples.axis < ndim - 1

    def view(self, call: Call, weight: Tensor) -> Tensor:
        return weight.flatten(1)[None]

    def left(self, call: Call, g: Tensor, samples: Samples, n: int) -> Tensor:
        g = samples.first(g, n, skip=1)
        return g.reshape(n, len(g[0]), -1, 1, g.shape[-1])

    def right(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
        a, b = (samples.first(x, n).reshape(n, 1, -1, 1, x.shape[-1]) for x in call.inputs)
        products = (a[..., :, None] * b[..., None, :]).flatten(-2)
        return with_ones(products) if ones else products


@pytest.fixture(autouse=True)
def registered() -> Iterator[Bilinear]:
    rule = Bilinear()
    register(rule, torch.bilinear)
    yield rule
    del RULES[torch.bilinear]


class TestLaws(RuleLaws):
    rule, function = Bilinear(), torch.bilinear

    def arguments(self, n: int) -> tuple:
        return normal(n, 3), normal(n, 2), normal(4, 3, 2), normal(4)


class TestLawsOfTokens(RuleLaws):
    rule, function = Bilinear(), torch.bilinear

    def arguments(self, n: int) -> tuple:
        return normal(n, 5, 3), normal(n, 5, 2), normal(4, 3, 2), None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.last = nn.Bilinear(3, 2, 4), nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.last(self.pair(a, b).tanh())


N, P = 40, 4 * 6 + 4 + 4 * 3 + 3


def network() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().double()


def data() -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (normal(N, 3), normal(N, 2)), torch.randint(3, (N,), generator=torch.Generator().manual_seed(0))


def fitted(net: nn.Module | None = None, **options: Any) -> lapwing.Laplace:
    (a, b), y = data()
    batches = [((a[:25], b[:25]), y[:25]), ((a[25:], b[25:]), y[25:])]
    options = {"factor": lapwing.GGN(tolerance=0.0), "progress": False} | options
    return lapwing.fit(net or network(), batches, "classification", **options)


def jacobians(net: Net) -> tuple[Tensor, Tensor]:
    """J (N, 3, P) and the Hessian Λ (N, 3, 3) of the negative log-likelihood, a sample and an output at a time."""
    (a, b), _ = data()
    params, rows, hessians = list(net.parameters()), [], []
    for k in range(N):
        f = net(a[k : k + 1], b[k : k + 1])[0]
        grads = [torch.autograd.grad(out, params, retain_graph=True) for out in f]
        rows.append(torch.stack([torch.cat([g.flatten() for g in own]) for own in grads]))
        p = f.detach().softmax(-1)
        hessians.append(p.diag() - torch.outer(p, p))
    return torch.stack(rows), torch.stack(hessians)


def pieces(net: Net) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of both layers: what the weight multiplies with a 1 for the bias (N, i), ∂f/∂output (N, 3, o), and the places of
    the matrix [weight, bias] in the flat vector (o, i)."""
    (a, b), _ = data()
    h = net.pair(a, b)
    f = net.last(h.tanh())
    ones, found, start = torch.ones(N, 1).double(), [], 0
    inputs = ((a[:, :, None] * b[:, None]).flatten(1), h.tanh().detach())
    for x, layer, out in zip(inputs, (net.pair, net.last), (h, f), strict=True):
        slope = torch.stack([torch.autograd.grad(f[:, c].sum(), out, retain_graph=True)[0] for c in range(3)], 1)
        o, i = len(layer.bias), x.shape[1]
        weight, bias = torch.arange(o * i).reshape(o, i) + start, torch.arange(o)[:, None] + start + o * i
        found.append((torch.cat([x, ones], 1), slope, torch.cat([weight, bias], 1)))
        start += o * (i + 1)
    return found


def test_the_rule_is_used(registered: Bilinear, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    plain = Bilinear.right
    monkeypatch.setattr(Bilinear, "right", lambda self, *args: asked.append(args) or plain(self, *args))
    la = fitted(structure="kron")
    assert asked
    assert [step.method for step in la.plan.steps] == ["rule", "rule"]
    assert [(block.kind, block.names) for block in la.plan.blocks] == [
        ("matrix", ("pair.weight", "pair.bias")),
        ("matrix", ("last.weight", "last.bias")),
    ]
    assert not la.curvature.notes or "replayed" not in " ".join(la.curvature.notes)


@pytest.mark.parametrize("structure", ["diag", "full", "kron", "ekfac"])
def test_curvature_is_that_of_autograd(structure: str) -> None:
    net = network()
    j, hessian = jacobians(net)
    full = torch.einsum("ncp,ncd,ndq->pq", j, hessian, j)
    found = fitted(net, structure=structure).curvature.dense()
    expected = {"diag": full.diagonal().diag(), "full": full}.get(structure)
    if expected is None:
        expected = torch.zeros(P, P).double()
        for a, slope, places in pieces(net):
            left, right = torch.einsum("nco,ncd,ndp->op", slope, hessian, slope), a.T @ a / N
            block = torch.kron(left.contiguous(), right)  # with opt_einsum, left has the strides of its transpose
            if structure == "ekfac":
                basis = torch.kron(*(torch.linalg.eigh(side)[1].contiguous() for side in (left, right)))
                own = full[places.flatten()][:, places.flatten()]
                block = basis @ (basis.T @ own @ basis).diagonal().diag() @ basis.T
            expected[places.flatten()[:, None], places.flatten()] = block
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("structure", ["diag", "full", "kron", "ekfac"])
def test_tune_predict_save_load_move_compare(structure: str, tmp_path: Path) -> None:
    net, (inputs, y) = network(), data()
    la = fitted(net, structure=structure).tune((inputs, y))
    probs = la.predict(inputs).probs
    torch.testing.assert_close(probs.sum(-1), torch.ones(N).double())
    la.save(tmp_path / "pair.lapwing")
    again = lapwing.load(tmp_path / "pair.lapwing", net)
    torch.testing.assert_close(again.predict(inputs).probs, probs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.to("cpu").predict(inputs).probs, probs, rtol=1e-9, atol=1e-12)
    table = lapwing.compare({"tuned": la, "untuned": fitted(net, structure=structure)})
    assert "untuned" in str(table)


class Broken(Bilinear):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "where"):
            raise KeyError(f"no such thing in {name}")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("where", ["bind", "accepts", "view", "left", "right"])
def test_the_exception_of_a_rule_is_shown(where: str) -> None:
    net = network()
    j, hessian = jacobians(net)
    register(Broken(where), torch.bilinear)
    la = fitted(net, structure="full")
    torch.testing.assert_close(la.curvature.dense(), torch.einsum("ncp,ncd,ndq->pq", j, hessian, j))
    said = (
        "bilinear is replayed per sample for the rows of pair.bias, pair.weight, which is slow: "
        f"its rule raised KeyError: 'no such thing in {where}'"
    )
    assert said in la.curvature.notes
    assert said in la.summary()
    assert "disagreed with autograd" not in la.summary()


def test_a_rule_that_is_wrong_is_named() -> None:
    class Doubled(Bilinear):
        def right(self, call: Call, samples: Samples, n: int, ones: bool = False) -> Tensor:
            return 2 * super().right(call, samples, n, ones)

    register(Doubled(), torch.bilinear)
    (note,) = [note for note in fitted(structure="full").curvature.notes if "bilinear" in note]
    assert "its rule disagreed with autograd (norm " in note


def test_inputs_whose_samples_are_elsewhere_are_not_read_by_the_rule() -> None:
    """The second input is a constant of the batch's length, which has no samples to cut."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = nn.Bilinear(3, 2, 3)

        def forward(self, a: Tensor) -> Tensor:
            return self.pair(a, torch.ones(1, 2, dtype=a.dtype).expand(len(a), 2))

    net = Fixed().double()
    x, y = normal(8, 3), torch.arange(8) % 3
    la = lapwing.fit(net, [(x, y)], "classification", structure="full", factor=lapwing.GGN(tolerance=0.0))
    exact = torch.zeros(21, 21).double()
    for f in net(x):
        grads = [torch.autograd.grad(out, list(net.parameters()), retain_graph=True) for out in f]
        rows, p = torch.stack([torch.cat([g.flatten() for g in own]) for own in grads]), f.detach().softmax(-1)
        exact += rows.T @ (p.diag() - torch.outer(p, p)) @ rows
    torch.testing.assert_close(la.curvature.dense(), exact)


@pytest.mark.parametrize("name", ["left", "right", "left_sum", "right_sum", "left_gram", "right_gram", "view"])
def test_the_laws_notice_a_wrong_answer(name: str) -> None:
    class Wrong(Bilinear):
        pass

    def wrong(self: Bilinear, *args: Any) -> Any:
        found = getattr(Bilinear, name)(self, *args)
        return (2 * found[0], found[1]) if isinstance(found, tuple) else found.flip(-1) * 2

    setattr(Wrong, name, wrong)
    case = type("Case", (TestLaws,), {"rule": Wrong()})()

    def every_law() -> None:
        for law in (law for law in dir(case) if law.startswith("test_")):
            getattr(case, law)()

    with pytest.raises(AssertionError):
        every_law()
