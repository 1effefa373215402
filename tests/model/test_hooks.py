"""Hooks on parameters change what autograd calls a gradient: they are refused, by name."""

import pytest
import torch
from torch import nn

import lapwing

from ..zoo import oracle
from ..zoo.cases import assert_same


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double().eval()
    return model, torch.randn(6, 2).double(), torch.randint(3, (6,))


@pytest.mark.parametrize("hook", [lambda g: g.clamp(-1e-3, 1e-3), lambda g: 2 * g, lambda g: None])
def test_refused_by_name(problem, hook, tmp_path):
    model, x, y = problem
    la = lapwing.fit(model, (x, y), "classification", structure="diag")
    la.save(tmp_path / "la")
    handle = model[0].weight.register_hook(hook)
    with pytest.raises(lapwing.UnsupportedModel, match=r"'0\.weight'.*handle\.remove"):
        lapwing.fit(model, (x, y), "classification", structure="diag")
    with pytest.raises(lapwing.UnsupportedModel, match=r"'0\.weight'"):
        lapwing.load(tmp_path / "la", model)
    handle.remove()
    lapwing.fit(model, (x, y), "classification", structure="diag")


def test_on_parameters_that_are_left_out(problem):
    model, x, y = problem
    model[0].weight.register_hook(lambda g: 2 * g)
    la = lapwing.fit(model, (x, y), "classification", structure="full", select="last_layer")
    f, j = oracle.outputs(model, x), oracle.jacobian(model, x, names=["2.weight", "2.bias"])
    assert_same(la.curvature.dense(), oracle.ggn(j, oracle.hessian_categorical(f)), 1e-9, "last layer")


def test_after_accumulation(problem):
    model, x, y = problem
    calls = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    la = lapwing.fit(model, (x, y), "classification", structure="full")
    la.predict(x)
    assert not calls
    f, j = oracle.outputs(model, x), oracle.jacobian(model, x)
    assert_same(la.curvature.dense(), oracle.ggn(j, oracle.hessian_categorical(f)), 1e-9, "full")


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_submodules(problem, register):
    model, x, y = problem
    getattr(model[1], register)(lambda module, *grads: None)
    la = lapwing.fit(model, (x, y), "classification", structure="full")
    f, j = oracle.outputs(model, x), oracle.jacobian(model, x)
    assert_same(la.curvature.dense(), oracle.ggn(j, oracle.hessian_categorical(f)), 1e-9, "full")
    getattr(model[1], register)(lambda module, *grads: (0.5 * grads[0][0],))
    with pytest.raises(lapwing.UnsupportedModel, match="backward hook of '1' changes gradients"):
        lapwing.fit(model, (x, y), "classification", structure="diag")
