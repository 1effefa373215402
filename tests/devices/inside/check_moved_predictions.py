"""Predictions that leave the device: `p.to("cpu")` holds every field and nothing of the device."""

from typing import Any

import pytest
import torch
from torch import nn

import lapwing
from tests.devices.elsewhere import device

HERE = device()
X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("options", [{}, {"joint": True}, {"method": "sampled", "samples": 4}], ids=str)
@pytest.mark.parametrize("select", ["all", "last_layer"])
def test_moved_predictions(task: str, options: dict[str, Any], select: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double().to(HERE)
    y = torch.arange(20) % 3 if task == "classification" else X**2
    la = lapwing.fit(model, (X.to(HERE), y.to(HERE)), task, structure="full", select=select)
    p = la.predict(X[:5].to(HERE), **options)
    moved = p.to("cpu")
    for name in ("mean", "entropy", "epistemic", "aleatoric", "novelty"):
        assert getattr(moved, name).device.type == "cpu"
        torch.testing.assert_close(getattr(moved, name), getattr(p, name).cpu())
    assert moved.function.variance.device.type == "cpu"
    torch.testing.assert_close(moved.log_prob(y[:5]), p.log_prob(y[:5].to(HERE)).cpu())
    torch.testing.assert_close(p[1:3].mean.cpu(), moved.mean[1:3])
    assert len(p.to_frame()) == 5
