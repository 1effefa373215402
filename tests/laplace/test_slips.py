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
    with pytest.raises(BadData, match=f"no device '{device}' here"):
        la.to(device)
