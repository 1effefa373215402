"""The exact Hessian of the negative log-likelihood, against torch.autograd.functional.hessian."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import lapwing
from tests.dense import assert_same, build, covariance, flat, ggn, jacobian, outputs, randn, seeded, softmax_hessian

SIGMA = 0.7


def net():
    return build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))


def eye(size, scale=1.0):
    return scale * torch.eye(size, dtype=torch.float64)


def exact_hessian(module, x, y, loss):
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    shapes = [dict(module.named_parameters())[name].shape for name in names]

    def total(theta):
        parts = theta.split([shape.numel() for shape in shapes])
        weights = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return loss(functional_call(module, weights, (x,)), y)

    return torch.autograd.functional.hessian(total, flat(module))


def gaussian_loss(f, y):
    return (f - y).square().sum() / (2 * SIGMA**2)


def class_loss(f, y):
    return F.cross_entropy(f, y, reduction="sum")


def token_loss(f, y):
    return F.cross_entropy(f.flatten(0, 1), y.flatten(), reduction="sum")


def problem(kind):
    """module, inputs, targets, likelihood, loss."""
    x = randn(8, 3)
    if kind == "regression":
        return net(), x, outputs(net(), x) + 2 * randn(8, 3, seed=2), lapwing.Gaussian(SIGMA), gaussian_loss
    if kind == "classification":
        return net(), x, torch.randint(3, (8,), generator=seeded(1)), "classification", class_loss
    y = torch.randint(3, (8, 5), generator=seeded(1))
    y[0, :3] = -100
    return net(), randn(8, 5, 3), y, "classification", token_loss


@pytest.mark.parametrize("structure", ["full", "blockdiag", "diag"])
@pytest.mark.parametrize("kind", ["regression", "classification", "tokens"])
def test_hessian_is_autograds(kind, structure):
    module, x, y, likelihood, loss = problem(kind)
    exact = exact_hessian(module, x, y, loss)
    if structure == "blockdiag":
        exact[:16, 16:] = exact[16:, :16] = 0
    elif structure == "diag":
        exact = exact.diag().diag()
    tau = 1.0 - min(0.0, torch.linalg.eigvalsh(exact).min().item())
    data = [(x[:3], y[:3]), (x[3:], y[3:])]
    for factor in ("hessian", lapwing.Hessian()):
        la = lapwing.fit(module, data, likelihood, structure=structure, factor=factor, prior=tau)
        assert_same(la.posterior.precision.dense(), exact + eye(31, tau))
    j = jacobian(module, x)
    if kind != "tokens":
        assert_same(la.predict(x).function.covariance, covariance(j, exact + eye(31, tau)), 1e-9)
    bracket = torch.linalg.slogdet((exact + eye(31, tau)) / tau)[1]
    log_p = -loss(outputs(module, x), y).double()
    if kind == "regression":
        log_p = torch.distributions.Normal(outputs(module, x), SIGMA).log_prob(y).sum()
    assert_same(la.log_evidence(), log_p - 0.5 * tau * flat(module).square().sum() - 0.5 * bracket)
    unit = la.posterior.sample(20_000, seeded(1)) - la.posterior.mean
    assert_same(unit.var(0), torch.linalg.inv(exact + eye(31, tau)).diag(), 0.06)


def test_hessian_differs_from_the_ggn_by_the_residuals_alone():
    """Equal where the network is linear, and for any network where the residuals vanish."""
    x = randn(8, 3)
    linear = build(lambda: nn.Linear(3, 3))
    y = torch.randint(3, (8,), generator=seeded(1))
    la = lapwing.fit(linear, (x, y), "classification", structure="full", factor="hessian")
    assert_same(la.curvature.dense(), ggn(jacobian(linear, x), softmax_hessian(outputs(linear, x))))
    module = net()
    la = lapwing.fit(module, (x, outputs(module, x)), lapwing.Gaussian(1.0), structure="full", factor="hessian")
    assert_same(la.curvature.dense(), ggn(jacobian(module, x)))


@pytest.mark.parametrize("structure", ["full", "blockdiag", "diag"])
def test_an_indefinite_hessian_names_its_smallest_eigenvalue_and_the_ways_out(structure):
    module, x, y, likelihood, loss = problem("regression")
    exact = exact_hessian(module, x, y, loss)
    if structure == "blockdiag":
        exact[:16, 16:] = exact[16:, :16] = 0
    elif structure == "diag":
        exact = exact.diag().diag()
    tau = 0.1
    smallest = torch.linalg.eigvalsh(exact + eye(31, tau)).min().item()
    assert smallest < -0.5
    fit = lambda **options: lapwing.fit(  # noqa: E731
        module, (x, y), likelihood, structure=structure, factor="hessian", **options
    )
    with pytest.raises(lapwing.NotPositiveDefinite) as caught:
        fit(prior=tau)
    message = str(caught.value)
    named = float(re.search(r"smallest eigenvalue is (-[0-9.e+-]*[0-9])", message).group(1))
    assert named == pytest.approx(smallest, rel=0.01)
    for way in ("prior precision", "GGN", "repair=True"):
        assert way in message

    repaired = fit(prior=tau, repair=True)
    increase = repaired.posterior.increase
    assert increase == pytest.approx(-smallest, rel=1e-3)
    assert increase > -smallest
    assert_same(repaired.posterior.precision.dense(), exact + eye(31, tau + increase), 1e-9)
    enough = fit(prior=tau + 1.01 * -smallest)  # the advice of the message, followed
    assert enough.posterior.increase == 0
    assert_same(enough.posterior.covariance(), torch.linalg.inv(exact + eye(31, tau - 1.01 * smallest)), 1e-6)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "lowrank"])
def test_hessian_needs_a_dense_structure(structure):
    module, x, y, likelihood, _ = problem("classification")
    with pytest.raises(lapwing.UnsupportedOperation, match=r"Hessian.*full"):
        lapwing.fit(module, (x, y), likelihood, structure=structure, factor="hessian")


def test_hessian_of_selected_weights():
    module, x, y, likelihood, loss = problem("classification")
    exact = exact_hessian(module, x, y, loss)
    la = lapwing.fit(module, (x, y), likelihood, structure="full", factor="hessian", select="2.*", prior=5.0)
    assert_same(la.curvature.dense(), exact[16:, 16:])
    select = lapwing.subnetwork(6, by="magnitude")
    la = lapwing.fit(module, (x, y), likelihood, structure="full", factor="hessian", select=select, prior=5.0)
    at = la.params.index
    assert_same(la.curvature.dense(), exact[at[:, None], at])


def test_hessian_adds_up_over_updates():
    module, x, y, likelihood, loss = problem("classification")
    la = lapwing.fit(module, (x[:3], y[:3]), likelihood, structure="full", factor="hessian", prior=9.0)
    la = la.update((x[3:], y[3:]))
    assert_same(la.curvature.dense(), exact_hessian(module, x, y, loss))


def test_tuning_an_indefinite_hessian_on_data_says_what_to_do():
    module, x, y, likelihood, _ = problem("classification")
    la = lapwing.fit(module, (x, y), likelihood, structure="full", factor=lapwing.Hessian(), prior=100.0)
    assert float(la.curvature.matrix.smallest_eigenvalue()) < 0
    for refused in (
        lambda: la.tune((x, y)),
        lambda: la.tune((x, y), method="loo"),
        lambda: la.temperature_curve((x, y)),
    ):
        with pytest.raises(lapwing.NotPositiveDefinite, match=r"indefinite.*factor='ggn'"):
            refused()
