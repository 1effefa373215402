"""Every likelihood obeys the laws of `lapwing.testing.LikelihoodLaws`, also one without any closed form."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import distributions as D

from lapwing.errors import LapwingError, UnsupportedOperation
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
from lapwing.storage import named
from lapwing.testing import LikelihoodLaws


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


class BrokenScore(Gaussian):
    def score(self, f, y):
        return (y - f) / self.sigma(f)


class BrokenFactor(Gaussian):
    def factor(self, f, y=None):
        return 2 * super().factor(f, y)


class BrokenShift(Gaussian):
    @property
    def shift_invariant(self):
        return True


class BrokenDraws(Gaussian):
    def sample_target(self, f, generator=None):
        return super().sample_target(f, None)


class BrokenMarginal(Gaussian):
    def marginal(self, f):
        return Gaussian(2 * self.noise).marginal(f)


@dataclass(frozen=True, eq=False)
class BrokenScaling(Likelihood):
    """Counts whose curvature does not scale with their dispersion, though they claim it."""

    alpha: float = 0.5
    dispersion_name = "alpha"

    def conditional(self, f):
        count = 1 / self.dispersion.to(f)
        return D.NegativeBinomial(count, logits=f[..., 0] - count.log())

    @property
    def dispersion(self):
        return torch.as_tensor(self.alpha, dtype=torch.float64)

    def with_dispersion(self, dispersion):
        return BrokenScaling(dispersion)


class TestCategorical(LikelihoodLaws):
    likelihood, outputs = Categorical(), 4


class TestGaussian(LikelihoodLaws):
    likelihood, outputs = Gaussian(0.3), 2


class TestGaussianPerOutput(LikelihoodLaws):
    likelihood, outputs = Gaussian([0.3, 0.6, 2.0]), 3


class TestBernoulli(LikelihoodLaws):
    likelihood, outputs = Bernoulli(), 3


class TestPoisson(LikelihoodLaws):
    likelihood, outputs = Poisson(), 2


class TestHeteroscedastic(LikelihoodLaws):
    likelihood, outputs = HeteroscedasticGaussian(), 4


class TestHeteroscedasticMean(LikelihoodLaws):
    likelihood, outputs = HeteroscedasticGaussian("mean"), 4


class TestBradleyTerry(LikelihoodLaws):
    likelihood, outputs = BradleyTerry(), 2


class TestOwnCategorical(LikelihoodLaws):
    likelihood, outputs = OwnCategorical(), 4


class TestOwnGamma(LikelihoodLaws):
    likelihood, outputs = OwnGamma(), 1


class TestOwnPoisson(LikelihoodLaws):
    likelihood, outputs = OwnPoisson(), 2


class TestOwnBinomial(LikelihoodLaws):
    likelihood, outputs = OwnBinomial(), 1


class TestOwnDispersed(LikelihoodLaws):
    likelihood, outputs = OwnDispersed(), 2


class TestOwnNegativeBinomial(LikelihoodLaws):
    likelihood, outputs = OwnNegativeBinomial(), 1


class TestOwnStudentT(LikelihoodLaws):
    likelihood, outputs = OwnStudentT(), 1


def test_no_family_is_left_out() -> None:
    tested = {type(case.likelihood) for case in LikelihoodLaws.__subclasses__()}
    assert {family for family in named(Likelihood).values() if family.__module__.startswith("lapwing.")} <= tested


@pytest.mark.parametrize(
    ("family", "law"),
    [
        (BrokenScore, "test_score_is_the_gradient"),
        (BrokenFactor, "test_factor_is_the_information"),
        (BrokenScaling, "test_another_dispersion_is_another_likelihood"),
        (BrokenShift, "test_what_it_claims_about_outputs"),
        (BrokenDraws, "test_draws_follow_the_generator"),
        (BrokenMarginal, "test_predictions_are_averages_over_f"),
    ],
)
def test_a_broken_likelihood_fails(family: type[Likelihood], law: str) -> None:
    case = type("Case", (LikelihoodLaws,), {"likelihood": family(0.5), "outputs": 1})
    with pytest.raises(AssertionError):
        getattr(case(), law)()


def test_files_name_the_likelihood() -> None:
    spec = json.loads(json.dumps(OwnGamma().spec()))
    with pytest.raises(LapwingError, match="Poisson"):
        likelihood_from_spec(spec, Poisson())
    spec = json.loads(json.dumps(Gaussian(0.3).spec()))
    assert likelihood_from_spec(spec, Gaussian(0.3)).spec() == spec
    with pytest.raises(LapwingError, match="registered"):
        likelihood_from_spec({"family": "Nobody"})


def make(likelihood, outputs, event=(), n=5):
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(n, *event, outputs, generator=generator, dtype=torch.float64)
    return f, likelihood.targets(f, likelihood.sample_target(f, generator))


def test_own_equals_builtin():
    """The defaults from `conditional` alone agree with the closed forms."""
    for mine, theirs, outputs in ((OwnCategorical(), Categorical(), 4), (OwnPoisson(), Poisson(), 2)):
        f, y = make(mine, outputs, (3,))
        y = theirs.targets(f, y)
        torch.testing.assert_close(mine.log_prob(f, y), theirs.log_prob(f, y))
        torch.testing.assert_close(mine.score(f, y), theirs.score(f, y))
        S, R = mine.factor(f), theirs.factor(f)
        torch.testing.assert_close(S @ S.mT, R @ R.mT)


def test_enumerated_root_is_the_information(monkeypatch):
    def no_divergence(p, q):
        raise NotImplementedError

    likelihood = OwnBinomial()
    f, _ = make(likelihood, 1)
    by_divergence = likelihood.factor(f)
    monkeypatch.setattr("lapwing.likelihoods.likelihood.kl_divergence", no_divergence)
    S = likelihood.factor(f)
    assert S.shape[-1] == 6
    torch.testing.assert_close(S @ S.mT, by_divergence @ by_divergence.mT)


def test_the_observed_hessian_needs_targets() -> None:
    for likelihood in (OwnNegativeBinomial(), OwnStudentT()):
        with pytest.raises(UnsupportedOperation, match="Pass y"):
            likelihood.factor(make(likelihood, 1)[0])


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
