"""Rewards of single items after a fit to preferences between two, against dense algebra."""

import pytest
import torch
from torch import nn

import lapwing
from tests.dense import assert_same, build, flat, ggn, jacobian, outputs, randn, seeded, softmax_hessian


class Rewards(nn.Module):
    """Pairs (B, 2, d) to (B, 2), items (B, d) to (B, 1) or (B,)."""

    def __init__(self, flat=False):
        super().__init__()
        self.net, self.flat = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), flat

    def forward(self, x):
        rewards = self.net(x)[..., 0]
        return rewards if x.ndim == 3 or self.flat else rewards[:, None]


def problem(flat=False):
    module = build(lambda: Rewards(flat))
    return module, randn(12, 2, 3), torch.randint(2, (12,), generator=seeded(1))


@pytest.mark.parametrize("flat_outputs", [False, True])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_distribution_of_a_reward(structure, flat_outputs):
    module, pairs, preferred = problem(flat_outputs)
    la = lapwing.fit(module, (pairs, preferred), "preference", structure=structure, prior=0.5)
    H = ggn(jacobian(module, pairs), softmax_hessian(outputs(module, pairs)))
    H = torch.diag(H.diagonal()) if structure == "diag" else H
    covariance = torch.linalg.inv(H + 0.5 * torch.eye(len(H), dtype=torch.float64))
    items = randn(5, 3, seed=4)
    J = jacobian(module, items)
    variance = (J @ covariance @ J.mT)[..., 0]
    p = la.predict(items)
    assert_same(p.mean, outputs(module, items).reshape(5, 1), 1e-12)
    assert_same(p.variance, variance, 1e-8)
    assert_same(p.epistemic, variance, 1e-8)
    assert torch.equal(p.aleatoric, torch.zeros(5, 1, dtype=torch.float64))
    lower, upper = p.interval(0.6826894921370859)
    assert_same((upper - lower) / 2, variance.sqrt(), 1e-8)
    one = la.predict(items[:1])
    assert_same(one.mean, p.mean[:1], 1e-12)
    assert_same(one.stddev, p.stddev[:1], 1e-10)


def test_pairs_and_joint_rewards_agree():
    """The probability of a pair follows from the joint distribution of the rewards of its two items."""
    module, pairs, preferred = problem()
    la = lapwing.fit(module, (pairs, preferred), "preference", structure="full")
    pair = randn(1, 2, 3, seed=7)
    joint = la.predict(pair[0], joint=True).function
    of_pair = la.predict(pair).function
    assert_same(joint.mean[:, 0], of_pair.mean[0], 1e-12)
    assert_same(joint.covariance.reshape(2, 2), of_pair.covariance[0], 1e-9)


def test_sampled_weights_and_draws():
    module, pairs, preferred = problem()
    la = lapwing.fit(module, (pairs, preferred), "preference", structure="full", prior=5.0)
    items = randn(4, 3, seed=4)
    draws = la.posterior.sample(40, seeded(2))
    expected = torch.stack(
        [torch.func.functional_call(module, la.params.unflatten(theta), (items,)) for theta in draws]
    )
    p = la.predict(items, method="sampled", samples=40, generator=seeded(2))
    assert_same(p.mean, expected.mean(0), 1e-10)
    assert_same(p.variance, expected.var(0, correction=0), 1e-9)
    assert_same(la.ensemble(40, seeded(2)).predict(items).mean, expected.mean(0), 1e-10)
    samples = la.predict(items).sample(4000, seeded(3))
    assert samples.shape == (4000, 4, 1)
    assert_same(samples.var(0), la.predict(items).variance, 0.15)


def test_a_farther_item_is_more_novel():
    module, pairs, preferred = problem()
    la = lapwing.fit(module, (pairs, preferred), "preference", structure="full")
    near, far = la.predict(pairs[:, 0]).novelty, la.predict(100 * pairs[:, 0]).novelty
    assert near.shape == (12,)
    assert bool((far > near).all())


def test_rewards_have_no_log_probability_and_no_fit():
    module, pairs, preferred = problem()
    la = lapwing.fit(module, (pairs, preferred), "preference")
    with pytest.raises(lapwing.BadData, match="not observed"):
        la.predict(pairs[:, 0]).log_prob(torch.zeros(12, 1))
    with pytest.raises(lapwing.BadData, match="rewards of two candidates"):
        lapwing.fit(module, (pairs[:, 0], preferred), "preference")
    assert flat(module).numel() == la.params.size
