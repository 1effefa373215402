"""Deep ensembles: averages of probabilities, mixtures of densities, training from a factory."""

import pytest
import torch
from tests import dense
from torch import nn
from torch.distributions import Normal

import lapwing
from lapwing.baselines import DeepEnsemble, TemperatureScaled
from lapwing.errors import BadData


def test_probabilities_are_averages_and_densities_mixtures() -> None:
    models = [dense.build(lambda: nn.Linear(3, 4), seed=k) for k in range(3)]
    x, y = dense.randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    p = DeepEnsemble(models, "classification").predict(x)
    expected = torch.stack([model(x).softmax(-1) for model in models]).mean(0)
    assert torch.allclose(p.probs, expected)
    each = torch.stack([torch.special.entr(model(x).softmax(-1)).sum(-1) for model in models])
    assert torch.allclose(p.epistemic, torch.special.entr(expected).sum(-1) - each.mean(0))
    values = DeepEnsemble(models, lapwing.Gaussian(noise=0.5)).predict(x)
    t = dense.randn(5, 4)
    parts = torch.stack([Normal(model(x), 0.5).log_prob(t).sum(-1) for model in models])
    assert torch.allclose(values.log_prob(t), parts.logsumexp(0) - torch.tensor(3.0).log())
    assert torch.allclose(values.epistemic, torch.stack([m(x) for m in models]).var(0, correction=0))
    assert len(y) == len(p.label)


def test_fit_trains_members_that_differ() -> None:
    x = dense.randn(80, 2)
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    ensemble = DeepEnsemble.fit(
        lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double(),
        (x, y), "classification", members=2, epochs=30, rate=0.05, batch_size=20,
    )  # fmt: skip
    assert (ensemble.predict(x).label == y).double().mean() > 0.95
    assert not torch.equal(ensemble.models[0][0].weight, ensemble.models[1][0].weight)


def test_a_ridge_regression_is_trained_to_its_solution() -> None:
    x, y = dense.randn(40, 3), dense.randn(40, 1)
    prior, noise = 2.0, 0.7
    ensemble = DeepEnsemble.fit(
        lambda: nn.Linear(3, 1, bias=False).double(), (x, y), lapwing.Gaussian(noise=noise), members=1, epochs=400,
        rate=0.05, batch_size=40, prior=prior,
    )  # fmt: skip
    exact = torch.linalg.solve(x.T @ x / noise**2 + prior * torch.eye(3), x.T @ y / noise**2)
    assert torch.allclose(ensemble.models[0].weight.T, exact, atol=1e-6)


def test_evaluate_takes_baselines_beside_a_network() -> None:
    model = dense.build(lambda: nn.Linear(3, 4))
    x = dense.randn(30, 3)
    y = model(x).argmax(-1)
    scaled = TemperatureScaled(model, 2.0, lapwing.Categorical())
    assert torch.allclose(scaled.predict(x).probs, (model(x) / 2).softmax(-1))
    models = {"MAP": model, "ensemble": DeepEnsemble([model], "classification"), "scaled": scaled}
    report = lapwing.evaluate(models, (x, y), ood={"far": 5 * x})
    table = report.to_dict()
    assert "ensemble" in str(table)
    rows = report.table("accuracy", "nll").splitlines()
    assert rows[-3].split()[1:] == rows[-2].split()[1:]


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(BadData, match=r"nn\.Modules"):
        DeepEnsemble([], "classification")
    with pytest.raises(BadData, match=r"nn\.Modules"):
        DeepEnsemble([lambda x: x], "classification")  # type: ignore[list-item]
