"""The Prediction object: shapes outside, targets of every form, generators, and what is refused."""

import pytest
import torch

from lapwing.errors import BadData, UnsupportedOperation
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from lapwing.predictive import GaussianFunction, SampledFunction, predict_targets


def make(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(*shape, generator=generator, dtype=torch.float64)
    root = torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64)
    return GaussianFunction(mean, root @ root.mT)


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), Poisson(), Bernoulli()], ids=lambda x: type(x).__name__)
def test_a_network_of_one_number_keeps_the_shape_of_its_targets(likelihood):
    """The network returned (B,): (B, 1) inside, (B,) outside."""
    f = make(5, 1)
    wide, flat = (predict_targets(f, likelihood, scalar=scalar) for scalar in (False, True))
    values = ["variance", "stddev", "total", "aleatoric", "epistemic"]
    for name in ["mean", *(["probs", "label", "confidence"] if type(likelihood) is Bernoulli else values)]:
        assert getattr(wide, name).shape == (5, 1)
        assert torch.equal(getattr(flat, name), getattr(wide, name)[:, 0])
    assert flat.entropy.shape == wide.entropy.shape == flat.epistemic.shape == (5,)
    assert flat.sample(3).shape == (3, 5)
    assert flat.function.mean.shape == (5, 1)
    y = flat.sample(1)[0]
    torch.testing.assert_close(flat.log_prob(y), wide.log_prob(y[:, None]))
    assert flat.log_prob(y).shape == (5,)
    if type(likelihood) is not Bernoulli:
        assert [bound.shape for bound in flat.interval()] == [(5,), (5,)]


def test_targets_of_every_form():
    f = make(4, 3)
    p = predict_targets(f, Categorical())
    y = torch.tensor([0, 2, -100, 1])
    log_probs = p.probs.log()
    want = torch.stack([log_probs[0, 0], log_probs[1, 2], torch.tensor(0.0).double(), log_probs[3, 1]])
    torch.testing.assert_close(p.log_prob(y), want)
    soft = torch.tensor([[0.2, 0.3, 0.5]] * 4)
    torch.testing.assert_close(p.log_prob(soft), (soft * log_probs).sum(-1))
    torch.testing.assert_close(p.log_prob(torch.eye(3)[[0, 2, 1, 1]]), p.log_prob(torch.tensor([0, 2, 1, 1])))
    with pytest.raises(BadData, match="target 3 at index"):
        p.log_prob(torch.tensor([0, 1, 2, 3]))
    with pytest.raises(BadData, match=r"\(3,\).*\(4, 3\)"):
        p.log_prob(torch.tensor([0, 1, 2]))


def test_segmentation():
    likelihood = Categorical(class_dim=1)
    raw = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = likelihood.outputs(raw)
    p = predict_targets(GaussianFunction(mean, 0.1 * torch.eye(3).double().expand(*mean.shape, 3)), likelihood)
    assert p.probs.shape == (2, 4, 5, 3)
    assert p.entropy.shape == p.label.shape == p.epistemic.shape == (2, 4, 5)
    y = torch.zeros(2, 4, 5, dtype=torch.long)
    torch.testing.assert_close(p.log_prob(y), p.probs[..., 0].log())
    assert p.sample(2).shape == (2, 2, 4, 5)


def test_several_labels_share_one_function():
    """Perfectly correlated logits: p(1, 1) is far above p(1)·p(1); soft labels use each label's own law."""
    mean = torch.zeros(1, 2, dtype=torch.float64)
    p = predict_targets(GaussianFunction(mean, 25 * torch.ones(1, 2, 2).double()), Bernoulli())
    torch.testing.assert_close(p.probs, torch.full((1, 2), 0.5).double())
    both = p.log_prob(torch.ones(1, 2)).exp()
    one = predict_targets(GaussianFunction(mean[:, :1], variance=torch.full((1, 1), 25.0).double()), Bernoulli())
    square = one.function.points(4096).sigmoid().square().mean()
    torch.testing.assert_close(both[0], square, rtol=0.02, atol=0)
    assert both > 0.35
    soft = p.log_prob(torch.full((1, 2), 0.5))
    torch.testing.assert_close(soft, 2 * torch.tensor([0.5]).double().log())


def test_a_generator_changes_the_draws_once():
    """Results follow the seed of the generator, not the order in which they are asked for."""
    f = make(4, 3)

    def build(seed):
        return predict_targets(f, Categorical(), generator=torch.Generator().manual_seed(seed))

    one, two, other = build(0), build(0), build(1)
    first = one.aleatoric
    assert torch.equal(two.probs, one.probs)
    assert torch.equal(two.aleatoric, first)
    assert not torch.equal(other.probs, one.probs)
    torch.testing.assert_close(other.probs, one.probs, rtol=0, atol=0.1)


def test_samples_count():
    f = make(4, 3)
    few, many = (predict_targets(f, Categorical(), samples=n).probs for n in (8, 1024))
    assert not torch.allclose(few, many, atol=1e-3)
    torch.testing.assert_close(few, many, rtol=0, atol=0.2)


def test_novelty_is_lazy():
    calls = []
    p = predict_targets(make(3, 2), Gaussian(), novelty=lambda: calls.append(1) or torch.arange(3.0))
    assert not calls
    assert p.novelty is p.novelty
    assert calls == [1]
    assert torch.equal(predict_targets(make(3, 2), Gaussian(), novelty=torch.ones(3)).novelty, torch.ones(3))
    with pytest.raises(UnsupportedOperation, match="novelty"):
        _ = predict_targets(make(3, 2), Gaussian()).novelty


def test_missing_fields_say_where_they_live():
    with pytest.raises(AttributeError, match=r"\.probs is for classification; a prediction of Gaussian has"):
        _ = predict_targets(make(3, 2), Gaussian()).probs
    with pytest.raises(AttributeError, match=r"\.interval is for regression"):
        predict_targets(make(3, 2), Categorical()).interval(0.9)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = predict_targets(make(3, 2), Categorical()).nonsense
    assert not hasattr(predict_targets(make(3, 2), Poisson()), "probs")


def test_joint_predictions_keep_each_items_law():
    """Per-item fields ignore correlation over inputs, draws have it."""
    generator = torch.Generator().manual_seed(0)
    jacobian = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    mean = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    covariance = torch.einsum("ncp,mdp->ncmd", jacobian, jacobian)
    for likelihood in (Gaussian(0.1), Categorical(), HeteroscedasticGaussian()):
        joint = predict_targets(GaussianFunction(mean, covariance, joint=True), likelihood)
        alone = predict_targets(GaussianFunction(mean, jacobian @ jacobian.mT), likelihood)
        y = alone.sample(1)[0]
        for name in ("mean", "entropy", "total", "epistemic"):
            torch.testing.assert_close(getattr(joint, name), getattr(alone, name))
        torch.testing.assert_close(joint.log_prob(y), alone.log_prob(y))
    draws = predict_targets(GaussianFunction(mean, covariance, joint=True), Gaussian(0.1)).sample(
        40_000, torch.Generator().manual_seed(0)
    )
    want = covariance.reshape(6, 6) + 0.01 * torch.eye(6).double()
    torch.testing.assert_close(draws.reshape(-1, 6).T.cov(), want, rtol=0.05, atol=0.15)


def test_gaussian_reads_no_covariance_for_moments():
    def never():
        raise AssertionError("the covariance was read")

    f = make(3, 2)
    p = predict_targets(GaussianFunction(f.mean, never, variance=f.variance), Gaussian(0.5))
    torch.testing.assert_close(p.variance, f.variance + 0.25)
    p.interval()
    with pytest.raises(AssertionError, match="was read"):
        p.log_prob(torch.zeros(3, 2))


def test_many_classes_are_predicted_from_weight_draws():
    """A thousand classes: no K × K covariance is formed, and blocks keep memory small."""

    def sampler(n, generator):
        return mean + 0.5 * torch.randn(n, 1, 1000, generator=generator)

    mean = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    p = predict_targets(GaussianFunction(mean, sampler=sampler), Categorical(), samples=256)
    torch.testing.assert_close(p.probs.sum(-1), torch.ones(2))
    assert (p.epistemic > 0).all()


def test_half_precision_outputs():
    mean = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    f = GaussianFunction(Categorical().outputs(mean.bfloat16()), torch.eye(4).expand(3, 4, 4))
    assert predict_targets(f, Categorical()).probs.dtype == torch.float32


@pytest.mark.parametrize("points", [1, 50])
def test_intervals_of_counts_from_few_points_of_f(points):
    """A network without a posterior, or a small ensemble: quantiles of Poisson by adding up its probabilities."""
    rates = torch.tensor([0.7, 4.0, 30.0], dtype=torch.float64)
    f = rates.log()[None, :, None].expand(points, -1, -1)
    p = predict_targets(SampledFunction(None, f), Poisson())
    lower, upper = p.interval(0.9)
    counts = torch.arange(100, dtype=torch.float64)
    mass = (counts * rates.log()[:, None] - rates[:, None] - torch.lgamma(counts + 1)).exp().cumsum(1)
    for bound, level in ((lower, 0.05), (upper, 0.95)):
        exact = (mass >= level).int().argmax(1).double()
        assert ((bound[:, 0] - exact).abs() <= 1).all()  # one count: the quantile of 1,024 draws
    assert (upper > lower).all()
    several = predict_targets(SampledFunction(None, torch.cat([f, f], -1)), Poisson())  # no quadrature for two outputs
    log_mass = mass.diff(dim=1, prepend=torch.zeros(3, 1)).clamp(min=1e-300).log()
    entropy = -(log_mass.exp() * log_mass).sum(1)
    torch.testing.assert_close(several.entropy, 2 * entropy, rtol=0.1, atol=0.1)
