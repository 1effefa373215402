"""no_grad, inference_mode, training mode, wrappers around the module: none of them changes a result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from lapwing import LowRank
from lapwing.predictive import maximum, softmax
from tests.laplace.small import STRUCTURES, X, Y, batches, fit, net


@pytest.mark.parametrize("structure", STRUCTURES)
def test_everything_works_without_gradients(structure: str) -> None:
    structure_ = LowRank(7) if structure == "lowrank" else structure
    truth = fit(structure=structure_)
    with torch.no_grad():
        la = fit(structure=structure_)
        assert torch.equal(la.log_evidence(), truth.log_evidence())
        assert torch.equal(la.predict(X[:4]).epistemic, truth.predict(X[:4]).epistemic)
        grid = {"prior": [0.1, 1.0]}
        assert (
            la.tune(batches(), learn="prior", grid=grid).tuning.score
            == truth.tune(batches(), learn="prior", grid=grid).tuning.score
        )
        assert not torch.is_grad_enabled()


def test_training_mode_is_evaluated_in_eval_mode() -> None:
    def model() -> nn.Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))

    training, evaluating = model().train(), model().eval()
    a, b = fit(training, structure="kron"), fit(evaluating, structure="kron")
    assert training[1].training
    assert training[2].training
    assert torch.equal(a.log_evidence(), b.log_evidence())
    assert torch.equal(a.predict(X[:4]).probs, b.predict(X[:4]).probs)
    assert training[1].num_batches_tracked == 0


class Compiled(nn.Module):
    """What torch.compile returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


@pytest.mark.parametrize(
    "wrap", [Compiled, nn.DataParallel, lambda m: Compiled(nn.DataParallel(m)), lambda m: nn.DataParallel(Compiled(m))]
)
def test_wrappers_are_looked_through(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    la, truth = fit(wrap(model), structure="kron"), fit(model, structure="kron")
    assert la.params.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert la.module is model
    assert torch.equal(la.log_evidence(), truth.log_evidence())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_fits_in_inference_mode(structure: str) -> None:
    model, truth = net(), fit(structure=structure)
    with torch.inference_mode():
        loader = DataLoader(TensorDataset(X, Y), batch_size=8)  # which stacks its batches in this mode
        la = fit(model, loader, structure=structure)
        assert torch.is_inference_mode_enabled()
        assert torch.equal(la.predict(X[:4] + 0).probs, truth.predict(X[:4]).probs)
    assert torch.equal(la.log_evidence(), truth.log_evidence())
    precision = torch.tensor(2.0, requires_grad=True)
    (slope,) = torch.autograd.grad(la.replace(prior=precision).log_evidence(), precision)
    assert slope.isfinite()


@pytest.mark.parametrize(
    "options", [{}, {"method": "sampled"}, {"joint": True}, {"differentiable": True}, {"link": "probit"}], ids=str
)
def test_predicts_in_inference_mode(options: dict[str, Any]) -> None:
    la = fit(structure="kron")
    truth = la.predict(X[:4], **options)
    fresh = fit(structure="kron")  # nothing is cached yet
    with torch.inference_mode():
        p = fresh.predict(X[:4] + 0, **options)
        for field in ("probs", "entropy", "epistemic", "novelty"):
            assert torch.equal(getattr(p, field), getattr(truth, field)), field
        assert torch.equal(fresh.ensemble(3).predict(X[:4] + 0).probs, la.ensemble(3).predict(X[:4]).probs)
        grid = {"prior": [0.1, 1.0]}
        fresh.tune((X + 0, Y + 0), learn="prior", grid=grid)
        fresh.update((X + 0, Y + 0))
    x = X[:4].clone().requires_grad_()  # what was cached in inference mode serves gradients, too
    (slope,) = torch.autograd.grad(fresh.predict(x, differentiable=True).entropy.sum(), x)
    (expected,) = torch.autograd.grad(la.predict(x, differentiable=True).entropy.sum(), x)
    assert torch.equal(slope, expected)


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = net()
    with pytest.raises(lapwing.BadData, match=r"made in torch\.inference_mode"):
        fit(model)


def test_properties_in_inference_mode() -> None:
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    la = lapwing.fit(nn.Linear(3, 2), (x, y), "classification", structure="kron")
    want = la.effective_parameters, la.stationarity
    with torch.inference_mode():
        assert (la.effective_parameters, la.stationarity) == want
        lapwing.log_evidence(la.curvature, 1.0, la.likelihood)
    prior = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(la.replace(prior=prior).log_evidence(), prior)
    ahead, behind = (float(la.replace(prior=2 + s).log_evidence()) for s in (1e-5, -1e-5))
    assert float(slope) == pytest.approx((ahead - behind) / 2e-5, rel=1e-5)


def forget_tables() -> None:
    """Empty the tables that predictions of classes keep for the whole process, as in a new process."""
    for module in (maximum, softmax):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@pytest.mark.parametrize("select", ["all", "last_layer"])
@pytest.mark.parametrize(
    ("classes", "structure"), [(3, "kron"), (3, "full"), (5, "diag"), (70, "kron"), (3, "matrixfree")]
)
def test_the_first_prediction_may_be_in_inference_mode(classes: int, structure: str, select: str) -> None:
    """Whatever it keeps for later calls, in the posterior or for the process, serves gradients as well."""
    data = batches(y=torch.arange(24) % classes)
    la, x = fit(net(classes), data, structure=structure, select=select), X[:4].clone().requires_grad_()
    forget_tables()
    with torch.inference_mode():
        p = la.predict(X[:4])
        _ = p.probs, p.epistemic, p.function.covariance, p.function.variance, p.novelty, p.sample(2)
    (slope,) = torch.autograd.grad(la.predict(x, differentiable=True).probs[:, 0].sum(), x)
    forget_tables()
    fresh = fit(net(classes), data, structure=structure, select=select)
    (expected,) = torch.autograd.grad(fresh.predict(x, differentiable=True).probs[:, 0].sum(), x)
    torch.testing.assert_close(slope, expected)
