"""Gaussian, Poisson, Bernoulli and heteroscedastic targets: what is particular to each."""

import dataclasses
import math

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, gaussian_nll_loss, poisson_nll_loss, softplus

from lapwing.errors import BadData
from lapwing.likelihoods import Bernoulli, Gaussian, HeteroscedasticGaussian, Poisson
from lapwing.predictive import GaussianFunction


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_one_output_may_drop_its_dimension():
    """(B,) from the network is (B, 1) inside; targets are (B,) or (B, 1); nothing is broadcast to (B, B)."""
    for likelihood in (Gaussian(), Poisson(), Bernoulli()):
        raw = data(5)
        f = likelihood.outputs(raw)
        assert f.shape == (5, 1)
        for y in (torch.ones(5), torch.ones(5, 1), [1, 1, 1, 1, 1]):
            target = likelihood.targets(f, y)
            assert target.shape == (5, 1)
            assert likelihood.log_prob(f, target).shape == (5,)
    with pytest.raises(BadData, match=r"\(1, 5\).*\(5, 1\) or \(5,\)"):
        Gaussian().targets(f, torch.ones(1, 5))
    with pytest.raises(BadData, match=r"\(5,\).*\(5, 2\)\."):
        Gaussian().targets(data(5, 2), torch.ones(5))
    with pytest.raises(BadData, match="one number for the whole batch"):
        Gaussian().outputs(torch.tensor(1.0))


@pytest.mark.parametrize("old", [1.0, torch.tensor([0.5, 2.0])], ids=["one", "each"])
@pytest.mark.parametrize("new", [0.3, torch.tensor([0.1, 4.0])], ids=["one", "each"])
def test_noise_may_change_after_the_sums(old, new):
    """Statistics do not depend on the noise: log-likelihoods at another noise are exact."""
    f, y = data(7, 3, 2), data(7, 3, 2, seed=1)
    statistics = Gaussian(old).statistics(f, y)
    changed = dataclasses.replace(Gaussian(old), noise=new)
    want = -gaussian_nll_loss(f, y, torch.as_tensor(new).double().square().expand(f.shape), full=True, reduction="sum")
    torch.testing.assert_close(changed.log_likelihood(statistics), want, rtol=1e-6, atol=0)


def test_gradients_flow_into_the_noise():
    f, y = data(7, 2), data(7, 2, seed=1)
    noise = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    likelihood = Gaussian(noise)
    value = likelihood.log_likelihood(likelihood.statistics(f, y).detach())
    (gradient,) = torch.autograd.grad(value, noise)
    square = (y - f).square().sum()
    torch.testing.assert_close(gradient, square / noise.detach() ** 3 - 14 / noise.detach())
    (slope,) = torch.autograd.grad(likelihood.dispersion, noise)
    torch.testing.assert_close(slope, 2 * noise.detach())
    assert likelihood.dispersion.ndim == 0
    assert not likelihood.factor(f).requires_grad


def test_the_factor_holds_only_the_ratios():
    f = data(4, 3)
    sigma = torch.tensor([0.3, 0.6, 2.0], dtype=torch.float64)
    S = Gaussian(sigma).factor(f)
    torch.testing.assert_close(Gaussian(5 * sigma).factor(f), S)
    torch.testing.assert_close(Gaussian(sigma).dispersion, sigma.square().prod() ** (1 / 3))
    torch.testing.assert_close(S[0] @ S[0].T / Gaussian(sigma).dispersion, torch.diag(1 / sigma.square()))
    torch.testing.assert_close(Gaussian(0.1).factor(f), torch.eye(3, dtype=torch.float64).expand(4, 3, 3))


def test_only_a_common_factor_keeps_the_curvature():
    base = Gaussian([1.0, 2.0])
    assert base.same_curvature(Gaussian([3.0, 6.0]))
    assert not base.same_curvature(Gaussian([1.0, 2.1]))
    assert not base.same_curvature(Gaussian(1.0))
    assert Gaussian(1.0).same_curvature(Gaussian(7.0))
    assert Gaussian(1.0).same_curvature(Gaussian([2.0, 2.0]))
    assert not base.same_curvature(Gaussian([1.0, 2.0, 2.0]))
    assert not base.same_curvature(Poisson())
    assert not HeteroscedasticGaussian().same_curvature(HeteroscedasticGaussian("mean"))


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, [1.0, 0.0], [[1.0]], []])
def test_noise_is_positive(noise):
    with pytest.raises(BadData, match="standard deviation"):
        Gaussian(noise)


def test_noise_fits_the_outputs():
    with pytest.raises(BadData, match="noise has 3 entries, but the network has 2 outputs"):
        Gaussian([1.0, 1.0, 1.0]).targets(data(4, 2), data(4, 2))


def test_bernoulli_is_binary_cross_entropy():
    likelihood, f = Bernoulli(), 3 * data(6, 4)
    y = (data(6, 4, seed=1) > 0).long()
    want = -binary_cross_entropy_with_logits(f, y.double(), reduction="none").sum(-1)
    torch.testing.assert_close(likelihood.log_prob(f, likelihood.targets(f, y)), want)
    soft = torch.rand(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    want = -binary_cross_entropy_with_logits(f, soft, reduction="none").sum(-1)
    torch.testing.assert_close(likelihood.log_prob(f, likelihood.targets(f, soft)), want)
    S = likelihood.factor(torch.tensor([[50.0, -50.0]]))
    torch.testing.assert_close(S[0].diagonal(), torch.full((2,), -25.0).exp(), rtol=1e-5, atol=0)
    with pytest.raises(BadData, match=r"target 2\.0 at index \(1, 0\).*Categorical"):
        likelihood.targets(data(2, 1), torch.tensor([0, 2]))


def test_poisson_is_torchs_loss():
    likelihood, f = Poisson(), data(6, 2)
    y = torch.tensor([[0, 3], [1, 0], [7, 2], [0, 0], [4, 4], [1, 1]])
    want = -poisson_nll_loss(f, y.double(), reduction="none") - torch.lgamma(y.double() + 1)
    torch.testing.assert_close(likelihood.log_prob(f, likelihood.targets(f, y)), want.sum(-1))
    for bad in (-1, 2.5):
        with pytest.raises(BadData, match=rf"target {float(bad)} at index \(0, 0\)"):
            likelihood.targets(data(2, 1), torch.tensor([bad, 1]))


def test_natural_parameters_are_those_of_the_paper():
    """log p = η₁y + η₂y² + η₁²/(4η₂) + ½log(−2η₂) − ½log 2π with η₂ = −½ softplus(ρ)."""
    likelihood, f, y = HeteroscedasticGaussian(), data(5, 6), data(5, 3, seed=1)
    first, rho = f[:, :3], f[:, 3:]
    second = -softplus(rho) / 2
    want = first * y + second * y**2 + first**2 / (4 * second) + (-2 * second).log() / 2 - math.log(2 * math.pi) / 2
    torch.testing.assert_close(likelihood.log_prob(f, y), want.sum(-1))


def test_natural_information_is_the_chain_rule():
    """Λ in (η₁, ρ) = Dᵀ (s₁s₁ᵀ + s₂s₂ᵀ) D with the roots in (η₁, η₂) and D = diag(1, ∂η₂/∂ρ)."""
    f = data(5, 2)
    first, rho = f[:, 0], f[:, 1]
    second = -softplus(rho) / 2
    one = torch.stack([torch.ones_like(first), -first / second], -1) / (-2 * second).sqrt()[:, None]
    two = torch.stack([torch.zeros_like(first), 1 / (math.sqrt(2) * second)], -1)
    slope = torch.stack([torch.ones_like(rho), -rho.sigmoid() / 2], -1)
    roots = torch.stack([one * slope, two * slope], -1)
    S = HeteroscedasticGaussian().factor(f)
    torch.testing.assert_close(S @ S.mT, roots @ roots.mT)


def test_mean_parametrization_is_torchs_loss():
    likelihood, f, y = HeteroscedasticGaussian("mean"), data(5, 4), data(5, 2, seed=1)
    want = -gaussian_nll_loss(f[:, :2], y, f[:, 2:].exp(), full=True, reduction="none").sum(-1)
    torch.testing.assert_close(likelihood.log_prob(f, likelihood.targets(f, y)), want)


def test_extreme_precisions_stay_finite():
    f = torch.tensor([[1.0, -80.0], [1.0, 80.0], [0.0, -200.0]])
    for parametrization in ("natural", "mean"):
        likelihood = HeteroscedasticGaussian(parametrization)
        for value in (likelihood.factor(f[:2]), likelihood.log_prob(f[:2], torch.ones(2, 1))):
            assert value.isfinite().all()
    assert HeteroscedasticGaussian().factor(f[2:]).isfinite().all()


def test_heteroscedastic_shapes():
    likelihood = HeteroscedasticGaussian()
    with pytest.raises(BadData, match="even last dimension"):
        likelihood.outputs(data(5, 3))
    with pytest.raises(BadData, match=r"\(5, 2\).*\(5, 1\) or \(5,\)"):
        likelihood.targets(data(5, 2), data(5, 2))
    with pytest.raises(BadData, match='"natural"'):
        HeteroscedasticGaussian("variance")


def test_heteroscedastic_natural_where_the_posterior_reaches_infinite_noise() -> None:
    """p(y) = ∫ N(ρ) N(y; m'/s, r/s² + 1/s) dρ with s = softplus ρ, which underflows at many of these ρ."""
    mean, covariance = torch.tensor([-300.0, 500.0]).double(), torch.tensor([[2e4, -1e4], [-1e4, 1.6e6]]).double()
    y = torch.tensor([-0.4]).double()
    x = torch.linspace(-12, 12, 400_001).double()
    log_weights = torch.distributions.Normal(0.0, 1.0).log_prob(x) + math.log(24 / 400_000)
    step, slope = covariance[1, 1].sqrt() * x, covariance[0, 1] / covariance[1, 1]
    s, center, rest = softplus(mean[1] + step), mean[0] + slope * step, covariance[0, 0] - slope * covariance[0, 1]
    each = s.log() - ((rest + s).log() + (y * s - center).square() / (rest + s) + math.log(2 * math.pi)) / 2
    found = HeteroscedasticGaussian().marginal(GaussianFunction(mean[None], covariance[None]))
    assert found.log_prob(y[None]).item() == pytest.approx((log_weights + each).logsumexp(0).item(), abs=0.02)
    assert all(torch.isfinite(part).all() for part in (found.mean, found.aleatoric, found.epistemic))


def natural_moments(rho: float, spread: float) -> tuple[torch.Tensor, ...]:
    """Mean, aleatoric and epistemic variance of y for f₁ ~ N(1 + 0.3(ρ − ρ̄), 0.2²), by a fine quadrature over ρ."""
    x = torch.linspace(-14, 14, 200_001).double()
    weights = torch.distributions.Normal(0.0, 1.0).log_prob(x).exp() * (28 / 200_000)
    noise = 1 / softplus(rho + spread * x)
    center = noise * (1.0 + 0.3 * spread * x)
    mean = (weights * center).sum()
    return mean, (weights * noise).sum(), (weights * (noise.square() * 0.04 + (center - mean).square())).sum()


def natural_function(rho: float, spread: float) -> GaussianFunction:
    covariance = torch.tensor([[0.09 * spread**2 + 0.04, 0.3 * spread**2], [0.3 * spread**2, spread**2]]).double()
    return GaussianFunction(torch.tensor([[1.0, rho]]).double(), covariance[None])


def natural_width(rho: float, spread: float) -> float:
    """Width of the central 95 % interval of y, from a fine quadrature over ρ and bisection in y."""
    x = torch.linspace(-14, 14, 20_001).double()
    weights = torch.distributions.Normal(0.0, 1.0).log_prob(x).exp() * (28 / 20_000)
    noise = 1 / softplus(rho + spread * x)
    law = torch.distributions.Normal(noise * (1.0 + 0.3 * spread * x), (noise.square() * 0.04 + noise).sqrt())
    ends = []
    for level in (0.025, 0.975):
        low, high = -50.0, 50.0  # y = sinh t
        for _ in range(60):
            middle = (low + high) / 2
            below = (weights * law.cdf(torch.tensor(math.sinh(middle)).double())).sum() < level
            low, high = (middle, high) if below else (low, middle)
        ends.append(math.sinh(low))
    return ends[1] - ends[0]


@pytest.mark.parametrize(
    ("rho", "spread"),
    [(-3.0, 0.3), (-3.0, 1.2), (-3.0, 1.99), (0.0, 1.2), (0.0, 2.0), (5.0, 2.0), (5.0, 3.0), (20.0, 2.5), (20.0, 8.0)],
)
def test_natural_moments_are_exact_unless_they_exceed_the_interval(rho: float, spread: float) -> None:
    """Exact while the standard deviation is at most the width of the 95 % interval, else that width."""
    found = HeteroscedasticGaussian().marginal(natural_function(rho, spread))
    expected, width = natural_moments(rho, spread), natural_width(rho, spread)
    deviation = (found.aleatoric + found.epistemic).sqrt().item()
    interval = (found.quantile(0.975) - found.quantile(0.025)).item()
    assert interval == pytest.approx(width, rel=1e-3)
    assert deviation <= interval * (1 + 1e-9)
    if (expected[1] + expected[2]).sqrt() < width:
        for value, wanted in zip((found.mean, found.aleatoric, found.epistemic), expected, strict=True):
            assert value.item() == pytest.approx(wanted.item(), rel=1e-5)
    else:
        assert deviation == pytest.approx(interval, rel=1e-6)


def test_moments_of_many_outputs_are_limited_one_by_one() -> None:
    """A wide output in a batch changes nothing for the others, in single and double precision."""
    cases = [(-3.0, 0.3), (20.0, 8.0), (5.0, 3.0), (5.0, 2.0)]
    each = [natural_function(*case) for case in cases]
    alone = [HeteroscedasticGaussian().marginal(function) for function in each]
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-4)):
        mean, covariance = (torch.cat(part).to(dtype) for part in zip(*((f.mean, f.covariance) for f in each)))
        together = HeteroscedasticGaussian().marginal(GaussianFunction(mean, covariance))
        for name in ("mean", "aleatoric", "epistemic"):
            wanted = torch.cat([getattr(one, name) for one in alone]).to(dtype)
            torch.testing.assert_close(getattr(together, name), wanted, rtol=tolerance, atol=tolerance)


def test_moments_of_a_wide_variance_in_mean_parameters_stay_within_the_interval() -> None:
    """E[exp(log σ²)] over N(0, s²) is e^(s²/2): the law of y is a scale mixture whose interval grows like e^s."""
    for spread, exact in ((1.0, True), (6.0, False), (60.0, False)):  # at 60, E[σ²] is no float64
        covariance = torch.diag(torch.tensor([0.01, spread**2]).double())
        found = HeteroscedasticGaussian("mean").marginal(GaussianFunction(torch.zeros(1, 2).double(), covariance[None]))
        width = (found.quantile(0.975) - found.quantile(0.025)).item()
        total = (found.aleatoric + found.epistemic).item()
        assert total <= width**2 * (1 + 1e-9)
        assert math.isfinite(total)
        assert not exact or total == pytest.approx(math.exp(spread**2 / 2) + 0.01, rel=1e-6)


@pytest.mark.parametrize("rho", [-10.0, -3.0, 0.0, 5.0, 20.0])
@pytest.mark.parametrize("spread", [10.0, 1e3])
def test_natural_moments_stay_bounded_where_the_noise_is_not_known(rho: float, spread: float) -> None:
    """They are those at the widest spread of ρ with E[σ⁴] ≤ e⁸ σ⁴."""
    likelihood = HeteroscedasticGaussian()
    found = likelihood.marginal(natural_function(rho, spread))
    plugged = 1 / softplus(torch.tensor(rho).double())
    assert plugged <= found.aleatoric.item() <= 8 * plugged
    assert abs(found.mean.item()) <= 30 * plugged * (1 + 0.3 * abs(rho))


def test_natural_moments_are_continuous_at_the_limit() -> None:
    likelihood = HeteroscedasticGaussian()
    low, high = 0.5, 2.5  # of the spread of ρ at which the standard deviation reaches the interval
    for _ in range(30):
        middle = (low + high) / 2
        exceeds = (sum(natural_moments(-8.0, middle)[1:]) ** 0.5).item() > natural_width(-8.0, middle)
        low, high = (low, middle) if exceeds else (middle, high)
    below, above = (likelihood.marginal(natural_function(-8.0, low + e)) for e in (-1e-2, 1e-2))
    assert 1.0 < low < 2.0
    assert above.aleatoric.item() == pytest.approx(below.aleatoric.item(), rel=0.05)
    assert above.epistemic.item() == pytest.approx(below.epistemic.item(), rel=0.2)


@pytest.mark.parametrize("noise", ["2", "loud", object(), [1.0, "x"]])
def test_a_noise_that_is_no_number_is_refused(noise) -> None:
    with pytest.raises(BadData, match="standard deviation"):
        Gaussian(noise)
