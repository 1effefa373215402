"""Every rule of the library obeys the laws of a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lapwing.model.rules import RULES, Samples
from lapwing.testing import RuleLaws
from lapwing.testing.rules import normal

T = torch.Tensor
OURS = {function: rule for function, rule in RULES.items() if type(rule).__module__.startswith("lapwing.")}
STATISTICS = (torch.tensor([0.1, -0.2, 0.3, 0.0]).double(), torch.tensor([0.7, 1.5, 1.0, 0.2]).double())


def laws(function: Callable, arguments: Callable[[int], tuple], samples: Samples | None = None, **options: Any) -> type:
    """A test case of the rule that is registered for a function."""
    own = {"rule": RULES[function], "function": function, "options": options, "samples": samples or Samples(0)}
    return type("Laws", (RuleLaws,), {**own, "arguments": lambda _, n: arguments(n)})


def tokens(n: int) -> Tensor:
    return torch.randint(6, (n, 4), generator=torch.Generator().manual_seed(n))


def convolved(dims: int, channels: int = 4, groups: int = 1) -> Callable[[int], tuple]:
    return lambda n: (normal(n, 4, *(5,) * dims), normal(channels, 4 // groups, *(3,) * dims), normal(channels))


def transposed(dims: int, groups: int = 1) -> Callable[[int], tuple]:
    return lambda n: (normal(n, 4, *(3,) * dims), normal(4, 6 // groups, *(3,) * dims), normal(6))


def image(n: int) -> Tensor:
    return normal(n, 4, 3, 3)


TestLinear = laws(F.linear, lambda n: (normal(n, 3), normal(2, 3), normal(2)))
TestLinearOfTokens = laws(F.linear, lambda n: (normal(n, 4, 3), normal(2, 3), normal(2)))
TestLinearOfTokensBatchSecond = laws(F.linear, lambda n: (normal(4, n, 3), normal(2, 3), normal(2)), Samples(1))
TestMatmul = laws(torch.matmul, lambda n: (normal(n, 3), normal(3, 2)))
TestMatmulOfTokens = laws(T.matmul, lambda n: (normal(n, 4, 3), normal(3, 2)))
TestAddmm = laws(torch.addmm, lambda n: (normal(2), normal(n, 3), normal(3, 2)))
TestEmbedding = laws(F.embedding, lambda n: (tokens(n), normal(6, 3)))
TestEmbeddingWithPadding = laws(F.embedding, lambda n: (tokens(n), normal(6, 3)), padding_idx=-2)
TestConv1d = laws(F.conv1d, convolved(1), padding=1)
TestConv2d = laws(F.conv2d, convolved(2, 9), padding=1)
TestConv2dOfManyChannels = laws(F.conv2d, lambda n: (normal(n, 8, 9, 9), normal(4, 8, 3, 3), normal(4)), padding=1)
TestConv2dStrided = laws(F.conv2d, convolved(2), stride=2, padding=(1, 2), dilation=(1, 2))
TestConv2dGrouped = laws(F.conv2d, convolved(2, 6, groups=2), groups=2)
TestConv2dSame = laws(F.conv2d, convolved(2), padding="same")
TestConv3d = laws(F.conv3d, convolved(3))
TestConvTranspose1d = laws(F.conv_transpose1d, transposed(1), stride=2, output_padding=1)
TestConvTranspose2d = laws(F.conv_transpose2d, transposed(2), padding=1)
TestConvTranspose2dGrouped = laws(F.conv_transpose2d, transposed(2, groups=2), groups=2, stride=2)
TestConvTranspose3d = laws(F.conv_transpose3d, transposed(3))
TestLayerNorm = laws(F.layer_norm, lambda n: (normal(n, 5, 3), (3,), normal(3), normal(3, seed=1)))
TestRmsNorm = laws(F.rms_norm, lambda n: (normal(n, 3), (3,), normal(3)), eps=1e-5)
TestGroupNorm = laws(F.group_norm, lambda n: (image(n), 2, normal(4), normal(4, seed=1)))
TestBatchNorm = laws(F.batch_norm, lambda n: (image(n), *STATISTICS, normal(4), normal(4, seed=1)))
TestBatchNormOfVectors = laws(F.batch_norm, lambda n: (normal(n, 4), *STATISTICS, normal(4), normal(4, seed=1)))
TestInstanceNorm = laws(F.instance_norm, lambda n: (image(n), None, None, normal(4), normal(4, seed=1)))
TestPReLU = laws(F.prelu, lambda n: (image(n), normal(4)))
TestPReLUOfOneWeight = laws(F.prelu, lambda n: (image(n), normal(1)))
TestSum = laws(torch.add, lambda n: (image(n), normal(4, 1, 3)), alpha=2.0)
TestDifference = laws(torch.sub, lambda n: (image(n), normal(3)))
TestProduct = laws(torch.mul, lambda n: (image(n), normal(4, 3, 1)))


def test_every_rule_has_laws() -> None:
    covered = {id(case.rule) for name, case in globals().items() if name.startswith("Test")}
    missing = sorted({getattr(f, "__name__", str(f)) for f, rule in OURS.items() if id(rule) not in covered})
    assert not missing, f"add a test case for {missing}"
