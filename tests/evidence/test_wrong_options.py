"""Options of tuning and of training with the evidence that cannot be used are refused before any work."""

import numpy as np
import pytest
import torch
from torch import nn

import lapwing
from lapwing.errors import BadData, LapwingError, UnsupportedOperation
from tests.dense import build, randn

DATA = (randn(12, 3), torch.arange(12) % 2)


def network() -> nn.Module:
    return build(lambda: nn.Linear(3, 2))


def fitted(**options: object) -> lapwing.Laplace:
    return lapwing.fit(network(), DATA, "classification", structure="full", **options)


def test_options_of_training() -> None:
    with pytest.raises(BadData, match="burnin counts optimizer steps, at least 0; got -1"):
        lapwing.train(network(), DATA, "classification", epochs=1, burnin=-1)
    with pytest.raises(UnsupportedOperation, match="keep is 'evidence', 'validation' or 'last', got 'best'"):
        lapwing.train(network(), DATA, "classification", epochs=1, keep="best")


def test_a_prior_that_is_a_posterior_is_not_tuned() -> None:
    first = fitted()
    second = fitted(prior=lapwing.Prior.from_posterior(first))
    with pytest.raises(UnsupportedOperation, match="a prior that is itself a posterior cannot be tuned"):
        second.tune(method="evidence")


def test_held_out_data_without_a_batch() -> None:
    with pytest.raises(LapwingError):
        fitted().tune([], predictive="sampled")
    with pytest.raises(LapwingError):
        fitted().tune([])


def test_a_grid_for_what_is_not_learned() -> None:
    with pytest.raises(ValueError, match="grid has candidates for 'prior', which is not in learn"):
        lapwing.fit(network(), (DATA[0], DATA[0][:, :2]), "regression", structure="full").tune(
            method="evidence", learn="noise", grid={"prior": [0.1, 1.0]}
        )


def test_held_out_targets_that_do_not_count() -> None:
    ignored = (DATA[0], torch.full((12,), -100))
    la, last = fitted(), fitted(select="last_layer")
    for use in (
        lambda: lapwing.compare({"one": la}, ignored),
        lambda: la.tune(ignored),
        lambda: last.tune(ignored),
        lambda: la.tune(ignored, predictive="sampled"),
        lambda: la.temperature_curve(ignored),
        lambda: lapwing.TemperatureScaled.fit(network(), ignored),
    ):
        with pytest.raises(BadData, match=r"hold no .*target that counts"):
            use()


def test_candidates_of_another_kind() -> None:
    la = fitted()
    for wrong, message in (
        ({"grid": [1, 2]}, r"grid maps names to candidates, .* got \[1, 2\]"),
        ({"grid": {"prior": 3.0}}, "candidates for 'prior' must be a list of at least one positive number, got 3.0"),
        ({"grid": {"prior": []}}, "at least one positive number"),
        ({"grid": {"prior": ["a"]}}, "each of the candidates for 'prior' must be positive and finite, got 'a'"),
        ({"learn": 3}, "learn is a name or a list of names"),
    ):
        with pytest.raises(BadData, match=message):
            la.tune(DATA, **wrong)
    for temperatures in (2.0, [], ["a"], [0.0]):
        with pytest.raises(BadData, match="temperatures must be"):
            la.temperature_curve(DATA, temperatures=temperatures)


def test_candidates_and_temperatures_in_tensors_and_arrays() -> None:
    la = fitted()
    for kind in (torch.tensor, np.array):
        tuned = la.tune(DATA, learn="prior", grid={"prior": kind([0.5, 2.0])}, rule="lowest")
        assert float(tuned.prior.precision) in (0.5, 2.0)
        curve = la.temperature_curve(DATA, temperatures=kind([0.5, 2.0]))
        torch.testing.assert_close(curve.nll, la.temperature_curve(DATA, temperatures=[0.5, 2.0]).nll)


def test_names_of_what_is_learned_are_those_that_users_write() -> None:
    regression = lapwing.fit(network(), (DATA[0], DATA[0][:, :2]), "regression", structure="full")
    with pytest.raises(BadData, match=r"the evidence can choose 'prior' and 'noise', got 'sigma'\. Temperatures need"):
        regression.tune(learn="sigma")
    with pytest.raises(BadData, match=r"choose 'prior', 'temperature', 'noise' for Gaussian, got 'sigma'"):
        regression.tune((DATA[0], DATA[0][:, :2]), learn="sigma")
    with pytest.raises(BadData, match=r"'temperature', 'logit_temperature' for Categorical, got 'priors'\. Did"):
        fitted().tune(DATA, learn="priors")
    with pytest.raises(UnsupportedOperation, match=r"got 'kfac'\. Did you mean 'kron'\?"):
        lapwing.fit(network(), DATA, "classification", structure="kfac")
