"""A network or data that contradict the likelihood are noticed at the fit: what was seen, and what to pass."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lapwing
from lapwing import BadData, HeteroscedasticGaussian


class Ending(nn.Module):
    """An MLP whose last layer is followed by a function."""

    def __init__(self, outputs, end):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))
        self.end = end

    def forward(self, x):
        return self.end(self.net(x))


def seeded(seed=0, n=40):
    torch.manual_seed(seed)
    return torch.randn(n, 3)


def fit(model, data, likelihood):
    return lapwing.fit(model, data, likelihood, structure="diag", progress=False)


def test_a_softmax_at_the_end():
    x = seeded()
    y = torch.randint(4, (40,))
    with pytest.warns(UserWarning, match=r"probabilities.*Return the logits") as seen:
        fit(Ending(4, lambda f: f.softmax(-1)), (x, y), "classification")
    assert len(seen) == 1
    assert seen[0].filename == __file__
    fit(Ending(4, lambda f: f), (x, y), "classification")  # warnings are errors here


def test_images_with_a_softmax_over_the_channels():
    x = torch.rand(6, 1, 4, 4)
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Softmax(1))
    with pytest.warns(UserWarning, match="softmax"):
        fit(net, [(x, torch.randint(3, (6, 4, 4)))], lapwing.Categorical(class_dim=1))


def test_log_probabilities_are_noted_and_predict_like_logits():
    x = seeded()
    y = torch.randint(4, (40,))
    plain, ended = Ending(4, lambda f: f), Ending(4, lambda f: f.log_softmax(-1))
    ended.load_state_dict(plain.state_dict())
    la, logs = (
        lapwing.fit(model.double(), (x.double(), y), "classification", structure="full") for model in (plain, ended)
    )
    assert "log-probabilities" in logs.summary()
    assert "log-probabilities" not in la.summary()
    torch.testing.assert_close(logs.curvature.dense(), la.curvature.dense())
    torch.testing.assert_close(logs.predict(x.double()).probs, la.predict(x.double()).probs, rtol=0, atol=2e-3)


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_sigmoid_at_the_end(outputs):
    x = seeded()
    model = Ending(outputs, torch.sigmoid)
    with torch.no_grad():
        model.net[2].weight.mul_(8)
        y = (model(x) > 0.5).float()
    with pytest.warns(UserWarning, match="sigmoid"):
        fit(model, (x, y), "binary")
    model.end = lambda f: f
    fit(model, (x, y), "binary")


def test_logits_between_zero_and_one_are_no_sigmoid():
    x = seeded()
    fit(Ending(1, lambda f: 0.5 + 0.1 * f.tanh()), (x, torch.ones(40)), "binary")


def test_rates_instead_of_log_rates():
    x = seeded()
    model = Ending(1, lambda f: 4 * F.softplus(f) + 1)
    with torch.no_grad():
        y = torch.poisson(model(x))
    with pytest.warns(UserWarning, match="logarithm of the rate"):
        fit(model, (x, y), "counts")
    model.end = lambda f: (4 * F.softplus(f) + 1).log()
    fit(model, (x, y), "counts")


def moments(x):
    """μ and σ of data that no network here has to learn."""
    return 20 + 10 * x[:, :1], 0.1 * (1 + x[:, 1:2].abs())


class Moments(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.scale = nn.Linear(1, 1)
        with torch.no_grad():
            self.scale.weight.fill_(1.0)
            self.scale.bias.zero_()
        self.form = form

    def forward(self, x):
        mean, deviation = moments(x)
        return self.form(self.scale(mean), deviation)


def natural(mean, deviation):
    precision = deviation**-2
    return (
        torch.cat([mean * precision, torch.expm1(precision).log()], -1)
        if precision.max() < 80
        else torch.cat([mean * precision, precision], -1)
    )  # the inverse of softplus


FORMS = {
    "natural": natural,
    "mean": lambda m, s: torch.cat([m, 2 * s.log()], -1),
    "deviation": lambda m, s: torch.cat([m, s], -1),
    "variance": lambda m, s: torch.cat([m, s**2], -1),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parametrization", ["natural", "mean"])
def test_parameters_of_a_normal_in_another_form(form, parametrization):
    x = seeded()
    mean, deviation = moments(x)
    y = mean + deviation * torch.randn(40, 1)
    model = Moments(FORMS[form])
    likelihood = HeteroscedasticGaussian(parametrization)
    if form == parametrization:
        fit(model, (x, y), likelihood)
        return
    what = {"natural": r"η₁, ρ", "mean": r"μ, log σ²", "deviation": r"\(μ, σ\)", "variance": r"\(μ, σ²\)"}[form]
    with pytest.warns(UserWarning, match=f"far better as .*{what}"):
        fit(model, (x, y), likelihood)


def test_a_mean_and_a_deviation_in_a_tuple():
    x = seeded()
    y = torch.randn(40, 1)
    with pytest.warns(UserWarning, match=r"2 tensors of shape .*only the first is used.*log_variance") as seen:
        la = fit(Ending(1, lambda f: (f, f.exp())), (x, y), "regression")
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.predict(x)  # once, at the fit
        la.tune()
        fit(Ending(1, lambda f: (f, f.new_zeros(7))), (x, y), "regression")  # something else beside the outputs


def test_class_indices_under_a_regression():
    x = seeded()
    with pytest.raises(BadData, match=r'class indices\. Use likelihood="classification"'):
        fit(Ending(4, lambda f: f), (x, torch.randint(4, (40,))), "regression")


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "words"),
    [
        ("classification", 4, 1 + torch.arange(40).remainder(4), "pass y - 1"),
        ("classification", 4, torch.linspace(0, 3, 40), 'likelihood="regression"'),
        ("classification", 4, torch.arange(40).remainder(4).float(), r"use y.long\(\)"),
        ("binary", 1, 2.0 * torch.arange(40).remainder(2) - 1, r"pass \(y \+ 1\) / 2"),
        ("binary", 1, torch.arange(40).remainder(3).float(), "for more classes: Categorical"),
        ("counts", 1, torch.linspace(0, 3, 40), 'likelihood="regression"'),
        ("counts", 1, -torch.arange(40.0), 'likelihood="regression"'),
    ],
)  # fmt: skip
def test_targets_that_contradict_the_likelihood(likelihood, outputs, y, words):
    with pytest.raises(BadData, match=words):
        fit(Ending(outputs, lambda f: f), (seeded(), y), likelihood)
