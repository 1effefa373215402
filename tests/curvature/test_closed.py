"""The curvature of a last layer in closed form equals that of the general path, which back-propagates."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import fitting
from lapwing.curvature import pose

TARGETS = {
    "classification": (4, lambda n: torch.randint(4, (n,))),
    "regression": (2, lambda n: torch.randn(n, 2)),
    "binary": (3, lambda n: torch.randint(2, (n, 3)).float()),
    "counts": (2, lambda n: torch.poisson(torch.ones(n, 2))),
    "heteroscedastic": (2, lambda n: torch.randn(n, 1)),
}
TAILS = {
    "none": lambda f: f,
    "scale and shift": lambda f: 0.5 * f - 1.0,
    "slice": lambda f: f[:, : f.shape[1] - 1],
    "temperatures": lambda f: f / torch.arange(1.0, f.shape[1] + 1.0, dtype=f.dtype),
    "mixed": lambda f: f - 0.3 * f.mean(-1, keepdim=True),
}
STRUCTURES = ("full", "kron", "ekfac", "diag", "blockdiag")


class Net(nn.Module):
    def __init__(self, outputs: int, tail: str = "none", bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        self.last, self.tail = nn.Linear(6, outputs, bias=bias), tail

    def forward(self, x: Tensor) -> Tensor:
        return TAILS[self.tail](self.last(self.body(x)))


def both(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> tuple[lapwing.Laplace, lapwing.Laplace]:
    """Fit by the short path and by the general one, from the same seed."""
    seen = []

    def general(*a: Any, closed: bool = False, **k: Any) -> Any:
        return pose(*a, **k)

    def short(*a: Any, **k: Any) -> Any:
        problem = pose(*a, **k)
        seen.append(problem.reader is not None)
        return problem

    found = []
    for way in (short, general):
        with monkeypatch.context() as m:
            m.setattr(fitting, "pose", way)
            own = {"generator": torch.Generator().manual_seed(3)} if "factor" in options else {}
            found.append(lapwing.fit(*args, select="last_layer", progress=False, **options, **own))
    assert seen == [True]
    return found[0], found[1]


def equal(short: lapwing.Laplace, general: lapwing.Laplace, rtol: float = 1e-6) -> None:
    one, two = short.curvature.dense(), general.curvature.dense()
    torch.testing.assert_close(one, two, rtol=rtol, atol=rtol * float(two.abs().max()))
    assert short.curvature.seen == general.curvature.seen
    assert short.curvature.names == general.curvature.names
    torch.testing.assert_close(short.curvature.statistics, general.curvature.statistics)
    torch.testing.assert_close(short.log_evidence(), general.log_evidence(), rtol=1e-6, atol=1e-5)
    if general.curvature.gradient is not None:
        torch.testing.assert_close(short.curvature.gradient, general.curvature.gradient, rtol=1e-5, atol=1e-5)


CASES = [("classification", tail) for tail in TAILS] + [(task, "temperatures") for task in TARGETS][1:]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("task", "tail"), CASES)
def test_the_short_path_gives_the_curvature_of_the_general_one(
    task: str, tail: str, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    outputs, draw = TARGETS[task]
    net = Net(outputs + (tail == "slice"), tail).double()
    data = [(torch.randn(n, 5).double(), draw(n)) for n in (7, 7, 3)]
    data = [(x, y if y.dtype == torch.long else y.double()) for x, y in data]
    basis = lapwing.EKFAC(basis=lapwing.GGN(tolerance=0)) if structure == "ekfac" else structure
    equal(*both(monkeypatch, net, data, task, structure=basis))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("factor", ["mc", "empirical"])
def test_directions_that_are_drawn_or_observed(factor: str, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 5).double(), torch.randint(4, (8,))) for _ in range(3)]
    equal(*both(monkeypatch, Net(4, "mixed").double(), data, "classification", structure=structure, factor=factor))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_weights_of_samples_and_missing_targets(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    y = torch.randint(4, (20,))
    y[3] = -100
    data = [(torch.randn(20, 5).double(), y, torch.rand(20).double())]
    split = lambda batch: batch  # noqa: E731
    basis = lapwing.EKFAC(basis=lapwing.GGN(tolerance=0)) if structure == "ekfac" else structure
    equal(*both(monkeypatch, Net(4).double(), data, "classification", structure=basis, split=split))


class Scaled(nn.Module):
    """Divides logits by a temperature per class."""

    def forward(self, f: Tensor) -> Tensor:
        return f / torch.arange(1.0, f.shape[-1] + 1.0, dtype=f.dtype)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("tail", [nn.Identity, Scaled])
def test_tokens(tail: type[nn.Module], structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), tail()).double()
    y = torch.randint(4, (12, 3))
    y[2, 1:] = -100
    basis = lapwing.EKFAC(basis=lapwing.GGN(tolerance=0)) if structure == "ekfac" else structure
    equal(*both(monkeypatch, net, (torch.randint(11, (12, 3)), y), "classification", structure=basis))


class Residual(Net):
    """Adds to the outputs of its last layer something that depends on the input alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[:, : self.last.out_features].square()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("tail", ["none", "temperatures"])
def test_a_residual_connection(tail: str, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 5).double(), torch.randint(4, (8,))) for _ in range(3)]
    basis = lapwing.EKFAC(basis=lapwing.GGN(tolerance=0)) if structure == "ekfac" else structure
    short, general = both(monkeypatch, Residual(4, tail).double(), data, "classification", structure=basis)
    equal(short, general)
    assert "backward passes were needed" not in short.summary()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_layer_without_a_bias_or_with_a_frozen_one(
    frozen: bool, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = Net(3, bias=frozen).double()
    if frozen:
        net.last.bias.requires_grad_(False)
    data = (torch.randn(20, 5).double(), torch.randint(3, (20,)))
    basis = lapwing.EKFAC(basis=lapwing.GGN(tolerance=0)) if structure == "ekfac" else structure
    equal(*both(monkeypatch, net, data, "classification", structure=basis))


def test_single_precision_of_a_confident_network(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Net(4)
    with torch.no_grad():
        net.last.weight.mul_(30)
    data = (torch.randn(64, 5), torch.randint(4, (64,)))
    for structure in ("full", "kron", "diag"):
        short, _ = both(monkeypatch, net, data, "classification", structure=structure)
        wide, _ = both(monkeypatch, net.double(), (data[0].double(), data[1]), "classification", structure=structure)
        net.float()
        expected = wide.curvature.dense()
        torch.testing.assert_close(
            short.curvature.dense().double(), expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max())
        )


def test_auto_and_update_take_the_short_path(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 5).double(), torch.randint(4, (40,))
    equal(*both(monkeypatch, Net(4).double(), (x, y), "classification"))
    net = Net(4).double()
    for structure in ("full", "kron", "diag", "blockdiag"):
        first = lapwing.fit(net, (x[:25], y[:25]), "classification", structure=structure, select="last_layer")
        whole = lapwing.fit(net, (x, y), "classification", structure=structure, select="last_layer")
        equal(first.update((x[25:], y[25:])), whole)


def test_no_tape_and_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    calls = []

    class Counted(Net):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            assert len(x) <= 8 or not torch.is_grad_enabled()
            return super().forward(x)

    data = [(torch.randn(64, 5), torch.randint(4, (64,))) for _ in range(6)]
    for structure in ("full", "kron", "ekfac", "diag"):
        calls.clear()
        lapwing.fit(Counted(4), data, "classification", structure=structure, select="last_layer", progress=False)
        assert calls.count(64) == 6, structure  # every batch runs once, also for ekfac, which needs two passes


class Sometimes(Net):
    """Multiplies its outputs by two where an input is large."""

    def forward(self, x: Tensor) -> Tensor:
        f = super().forward(x)
        return torch.where(x[:, :1] > 2.5, 2 * f, f)


def test_what_only_later_data_show_is_read_by_backward_passes() -> None:
    torch.manual_seed(0)
    net = Sometimes(3).double()
    x = torch.randn(30, 5).double().clamp(-2, 2)
    x[25:, 0] = 3.0
    data = [(x[:10], torch.randint(3, (10,))), (x[10:], torch.randint(3, (20,)))]
    la = lapwing.fit(net, data, "classification", structure="full", select="last_layer", progress=False)
    # the oracle: all derivatives by autograd
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(
        {name: p.detach() for name, p in net.named_parameters() if name.startswith("last")}
    )
    J = torch.cat([jacobians["last.weight"].flatten(2), jacobians["last.bias"]], -1)
    p = net(x).softmax(-1).detach()
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    torch.testing.assert_close(la.curvature.dense(), torch.einsum("ncp,ncd,ndq->pq", J, curvature, J))
    expected = torch.einsum("ncp,pq,ncq->nc", J, la.posterior.covariance(), J)
    torch.testing.assert_close(la.predict(x).function.variance, expected)
    torch.testing.assert_close(la.predict(x[:10]).function.variance, expected[:10])


def test_a_tail_that_is_not_affine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(TAILS, "softplus", nn.functional.softplus)
    net = Net(3, "softplus")
    la = lapwing.fit(net, (torch.randn(20, 5), torch.randint(3, (20,))), "classification", select="last_layer")
    assert "affine" in la.summary()


def test_a_thousand_classes_form_no_matrix_per_sample() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.ReLU(), nn.Linear(32, 1000))
    data = (torch.randn(100, 32), torch.randint(1000, (100,)))
    la = lapwing.fit(net, data, "classification", structure="kron", select="last_layer", memory=10**9)
    f = net(data[0]).double().softmax(-1)
    expected = f.sum(0).diag() - f.T @ f
    found = la.curvature.matrix.blocks[0]
    torch.testing.assert_close(found.left[0].double(), expected.detach(), rtol=1e-4, atol=1e-7)
    assert math.isfinite(float(la.log_evidence()))
