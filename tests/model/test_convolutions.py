"""Sums of patches without patches, against torch's own unfold."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from lapwing.linalg import rows
from lapwing.model.rules import Samples
from lapwing.model.rules.convolution import (
    PIXELS,
    Axis,
    Convolution,
    TransposedConvolution,
    band_gram,
    band_pays,
    correlation_gram,
    correlation_pays,
)


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


@pytest.mark.parametrize("pixels", [1, PIXELS])
def test_covariances_by_products_of_images(pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel and padding, where it pays and where it does not."""
    monkeypatch.setattr("lapwing.model.rules.convolution.PIXELS", pixels)
    generator = torch.Generator().manual_seed(0)
    sizes, kernels = ((1, 1), (2, 5), (7, 4)), ((1, 1), (3, 3), (2, 4), (5, 1))
    edges = ((0, 0), (1, 1), (0, 2), (5, 3))
    tried = 0
    for (h, w), (kh, kw), above, beside in itertools.product(sizes, kernels, edges, edges):
        if h + sum(above) < kh or w + sum(beside) < kw:
            continue
        x = torch.randn(3, 2, h, w, dtype=torch.float64, generator=generator)
        patches = F.unfold(F.pad(x, (*beside, *above)), (kh, kw))
        truth = torch.einsum("nit,njt->ij", patches, patches)
        found = correlation_gram(x, (kh, kw), (above, beside))
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12, msg=f"{(h, w)} {(kh, kw)} {above} {beside}")
        tried += 1
    assert tried > 100


@pytest.mark.parametrize("chunk", [1, rows.CHUNK_BYTES])
def test_covariances_by_products_of_rows(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel, stride, dilation along the width and padding, where it pays and where it does not."""
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk)
    generator = torch.Generator().manual_seed(0)
    sizes, kernels = ((1, 1), (2, 5), (9, 6)), ((1, 1), (3, 3), (2, 4), (5, 1))
    strides, edges = ((1, 1), (2, 1), (1, 3), (4, 2)), ((0, 0), (1, 1), (0, 2), (5, 3))
    tried = 0
    for (h, w), (kh, kw), stride, dilation, above, beside in itertools.product(
        sizes, kernels, strides, (1, 2), edges, edges
    ):
        if h + sum(above) < kh or w + sum(beside) < dilation * (kw - 1) + 1:
            continue
        x = torch.randn(3, 2, h, w, dtype=torch.float64, generator=generator)
        patches = F.unfold(F.pad(x, (*beside, *above)), (kh, kw), (1, dilation), 0, stride)
        truth = torch.einsum("nit,njt->ij", patches, patches)
        found = band_gram(x, (kh, kw), stride, dilation, (above, beside))
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
        tried += 1
    assert tried > 500


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("repeats", [1, 2])
def test_convolutions_use_products_of_rows(ones: bool, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, own = [], band_gram
    monkeypatch.setattr("lapwing.model.rules.convolution.band_gram", lambda *a: calls.append(a) or own(*a))
    x = torch.randn(4 * repeats, 3, 15, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.zeros(5, 3, 5, 3, dtype=torch.float64)
    for stride, padding, dilation in ((1, 0, 1), (2, (2, 1), 1), ((1, 3), "valid", (1, 2))):
        before = len(calls)
        call = Convolution(2).bind(x, weight, None, stride, padding, dilation)
        assert call is not None
        patches = F.unfold(x, (5, 3), dilation, 0 if padding == "valid" else padding, stride)
        if ones:
            patches = torch.cat([patches, torch.ones_like(patches[:, :1])], 1)
        found, positions = Convolution(2).right_gram(call, Samples(0), 4, ones, None, torch.float64)
        torch.testing.assert_close(found[0], torch.einsum("nit,njt->ij", patches, patches), rtol=1e-12, atol=1e-12)
        assert positions == repeats * patches.shape[-1]
        assert len(calls) == before + 1
    others = (
        Convolution(2).bind(x, weight, None, 1, 0, (2, 1)),
        Convolution(2).bind(x, weight[:, :1], None, 1, 0, 1, 3),
        TransposedConvolution(2).bind(x, weight.transpose(0, 1), None, 1, 0),
    )
    before = len(calls)
    for rule, other in zip((Convolution(2), Convolution(2), TransposedConvolution(2)), others, strict=True):
        assert other is not None
        rule.right_gram(other, Samples(0), 4, ones, None, torch.float64)
    assert len(calls) == before, "dilation along the height, groups and transposed convolutions have other patches"


def test_products_of_rows_are_for_few_numbers() -> None:
    none = ((0, 0), (0, 0))
    assert band_pays(torch.Size((1, 6, 14, 14)), (5, 5), (1, 1), none)
    assert not band_pays(torch.Size((1, 6, 14, 14)), (1, 1), (1, 1), none)  # patches are pixels
    assert not band_pays(torch.Size((1, 6, 5, 9)), (5, 5), (1, 1), none)  # one row of patches
    assert not band_pays(torch.Size((1, 256, 14, 14)), (3, 3), (2, 2), none)  # 60 MB of products


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("repeats", [1, 2])
def test_convolutions_use_products_of_images(ones: bool, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    counted = lambda *a: calls.append(a) or correlation_gram(*a)  # noqa: E731
    monkeypatch.setattr("lapwing.model.rules.convolution.correlation_gram", counted)
    x = torch.randn(4 * repeats, 8, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rule, weight = Convolution(2), torch.zeros(5, 8, 3, 3, dtype=torch.float64)
    patches = F.unfold(x, 3, padding=1)
    if ones:
        patches = torch.cat([patches, torch.ones_like(patches[:, :1])], 1)
    truth = torch.einsum("nit,njt->ij", patches, patches)
    for padding in (1, "same"):
        call = rule.bind(x, weight, None, 1, padding)
        assert call is not None
        found, positions = rule.right_gram(call, Samples(0), 4, ones, None, torch.float64)
        torch.testing.assert_close(found[0], truth, rtol=1e-12, atol=1e-12)
        assert positions == repeats * 63
    assert len(calls) == 2
    for other in (rule.bind(x, weight, None, 2, 1), rule.bind(x, weight, None, 1, 2, 2)):
        assert other is not None
        rule.right_gram(other, Samples(0), 4, ones, None, torch.float64)
    assert len(calls) == 2, "strides and dilations have patches of another kind"


def test_products_of_images_keep_their_digits() -> None:
    """Positive pixels in float32, as after a ReLU: the norm of the error against float64."""
    x = torch.randn(44, 16, 32, 32, generator=torch.Generator().manual_seed(0)).relu()
    exact = correlation_gram(x.double(), (3, 3), ((1, 1), (1, 1)))
    error = torch.linalg.matrix_norm(correlation_gram(x, (3, 3), ((1, 1), (1, 1))) - exact, 2)
    assert float(error / torch.linalg.matrix_norm(exact, 2)) < 1e-6


def test_products_of_images_are_for_images_larger_than_kernels() -> None:
    around = ((1, 1), (1, 1))
    assert correlation_pays(torch.Size((1, 16, 32, 32)), (3, 3), around)
    assert not correlation_pays(torch.Size((1, 6, 14, 14)), (5, 5), ((0, 0), (0, 0)))
    assert not correlation_pays(torch.Size((1, 16, 8, 8)), (1, 1), ((0, 0), (0, 0)))
