"""The share of positions at which each place of a kernel lies on data: against patches of an image of ones."""

import pytest
import torch
from torch.nn import functional as F

from lapwing.model.rules import RULES, MatrixRule


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 1},
        {"padding": (0, 2), "stride": 2},
        {"padding": 2, "dilation": (2, 1), "stride": (1, 3)},
        {"padding": "same", "dilation": 2},
        {"padding": "valid"},
    ],
)
def test_shares_of_a_convolution(options: dict) -> None:
    rule, x, weight = RULES[F.conv2d], torch.ones(1, 2, 6, 7), torch.randn(4, 2, 3, 2)
    assert isinstance(rule, MatrixRule)
    call = rule.bind(x, weight, **options)
    assert call is not None
    shares = rule.kernel_shares(call)
    places = [
        torch.zeros(1, 1, 3, 2).flatten().index_fill(0, torch.tensor([k]), 1.0).reshape(1, 1, 3, 2) for k in range(6)
    ]
    want = [F.conv2d(torch.ones(1, 1, 6, 7), place, **options).mean() for place in places]  # one place at a time
    torch.testing.assert_close(shares, torch.stack(want).double())


def test_shares_of_other_operations() -> None:
    linear, conv = RULES[F.linear], RULES[F.conv2d]
    assert isinstance(linear, MatrixRule)
    assert isinstance(conv, MatrixRule)
    call = linear.bind(torch.ones(2, 3), torch.ones(4, 3))
    assert call is not None
    assert linear.kernel_shares(call) == torch.ones(1)
    grouped = conv.bind(torch.ones(1, 2, 4, 4), torch.ones(2, 1, 3, 3), groups=2)
    assert grouped is not None
    assert conv.kernel_shares(grouped) is None
    embedding = RULES[F.embedding]
    assert isinstance(embedding, MatrixRule)
    call = embedding.bind(torch.tensor([[1]]), torch.ones(4, 3))
    assert call is not None
    assert embedding.kernel_shares(call) is None
