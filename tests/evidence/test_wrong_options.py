"""Options of tuning and of training with the evidence that cannot be used are refused before any work."""

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
    ignored = torch.full((12,), -100)
    with pytest.raises(BadData, match="hold no target that counts"):
        lapwing.compare({"one": fitted()}, (DATA[0], ignored))


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
