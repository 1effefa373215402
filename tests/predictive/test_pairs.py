"""E[softmax(f)] from pairs of classes: against quadrature and brute force, and what is said of its error."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests import dense
from torch import Tensor

from lapwing.predictive.function import DenseSpread, SharedSpread
from lapwing.predictive.softmax import (
    CLOSE,
    FewPairs,
    Pairs,
    expected_entropy,
    expected_sigmoid,
    expected_softmax,
    matched_points,
    narrowness,
    pairs_of_one,
)


def integral(mean: Tensor, variance: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    x = mean[..., None] + variance.sqrt()[..., None] * torch.linspace(-14, 14, 20_001, dtype=torch.float64)
    weights = (-torch.linspace(-14, 14, 20_001, dtype=torch.float64).square() / 2).softmax(0)
    return function(x) @ weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_expected_sigmoid_and_its_entropy_are_right_at_every_width(dtype: torch.dtype) -> None:
    mean = torch.tensor([-40.0, -15.0, -5.0, -1.0, 0.0, 0.3, 3.0], dtype=torch.float64)[:, None].expand(-1, 5)
    variance = torch.tensor([0.0, 1e-3, 0.5, 4.0, 30.0], dtype=torch.float64).expand(7, -1)
    narrow = narrowness(variance.to(dtype))
    core, tail = (part.double() for part in expected_sigmoid(mean.to(dtype), variance.to(dtype), narrow))
    value, entropy = core * tail.exp(), expected_entropy(mean.to(dtype), narrow).double()
    torch.testing.assert_close(value, integral(mean, variance, torch.sigmoid), rtol=2e-5, atol=1e-13)
    bits = lambda x: torch.nn.functional.softplus(x) - x * x.sigmoid()  # noqa: E731
    torch.testing.assert_close(entropy, integral(mean, variance, bits), rtol=0, atol=1e-6)


def test_of_two_classes_that_matter_pairs_are_exact() -> None:
    """The third class is so unlikely that the two others are a sigmoid of their difference, at any variance."""
    covariance = torch.tensor([[9.0, 2.0, 0.0], [2.0, 5.0, 0.0], [0.0, 0.0, 0.1]], dtype=torch.float64)[None]
    mean = torch.tensor([[0.4, 0.0, -60.0]], dtype=torch.float64)
    found = expected_softmax(mean, DenseSpread(covariance), None)
    want = integral(torch.tensor([0.4]).double(), torch.tensor([10.0]).double(), torch.sigmoid)
    torch.testing.assert_close(found.probs[:, 0], want, rtol=0, atol=1e-7)
    assert float(found.error) < 1e-12


@pytest.mark.parametrize("classes", [3, 10, 24])
def test_one_item_in_plain_numbers_is_what_tensors_give(classes: int) -> None:
    mean, root = items(40, classes, seed=5)
    mean[0, 1] = -1e9  # a masked class
    pairs = Pairs.of(mean, DenseSpread(root @ root.mT).apart)
    probs, entropy = pairs.alone()
    error = torch.minimum(pairs.least(), pairs.bound())
    for k, (p, apart) in enumerate(zip(pairs.pivot[:, 0].tolist(), pairs.apart.tolist(), strict=True)):
        found = pairs_of_one(mean[k].tolist(), p, apart)
        for ours, theirs in zip(found, (probs[k], entropy[k], error[k]), strict=True):
            torch.testing.assert_close(torch.tensor(ours).double(), theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("classes", [3, 10, 24, 63])
def test_a_few_items_in_numpy_are_what_tensors_give(classes: int) -> None:
    """Of the same logits, the very narrow, the very wide, ties and a masked class among them."""
    mean, root = items(60, classes, seed=5)
    mean[0, 1], mean[1] = -1e9, 0.0
    root[2:6] *= torch.tensor([0.0, 1e-3, 10.0, 100.0], dtype=torch.float64)[:, None, None]
    mean[6], root[6] = -50 * torch.arange(classes), 5 * root[6]
    spread = DenseSpread(root @ root.mT)
    pairs = Pairs.of(mean, spread.apart)
    narrow = (each.float().numpy() for each in (mean, pairs.apart))
    with np.errstate(all="ignore"):
        center, apart = narrow
        few = FewPairs.of(center, pairs.pivot[:, 0].numpy(), apart)
        points = matched_points(classes, 2, 2021, torch.float64)
        places, root = torch.arange(0, 60, 2), spread.root(pairs.pivot)
        found = few.with_points(places.numpy(), root[places].float().numpy(), points.float().numpy(), 3.0)
    want = *pairs.alone(), torch.minimum(pairs.least(), pairs.bound())
    for ours, theirs in zip((*few.alone, few.own, few.entropy), (*want, pairs.own, pairs.entropy), strict=True):
        finite = theirs.float().isfinite()  # a bound on the error may be beyond float32
        torch.testing.assert_close(torch.tensor(ours).double()[finite], theirs[finite], rtol=2e-5, atol=5e-6)
    rare = (pairs.own > 1e-30) & (pairs.own < 1e-6)  # which keep their relative accuracy
    torch.testing.assert_close(torch.tensor(few.own).double()[rare], pairs.own[rare], rtol=2e-4, atol=0)
    *want, error = pairs.with_points(root[places], points, 3.0, places)
    sure = error.isfinite()
    assert torch.equal(torch.tensor(found[2]).isfinite(), sure)
    for ours, theirs in zip(found, (*want, error), strict=True):
        torch.testing.assert_close(torch.tensor(ours).double()[sure], theirs[sure], rtol=2e-4, atol=5e-6)


@pytest.mark.parametrize("classes", [3, 10])
def test_probabilities_of_few_items_do_not_depend_on_the_way(classes: int) -> None:
    """NumPy serves few items in float32, PyTorch all others: pairs, points of both stages and levels are the same."""
    mean, root = items(64, classes, 20)
    found, want = (
        expected_softmax(mean.to(dtype), DenseSpread((root @ root.mT).to(dtype)), None)
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(found.probs.double(), want.probs, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.entropy.double(), want.entropy, rtol=0, atol=2e-4)
    torch.testing.assert_close(found.error.double(), want.error, rtol=2e-2, atol=2e-6)
    torch.testing.assert_close(found.log_probs.double(), want.log_probs, rtol=1e-3, atol=1e-3)
    for k in range(0, 64, 8):  # what an item gets does not depend on its batch
        alone = expected_softmax(mean[k : k + 2].float(), DenseSpread((root @ root.mT)[k : k + 2].float()), None)
        torch.testing.assert_close(alone.probs, found.probs[k : k + 2], rtol=0, atol=2e-6)


def items(n: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Means and roots of covariances of many sizes; what all logits share is left out."""
    level = torch.rand(n, 2, generator=dense.seeded(seed), dtype=torch.float64)
    mean = 6 * level[:, :1] * dense.randn(n, classes, seed=seed + 1)
    root = dense.randn(n, classes, classes, seed=seed + 2) / math.sqrt(classes)
    root = (3 * level[:, 1] - 2).exp()[:, None, None] * root
    return mean, root - root.mean(1, keepdim=True)


def truth_of(mean: Tensor, root: Tensor, draws: int = 2**13) -> tuple[Tensor, Tensor]:
    noise = torch.quasirandom.SobolEngine(mean.shape[-1], scramble=True, seed=99).draw(draws, dtype=torch.float64)
    noise = torch.special.ndtri(noise.clamp(1e-15, 1 - 1e-15))
    logs = [(m + noise @ r.mT).log_softmax(-1) for m, r in zip(mean, root, strict=True)]
    return torch.stack([x.exp().mean(0) for x in logs]), torch.stack([-(x.exp() * x).sum(-1).mean() for x in logs])


@pytest.mark.parametrize("classes", [3, 5, 10, 40])
def test_items_that_pairs_or_a_few_points_answer_are_right(classes: int) -> None:
    mean, root = items(80, classes, 20)
    probs, entropy = truth_of(mean, root)
    spread = DenseSpread(root @ root.mT)
    pairs = Pairs.of(mean, spread.apart)
    (found, _), bound = pairs.alone(), pairs.least()
    distance = (found - probs).abs().sum(-1) / 2
    assert (distance <= bound + 3e-3).all()  # the rest is the error of the truth
    ways = [((*pairs.alone(), bound), 3e-4, 2e-3)]
    for times, caution in ((1, 3.0), (16, 1.5)):
        points = matched_points(classes, times, 2021, torch.float64)
        ways.append((pairs.with_points(spread.root(pairs.pivot), points, caution), 2e-3, 8e-3))
    for (found, expected, error), close, near in ways:
        sure = error <= CLOSE
        assert sure.any() or classes == 40
        assert (((found - probs).abs().sum(-1) / 2)[sure] < close).all()
        assert ((expected - entropy).abs()[sure] < near).all()


@pytest.mark.parametrize("classes", [3, 10, 70])
def test_variances_of_differences_are_those_of_the_covariance(classes: int) -> None:
    left, spread = dense.randn(classes, classes), dense.randn(4, classes, seed=1).abs() + 0.1
    covariance = (left * spread.square()[:, None]) @ left.mT
    pivot = torch.tensor([[0], [2], [1], [0]])
    for index in range(4):
        p = int(pivot[index])
        c = covariance[index]
        want = c.diagonal() + c[p, p] - 2 * c[p]
        for found in (SharedSpread(left, spread), DenseSpread(covariance)):
            torch.testing.assert_close(found.apart(pivot)[index], want, rtol=1e-9, atol=1e-9)
            root = found.root(pivot)[index]
            torch.testing.assert_close(root.square().sum(-1), want, rtol=1e-5, atol=1e-5)


def test_a_masked_class_and_a_known_function_stay_as_they_are() -> None:
    mean = torch.tensor([[1.0, 0.9, -1e9], [0.2, 0.1, 0.0]])
    none = expected_softmax(mean, DenseSpread(torch.zeros(2, 3, 3)), None)
    torch.testing.assert_close(none.probs, mean.softmax(-1), rtol=0, atol=3e-6)
    sure = torch.tensor([[0.0, -9.0, -9.5]], dtype=torch.float64)  # pairs answer, and the third class is not neglected
    found = expected_softmax(sure, DenseSpread(torch.zeros(1, 3, 3, dtype=torch.float64)), None)
    torch.testing.assert_close(found.probs, sure.softmax(-1), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found.entropy, torch.special.entr(sure.softmax(-1)).sum(-1), rtol=0, atol=1e-7)
    some = expected_softmax(mean, DenseSpread(torch.eye(3).expand(2, -1, -1) - 1 / 3), None)
    assert some.probs[0, 2] == 0
    assert some.entropy.isfinite().all()
    assert torch.allclose(some.probs.sum(-1), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_probability_is_negative_far_from_the_data(dtype: torch.dtype) -> None:
    """Rounding must not leave less than nothing of a class that is many standard deviations below the highest."""
    mean = torch.tensor([[0.0, -300.0, -500.0, -1000.0, -1600.0]], dtype=dtype)
    spread = DenseSpread(torch.diag(torch.tensor([0.0, 200.0, 450.0, 1000.0, 2000.0], dtype=dtype))[None])
    for items in (1, 2):  # one item is worked out in plain numbers
        found = expected_softmax(mean.expand(items, -1), spread.take(torch.zeros(items, dtype=torch.long)), None)
        assert bool((found.probs >= 0).all())
        torch.testing.assert_close(found.probs.sum(-1), torch.ones(items, dtype=dtype), rtol=0, atol=1e-6)
        assert bool(found.log_probs.isfinite().all())
    probs, *_ = pairs_of_one(mean[0].tolist(), 0, [0.0, 200.0, 450.0, 1000.0, 2000.0])
    assert min(probs) >= 0
    pairs = Pairs.of(mean, spread.apart)
    assert bool(pairs.log_prob(torch.tensor([[1]]))[0].isfinite().all())
