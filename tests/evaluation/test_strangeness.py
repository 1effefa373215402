"""Scores of strangeness from the last layer, against scikit-learn and the published formulas."""

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance
from torch import nn

import lapwing
from lapwing import metrics
from lapwing.evaluation.scoring import Mahalanobis, energy, features_of, max_logit


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def test_features_are_the_inputs_of_the_last_layer() -> None:
    model, x = net(), torch.randn(7, 4)
    found = features_of(model, x)
    assert found is not None
    torch.testing.assert_close(found(x).float(), model[:2](x).detach())
    assert not model[2]._forward_pre_hooks


@pytest.mark.parametrize("dead", [False, True])
def test_mahalanobis_is_that_of_scikit_learn(dead: bool) -> None:
    model, x, y = net(), torch.randn(200, 4), torch.randint(3, (200,))
    if dead:  # a feature that is always zero makes the covariance singular
        with torch.no_grad():
            model[0].weight[0], model[0].bias[0] = 0.0, -1.0
    features = features_of(model, x)
    assert features is not None
    score = Mahalanobis.of(features, [(x[:150], y[:150]), (x[150:], y[150:])])
    a = features(x).numpy()
    means = np.stack([a[y.numpy() == c].mean(0) for c in range(3)])
    centered = a - means[y.numpy()]
    precision = EmpiricalCovariance(assume_centered=True).fit(centered).precision_  # as in the paper's own code
    new = torch.randn(30, 4)
    b = features(new).numpy()
    expected = np.min([np.einsum("ni,ij,nj->n", b - m, precision, b - m) for m in means], axis=0)
    np.testing.assert_allclose(score(new).numpy(), expected, rtol=1e-6)


def test_energy_and_maximum_logit() -> None:
    f = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(energy(f), -f.exp().sum(-1).log())
    torch.testing.assert_close(max_logit(f), -f.max(-1).values)


def test_they_are_columns_of_a_report() -> None:
    model, x, y, far = net(), torch.randn(60, 4), torch.randint(3, (60,)), 3 * torch.randn(30, 4)
    report = lapwing.evaluate({"MAP": model}, (x, y), ood={"far": far}, train=(x, y), likelihood="classification")
    row = report.row("MAP")
    f, g = model(x).detach(), model(far).detach()
    assert row["auroc_energy far"] == pytest.approx(metrics.auroc(energy(f), energy(g)).item())
    assert row["fpr95_maxlogit far"] == pytest.approx(metrics.fpr95(max_logit(f), max_logit(g)).item())
    features = features_of(model, x)
    assert features is not None
    score = Mahalanobis.of(features, [(x, y)])
    assert row["auroc_mahalanobis far"] == pytest.approx(metrics.auroc(score(x), score(far)).item())
    assert "auroc_epistemic far" not in row  # a network without a posterior has no doubt about its function
    assert "AUROC far by Mahalanobis" in report.table("auroc_mahalanobis far")


def test_they_are_left_out_where_nobody_asked_or_there_is_no_last_layer() -> None:
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    report = lapwing.evaluate({"MAP": net()}, (x, y), likelihood="classification", train=(x, y))
    assert list(report.results["MAP"].scores) == ["uncertainty"]
    bare = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    report = lapwing.evaluate({"MAP": bare}, (x, y), ood={"far": x}, likelihood="classification", train=(x, y))
    assert "auroc_energy far" in report.row("MAP")
    frozen = net().requires_grad_(False)
    assert features_of(frozen, x) is None
    values = lapwing.evaluate({"MAP": nn.Linear(4, 1)}, (x, torch.randn(30, 1)), ood={"far": x},
                              likelihood=lapwing.Gaussian(1.0), train=(x, torch.randn(30, 1)))  # fmt: skip
    assert list(values.results["MAP"].scores) == ["uncertainty"]


def test_a_layer_that_runs_twice_has_no_features() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.last(x))

    assert features_of(Twice(), torch.randn(5, 3)) is None


def test_epistemic_uncertainty_of_a_posterior_is_a_score() -> None:
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    la = lapwing.fit(net(), (x, y), "classification", structure="full")
    row = lapwing.evaluate({"Laplace": la}, (x, y), ood={"far": 4 * x}).row("Laplace")
    inside, outside = la.predict(x).epistemic, la.predict(4 * x).epistemic
    assert row["auroc_epistemic far"] == pytest.approx(metrics.auroc(inside, outside).item())


def test_a_network_without_such_a_layer_has_no_features() -> None:
    class Twice(nn.Module):
        """The last layer runs twice, so that its inputs are not the features of one item."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x).tanh())

    class Two(nn.Module):
        """The outputs come from two layers."""

        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) + self.right(x)

    x = torch.randn(4, 3)
    for model in (Twice(), Two(), nn.Conv1d(3, 2, 1)):
        assert features_of(model, x[..., None] if isinstance(model, nn.Conv1d) else x) is None


def test_training_data_that_do_not_fit_are_refused() -> None:
    model, x = net(), torch.randn(8, 4)
    features = features_of(model, x)
    assert features is not None
    with pytest.raises(lapwing.BadData, match=r"features of shape \(8, 6\) need one label per row, got \(4,\)"):
        Mahalanobis.of(features, [(x, torch.zeros(4, dtype=torch.long))])
    with pytest.raises(lapwing.BadData, match="hold no labeled item"):
        Mahalanobis.of(features, [(x, torch.full((8,), -100))])
