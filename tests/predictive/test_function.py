"""Distributions of f: lazy parts, joint draws, singular covariances, batch independence."""

import dataclasses

import pytest
import torch

from lapwing.errors import UnsupportedOperation
from lapwing.predictive import GaussianFunction, MixtureFunction, SampledFunction
from lapwing.predictive.decompositions import symmetric_root
from lapwing.predictive.softmax import base_points


def spd(*shape, rank=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(*shape, rank or shape[-1], generator=generator, dtype=torch.float64)
    return root @ root.mT


def test_parts_are_computed_once_and_when_read():
    calls = []

    def part(name, value):
        return lambda: calls.append(name) or value

    mean, covariance = torch.zeros(3, 2).double(), spd(3, 2)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    f = GaussianFunction(mean, part("covariance", covariance), variance=part("variance", variance))
    assert calls == []
    assert f.variance is f.variance
    assert calls == ["variance"]
    f.sample(2)
    f.sample(2)
    assert calls == ["variance", "covariance"]


@pytest.mark.parametrize("event", [(), (2,)], ids=str)
def test_joint_draws_are_correlated_over_inputs(event):
    """Samples at several inputs share weights: Cov(f_i, f_j) = J_i Σ J_jᵀ, also for duplicated inputs (singular)."""
    generator = torch.Generator().manual_seed(0)
    jacobian = torch.randn(3, *event, 2, 4, generator=generator, dtype=torch.float64)
    jacobian[2] = jacobian[0]
    flat = jacobian.reshape(-1, 4)
    shape = (3, *event, 2)
    f = GaussianFunction(torch.zeros(shape).double(), (flat @ flat.T).reshape(*shape, *shape), joint=True)
    assert f.joint
    draws = f.sample(40_000, torch.Generator().manual_seed(1))
    torch.testing.assert_close(draws[:, 0], draws[:, 2], rtol=0, atol=1e-6)
    empirical = draws.reshape(len(draws), -1).T.cov()
    torch.testing.assert_close(empirical, flat @ flat.T, rtol=0.05, atol=0.2)
    blocks = jacobian @ jacobian.mT
    torch.testing.assert_close(f.item_covariance, blocks)
    torch.testing.assert_close(f.variance, blocks.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(f.points(4096).var(0), f.variance, rtol=0.03, atol=0)


def test_separate_items_are_independent():
    f = GaussianFunction(torch.zeros(4, 1).double(), variance=torch.ones(4, 1).double())
    draws = f.sample(20_000, torch.Generator().manual_seed(0))[..., 0]
    torch.testing.assert_close(draws.T.cov(), torch.eye(4).double(), rtol=0, atol=0.05)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_root_of_singular_matrices(rank):
    matrix = spd(6, 5, rank=rank)
    root = symmetric_root(matrix)
    torch.testing.assert_close(root @ root, matrix)
    torch.testing.assert_close(root, root.mT)
    single = symmetric_root(matrix.float())
    torch.testing.assert_close(single @ single, matrix.float(), rtol=1e-3, atol=1e-4)
    assert torch.equal(symmetric_root(torch.zeros(2, 3, 3)), torch.zeros(2, 3, 3))


def test_root_is_continuous_at_equal_eigenvalues():
    """Rounding may turn eigenvectors of equal eigenvalues by any angle; the root does not notice."""
    base = torch.eye(6, dtype=torch.float64)
    noise = 1e-9 * spd(20, 6)
    torch.testing.assert_close(symmetric_root(base + noise), base.expand(20, 6, 6), rtol=0, atol=1e-7)


def test_root_gradients():
    matrix = spd(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: symmetric_root((a + a.mT) / 2), matrix)
    equal = torch.eye(3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: symmetric_root((a + a.mT) / 2), equal)
    singular = spd(3, 4, rank=2).requires_grad_()
    symmetric_root(singular).sum().backward()
    assert singular.grad.isfinite().all()


def test_a_sampler_replaces_the_covariance():
    """Many outputs: draws come from weights, in blocks of a constant size, and no covariance is read."""
    sizes = []

    def sampler(n, generator):
        sizes.append(n)
        return torch.randn(n, 1, 5, generator=generator).expand(n, 3, 5)

    def never():
        raise AssertionError("the covariance was read")

    f = GaussianFunction(torch.zeros(3, 5), never, sampler=sampler)
    points = f.points(150)
    assert sizes == [32, 32, 11]  # the other halves are mirror images
    assert points.shape == (150, 3, 5)
    assert torch.equal(points, f.points(150))
    assert torch.equal(f.sample(7), f.sample(7))
    free = GaussianFunction(torch.zeros(3, 5), sampler=sampler)
    assert free.variance.shape == (3, 5)
    with pytest.raises(UnsupportedOperation, match=r"\.sample"):
        _ = free.covariance


def test_points_are_a_good_rule():
    """First two moments of the fixed points, and no dependence on the rest of the batch."""
    z = base_points(1024, 10, torch.zeros(()).double())
    assert z.isfinite().all()
    torch.testing.assert_close(z.mean(0), torch.zeros(10).double(), rtol=0, atol=5e-3)
    torch.testing.assert_close(z.T.cov(), torch.eye(10).double(), rtol=0, atol=0.03)
    mean, covariance = torch.zeros(4, 3).double(), spd(4, 3)
    whole = GaussianFunction(mean, covariance).points(256)
    alone = GaussianFunction(mean[2:3], covariance[2:3]).points(256)
    torch.testing.assert_close(whole[:, 2:3], alone)
    draws = GaussianFunction(mean, covariance).points(256, torch.Generator().manual_seed(0))
    assert not torch.allclose(draws, whole)


def test_nothing_touches_the_global_state():
    f = GaussianFunction(torch.zeros(4, 3), spd(4, 3).float())
    before = torch.get_rng_state()
    f.sample(3)
    f.points(3)
    SampledFunction(None, f.sample(3)).sample(2)
    MixtureFunction([f, f]).sample(4)
    assert torch.equal(before, torch.get_rng_state())


def test_wrong_shapes_say_so():
    with pytest.raises(ValueError, match=r"\(3, 2, 2\), got \(3, 2\)"):
        _ = GaussianFunction(torch.zeros(3, 2), torch.zeros(3, 2)).covariance
    with pytest.raises(ValueError, match="all are missing"):
        GaussianFunction(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="do not fit"):
        SampledFunction(torch.zeros(3, 2), torch.zeros(5, 3, 1))
    with pytest.raises(UnsupportedOperation, match="variances"):
        _ = GaussianFunction(torch.zeros(3, 2), variance=torch.ones(3, 2)).covariance


def test_functions_are_frozen():
    f = GaussianFunction(torch.zeros(3, 2), spd(3, 2))
    for function in (f, SampledFunction(None, torch.zeros(4, 3, 2)), MixtureFunction([f])):
        with pytest.raises(dataclasses.FrozenInstanceError):
            function.anything = 1


def test_mixture_weights_are_normalized():
    one, two = (GaussianFunction(torch.full((2, 1), m), variance=torch.ones(2, 1)) for m in (0.0, 4.0))
    f = MixtureFunction([one, two], torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(f.mean, torch.full((2, 1), 3.0))
    torch.testing.assert_close(f.variance, torch.full((2, 1), 4.0))
    assert f.points(10).shape[0] == 10


def test_scaled_distributions_scale_their_moments_and_draws():
    mean = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).double()
    covariance = spd(3, 2)
    gaussian = GaussianFunction(mean, covariance)
    sampled = SampledFunction(None, gaussian.sample(5))
    by_draws = GaussianFunction(mean, variance=covariance.diagonal(dim1=-2, dim2=-1), sampler=gaussian.sample)
    for f in (gaussian, sampled, by_draws, MixtureFunction([gaussian, sampled], torch.tensor([0.3, 0.7]))):
        half = f.scaled(0.5)
        torch.testing.assert_close(half.mean, f.mean / 2)
        torch.testing.assert_close(half.variance, f.variance / 4)
        torch.testing.assert_close(half.points(16), f.points(16) / 2)
        torch.testing.assert_close(half.sample(3), f.sample(3) / 2)
    torch.testing.assert_close(gaussian.scaled(2.0).covariance, 4 * covariance)
