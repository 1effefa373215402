"""The gradient of the log-likelihood from the backward pass of the first direction: where it would not be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.curvature.onepass import _Pass
from lapwing.model.linearization import Linearization

CLASSES = 4


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The samples of every pass that served both."""
    passes: list[int] = []
    plain = Linearization.jacobian_and_vjp

    def counted(self: Linearization, *args: Any) -> Any:
        passes.append(self.n)
        return plain(self, *args)

    monkeypatch.setattr(Linearization, "jacobian_and_vjp", counted)
    # the self-check tries it too: count from the first pass over data on
    over = _Pass.over
    monkeypatch.setattr(_Pass, "over", lambda self, label: passes.clear() or over(self, label))
    return passes


def network(scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    net[2].weight.data *= scale
    return net


def truth(net: nn.Module, batches: list) -> tuple[Tensor, Tensor]:
    """Diagonal of Σ Jᵀ (diag p − ppᵀ) J, and Σ ∇ log p, a sample and an output at a time."""
    params = list(net.parameters())
    diagonal, gradient = torch.zeros(()), torch.zeros(())
    flat = lambda grads: torch.cat([g.flatten() for g in grads])  # noqa: E731
    for x, y in batches:
        labels = nn.functional.one_hot(y, CLASSES).double() if y.ndim == 1 else y
        for one, q in zip(x, labels, strict=True):
            f = net(one[None])[0]
            j = torch.stack([flat(torch.autograd.grad(o, params, retain_graph=True)) for o in f])
            p = f.detach().softmax(-1)
            diagonal = diagonal + (p @ j.square() - (p @ j).square())
            gradient = gradient + (q - p) @ j
    return diagonal, gradient


@pytest.mark.parametrize("tolerance", [0.0, None, 1e-9])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_one_pass_serves_both(tolerance: float | None, scale: float, shared: list[int]) -> None:
    net, x = network(scale), torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = net(x).argmax(-1).detach()
    y[::5] = (y[::5] + 1) % CLASSES
    batches = [(x[:16], y[:16]), (x[16:], y[16:])]
    la = lapwing.fit(net, batches, "classification", structure="diag", factor=lapwing.GGN(tolerance=tolerance))
    assert sum(shared) >= 16
    diagonal, gradient = truth(net, batches)
    torch.testing.assert_close(la.curvature.matrix.diagonal(), diagonal, rtol=1e-7, atol=1e-9 * float(diagonal.max()))
    assert la.curvature.gradient is not None
    torch.testing.assert_close(la.curvature.gradient, gradient, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("hard", [1, 2, 5])
def test_hard_and_soft_labels_are_not_brought_together(hard: int, shared: list[int]) -> None:
    """Few samples of two batches need directions: one group would hold soft labels and a few hard ones."""
    net = network(30.0)
    x = torch.randn(400, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    confidence = net(x).softmax(-1).max(-1).values
    sure, unsure = x[confidence > 0.999][:30], x[confidence < 0.8][:10]
    a, b = torch.cat([sure[:15], unsure[:5]]), torch.cat([sure[15:], unsure[5 : 5 + hard]])
    batches = [(a, (net(a).detach() + torch.linspace(-1, 1, CLASSES)).softmax(-1)), (b, net(b).argmax(-1).detach())]
    la = lapwing.fit(net, batches, "classification", structure="diag", factor=lapwing.GGN(tolerance=1e-2))
    assert shared, "no hard label took the short way: the test tests nothing"
    diagonal, gradient = truth(net, batches)
    assert float((la.curvature.matrix.diagonal() - diagonal).norm() / diagonal.norm()) < 0.02
    assert la.curvature.gradient is not None
    assert float((la.curvature.gradient - gradient).norm() / gradient.norm()) < 0.02


@pytest.mark.parametrize("margin", [10.0, 16.0, 20.0])
def test_half_precision_keeps_its_own_passes(margin: float, shared: list[int]) -> None:
    """The score of a confident sample underflows in float16, its root does not."""
    net = network().half()
    net[2].bias.data = torch.tensor([margin, 0.0, -1.0, -1.0]).half()
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1)).half()
    y = torch.zeros(16, dtype=torch.long)
    la = lapwing.fit(net, [(x, y)], "classification", structure="diag")
    assert not shared
    exact = network()
    exact.load_state_dict({name: t.double() for name, t in net.state_dict().items()})
    diagonal, _ = truth(exact, [(x.double(), y)])
    error = (la.curvature.matrix.diagonal().double() - diagonal).norm() / diagonal.norm()
    assert float(error) < 5e-3


def test_another_dispersion_keeps_its_own_pass(shared: list[int]) -> None:
    class Tempered(lapwing.Categorical):
        @property
        def dispersion(self) -> Tensor:
            return torch.tensor(4.0)

    net, x = network(), torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batches = [(x, net(x).argmax(-1).detach())]
    la = lapwing.fit(net, batches, Tempered(), structure="diag")
    assert not shared
    torch.testing.assert_close(la.curvature.matrix.diagonal(), truth(net, batches)[0])


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.inner(x[:, 0])
        return f if x.shape[1] == 1 else f.detach()


def test_a_later_batch_without_a_gradient() -> None:
    net = Detached()
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(6, k, 3, dtype=torch.float64, generator=generator), torch.arange(6) % 4) for k in (1, 2)]
    la = lapwing.fit(net, batches, "classification", structure="diag", factor=lapwing.GGN(tolerance=0.0))
    diagonal, gradient = truth(net.inner, [(batches[0][0][:, 0], batches[0][1])])
    torch.testing.assert_close(la.curvature.matrix.diagonal(), diagonal)
    assert la.curvature.gradient is not None
    torch.testing.assert_close(la.curvature.gradient, gradient)
