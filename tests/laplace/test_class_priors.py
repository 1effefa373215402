"""Priors per class and per feature of a last layer, beside dense algebra."""

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import Prior
from lapwing.errors import IncompatiblePrior, UnsupportedOperation
from lapwing.evidence.settings import partition
from tests import dense

FEATURES, CLASSES = 6, 4
UNITS = torch.tensor([0.1, 1.0, 5.0, 20.0], dtype=torch.float64)
INPUTS = torch.tensor([0.3, 1.0, 2.0, 0.7, 4.0, 9.0], dtype=torch.float64)
STRUCTURES = ("diag", "kron", "full", "blockdiag")


class Net(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, FEATURES), nn.Linear(FEATURES, CLASSES, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def fitted(structure: str, prior: object = 1.0, bias: bool = True) -> tuple[lapwing.Laplace, Net, Tensor]:
    net, x = dense.build(lambda: Net(bias)), dense.randn(80, 5)
    data = (x, dense.outputs(dense.build(lambda: Net(bias), 1), x).argmax(-1))
    options = {"structure": structure, "select": "last_layer", "progress": False}
    return lapwing.fit(net, data, "classification", prior=prior, **options), net, x


def curvature(structure: str, bias: bool = True) -> Tensor:
    la, _, _ = fitted(structure, 1.0, bias)
    precision = la.posterior.precision.dense()
    return precision - torch.eye(len(precision), dtype=precision.dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_predictions_and_evidence_are_those_of_dense_algebra(structure: str, bias: bool) -> None:
    prior = Prior.per_unit(dense.build(lambda: Net(bias)), "head", UNITS, INPUTS, bias=3.0)
    la, net, x = fitted(structure, prior, bias)
    flat = (UNITS[:, None] * INPUTS).flatten()
    flat = torch.cat([flat, 3 * UNITS]) if bias else flat
    precision = curvature(structure, bias) + torch.diag(flat)
    with torch.no_grad():
        a = net.body(x[:5]).tanh()
    rows = torch.eye(CLASSES, dtype=a.dtype)
    jacobian = torch.einsum("kc,nj->nkcj", rows, a).flatten(2)
    jacobian = torch.cat([jacobian, rows.expand(5, -1, -1)], -1) if bias else jacobian
    assert la._predictive.last_layer is not None
    found = la.predict(x[:5]).function.covariance
    torch.testing.assert_close(found, jacobian @ torch.linalg.inv(precision) @ jacobian.mT, rtol=1e-9, atol=1e-12)
    theta = torch.cat([p.detach().flatten() for p in net.head.parameters()])
    evidence = la.log_likelihood - (flat * theta**2).sum() / 2 + flat.log().sum() / 2
    evidence = evidence - torch.linalg.slogdet(precision).logabsdet / 2
    torch.testing.assert_close(la.log_evidence(), evidence, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["unit", "input"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_evidence_finds_a_precision_per_class_and_per_feature(structure: str, kind: str) -> None:
    la, net, _ = fitted(structure)
    tuned = la.tune(method="evidence", prior=kind)
    groups, h = partition(kind, la.curvature.names, la.params), curvature(structure)
    assert groups.count == (CLASSES if kind == "unit" else FEATURES + 1)
    theta = torch.cat([p.detach().flatten() for p in net.head.parameters()])

    def evidence(logs: Tensor) -> Tensor:
        each = logs.exp()[groups.index]
        ratio = each.log().sum() - torch.linalg.slogdet(h + torch.diag(each)).logabsdet
        return la.log_likelihood - (each * theta**2).sum() / 2 + ratio / 2

    start = torch.zeros(groups.count, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([start], max_iter=500, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def loss() -> Tensor:
        search.zero_grad()
        value = -evidence(start)
        value.backward()
        return value

    search.step(loss)
    found = tuned.prior.resolve(la.params.names, la.params.sizes)[1].diagonal().log()
    values = torch.stack([found[groups.index == k][0] for k in range(groups.count)])
    torch.testing.assert_close(found, values[groups.index], rtol=0, atol=1e-12)
    torch.testing.assert_close(evidence(values), evidence(start).detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(tuned.log_evidence(), evidence(values), rtol=0, atol=1e-7)
    assert float(tuned.log_evidence()) > float(la.log_evidence()) + 0.1


def test_a_file_keeps_them(tmp_path) -> None:
    prior = Prior.per_unit(dense.build(Net), "head", UNITS, INPUTS)
    la, net, x = fitted("kron", prior)
    la.save(tmp_path / "la.lapwing")
    again = lapwing.load(tmp_path / "la.lapwing", net)
    torch.testing.assert_close(again.predict(x[:3]).probs, la.predict(x[:3]).probs, rtol=0, atol=0)


def test_what_does_not_fit_is_refused() -> None:
    net = Net()
    with pytest.raises(IncompatiblePrior, match=r"linear layers are 'body', 'head'.*Did you mean 'head'"):
        Prior.per_unit(net, "heads", UNITS)
    with pytest.raises(IncompatiblePrior, match=r"has 4 units, and got \(6,\) precisions"):
        Prior.per_unit(net, "head", INPUTS)
    with pytest.raises(IncompatiblePrior, match="positive and finite"):
        Prior.per_unit(net, "head", -UNITS)
    with pytest.raises(IncompatiblePrior, match="is a Tanh"):
        Prior.per_unit(nn.Sequential(nn.Tanh()), "0", 1.0)
    la, _, x = fitted("kron")
    for options in ({}, {"method": "loo"}):
        with pytest.raises(UnsupportedOperation, match=r"method='evidence', prior='unit'"):
            la.tune((x, torch.zeros(80).long()), prior="unit", **options)
    with pytest.raises(UnsupportedOperation, match="Did you mean 'unit'"):
        la.tune(method="evidence", prior="units")
    with pytest.raises(IncompatiblePrior, match="fixed Kronecker eigenbasis"):
        fitted("ekfac", Prior.per_unit(net, "head", UNITS))
