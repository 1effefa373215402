"""Slips of the hand at the front door get one clear message each."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import lapwing
from lapwing.errors import BadData


def fitted() -> tuple[lapwing.Laplace, nn.Module]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    data = (torch.randn(20, 3), torch.arange(20) % 2)
    return lapwing.fit(net, data, "classification", structure="diag", progress=False), net


def test_an_unknown_option_of_fit_gets_a_suggestion() -> None:
    data = (torch.randn(20, 3), torch.arange(20) % 2)
    with pytest.raises(TypeError, match=r"fit has no option 'structur'.*Did you mean 'structure'\?"):
        lapwing.fit(nn.Linear(3, 2), data, "classification", structur="diag")
    with pytest.raises(TypeError, match="fit has no option 'zzz'"):
        lapwing.fit(nn.Linear(3, 2), data, "classification", zzz=1)
    for name, meant in {"noise": "Gaussian", "last_layer": "select='last_layer'", "prior_precision": "prior="}.items():
        with pytest.raises(TypeError, match=rf"fit has no option '{name}'.*\. Write .*{meant}"):
            lapwing.fit(nn.Linear(3, 2), data, "classification", **{name: 1.0})
    assert "structure" in inspect.signature(lapwing.fit).parameters


def test_swapped_arguments_of_load(tmp_path: Path) -> None:
    la, net = fitted()
    la.save(tmp_path / "la.lapwing")
    with pytest.raises(BadData, match="the file first and then the model"):
        lapwing.load(net, tmp_path / "la.lapwing")


@pytest.mark.parametrize(
    "device", ["nonsense", pytest.param("cuda", marks=pytest.mark.skipif("torch.cuda.is_available()"))]
)
def test_a_device_that_is_not_here(device: str) -> None:
    la, _ = fitted()
    with pytest.raises(BadData, match=f"no device '{device}' on this machine"):
        la.to(device)


def test_a_wrong_argument_is_an_error_of_this_library() -> None:
    la, _ = fitted()
    noisy = lapwing.fit(nn.Linear(3, 1), (torch.randn(20, 3), torch.randn(20, 1)), "regression", progress=False)
    p, x = noisy.predict(torch.randn(2, 3)), torch.randn(2, 3)
    wrong = {
        "interval level": lambda: p.interval(95),
        "quantile levels": lambda: p.quantile(50),
        "at='mode'": lambda: la.log_evidence(at="mode"),
        "which is not in learn": lambda: noisy.tune(method="evidence", learn="prior", grid={"noise": [1.0]}),
        "candidates for 'prior' must be positive": lambda: la.tune((x, torch.arange(2)), grid={"prior": [-1.0]}),
        "expected vectors of length 8": lambda: la.posterior.precision.matvec(torch.ones(3)),
        "weights='some'": lambda: lapwing.Mixture([la, la], weights="some").predict(x),
        "must be positive": lambda: lapwing.Prior.from_weight_decay(-1.0, 20),
        "as many precisions": lambda: lapwing.Prior.per_block(torch.ones(3), la.curvature.names),
    }
    for message, call in wrong.items():
        with pytest.raises(lapwing.LapwingError, match=message):
            call()
