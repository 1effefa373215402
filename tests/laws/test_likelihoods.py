"""Laws every likelihood obeys, checked against autograd, enumeration, quadrature and torch's own distributions."""

import copy
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import distributions as D

from lapwing.errors import BadData, LapwingError, UnsupportedOperation
from lapwing.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    likelihood_from_spec,
    resolve_likelihood,
)


@dataclass(frozen=True, eq=False)
class OwnCategorical(Likelihood):
    def conditional(self, f):
        return D.Categorical(logits=f)


@dataclass(frozen=True, eq=False)
class OwnGamma(Likelihood):
    shape: float = 2.0

    def conditional(self, f):
        return D.Gamma(self.shape, (-f[..., 0]).exp())


@dataclass(frozen=True, eq=False)
class OwnPoisson(Likelihood):
    """Batch shape of f, not of the items: made independent over the outputs."""

    def conditional(self, f):
        return D.Poisson(f.exp())


@dataclass(frozen=True, eq=False)
class OwnDispersed(Likelihood):
    """A dispersion of its own: curvature is stored without it."""

    scale: float = 0.3

    def conditional(self, f):
        return D.Normal(f, torch.full_like(f, self.scale))

    @property
    def dispersion(self):
        return torch.tensor(self.scale**2, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class OwnBinomial(Likelihood):
    """KL of binomials is registered; used for enumeration by hiding it below."""

    def conditional(self, f):
        return D.Binomial(5, logits=f[..., 0])


@dataclass(frozen=True, eq=False)
class OwnNegativeBinomial(Likelihood):
    """Neither a KL divergence nor an enumerable support: the observed Hessian."""

    def conditional(self, f):
        return D.NegativeBinomial(3.0, logits=f[..., 0])


@dataclass(frozen=True, eq=False)
class OwnStudentT(Likelihood):
    def conditional(self, f):
        return D.StudentT(4.0, f[..., 0], 0.5)


# (likelihood, outputs C)
FAMILIES = {
    "categorical": (Categorical(), 4),
    "gaussian": (Gaussian(0.3), 2),
    "gaussian-per-output": (Gaussian([0.3, 0.6, 2.0]), 3),
    "bernoulli": (Bernoulli(), 3),
    "poisson": (Poisson(), 2),
    "heteroscedastic": (HeteroscedasticGaussian(), 4),
    "heteroscedastic-mean": (HeteroscedasticGaussian("mean"), 4),
    "bradley-terry": (BradleyTerry(), 2),
    "own-categorical": (OwnCategorical(), 4),
    "own-gamma": (OwnGamma(), 1),
    "own-poisson": (OwnPoisson(), 2),
    "own-binomial": (OwnBinomial(), 1),
    "own-dispersed": (OwnDispersed(), 2),
}
EVENTS = [(), (3,), (2, 3)]
OBSERVED = {"own-negative-binomial": (OwnNegativeBinomial(), 1), "own-student": (OwnStudentT(), 1)}
ALL = FAMILIES | OBSERVED
families = pytest.mark.parametrize("name", FAMILIES)
every = pytest.mark.parametrize("name", ALL)
events = pytest.mark.parametrize("event", EVENTS, ids=str)


def make(name, event=(), n=5, dtype=torch.float64, seed=0):
    """A likelihood, outputs f and targets y drawn from torch's own conditional."""
    likelihood, c = ALL[name]
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(n, *event, c, generator=generator, dtype=torch.float64).to(dtype)
    y = likelihood.sample_target(f, generator)
    return likelihood, f, likelihood.targets(f, y)


def outcomes(likelihood, f):
    """Targets and weights with Σ w g(y) = E[g(y) | f] for one item f (C,): enumeration or Gauss–Hermite."""
    law = likelihood.law(f[None])
    inner = law.base_dist if isinstance(law, D.Independent) else law
    if isinstance(inner, D.Normal):
        x, w = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(12))
        k = law.event_shape[0]
        grid = torch.cartesian_prod(*[x] * k).reshape(-1, k)
        weights = torch.cartesian_prod(*[w / w.sum()] * k).reshape(-1, k).prod(-1)
        return inner.mean + inner.stddev * grid, weights
    if isinstance(inner, D.Gamma):
        x, w = (torch.from_numpy(a) for a in np.polynomial.laguerre.laggauss(40))
        weights = w * x ** (inner.concentration.item() - 1)
        return x / inner.rate, weights / weights.sum()
    size = {D.Categorical: f.shape[-1], D.Bernoulli: 2, D.Binomial: 6}.get(type(inner), 80)
    values = torch.arange(size, dtype=torch.float64)
    if law.event_shape:
        y = torch.cartesian_prod(*[values] * law.event_shape[0]).reshape(-1, law.event_shape[0])
    else:
        y = values.long() if isinstance(inner, D.Categorical) else values
    return y, law.log_prob(y).exp()


def autograd_score(likelihood, f, y):
    f = f.detach().requires_grad_()
    return torch.autograd.grad(likelihood.law(f).log_prob(y).sum(), f)[0]


@every
@events
def test_log_prob_is_that_of_the_conditional(name, event):
    likelihood, f, y = make(name, event)
    assert likelihood.log_prob(f, y).shape == (5, *event)
    torch.testing.assert_close(likelihood.log_prob(f, y), likelihood.law(f).log_prob(y))


@every
@events
def test_score_is_the_gradient(name, event):
    likelihood, f, y = make(name, event)
    torch.testing.assert_close(likelihood.score(f, y), autograd_score(likelihood, f, y))


@families
def test_factor_is_the_fisher_information(name):
    """S Sᵀ = φ E[∇log p ∇log pᵀ] by enumeration or quadrature over y."""
    likelihood, f, _ = make(name)
    S = likelihood.factor(f)
    for n in range(len(f)):
        y, w = outcomes(likelihood, f[n])
        s = autograd_score(likelihood, f[n].expand(len(y), -1), y)
        fisher = likelihood.dispersion * (w[:, None] * s).T @ s
        torch.testing.assert_close(S[n] @ S[n].T, fisher, rtol=1e-6, atol=1e-8)


@families
def test_factor_is_the_expected_hessian(name):
    """S Sᵀ = φ E[−∇² log p], the other form of the information."""
    likelihood, f, _ = make(name)
    for n in range(2):
        y, w = outcomes(likelihood, f[n])

        def risk(g, y=y, w=w):
            return -(w * likelihood.law(g.expand(len(y), -1)).log_prob(y)).sum()

        hessian = likelihood.dispersion * torch.autograd.functional.hessian(risk, f[n])
        S = likelihood.factor(f[n : n + 1])[0]
        torch.testing.assert_close(S @ S.T, hessian, rtol=1e-6, atol=1e-8)


@families
@events
def test_factor_of_events_is_that_of_items(name, event):
    """Event dimensions and batches of one are no special case; the information does not depend on y."""
    likelihood, f, y = make(name, event)
    S = likelihood.factor(f, y)
    assert S.shape[:-1] == f.shape
    flat = f.reshape(-1, f.shape[-1])
    single = torch.cat([likelihood.factor(flat[i : i + 1]) for i in range(len(flat))])
    torch.testing.assert_close((S @ S.mT).reshape(-1, *S.shape[-2:-1] * 2), single @ single.mT)


@families
def test_sampled_factor_estimates_the_factor(name):
    likelihood, f, _ = make(name, n=2)
    generator = torch.Generator().manual_seed(1)
    s = likelihood.sample_factor(f[:, None].expand(-1, 40_000, -1), generator=generator)
    S = likelihood.factor(f)
    target = S @ S.mT
    estimate = s.mT @ s / s.shape[1]
    fourth = (s[..., :, None] * s[..., None, :]).var(1).sqrt() / math.sqrt(s.shape[1])
    assert ((estimate - target).abs() <= 5 * fourth + 1e-12).all()


@every
def test_draws_follow_the_generator(name):
    likelihood, f, _ = make(name, (3,))
    before = torch.get_rng_state()
    draws = [likelihood.sample_target(f, torch.Generator().manual_seed(s)) for s in (7, 7, 8)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(before, torch.get_rng_state())
    many = likelihood.sample_target(f[:1].expand(20_000, 3, -1), torch.Generator().manual_seed(3))
    law = likelihood.law(f[:1])
    if not isinstance(law, D.Categorical):
        error = (many.mean(0) - law.mean[0]).abs()
        assert (error <= 5 * law.stddev[0] / math.sqrt(20_000)).all()


@every
@events
def test_statistics_give_the_log_likelihood(name, event):
    likelihood, f, y = make(name, event)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0])
    item = likelihood.law(f).log_prob(y).reshape(5, -1).sum(1)
    total = likelihood.statistics(f, y)
    assert total.dtype == torch.float64
    assert total.ndim == 1
    torch.testing.assert_close(likelihood.log_likelihood(total), item.sum())
    weighted = likelihood.log_likelihood(likelihood.statistics(f, y, weights))
    torch.testing.assert_close(weighted, (weights * item).sum())
    parts = likelihood.statistics(f[:2], y[:2]) + likelihood.statistics(f[2:], y[2:])
    torch.testing.assert_close(parts, total)
    assert likelihood.count(f, y) == 5
    assert likelihood.count(f, y, weights) == 4.5


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_follows_outputs(name, dtype):
    likelihood, f, y = make(name, dtype=dtype)
    want = dtype if dtype in (torch.float64, torch.float32) else torch.float32
    assert likelihood.outputs(f).dtype == want
    for value in (likelihood.log_prob(f, y), likelihood.score(f, y), likelihood.factor(f, y)):
        assert value.dtype == want
        assert value.isfinite().all()
    assert likelihood.sample_factor(f, y, torch.Generator().manual_seed(0)).dtype == want
    assert likelihood.statistics(f, y).dtype == torch.float64


@every
def test_weights_are_one_a_sample(name):
    likelihood, f, y = make(name)
    with pytest.raises(BadData, match="one per sample"):
        likelihood.statistics(f, y, torch.ones(3))


@every
def test_targets_are_checked(name):
    likelihood, f, y = make(name)
    torch.testing.assert_close(likelihood.targets(f, y), y)
    with pytest.raises(BadData, match="shape"):
        likelihood.targets(f, y[:-1])
    with pytest.raises(BadData, match=r"nan at index"):
        likelihood.targets(f, torch.full(y.shape, torch.nan))
    broken = f.clone()
    broken[3, 0] = torch.inf
    with pytest.raises(BadData, match=r"outputs are not finite: inf at index \(3, 0\)"):
        likelihood.targets(broken, y)


@every
def test_spec_survives_json(name):
    likelihood, f, y = make(name)
    spec = json.loads(json.dumps(likelihood.spec()))
    if spec.get("own"):
        with pytest.raises(LapwingError, match="likelihood="):
            likelihood_from_spec(spec)
        with pytest.raises(LapwingError, match="Poisson"):
            likelihood_from_spec(spec, Poisson())
        assert likelihood_from_spec(spec, likelihood) is likelihood
        return
    again = likelihood_from_spec(spec)
    assert type(again) is type(likelihood)
    assert again.spec() == likelihood.spec()
    assert again.same_curvature(likelihood)
    torch.testing.assert_close(again.log_prob(f, y), likelihood.log_prob(f, y))
    assert likelihood_from_spec(spec, likelihood).spec() == spec


@every
def test_likelihoods_are_frozen(name):
    likelihood, _, _ = make(name)
    with pytest.raises(AttributeError):
        likelihood.noise = 3.0
    assert copy.deepcopy(likelihood).spec() == likelihood.spec()


def test_own_equals_builtin():
    """The defaults from `conditional` alone agree with the closed forms."""
    for own, ours in (("own-categorical", "categorical"), ("own-poisson", "poisson")):
        mine, f, y = make(own, (3,))
        theirs = ALL[ours][0]
        y = theirs.targets(f, y)
        torch.testing.assert_close(mine.log_prob(f, y), theirs.log_prob(f, y))
        torch.testing.assert_close(mine.score(f, y), theirs.score(f, y))
        S, R = mine.factor(f), theirs.factor(f)
        torch.testing.assert_close(S @ S.mT, R @ R.mT)


def test_enumerated_root_is_the_information(monkeypatch):
    def no_divergence(p, q):
        raise NotImplementedError

    likelihood, f, _ = make("own-binomial")
    by_divergence = likelihood.factor(f)
    monkeypatch.setattr("lapwing.likelihoods.likelihood.kl_divergence", no_divergence)
    S = likelihood.factor(f)
    assert S.shape[-1] == 6
    torch.testing.assert_close(S @ S.mT, by_divergence @ by_divergence.mT)


@pytest.mark.parametrize("name", OBSERVED)
def test_observed_hessian_where_nothing_else_is_known(name):
    likelihood, f, y = make(name, (3,))
    S = likelihood.factor(f, y)
    for index in np.ndindex(5, 3):
        hessian = torch.autograd.functional.hessian(
            lambda g, index=index: -likelihood.law(g[None]).log_prob(y[index][None]).sum(), f[index]
        )
        torch.testing.assert_close((S @ S.mT)[index], hessian.clamp(min=0))
    with pytest.raises(UnsupportedOperation, match="Pass y"):
        likelihood.factor(f)


def test_names_resolve():
    for name, family in {
        "classification": Categorical,
        "regression": Gaussian,
        "binary": Bernoulli,
        "counts": Poisson,
        "heteroscedastic": HeteroscedasticGaussian,
        "preference": BradleyTerry,
    }.items():
        assert type(resolve_likelihood(name)) is family
    likelihood = Gaussian(0.1)
    assert resolve_likelihood(likelihood) is likelihood
    with pytest.raises(LapwingError, match='"classification"'):
        resolve_likelihood("softmax")
