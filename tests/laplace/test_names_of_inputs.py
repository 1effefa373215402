"""What a fit took as inputs is what predictions pass on, whatever it is called."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing

X, V = (torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).unbind()
Y = torch.arange(20) % 3


class Named(nn.Module):
    """Called with inputs under names that targets often have."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name, self.a, self.b = name, nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        assert set(others) <= {self.name}
        return self.a(x) + (self.b(others[self.name]) if others else 0.0)


FORMS: dict[str, Any] = {
    "a dict": lambda name, labels: [{"x": X, name: V, labels: Y}],
    "pairs with a dict": lambda name, labels: [({"x": X, name: V}, Y)],
    "an optional input": lambda name, labels: [{"x": X[:8], labels: Y[:8]}, {"x": X[8:], name: V[8:], labels: Y[8:]}],
}


@pytest.mark.parametrize(
    ("name", "labels"), [("y", "labels"), ("label", "labels"), ("target", "targets"), ("y", "target")]
)
@pytest.mark.parametrize("form", FORMS)
def test_inputs_with_names_of_targets(name: str, labels: str, form: str, tmp_path: Path) -> None:
    model = Named(name).double()
    data = FORMS[form](name, labels)
    la = lapwing.fit(model, data, "classification", structure="full")
    la.save(tmp_path / "file")
    truth = model(X, **{name: V}).detach()
    for posterior in (la, lapwing.load(tmp_path / "file", model)):
        assert torch.equal(posterior.predict({"x": X, name: V}).function.mean, truth)
        assert torch.equal(posterior.predict({name: V, "x": X}).function.mean, truth)
        assert torch.equal(posterior.predict({"x": X}).function.mean, model(X).detach())
        (p,) = posterior.predict_loader([{"x": X, name: V}])
        assert torch.equal(p.function.mean, truth)
        if form != "pairs with a dict":
            assert torch.equal(posterior.predict({"x": X, name: V, labels: Y}).function.mean, truth)
            (p,) = posterior.predict_loader([{"x": X, name: V, labels: Y}])
            assert torch.equal(p.function.mean, truth)
            tuned = posterior.tune([{"x": X, name: V, labels: Y}], grid={"prior": [0.1, 1.0]}, learn="prior")
            assert tuned.tuning is not None


def test_members_of_an_ensemble_read_inputs_as_the_posterior_does() -> None:
    la = lapwing.fit(
        Named("y").double(), [{"x": X, "y": V, "labels": Y}], "classification", structure="full", prior=1e9
    )
    batch = {"x": X.float(), "y": V.float(), "labels": Y}
    assert torch.allclose(la.ensemble(2).predict(batch).probs, la.predict(batch).probs, atol=1e-3)


def test_targets_keep_their_name() -> None:
    la = lapwing.fit(Named("y").double(), [{"x": X, "y": V, "labels": Y}], "classification", structure="full")
    with pytest.raises(lapwing.BadData, match=r"keys \['x', 'y'\] and none of \['labels'\]"):
        la.tune([{"x": X, "y": Y}])
    with pytest.raises(lapwing.BadData, match=r"keys \['target', 'x'\] and none of \['labels'\]"):
        lapwing.fit(Named("y").double(), [{"x": X, "labels": Y}, {"x": X, "target": Y}], "classification")
