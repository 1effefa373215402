"""Batch norms with fixed statistics against PyTorch's own: values, first and second derivatives, what it declines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lapwing
from lapwing.errors import UnsupportedModel
from lapwing.model import tape
from lapwing.model.kernels import fixed_batch_norm
from lapwing.model.tape import run

SHAPES = [(5, 3), (4, 3, 7), (4, 3, 5, 6), (2, 3, 2, 3, 4), (1, 3, 1, 1), (0, 3, 2, 2)]


def arguments(shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor | None]]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, dtype=dtype, generator=generator)  # noqa: E731
    x, mean, variance = draw(*shape), draw(3), draw(3).square() + 0.1
    own: list[Tensor | None] = [draw(3), draw(3)] if affine else [None, None]
    for tensor in (x, *own):
        if tensor is not None:
            tensor.requires_grad_()
    return [x, mean, variance], own


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_values_and_derivatives(shape: tuple[int, ...], affine: bool) -> None:
    given, own = arguments(shape, affine, torch.float64)
    leaves = [t for t in (given[0], *own) if t is not None]
    results = []
    for norm in (F.batch_norm, fixed_batch_norm):
        out = norm(*given, *own, False, 0.1, 1e-3)
        assert out is not None
        # a weight on every output, and a square: second derivatives are not zero
        weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
        first = grad((out.square() * weights).sum(), leaves, create_graph=True)
        second = grad(sum(((g * g).sum() for g in first), start=out.new_zeros(())), leaves)
        results.append((out, *first, *second))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_float32_is_as_near_as_rounding() -> None:
    given, own = arguments((4, 3, 5, 6), True, torch.float32)
    found = fixed_batch_norm(*given, *own)
    assert found is not None
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.batch_norm(*given, *own), rtol=1e-5, atol=1e-6)


def test_declines() -> None:
    given, own = arguments((4, 3, 5, 6), True, torch.float32)
    x, mean, variance = given
    assert fixed_batch_norm(x, mean, variance, *own, True) is None
    assert fixed_batch_norm(x, None, None, *own) is None
    assert fixed_batch_norm(x.bfloat16(), mean, variance, *own) is None
    assert fixed_batch_norm(x, mean[:2], variance, *own) is None
    assert fixed_batch_norm(x, mean.double(), variance, *own) is None
    # PyTorch's result is contiguous, or channels-last: what comes after may count on it
    assert fixed_batch_norm(x.transpose(2, 3), mean, variance, *own) is None
    assert fixed_batch_norm(x.contiguous(memory_format=torch.channels_last), mean, variance, *own) is None
    assert fixed_batch_norm(x, mean.clone().requires_grad_(), variance, *own) is None
    with torch.autograd.graph.save_on_cpu():
        assert fixed_batch_norm(x, mean, variance, *own) is None
    assert fixed_batch_norm(x, mean, variance, *own) is not None


def test_the_tape_goes_back_without_batch_norm() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)).eval()
    finished = run(module, torch.randn(2, 3, 5, 5), dict(module.named_parameters()))
    seen, nodes = set(), [finished.outputs.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [child for child, _ in node.next_functions]
    names = {node.name() for node in seen}
    assert "MulBackward0" in names
    assert not any("BatchNorm" in name for name in names)
    assert [record.name for record in finished.records] == ["conv2d", "batch_norm", "linear"]


def test_a_cheaper_operation_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a network that is not the user's would agree with its own outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)).eval()
    data = torch.randn(20, 3, 5, 5), torch.arange(20) % 2
    lapwing.fit(model, data, "classification", structure="diag")
    monkeypatch.setattr(tape, "fixed_batch_norm", lambda x, *_, **__: 1.1 * x)
    with pytest.raises(UnsupportedModel, match="other outputs for the same samples"):
        lapwing.fit(model, data, "classification", structure="diag")


class Viewed(nn.Module):
    """Reads the result of a norm by its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(42, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x).transpose(1, 2))
        return self.last(torch.as_strided(h, (len(x), 42), (42, 1)))


class Checkpointed(nn.Module):
    """Runs a norm again in the backward pass, where no tape sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(7, 6, 3), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda z: self.norm(self.first(z)).relu(), x, use_reentrant=False)
        return self.last(h.mean(2))


@pytest.mark.parametrize("build", [Viewed, Checkpointed])
def test_networks_that_tell_them_apart(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x, y = build().eval(), torch.randn(20, 7, 5), torch.arange(20) % 3
    la = lapwing.fit(model, (x, y), "classification", structure="diag", factor=lapwing.GGN(tolerance=0))
    assert not la.plan.looped
    weights, p = list(model.parameters()), model(x).softmax(-1).detach()
    diagonal = torch.zeros(la.params.size)
    for n in range(len(x)):
        f = model(x[n : n + 1])[0]
        each = [grad(f[c], weights, retain_graph=True) for c in range(3)]
        rows = torch.stack([torch.cat([g.flatten() for g in one]) for one in each])
        curvature = torch.diag(p[n]) - torch.outer(p[n], p[n])
        diagonal += torch.einsum("cp,cd,dp->p", rows, curvature, rows)
    torch.testing.assert_close(la.curvature.matrix.diagonal(), diagonal, rtol=1e-4, atol=1e-6)
