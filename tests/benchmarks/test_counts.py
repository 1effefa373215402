"""Counted multiplications, against PyTorch's own counter and against the products themselves."""

import torch
from benchmarks.counts import described, layers
from benchmarks.workloads import Task
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lapwing.model.rules.convolution import band_gram


def network() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, bias=False), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 5 * 5, 4, bias=False),
    )  # fmt: skip
    x = torch.randn(1, 8, 12, 12)
    return Task(model, [(x, torch.zeros(1, dtype=torch.long))], x)


def multiplied(work) -> int:
    """What PyTorch counts, two operations a multiplication."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() // 2


def test_forward_and_gradient_are_what_pytorch_counts():
    task = network()
    found, outputs = layers(task)
    assert outputs == 4
    assert sum(each.forward for each in found) == multiplied(lambda: task.model(task.new))
    gradient = 2 * sum(each.forward for each in found) + sum(each.forward for each in found[1:])
    assert gradient == multiplied(task.gradient)
    assert f"gradient {gradient / 1e6:.3g} M" in described(found, outputs)


def test_rows_and_their_rotation_are_the_products_that_make_them():
    task, r = network(), 4
    first, second, last = layers(task)[0]
    for each in (first, second):
        a, g = torch.randn(each.t, each.i), torch.randn(r, each.t, each.o)
        left, right = torch.randn(each.o, each.o), torch.randn(each.i, each.i)
        assert each.rows(r) == multiplied(lambda a=a, g=g: g.mT @ a)
        block = g.mT @ a
        ways = [
            multiplied(lambda a=a, g=g, left=left, right=right: (g @ left, a @ right)),
            multiplied(lambda block=block, left=left, right=right: left.T @ block @ right),
        ]
        assert each.rotation(r) == min(ways)
        grams = multiplied(lambda g=g: g.flatten(0, 1).T @ g.flatten(0, 1))
        assert each.factors(r) - each.square == grams
    x, none = torch.randn(1, 16, 12, 12), ((0, 0), (0, 0))
    assert second.square == multiplied(lambda: band_gram(x, (3, 3), (2, 2), 1, none))  # stride 2: products of rows
    assert first.square < first.t * first.i**2  # stride 1: products of images
    assert last.rows(r) == 0
    assert last.rotation(r) == r * last.o**2 + last.i**2
