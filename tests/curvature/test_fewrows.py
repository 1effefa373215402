"""Function space against weight space."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing
from lapwing.curvature.fewrows import Functional, Nystrom
from tests.curvature.test_matrixfree import CASES, problem


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("prior", [0.3, {"*weight*": 2.0, "*": 0.5}])
def test_the_gaussian_process_is_the_weight_space_posterior(name: str, prior: object) -> None:
    model, data, likelihood = problem(name)
    full = lapwing.fit(model, data, likelihood, structure="full", prior=prior)
    gp = lapwing.fit(model, data, likelihood, structure=Functional(), prior=prior)
    x = data[0][:4]
    torch.testing.assert_close(gp.log_evidence(), full.log_evidence(), rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(gp.log_evidence("linear-mode"), full.log_evidence("linear-mode"), rtol=1e-8, atol=1e-8)
    for joint in (False, True):
        one, other = (la.predict(x, joint=joint).function.covariance for la in (full, gp))
        torch.testing.assert_close(other, one, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gp.posterior.variance, full.posterior.variance, rtol=1e-7, atol=1e-9)


def test_a_subset_is_scaled_to_all_data() -> None:
    """Averaged over subsets the curvature is the whole one; each keeps the log-likelihood of all data."""
    model, data, likelihood = problem("mlp regression")
    full = lapwing.fit(model, data, likelihood, structure="full")
    each = [lapwing.fit(model, data, likelihood, structure=Functional(points=8, seed=s)) for s in range(30)]
    mean = torch.stack([la.curvature.matrix.trace() for la in each]).mean()
    assert abs(float(mean / full.curvature.matrix.trace()) - 1) < 0.1
    torch.testing.assert_close(each[0].log_likelihood, full.log_likelihood)
    assert "scaled by 3 to all data" in each[0].summary()
    whole = lapwing.fit(model, data, likelihood, structure=Functional(points=100))
    torch.testing.assert_close(whole.log_evidence(), full.log_evidence())


def test_weights_and_batches_enter_the_subset() -> None:
    model, (x, y), likelihood = problem("mlp regression")
    w = torch.rand(len(x), dtype=torch.float64)
    batches = [(x[:7], y[:7], w[:7]), (x[7:], y[7:], w[7:])]
    full = lapwing.fit(model, batches, likelihood, structure="full", split=lambda b: b)
    gp = lapwing.fit(model, batches, likelihood, structure=Functional(points=100), split=lambda b: b)
    torch.testing.assert_close(gp.log_evidence(), full.log_evidence())


def test_functional_tunes_updates_and_refuses() -> None:
    model, (x, y), likelihood = problem("mlp regression")
    full = lapwing.fit(model, (x, y), likelihood, structure="full")
    gp = lapwing.fit(model, (x[:10], y[:10]), likelihood, structure=Functional()).update((x[10:], y[10:]))
    torch.testing.assert_close(gp.log_evidence(), full.log_evidence())
    with pytest.warns(UserWarning, match="evidence"):
        tuned = gp.tune(), full.tune()
    torch.testing.assert_close(tuned[0].log_evidence(), tuned[1].log_evidence(), rtol=1e-6, atol=1e-6)
    with pytest.raises(lapwing.TooLarge, match=r"Functional\(points="):
        lapwing.fit(model, (x, y), likelihood, structure=Functional(), memory=50_000)
    with pytest.raises(lapwing.BadData, match="points"):
        Functional(points=0)


class TestNystrom:
    def test_exact_at_full_rank(self) -> None:
        for name in ("mlp regression", "conv classification"):
            model, data, likelihood = problem(name)
            full = lapwing.fit(model, data, likelihood, structure="full")
            low = lapwing.fit(model, data, likelihood, structure=Nystrom(rank=500))
            torch.testing.assert_close(low.log_evidence(), full.log_evidence(), rtol=1e-6, atol=1e-6)
            one, other = (la.predict(data[0][:4]).function.covariance for la in (full, low))
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)

    def test_it_is_the_projection(self) -> None:
        """ELLA's matrix inside the span, and never below the full posterior's variance."""
        model, data, likelihood = problem("conv classification")
        full = lapwing.fit(model, data, likelihood, structure="full", prior=0.7)
        low = lapwing.fit(model, data, likelihood, structure=Nystrom(rank=6), prior=0.7)
        basis = low.curvature.matrix.basis
        dense = full.curvature.dense()
        torch.testing.assert_close(
            basis @ dense @ basis.T, torch.diag(low.curvature.matrix.values), rtol=1e-7, atol=1e-9
        )
        assert bool((low.log_evidence() > full.log_evidence()).all())

    def test_more_data_in_the_same_span(self) -> None:
        model, (x, y), likelihood = problem("mlp regression")
        low = lapwing.fit(model, (x[:12], y[:12]), likelihood, structure=Nystrom(rank=8))
        grown = low.update((x[12:], y[12:]))
        basis = grown.curvature.matrix.basis
        dense = lapwing.fit(model, (x, y), likelihood, structure="full").curvature.dense()
        found = torch.diag(grown.curvature.matrix.values)
        torch.testing.assert_close(basis @ dense @ basis.T, found, rtol=1e-7, atol=1e-8)

    def test_refusals(self) -> None:
        model, data, likelihood = problem("mlp regression")
        with pytest.raises(lapwing.UnsupportedOperation, match="ggn"):
            lapwing.fit(model, data, likelihood, structure=Nystrom(4), factor="mc")
        with pytest.raises(lapwing.BadData, match="rank"):
            Nystrom(0)


def test_many_outputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 12)).double()
    x, y = torch.randn(15, 3, dtype=torch.float64), torch.randint(0, 12, (15,))
    full = lapwing.fit(model, (x, y), "classification", structure="full")
    gp = lapwing.fit(model, (x, y), "classification", structure=Functional())
    torch.testing.assert_close(gp.log_evidence(), full.log_evidence())
