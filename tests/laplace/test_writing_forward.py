"""Networks that write to themselves in the forward pass: features, counters, re-assigned buffers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.calls = 0
        self.scale = 1.0
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.features = x * 2
        self.calls += 1
        self.average = self.average + 1
        return self.scale * self.a(x)


def test_own_and_foreign_passes_between_predictions_do_not_matter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Writes(), torch.randn(12, 3)
    la = lapwing.fit(model, (x, torch.randint(3, (12,))), "classification")
    assert model.calls == 0
    assert not hasattr(model, "features")
    assert torch.equal(model.average, torch.zeros(3))
    first = la.predict(x[:2]).probs
    assert model.calls == 0
    model.calls, model.features = 7, x  # as the user's own forward pass leaves them
    assert torch.equal(la.predict(x[:2]).probs, first)
    la.save(tmp_path / "file")
    again = Writes()
    again.load_state_dict(model.state_dict())
    assert torch.equal(lapwing.load(tmp_path / "file", again).predict(x[:2]).probs, first)


def test_what_the_forward_only_reads_still_counts() -> None:
    torch.manual_seed(0)
    model, x = Writes(), torch.randn(12, 3)
    la = lapwing.fit(model, (x, torch.randint(3, (12,))), "classification")
    model.scale = 2.0
    with pytest.raises(lapwing.UnsupportedModel, match="changed"):
        la.predict(x)
