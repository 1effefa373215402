"""Sums of patches without patches, against torch's own unfold."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from lapwing.model.rules.convolution import Axis, Convolution
from lapwing.model.samples import Samples


@pytest.mark.parametrize("ones", [False, True])
def test_sum_of_patches(ones: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rule = Convolution(2)
    for kernel, stride, padding, dilation in itertools.product(((3, 3), (1, 4), (5, 2)), (1, 2, 3), (0, 1, 3), (1, 2)):
        x = torch.randn(3, 4, 11, 13, dtype=torch.float64, generator=generator)
        weight = torch.zeros(6, 4, *kernel, dtype=torch.float64)
        call = rule.bind(x, weight, None, stride, padding, dilation)
        assert call is not None
        patches = F.unfold(x, kernel, dilation, padding, stride)  # (n, in, positions)
        truth = patches.sum(-1)
        if ones:
            truth = torch.cat([truth, torch.full((3, 1), float(patches.shape[-1]))], 1)
        assert rule.positions(call, 3) == patches.shape[-1]
        assert torch.allclose(rule.right_sum(call, Samples(0), 3, ones)[:, 0], truth, rtol=1e-12, atol=1e-12)


def test_a_place_that_meets_padding_only() -> None:
    parts = Axis(size=1, kernel=5, stride=1, dilation=1, before=4, after=4).parts()
    assert [part.stop - part.start for part in parts] == [1] * 5
    assert Axis(size=2, kernel=2, stride=1, dilation=5, before=0, after=4).parts()[1] == slice(0, 0)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("ones", [False, True])
def test_covariances_without_transposed_patches(ones: bool, groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rule = Convolution(2)
    for size, kernel, weighted in itertools.product((3, 12), ((1, 1), (3, 2)), (False, True)):
        x = torch.randn(5, 4, size, size, dtype=torch.float64, generator=generator)
        weight = torch.zeros(6, 4 // groups, *kernel, dtype=torch.float64)
        call = rule.bind(x, weight, None, 1, 1, 1, groups)
        assert call is not None
        patches = F.unfold(x, kernel, padding=1).unflatten(1, (groups, -1))  # (n, groups, in, positions)
        if ones:
            patches = torch.cat([patches, torch.ones_like(patches[:, :, :1])], 2)
        w = torch.rand(5, dtype=torch.float64, generator=generator) if weighted else None
        scaled = patches if w is None else patches * w[:, None, None, None]
        found, positions = rule.right_gram(call, Samples(0), 5, ones, w, torch.float64)
        assert positions == patches.shape[-1]
        truth = torch.einsum("nqit,nqjt->qij", scaled, patches)
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
        g = torch.randn(3, 5, 6, size, size, dtype=torch.float64, generator=generator)
        own = g.flatten(3).unflatten(2, (groups, -1))
        truth = torch.einsum("rnqot,rnqpt->qop", own, own)
        torch.testing.assert_close(rule.left_gram(call, g, Samples(0), 5), truth, rtol=1e-12, atol=1e-12)
