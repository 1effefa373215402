"""What may change after a fit (prior, noise, temperature, more data, the size of the data), against dense algebra."""

import math

import pytest
import torch
from torch import nn

import lapwing
from tests.dense import (
    assert_same,
    build,
    covariance,
    flat,
    gaussian_log_density,
    ggn,
    jacobian,
    outputs,
    randn,
    seeded,
    softmax_hessian,
)
from tests.noise import unit_noise

STRUCTURES = ("diag", "blockdiag", "kron", "ekfac", "full", "lowrank")


def net():
    return build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def eye(size, scale=1.0):
    return scale * torch.eye(size, dtype=torch.float64)


def fit(module, data, likelihood, structure, **options):
    chosen = lapwing.LowRank(30) if structure == "lowrank" else structure  # no fewer than there are weights
    return lapwing.fit(module, data, likelihood, structure=chosen, **options)


class Once:
    """Batches that may be read by the fit and by nothing after it."""

    def __init__(self, *batches):
        self.batches, self.closed = batches, False

    def __iter__(self):
        assert not self.closed, "the data were read again"
        return iter(self.batches)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_noise_prior_and_temperature_change_without_a_data_pass(structure):
    module, x, y = net(), randn(9, 3), randn(9, 2, seed=2)
    data = Once((x, y))
    la = fit(module, data, lapwing.Gaussian(1.0), structure)
    data.closed = True
    h, j = la.curvature.dense(), jacobian(module, x)
    for sigma, tau, T in ((0.3, 0.5, 1.0), (2.0, 7.0, 0.4)):
        new = la.replace(likelihood=lapwing.Gaussian(sigma), prior=tau, temperature=T)
        precision = T * h / sigma**2 + eye(26, tau)
        assert_same(new.posterior.precision.dense(), precision)
        assert_same(new.predict(x).function.covariance, covariance(j, precision), 1e-9)
        residual = (y - outputs(module, x)).square().sum()
        log_p = -0.5 * (residual / sigma**2 + y.numel() * math.log(2 * math.pi * sigma**2))
        assert_same(new.log_likelihood, log_p)
        bracket = torch.linalg.slogdet(precision)[1] - 26 * math.log(tau)
        assert_same(new.log_evidence(), T * log_p - 0.5 * tau * flat(module).square().sum() - 0.5 * bracket, 1e-9)
    assert_same(la.posterior.precision.dense(), h + eye(26))  # the first object has not moved


@pytest.mark.parametrize("structure", STRUCTURES)
def test_noise_an_output_may_change_by_a_common_factor_alone(structure):
    module, x, y = net(), randn(9, 3), randn(9, 2, seed=2)
    sigma = torch.tensor([0.3, 0.9], dtype=torch.float64)
    la = fit(module, (x, y), lapwing.Gaussian(sigma), structure, prior=0.5)
    for factor in (1.0, 2.0, 0.1):
        new = la.replace(likelihood=lapwing.Gaussian(factor * sigma))
        lam = (factor * sigma).pow(-2).diag().expand(9, 2, 2)
        exact = ggn(jacobian(module, x), lam) + eye(26, 0.5)
        found = new.posterior.precision.dense()
        if structure in ("full", "lowrank"):
            assert_same(found, exact, 1e-9)
        elif structure == "diag":
            assert_same(found, exact.diag().diag(), 1e-9)
        else:  # the last layer is exactly a Kronecker product
            assert_same(found[16:, 16:], exact[16:, 16:], 1e-9)
        log_p = torch.distributions.Normal(outputs(module, x), factor * sigma).log_prob(y).sum()
        assert_same(new.log_likelihood, log_p)
        assert_same(new.predict(x).aleatoric, (factor * sigma).square().expand(9, 2))
    for other in (lapwing.Gaussian([0.3, 1.0]), lapwing.Gaussian(0.5), lapwing.Categorical(), "counts"):
        with pytest.raises(lapwing.UnsupportedOperation, match=r"common factor.*Fit again"):
            la.replace(likelihood=other)


def test_other_families_are_refused_by_replace():
    module, x, y = net(), randn(9, 3), torch.randint(2, (9,), generator=seeded(1))
    la = fit(module, (x, y), "classification", "kron")
    la.replace(likelihood="classification")
    for other in ("regression", "binary", lapwing.Categorical(ignore_index=1)):
        with pytest.raises(lapwing.UnsupportedOperation, match="Fit again"):
            la.replace(likelihood=other)


def test_a_prior_that_cannot_be_is_refused_by_replace_itself():
    """Whoever holds an object can use it."""
    module, x, y = net(), randn(9, 3), randn(9, 2, seed=2)
    la = fit(module, (x, y), lapwing.Gaussian(1.0), "kron")
    for prior in (torch.rand(26, generator=seeded()) + 0.1, torch.ones(5), {"nope": 1.0, "*": 2.0}):
        with pytest.raises(lapwing.IncompatiblePrior):
            la.replace(prior=prior)


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("structure", ["diag", "blockdiag", "kron", "full", "lowrank"])
def test_update_is_a_fit_on_the_union(structure, likelihood):
    module, x = net(), randn(15, 3)
    y = randn(15, 2, seed=2) if likelihood == "regression" else torch.randint(2, (15,), generator=seeded(1))
    whole = fit(module, (x, y), unit_noise(likelihood), structure, prior=0.5)
    first = fit(module, (x[:4], y[:4]), unit_noise(likelihood), structure, prior=0.5)
    kept = first.curvature.dense().clone()
    la = first.update((x[4:9], y[4:9])).update([(x[9:12], y[9:12]), (x[12:], y[12:])])
    assert la.n_data == 15
    assert_same(la.curvature.dense(), whole.curvature.dense())
    assert_same(la.log_likelihood, whole.log_likelihood)
    assert_same(la.log_evidence(at="linear-mode"), whole.log_evidence(at="linear-mode"))
    assert_same(la.predict(x).function.covariance, whole.predict(x).function.covariance, 1e-9)
    assert torch.equal(first.curvature.dense(), kept)
    if structure in ("diag", "full", "lowrank"):
        exact = ggn(jacobian(module, x), None if likelihood == "regression" else softmax_hessian(outputs(module, x)))
        assert_same(la.curvature.dense(), exact.diag().diag() if structure == "diag" else exact)


def test_update_of_ekfac_keeps_the_trace_exact():
    """It says that it keeps its first eigenbasis; the second moments in it are exact all the same."""
    module, x, y = net(), randn(15, 3), randn(15, 2, seed=2)
    la = fit(module, (x[:6], y[:6]), lapwing.Gaussian(1.0), "ekfac").update((x[6:], y[6:]))
    found, exact = la.curvature.dense(), ggn(jacobian(module, x))
    for block in (slice(0, 16), slice(16, 26)):
        assert_same(found[block, block].trace(), exact[block, block].trace())


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_update_of_a_subset_that_stands_for_more(structure):
    """n_data grows by the new data, and everything seen is scaled alike: a fit on the union with that n_data."""
    module, x, y = net(), randn(15, 3), randn(15, 2, seed=2)
    la = fit(module, (x[:6], y[:6]), lapwing.Gaussian(1.0), structure, n_data=24).update((x[6:], y[6:]))
    whole = fit(module, (x, y), lapwing.Gaussian(1.0), structure, n_data=33)
    assert la.n_data == 33
    assert_same(la.curvature.dense(), whole.curvature.dense())
    assert_same(la.log_likelihood, whole.log_likelihood)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("n_data", [100, 2.5])
def test_n_data_scales_curvature_and_likelihood(structure, n_data):
    module, x, y = net(), randn(10, 3), torch.randint(2, (10,), generator=seeded(1))
    plain = fit(module, (x, y), "classification", structure)
    la = fit(module, (x, y), "classification", structure, n_data=n_data, prior=0.5)
    assert la.n_data == n_data
    assert_same(la.curvature.dense(), n_data / 10 * plain.curvature.dense(), 1e-9)
    log_p = -nn.functional.cross_entropy(outputs(module, x), y, reduction="sum")
    assert_same(la.log_likelihood, n_data / 10 * log_p.double())
    precision = n_data / 10 * plain.curvature.dense() + eye(26, 0.5)
    bracket = torch.linalg.slogdet(precision / 0.5)[1]
    exact = n_data / 10 * log_p - 0.25 * flat(module).square().sum() - 0.5 * bracket
    assert_same(la.log_evidence(), exact, 1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_augmented_passes_average(structure):
    """R random draws of each datum with n_data = N: the mean over draws, not R times the data."""
    module, x, y = net(), randn(6, 3), randn(6, 2, seed=2)
    draws = [(x + 0.3 * randn(6, 3, seed=10 + r), y) for r in range(4)]
    la = fit(module, draws, lapwing.Gaussian(1.0), structure, n_data=6)
    j = torch.cat([jacobian(module, z) for z, _ in draws])
    exact = ggn(j) / 4
    assert la.n_data == 6
    if structure in ("full", "diag", "lowrank"):
        assert_same(la.curvature.dense(), exact.diag().diag() if structure == "diag" else exact, 1e-9)
    assert_same(la.curvature.dense()[16:, 16:].trace(), exact[16:, 16:].trace(), 1e-9)
    residual = sum((y - outputs(module, z)).square().sum() for z, _ in draws) / 4
    assert_same(la.log_likelihood, -0.5 * (residual + 12 * math.log(2 * math.pi)))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_both_forms_of_temperature(structure):
    """T·H + Π, and T·(H + Π)."""
    module, x, y = net(), randn(9, 3), torch.randint(2, (9,), generator=seeded(1))
    la = fit(module, (x, y), "classification", structure, prior=0.5)
    h = la.curvature.dense()
    half = la.replace(temperature=0.3)
    both = la.replace(temperature=lapwing.Tempered(0.3, prior=True))
    assert_same(half.posterior.precision.dense(), 0.3 * h + eye(26, 0.5))
    assert_same(both.posterior.precision.dense(), 0.3 * (h + eye(26, 0.5)))
    assert_same(both.posterior.covariance(), la.posterior.covariance() / 0.3, 1e-9)
    fresh = fit(module, (x, y), "classification", structure, prior=0.5, temperature=0.3)
    assert_same(fresh.posterior.covariance(), half.posterior.covariance())
    cold = la.replace(temperature=0.0)  # T → 0 is the prior
    assert_same(cold.posterior.variance, torch.full((26,), 2.0).double())
    assert "tempered" in half.summary()
    assert "tempered" not in la.summary()


def linear(x, weights):
    module = build(lambda: nn.Linear(x.shape[1], 1, bias=False))
    with torch.no_grad():
        module.weight.copy_(weights[None])
    return module


@pytest.mark.parametrize("structure", ["full", "blockdiag", "lowrank", "diag", "kron", "ekfac"])
def test_yesterdays_posterior_is_todays_prior(structure):
    """For a linear model, fitting A and then B under the posterior of A is fitting both; log p(A) p(B|A) = log p(A, B).

    The features of B are orthogonal for "diag", which is exact only then.
    """
    sigma, tau = 0.5, 0.7
    x = randn(12, 3, seed=1)
    if structure == "diag":
        x = torch.cat([torch.linalg.qr(x[:6])[0], torch.linalg.qr(x[6:])[0]]) * 3
    y = randn(12, 1, seed=2)
    solve = lambda z, t, h, pull: torch.linalg.solve(z.T @ z / sigma**2 + h, z.T @ t[:, 0] / sigma**2 + pull)  # noqa: E731
    h0 = eye(3, tau)
    first_mode = solve(x[:6], y[:6], h0, torch.zeros(3).double())
    first = fit(linear(x, first_mode), (x[:6], y[:6]), lapwing.Gaussian(sigma), structure, prior=tau)
    h1 = x[:6].T @ x[:6] / sigma**2 + h0
    second_mode = solve(x[6:], y[6:], h1, h1 @ first_mode)
    prior = lapwing.Prior.from_posterior(first.posterior)
    second = fit(linear(x, second_mode), (x[6:], y[6:]), lapwing.Gaussian(sigma), structure, prior=prior)
    assert_same(second_mode, solve(x, y, h0, torch.zeros(3).double()))
    assert_same(second.posterior.precision.dense(), x.T @ x / sigma**2 + h0)
    joint = gaussian_log_density(y[:, 0], torch.zeros(12).double(), x @ x.T / tau + eye(12, sigma**2))
    assert_same(first.log_evidence() + second.log_evidence(), joint)
    assert_same(second.log_evidence(at="linear-mode"), second.log_evidence())
    new = randn(4, 3, seed=5)
    truth = covariance(new[:, None], x.T @ x / sigma**2 + h0)
    assert_same(second.predict(new).function.covariance, truth)


def test_a_product_as_prior_is_added_exactly():
    """Factored damping gives a Kronecker product, and a sum of two of them has a basis in which both are diagonal."""
    module, x, y = net(), randn(9, 3), randn(9, 2, seed=2)
    first = fit(module, (x, y), lapwing.Gaussian(1.0), "kron").damping("factored")
    new = randn(8, 3, seed=3), randn(8, 2, seed=4)
    la = fit(module, new, lapwing.Gaussian(0.7), "kron", prior=lapwing.Prior.from_posterior(first.posterior))
    exact = la.curvature.dense() / 0.49 + first.posterior.precision.dense()
    assert_same(la.posterior.precision.dense(), exact)
    assert_same(la.predict(x).function.covariance, covariance(jacobian(module, x), exact))
    offset = (la.posterior.mean - first.posterior.mean).double()
    assert not offset.any()  # the weights did not move between the two fits
    ratio = torch.logdet(exact) - torch.logdet(first.posterior.precision.dense())
    assert_same(la.log_evidence(), la.log_likelihood - 0.5 * ratio)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_a_chain_of_kronecker_posteriors(structure, tmp_path):
    """The projected sum has the right trace in its own coordinates, and an evidence that is a lower bound."""
    module, prior, before = net(), lapwing.Prior(1.0), eye(26)
    for task in range(3):
        data = randn(9, 3, seed=task), randn(9, 2, seed=task + 10)
        la = fit(module, data, lapwing.Gaussian(1.0), structure, prior=prior)
        exact = la.curvature.dense() + before
        kept = la.posterior.precision
        assert_same((exact @ kept.solve(eye(26)).T).trace(), torch.tensor(26.0).double())
        assert kept.logdet() >= torch.logdet(exact) - 1e-9
        ratio = kept.logdet() - torch.logdet(before)
        distance = la.posterior.mean.square().sum() if task == 0 else 0.0  # later, from the weights themselves
        assert_same(la.log_evidence(), la.log_likelihood - 0.5 * ratio - 0.5 * distance)
        prior, before = lapwing.Prior.from_posterior(la.posterior), kept.dense()
    la.save(tmp_path / "third")
    again = lapwing.load(tmp_path / "third", module)
    assert torch.equal(again.posterior.precision.dense(), la.posterior.precision.dense())
    assert torch.equal(again.log_evidence(), la.log_evidence())


def test_any_posterior_is_a_prior_for_the_full_matrix():
    module, x, y = net(), randn(9, 3), randn(9, 2, seed=2)
    for structure in STRUCTURES:
        yesterday = fit(module, (x, y), lapwing.Gaussian(1.0), structure)
        la = fit(module, (x, y), lapwing.Gaussian(1.0), "full", prior=lapwing.Prior.from_posterior(yesterday.posterior))
        exact = ggn(jacobian(module, x)) + yesterday.curvature.dense() + eye(26)
        assert_same(la.posterior.precision.dense(), exact)


def test_a_prior_from_a_posterior_takes_the_laplace_that_holds_it_and_refuses_others():
    torch.manual_seed(0)
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    la = lapwing.fit(torch.nn.Linear(3, 1), (x, y), "regression", structure="full", progress=False)
    prior, same = lapwing.Prior.from_posterior(la), lapwing.Prior.from_posterior(la.posterior)
    assert prior.precision is same.precision
    assert torch.equal(prior.mean, same.mean)
    with pytest.raises(lapwing.IncompatiblePrior, match=r"expected a posterior, la\.posterior or la, got Linear"):
        lapwing.Prior.from_posterior(torch.nn.Linear(3, 1))
