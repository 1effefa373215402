"""Rows of norm layers, made while the backward passes run, against one row of autograd a sample and output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import lapwing
from lapwing.errors import BadData
from lapwing.model import Network
from lapwing.model.params import Params

N, OUT = 5, 3


class Tokens(nn.Module):
    """Layer norms and a shift over six tokens of four features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, OUT)
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.norm(self.first(x)) + self.shift).tanh().mean(1))


def images(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), *norms, nn.Flatten(), nn.Linear(64, OUT))


def batch_norm() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
    return norm


NETWORKS = {
    "batch norm": lambda: images(batch_norm(), nn.Tanh()),
    "batch norm twice": lambda: images(batch_norm(), nn.Tanh(), batch_norm()),
    "group norm": lambda: images(nn.GroupNorm(2, 4), nn.Tanh()),
    "prelu": lambda: images(nn.PReLU(4)),
    "tokens": Tokens,
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = NETWORKS[name]().double().eval()
    for p in model.parameters():  # norm layers start at ones and zeros
        p.data += 0.3 * torch.randn_like(p)
    return model, torch.randn(N, 6, 4).double() if name == "tokens" else torch.randn(N, 2, 6, 6).double()


def truth(model: nn.Module, x: Tensor) -> Tensor:
    """∂f/∂θ of every sample, (N, OUT, P)."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    each = [jacrev(lambda p, one=one: functional_call(model, p, (one,))[0])(weights) for one in x.split(1)]
    return torch.stack([torch.cat([rows[name].flatten(1) for name in weights], 1) for rows in each])


@pytest.mark.parametrize("name", NETWORKS)
def test_rows(name: str) -> None:
    model, x = build(name)
    network = Network(model, Params.of(model, tuple(n for n, _ in model.named_parameters())), lambda f: f)
    expected = truth(model, x)
    with network.borrow():
        plan = network.plan(x)
        at = network.linearize(plan, x)
    with network.borrow(), torch.no_grad():
        assert at.early
        # what is kept of a direction: gradients of matrices, rows of the others; and those of a pass under way
        names = {name for k in at.early for name in plan.steps[k].names}
        rows = sum(p.numel() for name, p in model.named_parameters() if name in names)
        matrices = sum(r.out[0].numel() for k, r in enumerate(at.recorded.records) if k not in at.early)
        assert plan.kept == at.kept == matrices + rows < plan.width
        assert plan.under_way(7) == 7 * plan.kept + plan.width - plan.kept
        eye = torch.eye(OUT).double()[:, None].expand(-1, N, -1)
        jacobian = at.jacobian(eye)
        assert all(not jacobian.rows.gradients.found[k] for k in at.early)
        torch.testing.assert_close(jacobian.dense(), expected, rtol=1e-9, atol=1e-11)
        # the first direction is that of the score times a number for each sample
        score, scale = torch.randn(N, OUT).double(), torch.linspace(-1, 2, N).double()
        directions = torch.stack([scale[:, None] * score, eye[1]])
        rows, gradient = at.jacobian_and_vjp(directions, score, scale)
        torch.testing.assert_close(
            rows.dense(), torch.einsum("rnc,ncp->nrp", directions, expected), rtol=1e-9, atol=1e-11
        )
        flat = torch.cat([g.flatten() for g in gradient.values() if g is not None])
        torch.testing.assert_close(flat, torch.einsum("nc,ncp->p", score, expected), rtol=1e-9, atol=1e-11)


def test_those_of_a_single_position_are_not_early() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, OUT)).double()
    network = Network(model, Params.of(model, tuple(n for n, _ in model.named_parameters())), lambda f: f)
    x = torch.randn(N, 3).double()
    with network.borrow():
        at = network.linearize(network.plan(x), x)
        assert not at.early
        assert at.width == at.kept == at.plan.width == at.plan.kept


class Pole(nn.Module):
    """Finite outputs without a derivative: the root of what is zero for the last samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).mean((2, 3))
        return self.last(((h - h.detach()) + (x.mean((1, 2, 3)) > 0)[:, None]).abs().sqrt())


def test_a_gradient_that_is_not_finite_is_named() -> None:
    torch.manual_seed(0)
    model = Pole().eval()
    good, bad = torch.rand(2, 8, 1, 4, 4)
    bad[5] *= -1.0
    y = torch.arange(8) % 2
    with pytest.raises(BadData, match=r"batch 1: the gradient of the outputs at layer batch_norm\("):
        lapwing.fit(model, [(good, y), (bad, y)], "classification", structure="diag", progress=False)
