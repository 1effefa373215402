"""Inputs, targets and options that cannot be used are refused in one line that says what came and what to do."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import baselines

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def fit(data: Any = (X, Y), **options: Any) -> lapwing.Laplace:
    return lapwing.fit(net(), data, options.pop("likelihood", "classification"), **{"structure": "kron", **options})


@pytest.fixture(scope="module")
def posterior() -> lapwing.Laplace:
    return fit()


INPUTS: dict[str, tuple[Tensor, str]] = {
    "too narrow": (X[:, :2], r"does not take inputs of shape \(20, 2\) float32 \(RuntimeError: mat1 and mat2 shapes"),
    "one dimension": (X[:, 0], r"does not take inputs of shape \(20,\) float32"),
    "integers": (X.long(), r"\(20, 3\) int64 .* pass x\.float\(\)"),
    "bytes": (X.to(torch.uint8), r"\(20, 3\) uint8 .* pass x\.float\(\)"),
    "complex": (X.to(torch.complex64), r"does not take inputs of shape \(20, 3\) complex64"),
    "sparse": (X.to_sparse(), r"of shape \(20, 3\), is sparse_coo: pass tensor\.to_dense\(\)"),
}

USES: dict[str, Callable[[lapwing.Laplace, Tensor], Any]] = {
    "fit": lambda la, x: fit((x, Y)),
    "fit, a later batch": lambda la, x: fit([(X, Y), (x, Y)]),
    "fit, last layer": lambda la, x: fit([(x, Y)], select="last_layer"),
    "predict": lambda la, x: la.predict(x),
    "predict, sampled": lambda la, x: la.predict(x, method="sampled"),
    "predict, differentiable": lambda la, x: la.predict(x, differentiable=True),
    "ensemble": lambda la, x: la.ensemble(2).predict(x),
    "tune": lambda la, x: la.tune((x, Y)),
    "tune, last layer": lambda la, x: fit(select="last_layer").tune((x, Y)),
    "distilled": lambda la, x: la.distill(torch.cat([X, X]), epochs=0).predict(x),
    "temperature scaling": lambda la, x: lapwing.TemperatureScaled.fit(net(), (x, Y)),
    "update": lambda la, x: la.update((x, Y)),
    "evaluate": lambda la, x: lapwing.evaluate({"MAP": net()}, (x, Y), likelihood="classification"),
    "evaluate, Laplace": lambda la, x: lapwing.evaluate({"Laplace": la}, [(x, Y)]),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_that_the_network_does_not_take(posterior: lapwing.Laplace, kind: str, use: str) -> None:
    x, message = INPUTS[kind]
    with pytest.raises(lapwing.BadData, match=message):
        USES[use](posterior, x)


@pytest.mark.parametrize("kind", ["too narrow", "one dimension", "integers", "complex"])
def test_inputs_that_are_split_or_shuffled_before_the_network_sees_them(posterior: lapwing.Laplace, kind: str) -> None:
    x = torch.cat([INPUTS[kind][0]] * 2)
    with pytest.raises(lapwing.BadData, match="does not take inputs of shape"):
        posterior.distill(x, epochs=0)
    with pytest.raises(lapwing.BadData, match="does not take inputs of shape"):
        baselines.MeanField.fit(net(), (x, torch.cat([Y, Y])), "classification", epochs=1)


def test_the_batch_is_named() -> None:
    with pytest.raises(lapwing.BadData, match=r"^batch 2: the network does not take"):
        fit([(X, Y), (X, Y), (X[:, :1], Y)])


TARGETS: dict[str, tuple[Any, str]] = {
    "strings": (["cat"] * 20, "targets are a list that is no tensor of numbers .* Write classes as 0, 1"),
    "nothing": ([None] * 20, "no tensor of numbers"),
    "ragged": ([[0], [0, 1]] * 10, "no tensor of numbers"),
    "a dict": ({"a": Y}, "targets are a dict"),
    "an array of strings": (np.array(["cat"] * 20), "dtype <U3 holds no plain numbers"),
    "sparse": (Y.to_sparse(), "to_dense"),
    "complex": (Y.to(torch.complex64), "complex numbers"),
}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("likelihood", ["classification", "regression", "binary"])
def test_targets_that_are_no_numbers(kind: str, likelihood: str) -> None:
    y, message = TARGETS[kind]
    with pytest.raises(lapwing.BadData, match=message):
        fit([(X, y)], likelihood=likelihood)


@pytest.mark.parametrize("kind", ["strings", "nothing", "ragged", "sparse"])
def test_targets_of_whole_data_and_of_predictions(posterior: lapwing.Laplace, kind: str) -> None:
    y, message = TARGETS[kind]
    with pytest.raises(lapwing.BadData, match=message):
        fit((X, y))
    with pytest.raises(lapwing.BadData, match=message):
        posterior.predict(X).log_prob(y)


def test_whole_data_with_targets_in_a_list() -> None:
    assert torch.equal(fit((X, Y.tolist())).log_likelihood, fit((X, Y)).log_likelihood)


OPTIONS: list[tuple[str, Any, str]] = [
    ("select", 3, "select is 'all', 'last_layer', a glob, .* got int"),
    ("select", [3], r"select is .* got \[3\]"),
    ("select", b"head", "select is .* got bytes"),
    ("select", torch.ones(3), "a vector of whole numbers or a mask .* got torch.float32"),
    ("n_data", "7", "n_data must be positive and finite, got '7'"),
    ("n_data", True, "n_data must be positive and finite, got True"),
    ("n_data", [7], "n_data must be positive"),
    ("memory", math.inf, "number of bytes, must be positive and finite, got inf"),
    ("memory", math.nan, "number of bytes"),
    ("memory", True, "number of bytes"),
    ("memory", "1GB", "number of bytes"),
    ("temperature", "1", "temperature must be a number, a 0-d tensor or Tempered"),
    ("temperature", None, "temperature must be a number"),
    ("temperature", [1.0], "temperature must be a number"),
    ("temperature", math.nan, "temperature must be at least 0, got nan"),
    ("temperature", torch.ones(2), "temperature must be a number or a 0-d tensor"),
    ("prior", "strong", "prior must be a precision"),
    ("prior", None, "prior must be a precision"),
    ("generator", 0, r"generator is a torch\.Generator, got 0"),
    ("device", "nowhere", "device='nowhere' is no device"),
    ("split", "x", "split is a function of a batch"),
    ("checkpoint", 3, "checkpoint is the path of a folder"),
]


@pytest.mark.parametrize(("name", "value", "message"), OPTIONS)
def test_options_of_another_kind(name: str, value: Any, message: str) -> None:
    with pytest.raises(lapwing.BadData, match=message):
        fit(**{name: value})


def test_names_may_come_in_any_iterable() -> None:
    for select in (("0.weight",), {"0.weight"}, (name for name in ["0.weight"]), {"0.weight": 1}):
        assert fit(select=select).params.names == ("0.weight",)


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_counts(posterior: lapwing.Laplace, value: Any) -> None:
    for make in (
        lapwing.MCFisher,
        lambda n: lapwing.GGN(limit=n),
        *([] if value is None else [lapwing.subnetwork]),  # which may have positions instead
        lapwing.LowRank,
        lapwing.Nystrom,
        lambda n: lapwing.MatrixFree(probes=n),
        posterior.ensemble,
    ):
        with pytest.raises(lapwing.BadData, match=f"whole number of at least 1, got {value!r}"):
            make(value)


def test_a_subnetwork_needs_a_number_or_positions() -> None:
    with pytest.raises(lapwing.BadData, match=r"subnetwork\(100\), or their positions"):
        lapwing.subnetwork()


@pytest.mark.parametrize("value", ["0.1", True, 1])
def test_tolerances(value: Any) -> None:
    with pytest.raises(lapwing.BadData, match="0 ≤ tolerance < 1"):
        lapwing.GGN(tolerance=value)
    with pytest.raises(lapwing.BadData, match="logit_temperature must be positive and finite"):
        fit().replace(logit_temperature=-float(value) if value == 1 and value is not True else value)
