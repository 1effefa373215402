"""Links from logits to probabilities: formulas, exactness and where they are known to fail."""

import math

import pytest
import torch
from torch import nn

import lapwing
from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods import Bernoulli, BradleyTerry, Categorical, Gaussian
from lapwing.likelihoods.marginal import NormalMarginal
from lapwing.predictive import ClassLaw, GaussianFunction, SampledFunction, predict_targets, register_link


def make(c, n=6, scale=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, c, generator=generator, dtype=torch.float64)
    root = scale * torch.randn(n, c, c, generator=generator, dtype=torch.float64)
    return GaussianFunction(mean.to(dtype), (root @ root.mT).to(dtype))


def brute_force(function, n=400_000):
    f = function.sample(n, torch.Generator().manual_seed(3))
    return f.softmax(-1).mean(0)


@pytest.mark.parametrize("c", [3, 10])
def test_monte_carlo_is_close_to_brute_force(c):
    f = make(c, n=4, scale=0.7)
    torch.testing.assert_close(predict_targets(f, Categorical()).probs, brute_force(f, 60_000), rtol=0, atol=6e-3)


def test_fixed_points_beat_independent_draws():
    """At 1,024 points the fixed sequence errs less than a third of what independent draws do."""
    f = make(5)
    best = predict_targets(f, Categorical(), samples=2**17).probs
    fixed = (predict_targets(f, Categorical()).probs - best).square().mean().sqrt()
    draws = [f.sample(1024, torch.Generator().manual_seed(s)).softmax(-1).mean(0) for s in range(5)]
    errors = [(probs - best).square().mean() for probs in draws]
    assert fixed < torch.stack(errors).mean().sqrt() / 3


def test_probit_reads_only_the_variance():
    def never():
        raise AssertionError("the covariance was read")

    f = make(4)
    lazy = GaussianFunction(f.mean, never, variance=f.variance)
    p = predict_targets(lazy, Categorical(), link="probit")
    torch.testing.assert_close(p.probs, (f.mean / (1 + math.pi * f.variance / 8).sqrt()).softmax(-1))
    assert (p.aleatoric <= p.entropy).all()
    assert (p.epistemic >= 0).all()


def test_binary_probit_is_mackays():
    f = make(3)
    p = predict_targets(f, Bernoulli(), link="probit")
    torch.testing.assert_close(p.probs, torch.sigmoid(f.mean / (1 + math.pi * f.variance / 8).sqrt()))
    exact = predict_targets(f, Bernoulli()).probs
    assert 0 < (p.probs - exact).abs().max() < 0.02


@pytest.mark.parametrize("normalize", [False, True], ids=["bridge", "bridge_norm"])
def test_bridge_is_the_published_formula(normalize):
    """Item by item, with P = I − 11ᵀ/K: μ = P m, Σ = P V P, α_k = (1 − 2/K + e^{μ_k}/K² Σ e^{−μ_l}) / Σ_kk."""
    f, k = make(4), 4
    p = predict_targets(f, Categorical(), link="bridge_norm" if normalize else "bridge")
    project = torch.eye(k).double() - 1 / k
    for n in range(6):
        mu = project @ f.mean[n]
        variance = (project @ f.covariance[n] @ project).diagonal()
        if normalize:
            c = variance.mean() / math.sqrt(k / 2)
            mu, variance = mu / c.sqrt(), variance / c
        alpha = (1 - 2 / k + mu.exp() / k**2 * (-mu).exp().sum()) / variance
        law = torch.distributions.Dirichlet(alpha)
        torch.testing.assert_close(p.probs[n], law.mean)
        q = law.sample((20_000,))
        torch.testing.assert_close(p.aleatoric[n], -torch.special.xlogy(q, q).sum(-1).mean(), rtol=0, atol=0.02)


@pytest.mark.parametrize("link", ["mc", "bridge", "bridge_norm"])
def test_links_do_not_see_a_common_shift(link):
    """f + c and f + ε·(1, …, 1) have the same softmax; singular covariances are nothing special."""
    f = make(3)
    center = torch.eye(3).double() - 1 / 3
    clean = GaussianFunction(f.mean @ center, center @ f.covariance @ center)
    shifted = GaussianFunction(f.mean + 5, f.covariance)
    a, b = (predict_targets(g, Categorical(), link=link).probs for g in (clean, shifted))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-2 if link == "mc" else 1e-9)
    sharp = GaussianFunction(f.mean, torch.zeros(6, 3, 3).double())
    assert predict_targets(sharp, Categorical(), link="bridge").probs.isfinite().all()


def test_links_agree_where_all_is_certain():
    f = make(2, scale=0.02)
    want = f.mean.softmax(-1)
    for link in set(Categorical.links) - {"bridge_norm"}:  # which rescales means by their own certainty
        torch.testing.assert_close(predict_targets(f, Categorical(), link=link).probs, want, rtol=0, atol=2e-3)


def test_two_classes_are_a_sigmoid_of_the_difference():
    f = make(2)
    slope = torch.tensor([-1.0, 1.0]).double()
    difference = GaussianFunction(
        (f.mean @ slope)[:, None], variance=torch.einsum("i,nij,j->n", slope, f.covariance, slope)[:, None]
    )
    binary = predict_targets(difference, Bernoulli())
    for likelihood in (Categorical(), BradleyTerry()):
        p = predict_targets(f, likelihood)
        assert p.link == "quadrature"
        torch.testing.assert_close(p.probs[:, 1:], binary.probs)
        torch.testing.assert_close(p.epistemic, binary.epistemic)


@pytest.mark.parametrize("deviation", [0.0, 0.1, 1.0, 10.0, 30.0])
def test_binary_quadrature_is_nearly_exact(deviation):
    """Against two million points; logits of any spread, confident ones in log space."""
    mean = torch.tensor([[0.3], [-5.0], [12.0], [-60.0]], dtype=torch.float64)
    f = GaussianFunction(mean, variance=torch.full((4, 1), deviation**2, dtype=torch.float64))
    p = predict_targets(f, Bernoulli())
    x = torch.linspace(-12, 12, 2_000_001, dtype=torch.float64)
    log_w = (-x.square() / 2).log_softmax(0)
    for n in range(4):
        log_p = torch.nn.functional.logsigmoid(mean[n] + deviation * x)
        want = (log_p + log_w).logsumexp(0)
        tolerance = 1e-8 if deviation <= 10 else 1e-3
        torch.testing.assert_close(p.log_prob(torch.ones(4, 1))[n], want, rtol=tolerance, atol=1e-9)


def test_extremely_confident_logits_keep_their_tails():
    """p of 1e-30 and its logarithm survive float32."""
    mean = torch.tensor([[70.0, 0.0, 1.0]])
    p = predict_targets(GaussianFunction(mean, 1e-6 * torch.eye(3)[None]), Categorical())
    torch.testing.assert_close(p.log_prob([1]), torch.tensor([-70.0]), rtol=1e-4, atol=0)
    assert p.entropy.isfinite().all()
    assert p.probs.isfinite().all()
    far = predict_targets(GaussianFunction(torch.tensor([[400.0, 0.0, -300.0]]), torch.eye(3)[None]), Categorical())
    assert far.entropy == 0
    assert far.log_prob([2]).isfinite().all()


def test_impossible_links_are_named():
    with pytest.raises(UnsupportedOperation, match=r"Gaussian.*'exact', 'mc'"):
        predict_targets(make(2), Gaussian(), link="probit")
    with pytest.raises(UnsupportedOperation, match=r"Categorical with 3 outputs.*'mc', 'probit'"):
        predict_targets(make(3), Categorical(), link="quadrature")
    with pytest.raises(UnsupportedOperation, match="Bernoulli with 1 output, whose law is not Gaussian"):
        predict_targets(SampledFunction(None, torch.zeros(4, 3, 1)), Bernoulli(), link="quadrature")
    assert predict_targets(SampledFunction(None, torch.zeros(4, 3, 1)), Bernoulli()).link == "mc"


@register_link("plug-in", when=lambda function, likelihood: likelihood.softmax)
def plug_in(function, likelihood, samples, generator):
    log_probs = function.mean.log_softmax(-1)
    return ClassLaw(log_probs, lambda: -(log_probs.exp() * log_probs).sum(-1))


@register_link("loud", when=lambda function, likelihood: bool(likelihood.dispersion_name))
def loud(function, likelihood, samples, generator):
    noise = 4 * likelihood.dispersion.to(function.mean).expand(function.mean.shape)
    return NormalMarginal(function.mean, noise, function.variance, lambda: function.item_covariance)


def test_a_strangers_link_is_found_by_name() -> None:
    f = make(4)
    prediction = predict_targets(f, Categorical(), link="plug-in")
    torch.testing.assert_close(prediction.probs, f.mean.softmax(-1))
    torch.testing.assert_close(prediction.epistemic, torch.zeros(6, dtype=torch.float64))
    assert predict_targets(f, Categorical()).link == "mc"  # it is nobody's default
    with pytest.raises(UnsupportedOperation, match="'loud'"):
        predict_targets(f, Gaussian(0.1), link="plug-in")
    wide = predict_targets(make(1), Gaussian(0.5), link="loud")
    torch.testing.assert_close(wide.aleatoric, torch.ones(6, 1, dtype=torch.float64))


def test_a_strangers_link_predicts_and_is_tuned(tmp_path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = nn.Linear(2, 3), torch.randn(60, 2)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    la = lapwing.fit(model, (x, y), "classification", progress=False)
    torch.testing.assert_close(la.predict(x, link="plug-in").probs, model(x).softmax(-1).detach())
    tuned = la.tune((x, y), link="plug-in", learn=("prior",), rule="lowest")
    assert tuned.tuning.scores.max() - tuned.tuning.scores.min() < 1e-5  # it does not see the posterior
    tuned.save(tmp_path / "a.lapwing")
    again = lapwing.load(tmp_path / "a.lapwing", model)
    torch.testing.assert_close(again.predict(x, link="plug-in").probs, model(x).softmax(-1).detach())
