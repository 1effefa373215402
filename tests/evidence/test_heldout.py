"""Held-out scores against plain Monte Carlo and dense posteriors: what `tune` scores is what `predict` gives."""

import itertools
from dataclasses import replace

import pytest
import torch

from lapwing.evidence import Groups, Setting, collect, heldout, linked
from lapwing.evidence.heldout import Nodes, class_log_prob
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.posterior import Tempered
from lapwing.predictive import GaussianFunction, predict_targets
from tests import dense
from tests.evidence.problems import mlp
from tests.evidence.test_search import held_out


@pytest.mark.parametrize("classes", [3, 10, 65])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_scores_are_those_of_predictions(classes: int, scale: float) -> None:
    n = 24
    mean = 3 * dense.randn(n, classes)
    factor = dense.randn(n, classes, 3, seed=1)
    covariance = scale * (torch.eye(classes, dtype=torch.float64) + factor @ factor.mT / 3)
    y = torch.randint(classes, (n,), generator=dense.seeded(2))
    found = class_log_prob(mean, covariance, y, Categorical(), 128)

    root = torch.linalg.cholesky(covariance).float()
    noise = torch.randn(20_000, classes, dtype=torch.float32, generator=dense.seeded(3))
    probs = torch.stack([(mean[k].float() + noise @ root[k].mT).softmax(-1).mean(0) for k in range(n)])
    truth = probs.gather(-1, y[:, None])[:, 0].log().double()
    assert (found.mean() - truth.mean()).abs() < 0.02
    predicted = predict_targets(GaussianFunction(mean, covariance), Categorical()).log_prob(y)
    assert (found.mean() - predicted.mean()).abs() < 0.02


def test_labels_that_do_not_count_score_nothing() -> None:
    mean, covariance = dense.randn(3, 4), torch.eye(4, dtype=torch.float64).expand(3, 4, 4)
    found = class_log_prob(mean, covariance, torch.tensor([0, -100, 3]), Categorical(), 64)
    assert found[1] == 0
    assert (found[[0, 2]] < 0).all()


@pytest.mark.parametrize("chunk", [2**22, 2**13])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.5)], ids=lambda v: type(v).__name__)
def test_settings_score_together_what_they_score_alone(
    likelihood: Likelihood, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is scored in one call: settings of several dispersions and logit temperatures, chunks of items."""
    monkeypatch.setattr(heldout, "CHUNK", chunk)
    problem = mlp(likelihood, outputs=3)
    groups = Groups.layerwise(problem.names, problem.flat_names, problem.sizes)
    belief = problem.belief(groups, "kron")
    sweep = collect(belief, groups, held_out(problem)[1], Nodes.spanning(1e-6, 1e6, 1e5), score=linked(), memory=2**30)
    noise = isinstance(likelihood, Gaussian)
    settings = [
        Setting(torch.tensor([tau, 2 * tau]).double(), T, phi if noise else None, logit_temperature=1.0 if noise else s)
        for tau, T, phi, s in itertools.product((0.1, 10.0), (1.0, 30.0), (0.1, 0.4), (1.0, 1.7))
    ]
    together = sweep.losses(settings)
    alone = torch.cat([sweep.losses([setting]) for setting in settings])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-12)
    f, y = sweep.flat
    for setting, losses in zip(settings, together, strict=True):
        law = likelihood if setting.dispersion is None else likelihood.with_dispersion(setting.dispersion)
        precision = replace(groups.applied(belief, setting.precision), likelihood=law)
        precision = replace(precision, temperature=Tempered(setting.temperature)).posterior.precision
        rows = problem.rows(held_out(problem)[0])[1]
        covariance = precision.quadratic(rows) / setting.logit_temperature**2
        expected = -linked()(f / setting.logit_temperature, covariance, y, law)
        torch.testing.assert_close(losses, expected, rtol=2e-3, atol=2e-3)
