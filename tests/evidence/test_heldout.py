"""Held-out scores of classes against plain Monte Carlo: what `tune` scores is what `predict` gives."""

import pytest
import torch

from lapwing.evidence.heldout import class_log_prob
from lapwing.likelihoods import Categorical
from lapwing.predictive import GaussianFunction, predict_targets
from tests import dense


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
