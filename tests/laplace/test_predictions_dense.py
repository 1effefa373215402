"""Predictions through the front door: gradients, sampled networks, loaders and splits, against dense algebra."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

import lapwing
from tests.dense import assert_same, build, randn, seeded

STRUCTURES = ("diag", "blockdiag", "kron", "ekfac", "full", "lowrank")
SIGMA = 0.7


def problem(kind):
    if kind == "mlp":
        return build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))), randn(8, 3)
    if kind == "norm":
        parts = lambda: (nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Tanh(), nn.Linear(4, 3))  # noqa: E731
        return build(lambda: nn.Sequential(*parts())), randn(8, 3)
    parts = lambda: (nn.Conv2d(2, 3, 2, bias=False), nn.Softplus(), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3))  # noqa: E731
    return build(lambda: nn.Sequential(*parts())), randn(8, 2, 3, 3)


def fitted(kind, structure, likelihood="regression"):
    module, x = problem(kind)
    if likelihood == "regression":
        family, y = lapwing.Gaussian(SIGMA), randn(8, 3, seed=2)
    else:
        family, y = likelihood, torch.randint(3, (8,), generator=seeded(1))
    return lapwing.fit(module, (x, y), family, structure=structure, prior=0.5), module, x


def rows(module, x):
    """J (N, K, P) as a function of x that autograd can follow. By a loop: through `jacrev`, layer norm is wrong."""
    f, weights = module(x), list(module.parameters())
    each = [torch.autograd.grad(value, weights, create_graph=True) for value in f.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in found]) for found in each]).reshape(*f.shape, -1)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "norm", "conv"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_with_respect_to_the_inputs(structure, kind, joint):
    la, module, x = fitted(kind, structure)
    sigma = torch.linalg.inv(la.posterior.precision.dense())
    shape = (3, 3, 3, 3) if joint else (3, 3, 3)
    mix, tilt = randn(*shape, seed=4), randn(3, 3, seed=5)
    here, there = (x[:3].clone().requires_grad_() for _ in range(2))
    function = la.predict(here, differentiable=True, joint=joint).function
    j = rows(module, there)
    exact = torch.einsum("ncp,pq,mdq->ncmd" if joint else "ncp,pq,ndq->ncd", j, sigma, j)
    assert_same(function.covariance.detach(), exact.detach(), 1e-9)
    (found,) = torch.autograd.grad((function.covariance * mix).sum() + (function.mean * tilt).sum(), here)
    (truth,) = torch.autograd.grad((exact * mix).sum() + (module(there) * tilt).sum(), there)
    assert_same(found, truth, 1e-8)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_gradients_of_what_attacks_and_acquisition_functions_use(structure):
    """Of the log-probability under the probit link, and of an upper confidence bound."""
    la, module, x = fitted("mlp", structure, "classification")
    y = torch.randint(3, (8,), generator=seeded(3))
    sigma = torch.linalg.inv(la.posterior.precision.dense())
    here, there = (x.clone().requires_grad_() for _ in range(2))
    j = rows(module, there)
    variance = torch.einsum("ncp,pq,ncq->nc", j, sigma, j)
    exact = nn.functional.cross_entropy(module(there) / (1 + math.pi / 8 * variance).sqrt(), y, reduction="sum")
    loss = -la.predict(here, link="probit", differentiable=True).log_prob(y).sum()
    assert_same(loss.detach(), exact.detach())
    assert_same(torch.autograd.grad(loss, here)[0], torch.autograd.grad(exact, there)[0], 1e-9)

    la, module, x = fitted("mlp", structure)
    sigma = torch.linalg.inv(la.posterior.precision.dense())
    here, there = (x.clone().requires_grad_() for _ in range(2))
    p = la.predict(here, differentiable=True)
    j = rows(module, there)
    exact = module(there) + 2 * (torch.einsum("ncp,pq,ncq->nc", j, sigma, j) + SIGMA**2).sqrt()
    (found,) = torch.autograd.grad((p.mean + 2 * p.stddev).sum(), here)
    assert_same(found, torch.autograd.grad(exact.sum(), there)[0], 1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_sampled_is_the_mixture_of_sampled_networks(structure):
    la, module, x = fitted("mlp", structure)
    draws = la.posterior.sample(9, seeded(5))
    sizes = [p.numel() for p in module.parameters()]
    f = []
    for theta in draws:
        parts = zip(module.named_parameters(), theta.split(sizes), strict=True)
        f.append(functional_call(module, {name: part.reshape(p.shape) for (name, p), part in parts}, (x,)))
    f = torch.stack(f).detach()
    y = randn(8, 3, seed=6)
    log_p = torch.distributions.Normal(f, SIGMA).log_prob(y).sum(-1)
    for p in (
        la.predict(x, method="sampled", samples=9, generator=seeded(5)),
        la.ensemble(9, generator=seeded(5)).predict(x),
    ):
        assert_same(p.mean, f.mean(0), 1e-13)
        assert_same(p.epistemic, f.var(0, correction=0), 1e-10)
        assert_same(p.variance, f.var(0, correction=0) + SIGMA**2, 1e-12)
        assert_same(p.log_prob(y), log_p.logsumexp(0) - math.log(9), 1e-12)

    la, module, x = fitted("mlp", structure, "classification")
    probs = torch.stack([functional_call(module, w, (x,)).softmax(-1) for w in la.ensemble(9, seeded(5))]).detach()
    p = la.predict(x, method="sampled", samples=9, generator=seeded(5))
    assert_same(p.probs, probs.mean(0), 1e-13)
    assert_same(p.aleatoric, -(probs * probs.log()).sum(-1).mean(0), 1e-12)
    assert_same(p.entropy, -(probs.mean(0) * probs.mean(0).log()).sum(-1), 1e-12)
    assert_same(p.epistemic, p.entropy - p.aleatoric, 1e-12)


@pytest.mark.parametrize("link", ["mc", "probit", "bridge"])
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_neither_splits_nor_loaders_nor_repetition_change_a_prediction(structure, link):
    la, _, x = fitted("conv", structure, "classification")
    whole = la.predict(x, link=link).probs
    assert torch.equal(whole, la.predict(x, link=link).probs)
    targets = torch.zeros(8, dtype=torch.long)
    for sizes in ([8], [1] * 8, [3, 5]):
        parts = x.split(sizes)
        assert_same(torch.cat([la.predict(part, link=link).probs for part in parts]), whole, 1e-9)
        for data in (list(parts), list(zip(parts, targets.split(sizes), strict=True))):
            assert_same(torch.cat([p.probs for p in la.predict_loader(data, link=link)]), whole, 1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_loaded_posterior_takes_more_data(structure, tmp_path):
    module, x = problem("mlp")
    y = randn(8, 3, seed=2)
    fit = lambda n: lapwing.fit(module, (x[:n], y[:n]), lapwing.Gaussian(SIGMA), structure=structure, prior=0.5)  # noqa: E731
    first = fit(5)
    first.save(tmp_path / "first.lapwing")
    more = lapwing.load(tmp_path / "first.lapwing", module).update((x[5:], y[5:]))
    assert more.n_data == 8
    if structure == "ekfac":  # it keeps its first eigenbasis: only the trace is that of the union
        assert_same(more.curvature.dense().trace(), fit(8).curvature.dense().trace())
    else:
        assert_same(more.curvature.dense(), fit(8).curvature.dense())
        assert_same(more.log_evidence(at="linear-mode"), fit(8).log_evidence(at="linear-mode"), 1e-9)
