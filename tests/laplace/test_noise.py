"""Regression: the noise is estimated from the residuals, learned by every tuning, and the user's where it is given."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import lapwing
from lapwing import Gaussian
from lapwing.errors import UnsupportedOperation
from tests.dense import jacobian


def problem(outputs=1, n=60, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x = torch.randn(n, 3, dtype=torch.float64)
    scale = torch.tensor([0.3, 5.0, 0.02], dtype=torch.float64)[:outputs]
    y = model(x).detach() + scale * torch.randn(n, outputs, dtype=torch.float64)
    return model, x, y


def residual_noise(model, x, y):
    return (y - model(x).detach()).square().mean(0).sqrt()


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "functional", "ekfac"])
def test_fit_estimates_the_noise_of_every_output(outputs, structure):
    model, x, y = problem(outputs)
    la = lapwing.fit(model, (x, y), "regression", structure=structure)
    torch.testing.assert_close(la.likelihood.sigma(y).expand(outputs), residual_noise(model, x, y))
    assert la.likelihood.estimated


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("factor", ["ggn", "empirical"])
def test_posterior_under_the_estimated_noise_is_the_dense_one(outputs, factor):
    model, x, y = problem(outputs)
    la = lapwing.fit(model, (x, y), "regression", structure="full", prior=2.0, factor=factor)
    sigma = residual_noise(model, x, y)
    rows = jacobian(model, x) / sigma[:, None]
    if factor == "empirical":
        rows = (rows * ((y - model(x).detach()) / sigma)[..., None]).sum(1, keepdim=True)
    rows = rows.flatten(0, 1)
    truth = rows.T @ rows + 2.0 * torch.eye(rows.shape[1], dtype=torch.float64)
    torch.testing.assert_close(la.posterior.precision.dense(), truth)


def test_weights_and_missing_passes_give_the_weighted_estimate():
    model, x, y = problem(3)
    weights = torch.rand(60, dtype=torch.float64)
    split = lambda b: b  # noqa: E731
    batches = [(x[:25], y[:25], weights[:25]), (x[25:], y[25:], weights[25:])]
    la = lapwing.fit(model, batches, "regression", structure="full", split=split)
    r = (y - model(x).detach()).square()
    truth = ((weights[:, None] * r).sum(0) / weights.sum()).sqrt()
    torch.testing.assert_close(la.likelihood.sigma(y), truth)
    once = lapwing.fit(model, iter(batches), "regression", structure="full", split=split)
    first = ((weights[:25, None] * r[:25]).sum(0) / weights[:25].sum()).sqrt()
    found = once.likelihood.sigma(y)
    torch.testing.assert_close(found / found[0], first / first[0])  # ratios of the first batch
    torch.testing.assert_close((truth.square() / found.square()).mean(), torch.ones((), dtype=torch.float64))
    assert "first batch" in once.summary()


def test_a_given_noise_stays_put_unless_learn_names_it():
    model, x, y = problem()
    la = lapwing.fit(model, (x, y), Gaussian(noise=0.7), structure="full")
    for tuned in (la.tune(), la.tune((x, y)), la.tune((x, y), method="loo")):
        assert float(tuned.likelihood.noise) == 0.7
    assert float(la.tune(learn=("prior", "noise")).likelihood.noise) != 0.7
    assert float(la.tune((x, y), learn=("prior", "noise")).likelihood.noise) != 0.7


def test_every_tuning_learns_an_estimated_noise():
    model, x, y = problem(3)
    la = lapwing.fit(model, (x, y), "regression", structure="full")
    before = la.likelihood.sigma(y)
    by_evidence = la.tune()
    explicit = lapwing.fit(model, (x, y), Gaussian(before), structure="full").tune(learn=("prior", "noise"))
    torch.testing.assert_close(by_evidence.likelihood.sigma(y), explicit.likelihood.sigma(y), rtol=1e-5, atol=0)
    torch.manual_seed(1)
    vx = torch.randn(200, 3, dtype=torch.float64)
    vy = model(vx).detach() + 10 * before * torch.randn(200, 3, dtype=torch.float64)
    by_validation = la.tune((vx, vy))
    for tuned in (by_evidence, by_validation):
        after = tuned.likelihood.sigma(y)
        torch.testing.assert_close(after / after[0], before / before[0])  # a common factor
        assert not torch.allclose(after, before)
        assert tuned.likelihood.estimated
        assert "noise" in str(tuned.tuning.setting)
    assert 7 < float(by_validation.likelihood.sigma(y)[0] / before[0]) < 13
    kept = la.tune((vx, vy), learn="prior")
    torch.testing.assert_close(kept.likelihood.sigma(y), before)


@pytest.mark.parametrize("select", ["all", "last_layer"])
@pytest.mark.parametrize("rule", ["widest", "lowest"])
def test_tuning_does_not_depend_on_batches_and_their_order(rule, select):
    """The levels of noise to try follow from all held-out data, not from a first item that happens to fit."""
    model, x, y = problem(2, n=120)
    la = lapwing.fit(model, (x[:60], y[:60]), "regression", structure="full", select=select)
    order = (model(x[60:]) - y[60:]).square().sum(1).argsort()
    x, y = x[60:][order], y[60:][order]
    singles = [(x[k : k + 1], y[k : k + 1]) for k in range(60)]
    expected = la.tune((x, y), rule=rule)
    for data in (singles, singles[::-1]):
        tuned = la.tune(data, rule=rule)
        assert tuned.tuning.score == pytest.approx(expected.tuning.score, abs=1e-4)
        torch.testing.assert_close(tuned.likelihood.noise, expected.likelihood.noise, rtol=0.02, atol=0)


def test_summary_shows_the_noise():
    model, x, y = problem()
    la = lapwing.fit(model, (x, y), "regression", structure="full")
    assert f"noise {float(residual_noise(model, x, y)):.4g} (learned from data)" in la.summary()
    given = lapwing.fit(model, (x, y), Gaussian(noise=0.25), structure="full").summary()
    assert "noise 0.25\n" in given


def test_replace_estimates_again_and_refuses_other_ratios():
    model, x, y = problem(3)
    la = lapwing.fit(model, (x, y), "regression", structure="full")
    back = la.tune().replace(likelihood="regression")
    torch.testing.assert_close(back.likelihood.sigma(y), la.likelihood.sigma(y))
    with pytest.raises(UnsupportedOperation, match="common factor"):
        la.replace(likelihood=Gaussian(0.5))
    with pytest.raises(UnsupportedOperation, match="common factor"):
        lapwing.fit(model, (x, y), Gaussian(0.5), structure="full").replace(likelihood="regression")


def test_update_is_a_fit_on_the_union_for_one_output():
    model, x, y = problem()
    whole = lapwing.fit(model, (x, y), "regression", structure="full")
    parts = lapwing.fit(model, (x[:20], y[:20]), "regression", structure="full").update((x[20:], y[20:]))
    torch.testing.assert_close(parts.likelihood.sigma(y), whole.likelihood.sigma(y))
    torch.testing.assert_close(parts.posterior.precision.dense(), whole.posterior.precision.dense())


def test_storage_keeps_whose_noise_it_is(tmp_path):
    model, x, y = problem(3)
    for likelihood, estimated in (("regression", True), (Gaussian(noise=0.5), False)):
        la = lapwing.fit(model, (x, y), likelihood, structure="diag")
        la.save(tmp_path / "a.lapwing")
        back = lapwing.load(tmp_path / "a.lapwing", model)
        assert back.likelihood.estimated is estimated
        torch.testing.assert_close(back.likelihood.sigma(y), la.likelihood.sigma(y))


def test_outputs_without_residuals_are_said():
    model, x, _ = problem(2)
    y = model(x).detach()
    y[:, 0] += 1.0
    with pytest.warns(UserWarning, match="1 of 2 outputs have no residuals"):
        la = lapwing.fit(model, (x, y), "regression", structure="diag")
    torch.testing.assert_close(la.likelihood.sigma(y), torch.ones(2, dtype=torch.float64))


def test_subnetwork_by_variance_uses_the_estimate():
    model, x, y = problem(3)
    la = lapwing.fit(model, (x, y), "regression", structure="full", select=lapwing.subnetwork(5, by="variance"))
    rows = (jacobian(model, x) / residual_noise(model, x, y)[:, None]).flatten(0, 1)
    variance = 1 / (rows.square().sum(0) + 1.0)
    assert set(la.params.index.tolist()) == set(variance.topk(5).indices.tolist())


def test_training_hands_its_own_noise_to_the_fit():
    model, x, y = problem()
    trained = lapwing.train(model, (x, y), "regression", epochs=2, progress=False)
    torch.testing.assert_close(trained.laplace.likelihood.dispersion, trained.online.likelihood.dispersion)
    assert trained.laplace.likelihood.estimated
    assert not math.isclose(float(trained.laplace.likelihood.dispersion), 1.0)


def test_network_alone_under_an_unknown_noise_says_what_it_is_scored_with():
    model, x, y = problem()
    la = lapwing.fit(model, (x, y), "regression", structure="diag")
    both = lapwing.evaluate({"MAP": model, "Laplace": la}, (x, y), likelihood="regression")
    sigma = float(residual_noise(model, x, y))
    law = torch.distributions.Normal(model(x).detach(), sigma)
    assert math.isclose(both.row("MAP")["nll"], -law.log_prob(y).mean().item(), rel_tol=1e-6)
    with pytest.warns(UserWarning, match="noise"):
        lapwing.evaluate({"MAP": model}, (x, y), likelihood="regression")


def test_flat_parameters_are_those_of_torch():
    model, x, y = problem()
    la = lapwing.fit(model, (x, y), "regression", structure="full")
    torch.testing.assert_close(la.posterior.mean, parameters_to_vector(model.parameters()).detach())
