"""Data, targets and weights that a fit cannot use raise, and the message says where and what."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from tests.laplace.small import STRUCTURES, X, Y, batches, fit, net


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_inputs_that_are_not_finite_are_located(value: float) -> None:
    x = X.clone()
    x[20, 1] = value
    linear = nn.Linear(3, 3)
    with pytest.raises(lapwing.BadData, match=rf"batch 2: the inputs hold {value} at index \(4, 1\)"):
        fit(linear, batches(x))
    with pytest.raises(lapwing.BadData, match=rf"the inputs hold {value} at index \(0, 1\)"):
        fit(linear).predict(x[20:21])


def test_targets_that_are_not_finite_are_located() -> None:
    y = torch.zeros(24)
    y[10] = math.nan
    with pytest.raises(lapwing.BadData, match=r"batch 1: targets are not finite: nan at index \(2, 0\)"):
        fit(net(1), batches(y=y), "regression")


def test_weights_that_are_not_finite_are_named() -> None:
    model = net()
    with torch.no_grad():
        model[2].weight[1, 1] = math.nan
    with pytest.raises(lapwing.BadData, match=r"parameter '2\.weight' of the network is not finite"):
        fit(model)


class Diverging(nn.Module):
    """Overflows where an input is large: in the middle, or after the last layer."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), last

    def forward(self, x: Tensor) -> Tensor:
        size = 1 + x[:, :1].clamp(min=50).sub(50) * 1e38  # infinite at 100
        h = self.first(x) * (1 if self.last else size)
        return self.second(h) * (size if self.last else 1)


@pytest.mark.parametrize(("last", "where"), [(False, r"layer linear\(second"), (True, "after its last layer")])
def test_outputs_that_are_not_finite_name_batch_and_layer(last: bool, where: str) -> None:
    x = X.clone()
    x[9] = 100
    model = Diverging(last)
    with pytest.raises(lapwing.BadData, match=f"batch 1: the outputs .*{where}"):
        fit(model, batches(x))
    fit(model)


@pytest.mark.parametrize(
    "data", [[], (X[:0], Y[:0]), [(X[:0], Y[:0])] * 3, iter([])], ids=["list", "pair", "batches", "iterator"]
)
def test_no_data(data: Any) -> None:
    with pytest.raises(lapwing.BadData, match="no samples"):
        fit(data=data, structure="kron")


def test_empty_batches_are_passed_over() -> None:
    empty = (X[:0], Y[:0])
    la = fit(data=[empty, (X[:5], Y[:5]), empty, (X[5:], Y[5:]), empty], structure="full")
    assert la.n_data == 24
    assert torch.equal(
        la.curvature.dense(), fit(data=[(X[:5], Y[:5]), (X[5:], Y[5:])], structure="full").curvature.dense()
    )


def test_n_is_what_was_seen() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=7, drop_last=True)
    assert fit(data=loader).n_data == 21
    assert fit(data=(X, Y)).n_data == 24
    assert fit(data=(X, Y), n_data=1000).n_data == 1000


@pytest.mark.parametrize("structure", ["diag", "blockdiag", "kron", "full", "lowrank"])
def test_one_pass_structures_take_a_one_shot_iterator(structure: str) -> None:
    once, often = (fit(data=data, structure=structure) for data in (iter(batches()), batches()))
    assert once.n_data == often.n_data == 24
    assert torch.equal(once.curvature.dense(), often.curvature.dense())
    assert once.update(batch for batch in batches()).n_data == 48


@pytest.mark.parametrize(
    "options",
    [{"structure": "ekfac"}, {"structure": "full", "select": lapwing.subnetwork(5)}],
    ids=["ekfac", "subnetwork by variance"],
)
def test_several_passes_need_data_that_can_be_read_again(options: dict[str, Any]) -> None:
    with pytest.raises(lapwing.NotReiterable, match=r"more than once, but the data is a one-shot .*list\(data\)"):
        fit(data=(batch for batch in batches()), **options)
    with pytest.raises(TypeError):  # the builtin that users may already catch
        fit(data=map(tuple, batches()), **options)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y + 1, r"batch 0: target 3 at index \(2,\) is outside the 3 classes 0…2"),
        (Y - 1, r"target -1 at index \(0,\)"),
        (Y.float(), r"must be integers, got torch\.float32"),
        (Y[:, None], r"targets have shape \(8, 1\)"),
        (torch.ones(24, 3), r"target \[1\.0, 1\.0, 1\.0\] at index \(0,\) .*sum to 1"),
        (torch.ones(24, 4), r"targets have shape \(8, 4\)"),
    ],
    ids=["too large", "negative", "float", "column", "no probabilities", "too wide"],
)
def test_wrong_classes(y: Tensor, message: str) -> None:
    with pytest.raises(lapwing.BadData, match=message):
        fit(data=batches(y=y))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "message"),
    [
        ("regression", 1, torch.zeros(24, 2), r"targets have shape \(8, 2\), but Gaussian .* needs \(8, 1\) or \(8,\)"),
        ("regression", 2, torch.zeros(24), r"targets have shape \(8,\)"),
        ("binary", 1, Y, r"target 2\.0 at index \(2, 0\) is outside \[0, 1\]"),
        ("counts", 1, Y - 1, "target -1"),
        ("counts", 1, Y + 0.5, r"target 0\.5"),
        ("classification", 1, Y, "single logit"),
        ("heteroscedastic", 3, torch.zeros(24), "even last dimension"),
        ("preference", 3, Y, "rewards of two candidates"),
        (lapwing.Gaussian([1.0, 2.0]), 3, torch.zeros(24, 3), "noise has 2 entries, but the network has 3 outputs"),
    ],
)
def test_targets_that_do_not_fit_the_likelihood(likelihood: Any, outputs: int, y: Tensor, message: str) -> None:
    with pytest.raises(lapwing.BadData, match=message):
        fit(net(outputs), batches(y=y), likelihood)


def test_targets_of_any_integer_type_and_one_hot_are_the_same() -> None:
    truth = fit().log_evidence()
    one_hot = nn.functional.one_hot(Y, 3)
    for y in (Y.to(torch.uint8), Y.int()):
        assert torch.equal(fit(data=batches(y=y)).log_evidence(), truth)
    for y in (one_hot, one_hot.double()):  # labels in general: another root of the same curvature
        torch.testing.assert_close(fit(data=batches(y=y)).log_evidence(), truth, rtol=1e-7, atol=0)
    assert torch.equal(fit(data=[(x, y.tolist()) for x, y in batches()]).log_evidence(), truth)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "data is a NoneType"),
        (X, r"data is one tensor or table; expected .* pass \(table\[features\], table\[target\]\)"),
        (TensorDataset(X, Y), "data is a TensorDataset; expected a DataLoader"),
        ([(X, Y, Y)], r"tuple of 3 entries; .*split="),
        ([{"pixels": X}], r"keys \['pixels'\] and none of"),
        (["text"], "a batch is a str"),
    ],
    ids=["none", "tensor", "data set", "triple", "dict without labels", "text"],
)
def test_data_of_another_kind(data: Any, message: str) -> None:
    with pytest.raises(lapwing.BadData, match=message):
        fit(data=data)


def test_infinite_inputs_are_found_where_the_network_saturates() -> None:
    for row, batch in ((0, 0), (17, 2)):
        x = X.clone()
        x[row, 1] = math.inf
        with pytest.raises(lapwing.BadData, match=rf"batch {batch}: the inputs hold inf at index \({row % 8}, 1\)"):
            fit(data=batches(x))


def test_infinite_weights_are_found_where_the_network_saturates() -> None:
    model = net()
    with torch.no_grad():
        model[0].bias[1] = math.inf
    assert model(X).isfinite().all()
    with pytest.raises(lapwing.BadData, match=r"parameter '0\.bias' of the network is not finite"):
        fit(model)


class Root(nn.Module):
    """No derivative at inputs of zero, where the output is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).abs().sqrt()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_infinite_gradients_name_batch_and_layer(structure: str) -> None:
    x = X.clone()
    x[17] = 0
    with pytest.raises(lapwing.BadData, match=r"batch 2: the gradient .* linear\(layer\.weight\) is not finite"):
        fit(Root(), batches(x), structure=structure)
    x[0] = 0
    with pytest.raises(lapwing.BadData, match=r"the gradient .*'layer\.weight' is not finite"):
        fit(Root(), batches(x), structure=structure)


def test_sample_weights_are_checked() -> None:
    for value in (-1.0, math.nan):
        with pytest.raises(lapwing.BadData, match=f"batch 0: a sample weight is {value}"):
            fit(split=lambda batch, value=value: (*batch, torch.full((8,), value)))
    with pytest.raises(lapwing.BadData, match=r"weights of shape \(3,\) for 8 samples"):
        fit(split=lambda batch: (*batch, torch.ones(3)))


def test_errors_of_tune_name_the_batch_and_the_place_in_it() -> None:
    la = fit(structure="diag")
    good = (X, Y)
    bad = Y.clone()
    bad[5] = 8
    with pytest.raises(lapwing.BadData, match=r"batch 1: .*8.*5"):
        la.tune([good, (X, bad)], learn="prior", grid={"prior": [1.0]})
    broken = X.clone()
    broken[2, 0] = float("nan")
    with pytest.raises(lapwing.BadData, match=r"batch 1: the inputs hold nan at index \(2, 0\)"):
        la.tune([good, (broken, Y)], learn="prior", grid={"prior": [1.0]})
