"""KFRA for convolutions, residual joins and minibatches: against exact GGNs where it is exact, and its definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests.dense import assert_same, build, ggn, jacobian, outputs, randn, seeded, softmax_hessian
from tests.noise import unit_noise
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from lapwing import EKFAC, KFRA, BadData, Kron


def fit(module: nn.Module, pair: object, likelihood: object = "classification", **options) -> lapwing.Laplace:
    return lapwing.fit(module, pair, unit_noise(likelihood), **{"structure": "kron", "factor": KFRA()} | options)


def labels(n: int, classes: int = 3) -> Tensor:
    return torch.randint(classes, (n,), generator=seeded(2))


class Residual(nn.Module):
    """x₁ = a(x), x₂ = x₁ + b(tanh x₁), x₃ = x₂ + c(tanh x₂), f = d(tanh x₃)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def streams(self, x: Tensor) -> list[Tensor]:
        one = self.a(x)
        two = one + self.b(one.tanh())
        return [one, two, two + self.c(two.tanh())]

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.streams(x)[-1].tanh())


def test_branches_are_added_after_every_join() -> None:
    """Appendix G: the matrix before a join is that after it, plus that of the branch, in means over all data."""
    module, x = build(Residual), randn(11, 4)
    with torch.no_grad():
        slopes = [1 - stream.tanh() ** 2 for stream in module.streams(x)]
    means = [(b.T @ b) / len(x) for b in slopes]
    back = lambda layer, left, mean: (layer.weight.detach().T @ left @ layer.weight.detach()) * mean  # noqa: E731
    top = softmax_hessian(outputs(module, x)).sum(0)
    third = back(module.d, top, means[2])
    second = third + back(module.c, third, means[1])
    first = second + back(module.b, second, means[0])
    found = fit(module, (x, labels(11))).curvature.matrix.blocks
    for block, want in zip(found, (first, second, third, top), strict=True):
        assert_same(block.left[0], want)


def test_what_a_join_leaves_out_are_the_cross_terms() -> None:
    """(I + sJ)ᵀ H (I + sJ) has cross terms that change sign with the branch: the mean over s = ±1 has none."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
            self.sign = 1.0

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()
            return self.c(h + self.sign * self.b(h))

    module, x = build(Branch), randn(1, 4)
    exact = []
    for module.sign in (1.0, -1.0):
        exact.append(ggn(jacobian(module, x))[:25, :25])
        found = fit(module, (x, randn(1, 3)), "regression").curvature.dense()
        assert_same(found[25:, 25:][:30, :30], ggn(jacobian(module, x))[25:55, 25:55])  # the branch itself has one way
        assert (found[:25, :25] - exact[-1]).norm() > 0.01 * exact[-1].norm()
    assert_same(found[:25, :25], 0.5 * (exact[0] + exact[1]))


def test_branches_side_by_side_are_exact() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x).tanh() * 2 + self.b(x).relu())

    module, x = build(Two), randn(1, 4)
    exact, found = ggn(jacobian(module, x), softmax_hessian(outputs(module, x))), fit(module, (x, labels(1)))
    for part in (slice(0, 25), slice(25, 50), slice(50, 68)):
        assert_same(found.curvature.dense()[part, part], exact[part, part])


HEADS = {
    "flat": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 20, 3)),
    "pooled": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
    ),
    "whole image": lambda: nn.Sequential(nn.Conv2d(2, 5, (4, 5)), nn.ReLU(), nn.Flatten(), nn.Linear(5, 3)),
    "a vector": lambda: nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(2, 5, 1), nn.Tanh(), nn.Conv2d(5, 4, 1), nn.Tanh(), nn.Flatten(),
        nn.Linear(4, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_one_datum_before_the_head_is_exact(name: str) -> None:
    """Pre-activation GGNs of single positions, summed over positions: KFAC's factors with sharing expanded."""
    module, x = build(HEADS[name]), randn(1, 2, 4, 5)
    kfra, kfac = (
        fit(module, (x, labels(1)), structure=Kron(sharing="expand"), factor=f).curvature.matrix.blocks
        for f in (KFRA(), "ggn")
    )
    for ours, exact in zip(kfra, kfac, strict=True):
        assert_same(ours.left, exact.left)
        assert_same(ours.right, exact.right)


def test_linear_maps_of_single_pixels_are_exact() -> None:
    """Without kernels and nonlinearities positions are alike, and no mean loses anything."""
    module = build(lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(80, 3)))
    x = randn(6, 2, 4, 5)
    kfra, kfac = (
        fit(module, (x, randn(6, 3)), "regression", structure=Kron(sharing="expand"), factor=f).curvature.matrix.blocks
        for f in (KFRA(), "ggn")
    )
    for ours, exact in zip(kfra, kfac, strict=True):
        assert_same(ours.left, exact.left)


@pytest.mark.parametrize(("stride", "padding", "pool"), [(1, 1, 1), (2, 1, 1), (1, 0, 1), (1, 1, 2)])
def test_convolutions_are_the_definition(stride: int, padding: int, pool: int) -> None:
    """One position, one place of the kernel and one datum at a time."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(1, 2, 3, padding=1)
            self.b = nn.Conv2d(2, 3, 3, stride=stride, padding=padding)
            self.c = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(F.avg_pool2d(self.a(x).tanh(), pool)).tanh().mean((2, 3)))

    module, x = build(Net), randn(5, 1, 6, 8)
    with torch.no_grad():
        h = module.a(x)
        a = F.avg_pool2d(h.tanh(), pool)
        out = module.b(a)
    top = softmax_hessian(outputs(module, x)).sum(0)
    positions = out.shape[2] * out.shape[3]
    weight, head = module.b.weight.detach(), module.c.weight.detach()
    second, first, through = torch.zeros(3, 3).double(), torch.zeros(2, 2).double(), torch.zeros(2, 2).double()
    slopes = torch.zeros(3, 3).double()
    for image in 1 - out.tanh() ** 2:
        for p in image.flatten(1).T:
            slopes += torch.outer(p, p) / positions**2 / len(x)
    second = (head.T @ top @ head) * slopes
    for i in range(out.shape[2]):
        for j in range(out.shape[3]):
            for k in range(3):
                for m in range(3):
                    inside = 0 <= i * stride + k - padding < a.shape[2] and 0 <= j * stride + m - padding < a.shape[3]
                    w = weight[:, :, k, m]
                    through += inside * (w.T @ second @ w) / positions
    mean = torch.zeros(2, 2).double()
    for image in (1 - h.tanh() ** 2) / pool**2:
        for p in image.flatten(1).T:
            mean += torch.outer(p, p) / (a.shape[2] * a.shape[3]) / len(x)
    first = through * mean
    found = fit(module, (x, labels(5))).curvature.matrix.blocks
    for block, want in zip(found, (first, second, top), strict=True):
        assert_same(block.left[0], want)


class WideBlock(nn.Module):
    """A residual network of the kind of appendix G, with frozen batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.c, self.short = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.Conv2d(4, 6, 2, stride=2)
        self.norm, self.head = nn.BatchNorm2d(4, affine=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h + self.b(self.norm(h).relu())
        h = self.short(h) + self.c(self.norm(h).relu())
        return self.head(h.relu().mean((2, 3)))


def test_a_residual_network_of_convolutions_is_fitted_tuned_and_saved(tmp_path) -> None:
    module = build(WideBlock).eval()
    x, y = randn(12, 2, 8, 8), labels(12)
    la = fit(module, (x, y))
    assert "recursion" in la.summary()
    exact = fit(module, (x, y), structure=Kron(sharing="expand"), factor="ggn")
    for ours, theirs in zip(la.curvature.matrix.blocks, exact.curvature.matrix.blocks, strict=True):
        assert_same(ours.right, theirs.right)
        assert 0.05 < float(ours.trace() / theirs.trace()) < 20
    parts = fit(module, list(zip(x.split(5), y.split(5), strict=True)))
    assert_same(parts.curvature.dense(), la.curvature.dense())
    la.save(tmp_path / "a.lapwing")
    back = lapwing.load(tmp_path / "a.lapwing", module)
    assert torch.equal(back.predict(x).probs, la.predict(x).probs)
    again = fit(module, (x[:5], y[:5])).update((x[5:], y[5:]))
    assert_same(again.curvature.dense(), la.curvature.dense())
    basis = lapwing.fit(module, (x, y), "classification", structure=EKFAC(basis=KFRA()))
    full = ggn(jacobian(module, x), softmax_hessian(outputs(module, x)))
    assert_same(basis.curvature.dense().trace(), full.trace())


def mlp() -> nn.Module:
    parts: list[nn.Module] = []
    for a, b in pairwise((4, 6, 5, 3)):
        parts += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


@pytest.mark.parametrize("cut", [[7], [3, 4], [1] * 7])
def test_groups_of_one_are_the_exact_expectation(cut: list[int]) -> None:
    """Appendix C: with one datum at a time the recursion gives E[H], which KFAC sums from the other side."""
    module, x, y = build(mlp), randn(7, 4), labels(7)
    loader = list(zip(x.split(cut), y.split(cut), strict=True))
    found, exact = (fit(module, loader, factor=factor).curvature.dense() for factor in (KFRA(batch=1), "ggn"))
    assert_same(found, exact)
    assert (found - fit(module, loader).curvature.dense()).norm() > 1e-3 * exact.norm()


def test_groups_are_fits_of_their_own_added_up() -> None:
    module, x, y = build(mlp), randn(10, 4), labels(10)
    lefts = lambda la: [block.left for block in la.curvature.matrix.blocks]  # noqa: E731
    found = lefts(fit(module, (x, y), factor=KFRA(batch=4)))
    parts = [lefts(fit(module, (x[rows], y[rows]))) for rows in torch.arange(10).split(4)]
    for ours, *each in zip(found, *parts, strict=True):
        assert_same(ours, sum(each))
    assert_same(fit(module, (x, y), factor=KFRA(batch=10)).curvature.dense(), fit(module, (x, y)).curvature.dense())
    tiny = fit(module, (x, y), factor=KFRA(batch=1), memory=40_000)  # a few directions at a time
    assert_same(tiny.curvature.dense(), fit(module, (x, y), factor="ggn").curvature.dense())


def test_groups_with_weights_and_updates(tmp_path) -> None:
    module, x, y = build(mlp), randn(8, 4), labels(8)
    split = lambda b: (b[0], b[1], b[2])  # noqa: E731
    w = torch.tensor([0.5, 0.0, 2.0, 1.0, 0.0, 0.0, 3.0, 1.0]).double()
    found, exact = (fit(module, [(x, y, w)], split=split, factor=f).curvature.dense() for f in (KFRA(batch=1), "ggn"))
    assert_same(found, exact)
    fit(module, [(x, y, w)], split=split, factor=KFRA(batch=2))  # the third group has no weight
    la = fit(module, (x[:4], y[:4]), factor=KFRA(batch=2))
    la.save(tmp_path / "a.lapwing")
    whole = fit(module, (x, y), factor=KFRA(batch=2)).curvature.dense()
    for one in (la, lapwing.load(tmp_path / "a.lapwing", module)):
        assert one.curvature.factor.batch == 2
        assert_same(one.update((x[4:], y[4:])).curvature.dense(), whole)


@pytest.mark.parametrize("batch", [0, -1, 2.0, True])
def test_groups_are_whole_numbers(batch: object) -> None:
    with pytest.raises(BadData, match="whole number"):
        KFRA(batch=batch)
