"""What is chosen from a grid is one of its candidates, by every method; a choice at the edge of a grid is reported."""

import itertools

import pytest
import torch
from torch import nn

import lapwing
from lapwing import Gaussian


def classifier(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(80, 3, dtype=torch.float64)
    y = torch.randint(3, (80,))
    return model, (x[:40], y[:40]), (x[40:], y[40:])


def regressor():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.randn(80, 3, dtype=torch.float64)
    y = model(x).detach() + 0.5 * torch.randn(80, 1, dtype=torch.float64)
    return model, (x[:40], y[:40]), (x[40:], y[40:])


def precisions(la):
    return set(la.prior.resolve(la.params.names, la.params.sizes)[1].diagonal().tolist())


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
@pytest.mark.parametrize("rule", ["widest", "lowest"])
@pytest.mark.parametrize("kind", [classifier, regressor])
def test_validation_never_leaves_the_grid(kind, rule, prior):
    model, train, val = kind()
    la = lapwing.fit(model, train, "classification" if kind is classifier else "regression", structure="kron")
    tuned = la.tune(val, grid={"prior": [1, 10], "temperature": [1, 2]}, rule=rule, prior=prior)
    assert precisions(tuned) <= {1.0, 10.0}
    assert float(tuned.temperature.T) in (1.0, 2.0)
    assert any("at the edge of its grid" in message for message in tuned.tuning.messages)
    assert "at the edge of its grid" in tuned.summary()


@pytest.mark.parametrize("rule", ["widest", "lowest"])
def test_every_name_of_the_grid_is_respected(rule):
    model, train, val = classifier()
    la = lapwing.fit(model, train, "classification", structure="full")
    tuned = la.tune(val, grid={"logit_temperature": [0.5, 3.0]}, rule=rule)
    assert tuned.logit_temperature in (0.5, 3.0)
    model, train, val = regressor()
    for likelihood in (Gaussian(noise=1.0), "regression"):
        la = lapwing.fit(model, train, likelihood, structure="full")
        tuned = la.tune(val, grid={"noise": [0.3, 0.9]}, rule=rule)
        assert min(abs(float(tuned.likelihood.noise) - sigma) for sigma in (0.3, 0.9)) < 1e-12


def test_lowest_on_a_grid_is_the_lowest_of_all_its_points():
    model, train, val = classifier()
    la = lapwing.fit(model, train, "classification", structure="full")
    grid = {"prior": [0.5, 3.0, 20.0], "temperature": [1.0, 4.0], "logit_temperature": [0.7, 1.5]}
    tuned = la.tune(val, grid=grid, rule="lowest")

    def nll(tau, T, s):
        at = la.replace(prior=tau, temperature=T, logit_temperature=s)
        return -at.predict(val[0], samples=128).log_prob(val[1]).mean().item()

    scores = {point: nll(*point) for point in itertools.product(*grid.values())}
    chosen = (tuned.tuning.setting.narrow, tuned.tuning.setting.temperature, tuned.tuning.setting.logit_temperature)
    assert chosen == pytest.approx(min(scores, key=scores.get))


@pytest.mark.parametrize("likelihood", ["regression", Gaussian(noise=0.8)])
@pytest.mark.parametrize("structure", ["full", "kron", "functional"])
def test_evidence_picks_the_best_candidate(structure, likelihood):
    model, train, _ = regressor()
    la = lapwing.fit(model, train, likelihood, structure=structure)
    grid = {"prior": [0.3, 1.0, 30.0], "noise": [0.2, 0.5, 2.0]}
    tuned = la.tune(grid=grid)
    evidence = {
        (tau, sigma): float(la.replace(prior=tau, likelihood=Gaussian(sigma)).log_evidence())
        for tau, sigma in itertools.product(grid["prior"], grid["noise"])
    }
    tau, sigma = max(evidence, key=evidence.get)
    assert precisions(tuned) == {tau}
    assert float(tuned.likelihood.noise) == pytest.approx(sigma)
    assert tuned.tuning.score == pytest.approx(-evidence[tau, sigma])
    assert len(tuned.tuning.settings) == 9


def test_evidence_learns_what_the_grid_leaves_free():
    model, train, _ = regressor()
    la = lapwing.fit(model, train, "regression", structure="full")
    tuned = la.tune(grid={"prior": [3.0]})
    assert precisions(tuned) == {3.0}
    fixed = la.replace(prior=3.0).tune(learn="noise")
    assert float(tuned.likelihood.noise) == pytest.approx(float(fixed.likelihood.noise))


@pytest.mark.parametrize("prior", ["layerwise", "parameterwise"])
def test_evidence_with_many_precisions_stays_on_the_grid(prior):
    model, train, _ = classifier()
    la = lapwing.fit(model, train, "classification", structure="diag")
    with pytest.warns(UserWarning, match="interpolates"):
        tuned = la.tune(grid={"prior": [0.1, 1.0, 10.0]}, prior=prior)
    assert precisions(tuned) <= {0.1, 1.0, 10.0}
    best = max(float(la.replace(prior=tau).log_evidence()) for tau in (0.1, 1.0, 10.0))
    assert float(tuned.log_evidence()) >= best - 1e-9


def test_leave_one_out_stays_on_the_grid_and_learns_what_it_is_told():
    model, train, _ = regressor()
    la = lapwing.fit(model, train, "regression", structure="full")
    tuned = la.tune(train, method="loo", grid={"prior": [0.1, 100.0], "noise": [0.4, 0.6]})
    assert precisions(tuned) <= {0.1, 100.0}
    assert min(abs(float(tuned.likelihood.noise) - sigma) for sigma in (0.4, 0.6)) < 1e-12
    noise = la.tune(train, method="loo", learn="noise")
    assert precisions(noise) == {1.0}
    assert float(noise.likelihood.noise) != float(la.likelihood.noise)


def test_inducing_points_stay_on_the_grid():
    model, train, _ = regressor()
    la = lapwing.fit(model, train, "regression", structure=lapwing.VaLLA(inducing=10))
    assert precisions(la.tune(grid={"prior": [0.2, 5.0]})) <= {0.2, 5.0}
