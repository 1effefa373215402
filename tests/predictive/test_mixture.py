"""Mixtures against Monte Carlo over members, closed forms and the laws of total entropy and variance."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from lapwing.errors import BadData, UnsupportedOperation
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from lapwing.predictive import GaussianFunction, Prediction, predict_targets
from lapwing.predictive.mixture import Mixture, mix
from lapwing.predictive.values import ValuePrediction

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def function(seed: int, outputs: int, n: int = 5) -> GaussianFunction:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(n, outputs, outputs, dtype=torch.float64, generator=generator)
    return GaussianFunction(
        torch.randn(n, outputs, dtype=torch.float64, generator=generator), root @ root.mT + 0.1 * torch.eye(outputs)
    )


@dataclass(frozen=True, eq=False)
class Member:
    """A stand-in for a Laplace object."""

    seed: int
    likelihood: Likelihood
    outputs: int
    evidence: float = 0.0

    def predict(self, x: Any, **options: Any) -> Prediction:
        return predict_targets(function(self.seed, self.outputs), self.likelihood, novelty=torch.ones(5), **options)

    def log_evidence(self) -> Tensor:
        return torch.tensor(self.evidence, dtype=torch.float64)

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        raise NotImplementedError


def members(likelihood: Likelihood, outputs: int) -> list[Member]:
    return [Member(seed, likelihood, outputs, float(-seed)) for seed in range(3)]


def test_classes() -> None:
    parts = [m.predict(None) for m in members(Categorical(), 4)]
    mixed = Mixture(members(Categorical(), 4), WEIGHTS).predict(None)
    probs = sum(w * part.probs for w, part in zip(WEIGHTS, parts))
    torch.testing.assert_close(mixed.probs, probs)
    torch.testing.assert_close(mixed.label, probs.argmax(-1))
    torch.testing.assert_close(mixed.confidence, probs.amax(-1))
    torch.testing.assert_close(mixed.total, -(probs * probs.log()).sum(-1))
    torch.testing.assert_close(mixed.aleatoric, sum(w * part.aleatoric for w, part in zip(WEIGHTS, parts)))
    torch.testing.assert_close(mixed.epistemic + mixed.aleatoric, mixed.total)
    inner = sum(w * part.epistemic for w, part in zip(WEIGHTS, parts))
    assert (mixed.epistemic >= inner - 1e-12).all()  # disagreement adds
    y = torch.tensor([0, 1, 2, 3, -100])
    torch.testing.assert_close(mixed.log_prob(y)[:4], probs[torch.arange(4), y[:4]].log())
    assert mixed.log_prob(y)[4] == 0
    soft = torch.rand(5, 4, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(mixed.log_prob(soft), (soft * probs.log()).sum(-1))
    draws = mixed.sample(20_000, torch.Generator().manual_seed(0))
    frequencies = torch.stack([(draws == c).double().mean(0) for c in range(4)], -1)
    torch.testing.assert_close(frequencies, probs, atol=0.02, rtol=0)
    torch.testing.assert_close(mixed.novelty, torch.ones(5, dtype=torch.float64), check_dtype=False)


def test_labels() -> None:
    parts = [m.predict(None) for m in members(Bernoulli(), 2)]
    mixed = Mixture(members(Bernoulli(), 2), WEIGHTS).predict(None)
    torch.testing.assert_close(mixed.probs, sum(w * part.probs for w, part in zip(WEIGHTS, parts)))
    torch.testing.assert_close(mixed.epistemic + mixed.aleatoric, mixed.total)


def test_values() -> None:
    likelihood = Gaussian(0.5)
    parts = [m.predict(None) for m in members(likelihood, 2)]
    mixed = Mixture(members(likelihood, 2), WEIGHTS).predict(None)
    assert isinstance(mixed, ValuePrediction)
    mean = sum(w * part.mean for w, part in zip(WEIGHTS, parts))
    torch.testing.assert_close(mixed.mean, mean)
    second = sum(w * (part.variance + part.mean**2) for w, part in zip(WEIGHTS, parts))
    torch.testing.assert_close(mixed.variance, second - mean**2)
    torch.testing.assert_close(mixed.aleatoric, torch.full((5, 2), 0.25, dtype=torch.float64))
    torch.testing.assert_close(mixed.total, mixed.aleatoric + mixed.epistemic)
    y = torch.randn(5, 2, dtype=torch.float64)
    density = 0.0
    for w, seed in zip(WEIGHTS, range(3)):
        f = function(seed, 2)
        normal = MultivariateNormal(f.mean, f.covariance + 0.25 * torch.eye(2).double())
        density = density + w * normal.log_prob(y).exp()
    torch.testing.assert_close(mixed.log_prob(y).exp(), density)
    draws = mixed.sample(100_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.mean(0), mean, atol=0.04, rtol=0)
    torch.testing.assert_close(draws.var(0), mixed.variance, rtol=0.03, atol=0)
    low, high = mixed.interval(0.9)
    for bound, level in ((low, 0.05), (high, 0.95)):
        below = (draws <= bound).double().mean(0)
        torch.testing.assert_close(below, torch.full_like(below, level), atol=0.004, rtol=0)
    assert mixed.entropy.shape == (5,)


def test_members_keep_their_own_noise() -> None:
    own = [Member(0, Gaussian(0.1), 2), Member(1, Gaussian(torch.tensor([0.2, 2.0])), 2), Member(2, Gaussian(0.5), 2)]
    mixed = Mixture(own, WEIGHTS).predict(None)
    noise = torch.tensor([[0.1, 0.1], [0.2, 2.0], [0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(mixed.aleatoric, (WEIGHTS @ noise.square()).expand(5, 2))
    y = torch.randn(5, 2, dtype=torch.float64)
    laws = []
    for k in range(3):
        f = function(k, 2)
        laws.append(MultivariateNormal(f.mean, f.covariance + noise[k].square().diag()))
    torch.testing.assert_close(mixed.log_prob(y).exp(), sum(w * law.log_prob(y).exp() for w, law in zip(WEIGHTS, laws)))
    draws = mixed.sample(100_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.var(0), mixed.variance, rtol=0.03, atol=0)
    torch.testing.assert_close(mixed[1:3].variance, mixed.variance[1:3])
    low, high = mixed.interval(0.9)
    inside = ((draws >= low) & (draws <= high)).double().mean(0)
    torch.testing.assert_close(inside, torch.full_like(inside, 0.9), atol=0.004, rtol=0)


def test_entropy_of_members_that_do_not_overlap() -> None:
    """H = Σ_k w_k (H_k − log w_k) where the members have nothing in common; here they differ in scale by 64."""
    eye, f = torch.eye(2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    parts = [predict_targets(GaussianFunction(100.0 * k * f, 0.1 * 4**k * eye[None]), Gaussian(0.5)) for k in range(4)]
    for weights in (torch.full((4,), 0.25), torch.tensor([0.1, 0.2, 0.3, 0.4])):
        expected = sum(w * (part.entropy - w.log()) for w, part in zip(weights.double(), parts))
        torch.testing.assert_close(mix(parts, weights.double()).entropy, expected, atol=0.05, rtol=0)


@pytest.mark.parametrize(("likelihood", "outputs"), [(HeteroscedasticGaussian(), 2), (Poisson(), 1)])
def test_intervals_of_members_without_a_closed_form(likelihood: Likelihood, outputs: int) -> None:
    mixed = Mixture(members(likelihood, outputs)).predict(None)
    low, high = mixed.interval(0.8)
    draws = mixed.sample(20_000, torch.Generator().manual_seed(0))
    inside = ((draws >= low) & (draws <= high)).double().mean(0)
    assert (inside > 0.77).all()
    assert (low < high).all()


def test_weights() -> None:
    three = members(Categorical(), 3)
    torch.testing.assert_close(Mixture(three).probabilities, torch.full((3,), 1 / 3).double())
    expected = torch.tensor([0.0, -1.0, -2.0]).double().softmax(0)
    torch.testing.assert_close(Mixture(three, "evidence").probabilities, expected)
    total = (torch.tensor([0.0, -1.0, -2.0]).double().exp() * WEIGHTS).sum().log()
    torch.testing.assert_close(Mixture(three, WEIGHTS).log_evidence(), total)
    with pytest.raises(UnsupportedOperation, match="not a prior"):
        Mixture(three, "evidence").log_evidence()
    alone = Mixture(three[:1]).predict(None)
    torch.testing.assert_close(alone.probs, three[0].predict(None).probs)
    zero = Mixture(three, torch.tensor([0.0, 1.0, 0.0])).predict(None)
    torch.testing.assert_close(zero.probs, three[1].predict(None).probs)


def test_refusals() -> None:
    with pytest.raises(BadData, match="at least one"):
        Mixture([])
    with pytest.raises(ValueError, match="'uniform'"):
        Mixture(members(Categorical(), 3), "best")
    with pytest.raises(ValueError, match="3 weights"):
        Mixture(members(Categorical(), 3), torch.ones(2))
    with pytest.raises(BadData, match="different likelihoods"):
        Mixture([Member(0, Gaussian(0.1), 2), Member(1, Poisson(), 2)]).predict(None)
    with pytest.raises(BadData, match="different things"):
        mix([Member(0, Categorical(), 2).predict(None), Member(0, Gaussian(), 2).predict(None)], torch.ones(2) / 2)
