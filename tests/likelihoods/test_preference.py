"""Preferences between two candidates: a sigmoid of the difference of their rewards, and what is refused."""

import pytest
import torch

from lapwing.errors import BadData
from lapwing.likelihoods import BradleyTerry


def test_preference_is_the_sigmoid_of_the_difference():
    likelihood = BradleyTerry()
    f = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    margin = torch.where(y == 0, f[:, 0] - f[:, 1], f[:, 1] - f[:, 0])
    torch.testing.assert_close(likelihood.log_prob(f, likelihood.targets(f, y)), margin.sigmoid().log())
    assert likelihood.factor(f).shape == (6, 2, 1)
    S = likelihood.factor(torch.tensor([[60.0, -60.0]]))
    torch.testing.assert_close(S[0, 0, 0], torch.tensor(-60.0).exp(), rtol=1e-4, atol=0)
    with pytest.raises(BadData, match="target 2 at index"):
        likelihood.targets(f, y + 1)
    with pytest.raises(BadData, match="two candidates"):
        likelihood.outputs(torch.zeros(5, 3))
    soft = torch.tensor([[0.25, 0.75]] * 6, dtype=torch.float64)
    torch.testing.assert_close(likelihood.log_prob(f, likelihood.targets(f, soft)), (soft * f.log_softmax(-1)).sum(-1))
