"""A prediction as a Python object: items, pickles, frames, quantiles, abstention, notebooks."""

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MixtureSameFamily, Normal
from torch.distributions import Poisson as PoissonLaw

import lapwing
from lapwing import metrics
from lapwing.errors import BadData, UnsupportedOperation
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from lapwing.predictive import GaussianFunction, Prediction, SampledFunction, predict_targets
from lapwing.predictive.mixture import mix

FIELDS = ("mean", "entropy", "epistemic", "aleatoric", "total", "uncertainty", "probs", "label", "confidence", "stddev")


def make(*shape: int, seed: int = 0) -> GaussianFunction:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(*shape, generator=generator, dtype=torch.float64)
    root = torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64) / 2
    return GaussianFunction(mean, root @ root.mT)


def net(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = {"classification": torch.arange(12) % 3, "regression": X[:, :2] ** 2}
ASKED: dict[str, dict[str, Any]] = {
    "all weights": {},
    "joint": {"joint": True},
    "forward-mode draws": {"link": "jvp"},
    "sampled": {"method": "sampled", "samples": 6},
    "seeded": {"generator": True},
}


def posterior(task: str, **options: Any) -> lapwing.Laplace:
    model = net(3 if task == "classification" else 2)
    return lapwing.fit(model, (X, TARGETS[task]), task, structure="full", **options)


def asked(la: lapwing.Laplace, **options: Any) -> Prediction:
    if options.get("generator"):
        options["generator"] = torch.Generator().manual_seed(3)
    return la.predict(X[:7], **options)


def every(p: Prediction) -> dict[str, Tensor]:
    found = {name: getattr(p, name) for name in FIELDS if hasattr(p, name)}
    return found | {"f": p.function.mean, "variance of f": p.function.variance, "novelty": p.novelty}


def made(name: str) -> tuple[Prediction, Tensor]:
    """Every kind of prediction, with targets."""
    if name == "mixture":
        parts = [predict_targets(make(7, 3, seed=k), Categorical(), novelty=torch.arange(7.0)) for k in range(3)]
        return mix(parts, torch.tensor([0.2, 0.3, 0.5])), torch.arange(7) % 3
    if name == "mixture of numbers":
        some = [predict_targets(make(7, 1, seed=k), Gaussian(0.3), novelty=torch.arange(7.0)) for k in range(2)]
        return mix(some, torch.tensor([0.25, 0.75])), torch.randn(7, 1).double()
    if name == "tokens":
        return predict_targets(make(7, 4, 3), Categorical(), novelty=torch.zeros(7, 4)), torch.arange(28).reshape(
            7, 4
        ) % 3
    likelihood: Any = {"labels": Bernoulli(), "counts": Poisson(), "varying noise": HeteroscedasticGaussian()}[name]
    p = predict_targets(make(7, 4), likelihood, novelty=torch.arange(7.0))
    return p, p.sample(1)[0]


MADE = ("mixture", "mixture of numbers", "tokens", "labels", "counts", "varying noise")
CASES = [*((task, how) for task in TARGETS for how in ASKED if (task, how) != ("regression", "forward-mode draws"))]


def prediction(task: str, how: str) -> tuple[Prediction, Tensor]:
    if task == "made":
        return made(how)
    if how == "last layer":
        return posterior(task, select="last_layer").predict(X[:7]), TARGETS[task][:7]
    return asked(posterior(task), **ASKED[how]), TARGETS[task][:7]


ALL = [*CASES, ("classification", "last layer"), ("regression", "last layer"), *(("made", name) for name in MADE)]


@pytest.mark.parametrize(("task", "how"), ALL)
def test_items_of_a_prediction_are_those_of_its_fields(task: str, how: str) -> None:
    p, y = prediction(task, how)
    assert len(p) == 7
    indices: tuple[Any, ...] = (2, -1, slice(2, 5), slice(None, None, -3), [4, 0], np.array([True, False] * 3 + [True]))
    for index in indices:
        rows = np.atleast_1d(np.arange(7)[index]).copy()
        part, want = p[index], every(p)
        assert len(part) == len(rows)
        for name, value in every(part).items():
            torch.testing.assert_close(value, want[name][rows], rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(part.log_prob(y[rows]), p.log_prob(y)[rows], rtol=1e-6, atol=1e-8)
    if p.function.joint:
        torch.testing.assert_close(p[2:4].function.covariance, p.function.covariance[2:4, :, 2:4])
    assert len(list(p)) == 7
    with pytest.raises(IndexError, match="out of range for a prediction of 7 items"):
        p[7]
    with pytest.raises(IndexError, match="a mask of shape"):
        p[torch.ones(3, dtype=torch.bool)]
    with pytest.raises(IndexError, match="chosen by a number"):
        p[torch.ones(3)]
    nothing = p[3:3]
    assert len(nothing) == 0
    for name, value in every(nothing).items():
        assert value.shape == (0, *every(p)[name].shape[1:])
    assert nothing.abstain(0.5).shape[0] == len(nothing.to_frame()) == 0


@pytest.mark.parametrize(("task", "how"), ALL)
@pytest.mark.parametrize("asked_before", [False, True], ids=["new", "asked"])
def test_pickles_hold_every_field(task: str, how: str, asked_before: bool) -> None:
    p, y = prediction(task, how)
    if asked_before:
        every(p)
    back = pickle.loads(pickle.dumps(p))
    assert type(back) is type(p)
    for name, value in every(back).items():
        torch.testing.assert_close(value, every(p)[name], rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(back.log_prob(y), p.log_prob(y), rtol=1e-6, atol=1e-8)
    if hasattr(p, "interval"):
        torch.testing.assert_close(back.interval(0.9), p.interval(0.9))
    part = pickle.loads(pickle.dumps(back[2:4]))
    torch.testing.assert_close(part.mean, p.mean[2:4], rtol=1e-6, atol=1e-8)
    assert len(pickle.dumps(p)) < 400_000  # without network and data, of which this is many times the size
    torch.testing.assert_close(copy.deepcopy(p).mean, p.mean)


def test_a_pickle_draws_from_the_law_of_each_item_or_refuses() -> None:
    p = pickle.loads(pickle.dumps(posterior("regression", select="last_layer").predict(X[:3])))
    drawn = p.function.sample(60_000)
    torch.testing.assert_close(drawn.mean(0), p.function.mean, rtol=0, atol=0.05)
    torch.testing.assert_close(drawn.var(0), p.function.variance, rtol=0.05, atol=1e-3)
    mean = torch.zeros(3, 2)
    function = GaussianFunction(mean, sampler=lambda n, generator: torch.randn(n, 3, 2, generator=generator))
    whole = predict_targets(function, Categorical())
    by_draws = pickle.loads(pickle.dumps(whole))
    torch.testing.assert_close(by_draws.probs, whole.probs)
    with pytest.raises(UnsupportedOperation, match="draw before pickling"):
        by_draws.sample(2)


def test_gradients_stay_behind() -> None:
    x = X[:3].clone().requires_grad_()
    p = posterior("classification").predict(x, differentiable=True)
    assert p[1].probs.requires_grad
    back = pickle.loads(pickle.dumps(p))
    assert not back.probs.requires_grad
    torch.testing.assert_close(back.probs, p.probs.detach())


def test_to_the_device_where_it_is() -> None:
    p = predict_targets(make(3, 2), Gaussian(0.1))
    assert p.to("cpu") is p
    buffer = io.BytesIO()
    torch.save(p, buffer)
    buffer.seek(0)
    back = torch.load(buffer, map_location="cpu", weights_only=False)
    torch.testing.assert_close(back.stddev, p.stddev)
    assert p.to("meta").mean.device.type == "meta"


LEVELS = (0.01, 0.3, 0.5, 0.95)


def test_quantiles_and_distribution_functions_of_a_gaussian() -> None:
    f = make(5, 2)
    p = predict_targets(f, Gaussian(0.3))
    law = Normal(f.mean, (f.variance + 0.09).sqrt())
    want = torch.stack([law.icdf(torch.tensor(q).double()) for q in LEVELS])
    torch.testing.assert_close(p.quantile(LEVELS), want)
    torch.testing.assert_close(p.quantile(np.array(LEVELS)), want)
    torch.testing.assert_close(p.quantile(0.3), want[1])
    y = f.mean + 0.1
    torch.testing.assert_close(p.cdf(y), law.cdf(y))
    torch.testing.assert_close(p.cdf(y.numpy()), law.cdf(y))
    torch.testing.assert_close(p.cdf(0.25), law.cdf(torch.tensor(0.25).double()))
    for wrong in (0.0, 1.0, -1.0, [0.5, 2.0], [], [[0.5]]):
        with pytest.raises(ValueError, match="probabilities between 0 and 1"):
            p.quantile(wrong)  # type: ignore[arg-type]
    with pytest.raises(BadData, match=r"y has shape \(5,\); expected \(5, 2\)"):
        p.cdf(torch.zeros(5))


def test_one_number_per_item() -> None:
    f = make(5, 1)
    flat, wide = (predict_targets(f, Gaussian(0.3), scalar=scalar) for scalar in (True, False))
    y = torch.linspace(-1, 1, 5).double()
    assert flat.quantile([0.2, 0.8]).shape == (2, 5)
    assert wide.quantile([0.2, 0.8]).shape == (2, 5, 1)
    torch.testing.assert_close(flat.cdf(y), wide.cdf(y[:, None])[:, 0])
    torch.testing.assert_close(wide.cdf(y), wide.cdf(y[:, None]))
    torch.testing.assert_close(flat.cdf(flat.quantile(0.2)), torch.full((5,), 0.2).double())


def test_quantiles_and_distribution_functions_of_mixtures() -> None:
    parts = [predict_targets(make(4, 1, seed=k), Gaussian(0.3)) for k in range(2)]
    p = mix(parts, torch.tensor([0.25, 0.75]))
    each = Normal(*(torch.cat([getattr(part, name) for part in parts], -1) for name in ("mean", "stddev")))
    weights = torch.distributions.Categorical(torch.tensor([0.25, 0.75]).double().expand(4, 2))
    law = MixtureSameFamily(weights, each)
    y = p.mean[:, 0] + 0.2
    torch.testing.assert_close(p.cdf(y)[:, 0], law.cdf(y))
    torch.testing.assert_close(law.cdf(p.quantile(0.3)[:, 0]), torch.full((4,), 0.3).double())


def test_counts_by_many_draws() -> None:
    f = make(3, 1)
    p = predict_targets(f, Poisson())
    rates = (
        f.mean + f.variance.sqrt() * torch.randn(200_000, 1, 1, generator=torch.Generator().manual_seed(0)).double()
    ).exp()
    for count in (0, 1, 3):
        want = PoissonLaw(rates).log_prob(torch.arange(count + 1.0).reshape(-1, 1, 1, 1).double()).exp().sum(0).mean(0)
        torch.testing.assert_close(p.cdf(float(count)), want, rtol=0, atol=5e-3)
        torch.testing.assert_close(p.cdf(count + 0.5), p.cdf(float(count)))


def test_a_law_without_a_distribution_function_uses_draws() -> None:
    class Counts(Poisson):
        def marginal(self, f: Any) -> None:
            return None

    f = make(3, 1)
    torch.testing.assert_close(
        predict_targets(f, Counts(), link="mc").cdf(1.0), predict_targets(f, Poisson()).cdf(1.0), rtol=0, atol=0.06
    )


def test_frames() -> None:
    pytest.importorskip("pandas")
    p = predict_targets(make(4, 3), Categorical(), novelty=torch.arange(4.0))
    frame = p.to_frame(novelty=True, index=list("abcd"))
    names = ["label", "confidence", "entropy", "epistemic", "probs_0", "probs_1", "probs_2", "novelty"]
    assert list(frame.columns) == names
    assert list(frame.index) == list("abcd")
    np.testing.assert_array_equal(frame[["probs_0", "probs_1", "probs_2"]].to_numpy(), p.probs.numpy())
    numbers = predict_targets(make(4, 1), Gaussian(0.3), scalar=True)
    assert list(numbers.to_frame().columns) == ["mean", "stddev", "epistemic", "aleatoric", "lower", "upper"]
    np.testing.assert_array_equal(numbers.to_frame(level=0.5)["upper"], numbers.interval(0.5)[1].numpy())
    tokens = predict_targets(make(2, 4, 3), Categorical()).to_frame()
    assert tokens.index.names == ["item", "position"]
    probs = predict_targets(make(2, 4, 3), Categorical()).probs
    assert tokens.loc[(1, 2), "probs_1"] == pytest.approx(float(probs[1, 2, 1]))
    assert predict_targets(make(2, 4, 4, 3), Categorical()).to_frame().index.names == [
        "item",
        "position_0",
        "position_1",
    ]
    assert list(predict_targets(make(2, 2), Gaussian(0.1)).to_frame().columns)[:2] == ["mean_0", "mean_1"]


@pytest.mark.parametrize("form", ["tensor", "array", "series with other labels", "list"])
def test_targets_in_any_form(form: str) -> None:
    y = torch.tensor([0, 2, 1, 1])
    p = predict_targets(make(4, 3), Categorical())
    given: Any = {"tensor": y, "array": y.numpy(), "list": y.tolist()}.get(form)
    if given is None:
        given = pytest.importorskip("pandas").Series(y.numpy(), index=[3, 2, 1, 0])
    torch.testing.assert_close(p.log_prob(given), p.log_prob(y))
    torch.testing.assert_close(metrics.rejection(p, given).risk, metrics.rejection(p, y).risk)


def test_abstaining_and_the_curve_behind_it() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.45, 0.55], [0.6, 0.4]]).double()
    p = predict_targets(SampledFunction(None, probs.log()[None]), Categorical())
    y = torch.tensor([0, 1, 1, 0, 0])  # right, wrong, right, wrong, right
    assert p.abstain(0.58).tolist() == [False, False, False, True, False]
    assert p.abstain(0.5, by="entropy").tolist() == [False, True, True, True, True]
    curve = metrics.rejection(p, y)
    torch.testing.assert_close(curve.share, torch.tensor([0.2, 0.4, 0.8, 1.0]).double())  # two items at 0.6
    torch.testing.assert_close(curve.risk, torch.tensor([0, 0, 1 / 4, 2 / 5]).double())
    torch.testing.assert_close(curve.accuracy, 1 - curve.risk)
    torch.testing.assert_close(curve.thresholds, torch.tensor([0.9, 0.8, 0.6, 0.55]).double())
    torch.testing.assert_close(curve.area, torch.tensor(0.4 * 0 + 0.4 / 4 + 0.2 * 2 / 5).double())
    threshold = curve.threshold(risk=0.3)
    assert p.abstain(threshold).tolist() == [False, False, False, True, False]
    assert "80.0%    0.7500" in curve.table()
    wrong = metrics.rejection(p, 1 - p.label)
    with pytest.raises(BadData, match=r"no threshold reaches a risk of 0\.1"):
        wrong.threshold(0.1)
    with pytest.raises(BadData, match="by='stddev': predictions of classes are judged by one of confidence, entropy"):
        p.abstain(0.5, by="stddev")
    with pytest.raises(BadData, match="threshold must be a number"):
        p.abstain("high")  # type: ignore[arg-type]
    ignored = metrics.rejection(p, torch.tensor([0, 1, 1, -100, 0]))
    assert ignored.share[-1] == 1
    assert ignored.risk[-1] == 1 / 4


def test_abstaining_of_numbers() -> None:
    mean, deviation = torch.zeros(3, 1), torch.tensor([[1.0], [3.0], [2.0]])
    p = predict_targets(GaussianFunction(mean, variance=deviation**2), Gaussian(1e-6), scalar=True)
    curve = metrics.rejection(p, torch.tensor([1.0, 5.0, 2.0]))
    torch.testing.assert_close(curve.risk, torch.tensor([1, (5 / 2) ** 0.5, 10**0.5]).double())
    torch.testing.assert_close(curve.thresholds, torch.tensor([1.0, 2.0, 3.0]).double())
    assert p.abstain(curve.threshold(1.6)).tolist() == [False, True, False]
    with pytest.raises(BadData, match="numbers have no accuracy"):
        _ = curve.accuracy


def test_notebooks_and_completion() -> None:
    p = predict_targets(make(20, 3), Categorical())
    page = p._repr_html_()
    assert page.count("<tr>") == 9
    assert "12 more rows" in page
    assert f"{float(p.probs[3, 1]):.4g}" in page
    assert "uncertainty" in predict_targets(make(2, 4, 3), Categorical())._repr_html_()
    assert {"probs", "interval", "to_frame", "abstain", "quantile"} <= set(dir(p))
    assert not any("__getattr__" in vars(kind) for kind in type(p).__mro__)
    assert len(repr(p)) < 100
