"""Sums and grams of gradients, made while the backward passes run, against what autograd brings to the layers."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.curvature.kron import KronAccumulator
from lapwing.errors import BadData
from lapwing.linalg import Jacobian
from lapwing.model import BlockRows, Digest, Linearization, Network
from lapwing.model.params import Params

N, OUT = 5, 3
Kind = Literal["sums", "grams"]


class Twice(nn.Module):
    """One layer at two places, with different numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, OUT)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        return self.last(self.layer(h[:, 1:]).tanh().mean(1))


class Lone(nn.Module):
    """A bias of a convolution that is used once more, and so has a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 4, 3), nn.Linear(4, OUT)

    def forward(self, x: Tensor) -> Tensor:
        assert self.conv.bias is not None
        return self.last(self.conv(x).tanh().mean((2, 3)) * self.conv.bias)


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, OUT))


NETWORKS = {
    "convolution": lambda: images(nn.Conv2d(2, 4, 3)),
    "groups and a norm": lambda: images(nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4)),
    "transposed": lambda: images(nn.ConvTranspose2d(2, 4, 3, stride=2)),
    "tokens": lambda: nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(36, OUT)),
    "twice": Twice,
    "bias used twice": Lone,
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = NETWORKS[name]().double().eval()
    return model, torch.randn(N, 18, 4).double() if name in ("tokens", "twice") else torch.randn(N, 2, 8, 8).double()


def layer_gradients(model: nn.Module, layer: nn.Module, x: Tensor, v: Tensor) -> list[Tensor]:
    """∂(v·f)/∂output of every call of a layer as (n, positions, groups, outputs), by autograd alone."""
    outputs: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, __, out: outputs.append(out))
    f = model(x)
    handle.remove()
    found = torch.autograd.grad((f * v).sum(), outputs)
    if isinstance(layer, nn.Linear):
        return [g.reshape(N, -1, 1, g.shape[-1]) for g in found]
    groups = layer.groups
    return [g.flatten(2).mT.unflatten(2, (groups, -1)) for g in found]


def truth(model: nn.Module, layer: nn.Module, x: Tensor, directions: Tensor, kind: Kind) -> Tensor:
    """Σ g gᵀ over samples and directions, and over positions or of sums over them."""
    total: Tensor | float = 0.0
    for v in directions:
        found = layer_gradients(model, layer, x, v)
        if kind == "sums":
            found = [sum((g.sum(1, keepdim=True) for g in found), start=torch.zeros(()))]
        total = total + sum(torch.einsum("ntqo,ntqp->qop", g, g) for g in found)
    assert isinstance(total, Tensor)
    return total


def linearized(model: nn.Module, x: Tensor) -> tuple[Network, Linearization]:
    network = Network(model, Params.of(model, tuple(n for n, _ in model.named_parameters())), lambda f: f)
    with network.borrow():
        return network, network.linearize(network.plan(x), x)


def factors(at: Linearization, jacobian: Jacobian, kind: Kind) -> dict[str, Tensor]:
    assert isinstance(jacobian.rows, BlockRows)
    return {
        block.names[0]: jacobian.rows.gradient_gram(block, False, kind == "sums")
        for block in at.plan.blocks
        if block.kind == "matrix"
    }


@pytest.mark.parametrize("kind", ["sums", "grams"])
@pytest.mark.parametrize("name", NETWORKS)
def test_factors(name: str, kind: Kind) -> None:
    model, x = build(name)
    network, at = linearized(model, x)
    digest = Digest(kind, frozenset(k for k, b in enumerate(at.plan.blocks) if b.kind == "matrix"))
    score, scale = torch.randn(N, OUT).double(), torch.linspace(-1, 2, N).double()
    directions = torch.cat([(scale[:, None] * score)[None], torch.randn(2, N, OUT).double()])
    with network.borrow(), torch.no_grad():
        plain = at.jacobian(directions, digest)
        scored, gradient = at.jacobian_and_vjp(directions, score, scale, digest)
    assert isinstance(plain.rows, BlockRows)
    digested = at.digested(digest)
    assert bool(digested) == (name != "bias used twice")  # whose gradients are wanted for the rows of the bias
    assert all(not plain.rows.gradients.found[k] for k in digested)
    modules = dict(model.named_modules())
    for jacobian in (plain, scored):
        for weight, found in factors(at, jacobian, kind).items():
            layer = modules[weight.removesuffix(".weight")]
            torch.testing.assert_close(found, truth(model, layer, x, directions, kind), rtol=1e-9, atol=1e-12)
    expected = torch.autograd.grad((model(x) * score).sum(), list(model.parameters()))
    for g, e in zip(gradient.values(), expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["sums", "grams"])
def test_what_is_kept(kind: Kind) -> None:
    """Gradients of the last layer, whose single position leaves nothing to sum, and what is made of the others."""
    model, x = build("convolution")
    _, at = linearized(model, x)
    digest = Digest(kind, frozenset({0, 1}))
    sizes = at.digested(digest)
    assert sizes == {0: N * 4 if kind == "sums" else 4 * 4}
    assert at.kept_with(digest) == OUT + sizes[0] // N
    assert at.kept == OUT + 4 * 36


def test_rows_of_other_blocks_are_as_without() -> None:
    model, x = build("groups and a norm")
    network, at = linearized(model, x)
    eye = torch.eye(OUT).double()[:, None].expand(-1, N, -1)
    with network.borrow(), torch.no_grad():
        some, every = at.jacobian(eye, Digest("sums", frozenset({0}))), at.jacobian(eye)
        for k in range(1, len(at.plan.blocks)):
            torch.testing.assert_close(some.rows[k].dense(), every.rows[k].dense(), rtol=0, atol=0)


@pytest.mark.parametrize("sharing", ["reduce", "expand"])
def test_a_fit_hands_over_all_directions_at_once(sharing: Literal["reduce", "expand"], monkeypatch) -> None:
    """And its factors are those of autograd."""
    model, x = build("convolution")
    y = torch.arange(N) % OUT
    seen = []
    plain = KronAccumulator.update

    def update(self: KronAccumulator, jacobian: Jacobian, fresh: Tensor | None) -> None:
        seen.append((jacobian.n, jacobian.r))
        plain(self, jacobian, fresh)

    monkeypatch.setattr(KronAccumulator, "update", update)
    monkeypatch.setattr("lapwing.curvature.onepass.SMALL", 0)  # nothing is small
    structure, factor = lapwing.Kron(sharing=sharing), lapwing.GGN(tolerance=0.0)
    la = lapwing.fit(model, (x, y), "classification", structure=structure, factor=factor, progress=False)
    assert seen == [(N, OUT - 1)]
    p = model(x).softmax(-1).detach()
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    kind: Kind = "sums" if sharing == "reduce" else "grams"
    expected = truth(model, model[0], x, root.movedim(-1, 0), kind)
    torch.testing.assert_close(la.curvature.matrix.blocks[0].left, expected, rtol=1e-8, atol=1e-12)


class Pole(nn.Module):
    """Finite outputs without a derivative for the last samples: the root of what is zero there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 2, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).mean((2, 3))
        return self.last(((h - h.detach()) + (x.mean((1, 2, 3)) > 0)[:, None]).abs().sqrt())


@pytest.mark.parametrize("sharing", ["reduce", "expand"])
def test_what_is_not_finite_is_named(sharing: Literal["reduce", "expand"]) -> None:
    torch.manual_seed(0)
    good, bad = torch.rand(2, 8, 1, 8, 8)
    bad[5] *= -1.0
    batches = [(batch, torch.arange(8) % 2) for batch in (good, bad)]
    with pytest.raises(BadData, match=r"batch 1: the gradient of the outputs at layer conv2d\("):
        lapwing.fit(Pole().eval(), batches, "classification", structure=lapwing.Kron(sharing=sharing), progress=False)


class Steep(nn.Module):
    """Finite outputs and gradients, whose squares overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return 1e25 * self.conv(x).mean((2, 3))


def test_products_that_overflow_are_not_said_to_have_no_derivative() -> None:
    torch.manual_seed(0)
    data, structure = (torch.rand(8, 1, 8, 8), torch.rand(8, 2)), lapwing.Kron(sharing="expand")
    with pytest.raises(BadData, match=r"too large for its square .* or a very steep one"):
        lapwing.fit(Steep(), data, lapwing.Gaussian(1.0), structure=structure, progress=False)
