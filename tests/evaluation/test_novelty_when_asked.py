"""`evaluate` computes the novelty of items only when it is asked to, or when there is something to compare it with."""

import pytest
import torch
from torch import nn

import lapwing
from lapwing.predictive.predictive import Predictive


@pytest.fixture
def counted(monkeypatch):
    calls = []
    plain = Predictive.novelty
    monkeypatch.setattr(Predictive, "novelty", lambda self, *args: (calls.append(1), plain(self, *args))[1])
    return calls


@pytest.mark.parametrize(
    ("options", "wanted"), [({}, 0), ({"novelty": True}, 1), ({"ood": True}, 2), ({"ood": True, "novelty": False}, 0)]
)
def test_novelty_is_computed_where_it_is_wanted(counted, options, wanted):
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    x, y = torch.randn(40, 3), torch.randint(3, (40,))
    la = lapwing.fit(model, (x, y), "classification", structure="full")
    if "ood" in options:
        options = {**options, "ood": {"far": 5 * x}}
    report = lapwing.evaluate({"Laplace": la}, (x, y), **options)
    assert len(counted) == wanted
    assert (report.results["Laplace"].novelty is not None) == (wanted > 0)
    assert ("auroc_novelty far" in report.row("Laplace")) == (wanted == 2)
