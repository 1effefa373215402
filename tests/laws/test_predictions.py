"""Every prediction is the integral it says it is: against tensor quadrature over f, and sums or integrals over y.

Outputs are f = m + A x with x ~ N(0, I₂), so that a grid over x is exact whatever the number of outputs, and the
covariance A Aᵀ is singular for more than two.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import distributions as D

from lapwing.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from lapwing.predictive import GaussianFunction, MixtureFunction, SampledFunction, predict_targets


@dataclass(frozen=True, eq=False)
class OwnCategorical(Likelihood):
    """Three classes from two outputs: p(y | f) is not the softmax of f."""

    def conditional(self, f):
        return D.Categorical(logits=torch.cat([f, torch.zeros_like(f[..., :1])], -1))


@dataclass(frozen=True, eq=False)
class OwnGamma(Likelihood):
    def conditional(self, f):
        return D.Gamma(2.0, (-f[..., 0]).exp())


@dataclass(frozen=True, eq=False)
class OwnStudentT(Likelihood):
    def conditional(self, f):
        return D.StudentT(5.0, f[..., 0], 0.5)


@dataclass(frozen=True, eq=False)
class OwnNormal(Likelihood):
    """A clone of Gaussian(0.4)."""

    def conditional(self, f):
        return D.Normal(f, torch.full_like(f, 0.4))


# (likelihood, outputs, tolerance of what is computed by link "auto")
CASES = {
    "two classes": (Categorical(), 2, 1e-9),
    "three classes": (Categorical(), 3, 3e-3),
    "ten classes": (Categorical(), 10, 5e-3),
    "preference": (BradleyTerry(), 2, 1e-9),
    "own classes": (OwnCategorical(), 2, 3e-3),
    "binary": (Bernoulli(), 1, 1e-9),
    "labels": (Bernoulli(), 3, 1e-9),
    "regression": (Gaussian(0.4), 1, 1e-9),
    "outputs": (Gaussian([0.4, 0.2, 0.6]), 3, 1e-9),
    "count": (Poisson(), 1, 1e-7),
    "counts": (Poisson(), 2, 1e-7),
    "natural": (HeteroscedasticGaussian(), 2, 1e-7),
    "naturals": (HeteroscedasticGaussian(), 4, 1e-7),
    "mean": (HeteroscedasticGaussian("mean"), 2, 1e-7),
    "own gamma": (OwnGamma(), 1, 5e-3),
    "own normal": (OwnNormal(), 2, 5e-3),
}
CLASSES = ["two classes", "three classes", "ten classes", "preference", "own classes"]
LABELS = ["binary", "labels"]
VALUES = [name for name in CASES if name not in CLASSES + LABELS]
EVENTS = [(), (2,)]
every = pytest.mark.parametrize("name", CASES)


def make(name, event=(), n=4, scale=0.6, seed=0):
    """The likelihood, a Gaussian f, its mean and its factor A (*, C, 2)."""
    likelihood, c, _ = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, *event, c, generator=generator, dtype=torch.float64)
    factor = scale * torch.randn(n, *event, c, 2, generator=generator, dtype=torch.float64)
    return likelihood, GaussianFunction(mean, factor @ factor.mT), mean, factor


def grid(mean, factor, n=101, width=10.0):
    """f (Q, *shape) and weights (Q,): trapezoidal rule over x ∈ R²."""
    x = torch.linspace(-width, width, n, dtype=torch.float64)
    nodes = torch.cartesian_prod(x, x)
    weights = (-nodes.square().sum(-1) / 2).exp()
    keep = weights > 1e-18
    nodes, weights = nodes[keep], weights[keep]
    return mean + torch.einsum("...ck,qk->q...c", factor, nodes), weights / weights.sum()


def average(weights, values):
    return torch.tensordot(weights, values, 1)


def class_probs(likelihood, f):
    """(…, C), or (…, K, 2) for labels."""
    law = likelihood.law(f)
    if isinstance(law, D.Independent):
        p = law.base_dist.probs
        return torch.stack([1 - p, p], -1)
    return law.probs


def shannon(p):
    return -torch.special.xlogy(p, p).sum(-1)


@pytest.mark.parametrize("name", CLASSES + LABELS)
@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_classes_against_quadrature(name, event):
    likelihood, function, mean, factor = make(name, event, scale=1.0)
    tolerance = CASES[name][2]
    p = predict_targets(function, likelihood)
    f, w = grid(mean, factor)
    probs = class_probs(likelihood, f)
    want = average(w, probs)
    entropy, expected = shannon(want), average(w, shannon(probs))
    if name == "binary":  # a single logit: one entropy an item
        entropy, expected = entropy[..., 0], expected[..., 0]
    got = p.probs if name in CLASSES else torch.stack([1 - p.probs, p.probs], -1)
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    torch.testing.assert_close(p.mean, p.probs)
    torch.testing.assert_close(p.entropy, entropy, rtol=0, atol=3 * tolerance)
    torch.testing.assert_close(p.total, p.entropy)
    torch.testing.assert_close(p.aleatoric, expected, rtol=0, atol=3 * tolerance)
    torch.testing.assert_close(p.epistemic, entropy - expected, rtol=0, atol=3 * tolerance)
    assert torch.equal(p.label, got.argmax(-1))
    torch.testing.assert_close(p.confidence, got.amax(-1))
    assert p.epistemic.max() > 0.05


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_values_against_quadrature(name, event):
    """Law of total variance, with moments of p(y | f) from torch."""
    likelihood, function, mean, factor = make(name, event)
    tolerance = CASES[name][2]
    p = predict_targets(function, likelihood)
    f, w = grid(mean, factor)
    law = likelihood.law(f)
    center = average(w, law.mean)
    aleatoric = average(w, law.variance)
    epistemic = average(w, (law.mean - center).square())
    for got, want in [
        (p.mean, center),
        (p.aleatoric, aleatoric),
        (p.epistemic, epistemic),
        (p.variance, aleatoric + epistemic),
        (p.total, aleatoric + epistemic),
        (p.stddev, (aleatoric + epistemic).sqrt()),
    ]:
        torch.testing.assert_close(got, want, rtol=20 * tolerance, atol=tolerance)


@every
@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_log_prob_against_quadrature(name, event):
    """log ∫ p(y | f) p(f) df over all outputs of an item together."""
    likelihood, function, mean, factor = make(name, event)
    p = predict_targets(function, likelihood)
    y = likelihood.sample_target(mean, torch.Generator().manual_seed(1))
    f, w = grid(mean, factor, n=151)
    want = average(w, likelihood.law(f).log_prob(y).exp()).log()
    joint_by_draws = name in ("labels", "counts", "naturals")
    tolerance = 5e-2 if joint_by_draws or name.startswith("own") else max(2 * CASES[name][2], 1e-7)
    assert p.log_prob(y).shape == (4, *event)
    torch.testing.assert_close(p.log_prob(y), want, rtol=0, atol=10 * tolerance if "classes" in name else tolerance)


@every
@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_an_item_does_not_depend_on_its_batch(name, event):
    """Alone, in a part, in the whole: the same numbers. A batch of one is no special case."""
    likelihood, function, mean, _ = make(name, event)
    y = likelihood.sample_target(mean, torch.Generator().manual_seed(1))

    def fields(rows):
        part = GaussianFunction(mean[rows], function.covariance[rows])
        p = predict_targets(part, likelihood, samples=128)
        values = [p.mean, p.entropy, p.total, p.aleatoric, p.epistemic, p.log_prob(y[rows])]
        return values + (list(p.interval(0.9)) if name in VALUES else [p.label])

    whole = fields(slice(None))
    for rows in (slice(0, 1), slice(1, 4)):
        for one, all_ in zip(fields(rows), whole):
            torch.testing.assert_close(one, all_[rows])


@every
def test_known_outputs_leave_only_noise(name):
    """Zero covariance: p(y) = p(y | f)."""
    likelihood, _, mean, _ = make(name)
    p = predict_targets(GaussianFunction(mean, torch.zeros(*mean.shape, mean.shape[-1]).double()), likelihood)
    y = likelihood.sample_target(mean, torch.Generator().manual_seed(1))
    law = likelihood.law(mean)
    torch.testing.assert_close(p.log_prob(y), law.log_prob(y))
    assert p.epistemic.abs().max() < 1e-12
    if name in VALUES:
        torch.testing.assert_close(p.mean, law.mean)
        torch.testing.assert_close(p.variance, law.variance)
    else:
        torch.testing.assert_close(p.aleatoric, shannon(class_probs(likelihood, mean)).reshape(p.aleatoric.shape))


@every
def test_draws_have_the_moments(name):
    likelihood, function, mean, _ = make(name)
    p = predict_targets(function, likelihood)
    n = 20_000
    y = p.sample(n, torch.Generator().manual_seed(5))
    assert y.shape == (n, *likelihood.sample_target(mean, torch.Generator()).shape)
    assert torch.equal(y, p.sample(n, torch.Generator().manual_seed(5)))
    assert torch.equal(p.sample(3), p.sample(3))
    if name in CLASSES:
        y = torch.nn.functional.one_hot(y, p.probs.shape[-1]).double()
    error = (y.mean(0) - p.mean).abs()
    assert (error <= 5 * y.std(0) / math.sqrt(n) + CASES[name][2]).all()
    if name in VALUES and name not in ("natural", "naturals"):  # whose fourth moments are too large for this
        spread = (y - y.mean(0)).square()
        assert ((spread.mean(0) - p.variance).abs() <= 6 * spread.std(0) / math.sqrt(n) + 0.03 * p.variance).all()


@every
def test_sampled_functions_are_mixtures(name):
    """method="sampled": equal weights on S networks, exactly."""
    likelihood, function, mean, _ = make(name)
    f = function.sample(7, torch.Generator().manual_seed(2))
    p = predict_targets(SampledFunction(mean, f), likelihood)
    y = likelihood.sample_target(mean, torch.Generator().manual_seed(1))
    law = likelihood.law(f)
    if name != "labels":
        torch.testing.assert_close(p.log_prob(y), law.log_prob(y).exp().mean(0).log())
    if name in VALUES:
        torch.testing.assert_close(p.mean, law.mean.mean(0))
        torch.testing.assert_close(p.epistemic, law.mean.var(0, correction=0))
        torch.testing.assert_close(p.aleatoric, law.variance.mean(0))
    else:
        probs = class_probs(likelihood, f)
        got = p.probs if name in CLASSES else torch.stack([1 - p.probs, p.probs], -1)
        torch.testing.assert_close(got, probs.mean(0))
        torch.testing.assert_close(p.aleatoric, shannon(probs).mean(0).reshape(p.aleatoric.shape))
    torch.testing.assert_close(p.function.variance, f.var(0, correction=0))
    p.sample(3)


@every
def test_mixtures_of_posteriors(name):
    """0.3 p₁ + 0.7 p₂ for densities and means."""
    likelihood, one, mean, _ = make(name)
    _, two, _, _ = make(name, seed=9)
    function = MixtureFunction([one, two], torch.tensor([0.3, 0.7]))
    p = predict_targets(function, likelihood, samples=8192)
    parts = [predict_targets(part, likelihood, link="mc", samples=8192) for part in (one, two)]
    y = likelihood.sample_target(mean, torch.Generator().manual_seed(1))
    want = torch.logaddexp(parts[0].log_prob(y) + math.log(0.3), parts[1].log_prob(y) + math.log(0.7))
    if name != "labels":
        torch.testing.assert_close(p.log_prob(y), want, rtol=0, atol=0.03)
    scale = parts[0].mean.abs().max()
    torch.testing.assert_close(p.mean, 0.3 * parts[0].mean + 0.7 * parts[1].mean, rtol=0, atol=1e-2 * max(1.0, scale))
    draws = function.sample(20_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.mean(0), function.mean, rtol=0, atol=0.05)
    torch.testing.assert_close(draws.var(0), function.variance, rtol=0.06, atol=0.01)
    torch.testing.assert_close(function.covariance.diagonal(dim1=-2, dim2=-1), function.variance)


@pytest.mark.parametrize("name", [name for name in VALUES if CASES[name][1] <= 2])
def test_interval_holds_its_probability(name):
    """P(y < lower) and P(y > upper) under the mixture over f: ½(1 − level), at most that for counts."""
    likelihood, function, mean, factor = make(name)
    p = predict_targets(function, likelihood)
    f, w = grid(mean, factor, n=81)
    law = likelihood.law(f)
    base = law.base_dist if isinstance(law, D.Independent) else law
    lower, upper = p.interval(0.8)
    if isinstance(base, D.Poisson):
        counts = torch.arange(400, dtype=torch.float64).reshape(-1, 1, 1)
        mass = torch.stack([average(w, base.log_prob(k.expand(mean.shape)).exp()) for k in counts])
        cumulative = mass.cumsum(0)
        for bound, level in ((lower, 0.1), (upper, 0.9)):
            index = bound.long()[None]
            assert (cumulative.gather(0, index) >= level).all()
            assert (cumulative.gather(0, index) - mass.gather(0, index) < level).all()
        return
    tolerance = 5e-3 if name.startswith("own") else 1e-6
    for bound, level in ((lower, 0.1), (upper, 0.9)):
        mass = average(w, base.cdf(bound))
        torch.testing.assert_close(mass, torch.full_like(mass, level), rtol=0, atol=tolerance)


def test_interval_without_a_distribution_function():
    """StudentT has no cdf in torch: the quantiles of draws."""
    mean = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    p = predict_targets(GaussianFunction(mean, variance=torch.full((2, 1), 0.3, dtype=torch.float64)), OwnStudentT())
    lower, upper = p.interval(0.9)
    y = p.sample(200_000, torch.Generator().manual_seed(0))
    assert lower.shape == (2,)
    torch.testing.assert_close(lower, y.quantile(0.05, 0), rtol=0, atol=0.12)
    torch.testing.assert_close(upper, y.quantile(0.95, 0), rtol=0, atol=0.12)
    with pytest.raises(ValueError, match="between 0 and 1"):
        p.interval(95)


@pytest.mark.parametrize("name", ["regression", "natural", "mean", "own gamma"])
def test_entropy_of_one_value(name):
    """−∫ p log p over a grid of y."""
    likelihood, function, _, _ = make(name, scale=0.4)
    p = predict_targets(function, likelihood)
    low, high = p.interval(1 - 1e-6) if name != "own gamma" else (torch.full((4,), 1e-9), torch.full((4,), 80.0))
    y = torch.linspace(0, 1, 801, dtype=torch.float64).reshape(-1, 1, *(1,) * (low.ndim - 1))
    y = low + (high - low) * y
    log_p = torch.stack([p.log_prob(row) for row in y])
    step = (high - low).reshape(4) / 800
    want = -torch.trapezoid(log_p.exp() * log_p, dim=0) * step
    torch.testing.assert_close(p.entropy, want, rtol=0, atol=0.12 if name == "own gamma" else 2e-3)


def test_entropy_of_counts():
    for name, tolerance in (("count", 1e-6), ("counts", 0.06)):
        likelihood, function, mean, factor = make(name, scale=0.4)
        p = predict_targets(function, likelihood)
        f, w = grid(mean, factor, n=101 if name == "count" else 31)
        axis = torch.arange(400.0 if name == "count" else 40.0, dtype=torch.float64)
        want = torch.zeros(4, dtype=torch.float64)
        for y in torch.cartesian_prod(*[axis] * mean.shape[-1]).reshape(-1, mean.shape[-1]):
            mass = average(w, likelihood.log_prob(f, y.expand(f.shape)).exp())
            want -= torch.special.xlogy(mass, mass)
        torch.testing.assert_close(p.entropy, want, rtol=0, atol=tolerance)


def test_gaussian_prediction_is_the_conjugate_one():
    """y ~ N(m, V + diag σ²), all fields from torch's multivariate normal."""
    likelihood, function, mean, _ = make("outputs")
    sigma = torch.tensor([0.4, 0.2, 0.6], dtype=torch.float64)
    exact = D.MultivariateNormal(mean, function.covariance + torch.diag(sigma.square()))
    p = predict_targets(function, likelihood)
    y = exact.sample()
    torch.testing.assert_close(p.log_prob(y), exact.log_prob(y))
    torch.testing.assert_close(p.entropy, exact.entropy())
    torch.testing.assert_close(p.variance, exact.variance)
    torch.testing.assert_close(p.aleatoric, sigma.square().expand(4, 3))
    lower, upper = p.interval(0.95)
    torch.testing.assert_close(upper - lower, 2 * 1.959963984540054 * exact.variance.sqrt())
    torch.testing.assert_close((upper + lower) / 2, mean)


def test_own_normal_agrees_with_gaussian():
    _, function, mean, _ = make("own normal")
    mine, ours = (predict_targets(function, lik, samples=2048) for lik in (OwnNormal(), Gaussian(0.4)))
    y = mean + 0.3
    torch.testing.assert_close(mine.mean, ours.mean, rtol=0, atol=3e-3)
    torch.testing.assert_close(mine.epistemic, ours.epistemic, rtol=1e-2, atol=0)
    torch.testing.assert_close(mine.log_prob(y), ours.log_prob(y), rtol=0, atol=0.02)
    torch.testing.assert_close(mine.entropy, ours.entropy, rtol=0, atol=0.08)


def test_poisson_moments_are_lognormal():
    mean = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    variance = torch.tensor([[0.3], [1.5]], dtype=torch.float64)
    p = predict_targets(GaussianFunction(mean, variance=variance), Poisson())
    rate = D.LogNormal(mean, variance.sqrt())
    torch.testing.assert_close(p.mean, rate.mean)
    torch.testing.assert_close(p.aleatoric, rate.mean)
    torch.testing.assert_close(p.epistemic, rate.variance)


def test_epistemic_needs_the_whole_covariance():
    """Natural parameters: ∂μ/∂(η₁, η₂) = (σ², 2μσ²) through the 2 × 2 covariance; σ⁴ Var(η₁) alone is under half."""
    mean = torch.tensor([[2.0, 0.3]], dtype=torch.float64)
    covariance = 1e-4 * torch.tensor([[[1.0, -0.6], [-0.6, 1.0]]], dtype=torch.float64)
    p = predict_targets(GaussianFunction(mean, covariance), HeteroscedasticGaussian())
    variance = 1 / torch.nn.functional.softplus(mean[0, 1])
    mu = mean[0, 0] * variance
    slope = -mean[0, 1].sigmoid() / 2  # ∂η₂/∂ρ
    gradient = torch.stack([variance, 2 * mu * variance * slope])
    delta = gradient @ covariance[0] @ gradient
    torch.testing.assert_close(p.epistemic[0, 0], delta, rtol=2e-3, atol=0)
    assert variance.square() * covariance[0, 0, 0] < 0.5 * p.epistemic[0, 0]


@every
def test_dtype_follows_outputs(name):
    likelihood, function, mean, _ = make(name)
    single = GaussianFunction(mean.float(), function.covariance.float())
    p, q = predict_targets(single, likelihood), predict_targets(function, likelihood)
    y = likelihood.sample_target(mean, torch.Generator().manual_seed(1))
    pairs = [(getattr(p, a), getattr(q, a)) for a in ("mean", "entropy", "total", "aleatoric", "epistemic")]
    for low, high in [*pairs, (p.log_prob(y), q.log_prob(y))]:
        assert low.dtype == torch.float32
        drawn = high is q.entropy and name in ("counts", "naturals", "own gamma", "own normal")
        torch.testing.assert_close(low.double(), high, rtol=1e-3, atol=0.15 if drawn else 1e-4)


@every
def test_gradients_reach_mean_and_covariance(name):
    """d/dε of the mean prediction along a direction, against a central difference."""
    likelihood, _, mean, factor = make(name)
    generator = torch.Generator().manual_seed(4)
    full = factor @ factor.mT + 0.1 * torch.eye(mean.shape[-1]).double()
    root = torch.randn(full.shape, generator=generator, dtype=torch.float64)
    moves = (torch.randn(mean.shape, generator=generator, dtype=torch.float64), root @ root.mT)

    def value(step):
        p = predict_targets(GaussianFunction(mean + step * moves[0], full + step * moves[1]), likelihood, samples=64)
        return (p.mean * torch.arange(1.0, 1 + p.mean.shape[-1])).sum() + p.aleatoric.sum()

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(value(step), step)
    difference = (value(torch.tensor(1e-5)) - value(torch.tensor(-1e-5))) / 2e-5
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-6)


def test_counts_of_any_size():
    """Large counts with uncertain rates: the masses of neighbors sum to those of a fine grid over f."""
    for center, spread in ((7.0, 1.0), (9.0, 0.04), (0.0, 25.0), (-3.0, 0.0)):
        mean = torch.full((1, 1), center, dtype=torch.float64)
        p = predict_targets(GaussianFunction(mean, variance=torch.full((1, 1), spread).double()), Poisson())
        x = torch.linspace(-50, 50, 400_001, dtype=torch.float64)
        f, log_w = center + math.sqrt(spread) * x, (-x.square() / 2).log_softmax(0)
        for y in (0.0, 1.0, 37.0, 1000.0, 9000.0):
            target = torch.tensor(y, dtype=torch.float64)
            want = ((target * f - f.exp() - torch.lgamma(target + 1)) + log_w).logsumexp(0)
            torch.testing.assert_close(p.log_prob(target.reshape(1, 1))[0], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parametrization", ["natural", "mean"])
def test_wide_epistemic_variance_leaves_no_comb(parametrization):
    """μ far more uncertain than the noise: the density stays that of a fine grid, between the nodes too."""
    likelihood = HeteroscedasticGaussian(parametrization)
    mean = torch.tensor([[300.0, 0.0]], dtype=torch.float64)
    factor = torch.tensor([[[50.0, 0.01], [0.5, 0.0]]], dtype=torch.float64)
    p = predict_targets(GaussianFunction(mean, factor @ factor.mT), likelihood)
    x = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
    f = mean[0] + x[:, None] * factor[0, :, 0]
    w = (-x.square() / 2).softmax(0)
    for y in torch.linspace(250.0, 420.0, 9, dtype=torch.float64):
        want = (likelihood.log_prob(f, y.expand(len(f), 1)) + w.log()).logsumexp(0)
        torch.testing.assert_close(p.log_prob(y.reshape(1, 1))[0], want, rtol=0, atol=0.02)


@pytest.mark.parametrize("deviation", [0.0, 0.2])
@pytest.mark.parametrize("rate", [0.1, 60.0, 1000.0])
def test_entropy_of_large_counts(rate, deviation):
    """The sum over every count."""
    n = 5000
    mean = torch.full((n, 1), math.log(rate), dtype=torch.float64)
    function = GaussianFunction(mean, variance=torch.full((n, 1), deviation**2).double())
    log_p = predict_targets(function, Poisson()).log_prob(torch.arange(n))
    torch.testing.assert_close(log_p.exp().sum(), torch.tensor(1.0).double(), rtol=0, atol=1e-9)
    one = predict_targets(GaussianFunction(mean[:1], variance=function.variance[:1]), Poisson())
    torch.testing.assert_close(one.entropy[0], -(log_p.exp() * log_p).sum(), rtol=0, atol=5e-4)
