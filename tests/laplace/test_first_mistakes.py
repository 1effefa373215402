"""What new users get wrong first is refused in one line that says what came and what to write instead."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lapwing

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3
FRAME = pd.DataFrame({"size": np.ones(20), "color": ["red"] * 20, "weight": np.ones(20)})


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def fit(data: Any = (X, Y), likelihood: Any = "classification") -> lapwing.Laplace:
    return lapwing.fit(net(), data, likelihood)


MISTAKES: dict[str, tuple[Callable[[lapwing.Laplace], Any], str]] = {
    "one item without its dimension": (lambda la: la.predict(X[0]), r"\(3,\) have no dimension for .*x\[None\]"),
    "an item too flat for the network": (
        lambda la: lapwing.fit(nn.Sequential(nn.BatchNorm1d(3), net()), (X, Y), "classification").predict(X[0]),
        r"shape \(3,\) float32 .*a single item is x\[None\]",
    ),
    "targets as a third argument": (lambda la: fit(X, Y), r"likelihood is a Tensor.*fit\(model, \(x, y\)"),
    "targets as a list": (lambda la: fit(X, Y.tolist()), r"likelihood is a list.*fit\(model, \(x, y\)"),
    "a data set": (lambda la: fit(TensorDataset(X, Y)), r"a TensorDataset; .*DataLoader\(data, batch_size=256\)"),
    "one dict": (lambda la: fit({"x": X, "labels": Y}), r"one dict with keys \['labels', 'x'\]; a list of batches is"),
    "no held-out data": (lambda la: la.tune([]), r"holds no samples: pass at least one batch"),
    "names of classes": (lambda la: fit((X, np.array(["a", "b"] * 10))), r"<U1 holds no plain numbers\. .*np\.unique"),
    "a column of text": (lambda la: fit((FRAME, Y)), r"no plain numbers \(columns 'color'\)\. .*get_dummies"),
    "models without names": (lambda la: lapwing.evaluate([la], (X, Y)), r"the models by name.*got a list"),
    "a model alone": (lambda la: lapwing.evaluate(la, (X, Y)), r"the models by name.*got a Laplace"),
    "ood without a name": (lambda la: lapwing.evaluate({"la": la}, (X, Y), ood=X), r"ood by name.*got a Tensor"),
    "a foreign estimator": (
        lambda la: lapwing.evaluate({"theirs": type("E", (), {"predict": lambda self, x: x.numpy()})()}, (X, Y)),
        r"returned a ndarray; expected a lapwing Prediction.*\.laplace_",
    ),
    "a risk in percent": (
        lambda la: lapwing.metrics.rejection(la.predict(X), Y).threshold(5),
        r"the risk is a share of wrong answers, from 0 to 1, got 5",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_says_what_to_write(mistake: str) -> None:
    attempt, message = MISTAKES[mistake]
    with pytest.raises(lapwing.BadData, match=message):
        attempt(fit())
