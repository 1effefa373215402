"""Tuning matrix-free posteriors by the evidence, against Newton's method on the full matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.errors import UnsupportedOperation
from lapwing.evidence import Groups, tune_evidence
from lapwing.evidence.fixed_point import tune_probes
from lapwing.evidence.groups import partition


def fits(structure: object) -> tuple[lapwing.Laplace, lapwing.Laplace]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 2)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    y = torch.sin(x[:, :2]) + 0.3 * torch.randn(40, 2, dtype=torch.float64)
    return tuple(lapwing.fit(model, (x, y), lapwing.Gaussian(1.0), structure=s) for s in ("full", structure))  # type: ignore[return-value]


@pytest.mark.parametrize("learn", [("prior",), ("prior", "dispersion")])
@pytest.mark.parametrize("kind", ["scalar", "layerwise"])
def test_it_finds_the_maximum_of_the_full_evidence(kind: str, learn: tuple[str, ...]) -> None:
    full, free = fits(MatrixFree(rank=60, probes=8, tolerance=1e-8))
    groups = partition(kind, full.curvature.names, full.params)
    truth = tune_evidence(full.belief, groups, learn=learn)
    found = tune_probes(free.belief, groups, tolerance=1e-4, iterations=300, learn=learn)
    assert found.converged
    torch.testing.assert_close(found.setting.precision, truth.setting.precision, rtol=1e-2, atol=0)
    torch.testing.assert_close(found.scores[1], truth.scores[1], rtol=1e-4, atol=1e-3)
    if "dispersion" in learn:
        assert found.setting.dispersion == pytest.approx(truth.setting.dispersion, rel=1e-2)


def test_it_says_when_it_stops_early_and_what_it_is_for() -> None:
    full, free = fits(MatrixFree(rank=8, probes=2, steps=2))
    groups = Groups.scalar(full.params.size)
    found = tune_probes(free.belief, groups, iterations=1)
    assert not found.converged
    assert any("not converged" in message for message in found.messages)
    with pytest.raises(UnsupportedOperation, match="matrixfree"):
        tune_probes(full.belief, groups)


def test_tune_comes_here_for_matrix_free_posteriors() -> None:
    full, free = fits(MatrixFree(rank=60, probes=8, tolerance=1e-8))
    with pytest.warns(UserWarning, match="evidence"):
        truth, found = (la.tune(learn=("prior", "noise")) for la in (full, free))
    assert float(found.log_evidence()) == pytest.approx(float(truth.log_evidence()), abs=0.05)
    assert any("standard error" in message for message in found.tuning.messages)


def test_samples_give_the_same_within_monte_carlo_error() -> None:
    full, free = fits(MatrixFree(rank=40, columns=64, tolerance=1e-5))
    groups = partition("layerwise", full.curvature.names, full.params)
    truth = tune_evidence(full.belief, groups)
    near = groups.applied(free.belief, truth.setting.precision * 1.5)
    found = tune_probes(near, groups, samples=64, tolerance=2e-2)
    assert found.converged
    torch.testing.assert_close(found.setting.precision, truth.setting.precision, rtol=0.2, atol=0)
    assert float(found.scores[1]) == pytest.approx(float(truth.scores[1]), abs=0.3)
