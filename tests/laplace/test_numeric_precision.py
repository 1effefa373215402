"""Sums keep the precision of the weights, or a better one, and confident networks keep finite curvature."""

import copy

import pytest
import torch
from torch import nn

import lapwing
from tests.laplace.small import STRUCTURES, X, batches, fit, net


@pytest.mark.parametrize("structure", STRUCTURES)
def test_float64_is_computed_in_float64(structure: str) -> None:
    """The same numbers from data in a basis in which float32 would round: J of a linear net is known exactly."""
    model = nn.Linear(3, 1).double()
    x = X.double() + 1e-9 * torch.arange(72).reshape(24, 3)
    la = fit(model, [(x, x[:, 0])], lapwing.Gaussian(0.5), structure=structure, prior=3.0)
    rows = torch.cat([x, torch.ones(24, 1)], 1)
    truth = rows.T @ rows
    if structure == "diag":
        truth = truth.diagonal().diag()
    assert la.curvature.matrix.dtype == torch.float64
    assert (la.curvature.dense() - truth).abs().max() < 1e-12 * truth.abs().max()
    f = la.predict(x[:2]).function
    covariance = torch.linalg.inv(truth / 0.25 + 3 * torch.eye(4, dtype=torch.float64))
    assert f.mean.dtype == f.variance.dtype == torch.float64
    assert torch.allclose(f.variance[:, 0], torch.einsum("ni,ij,nj->n", rows[:2], covariance, rows[:2]), rtol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=["bf16", "fp16"])
def test_half_precision_accumulates_in_float32(structure: str, dtype: torch.dtype, tolerance: float) -> None:
    half = net().to(dtype)
    x = X.to(dtype)
    la = fit(half, batches(x), structure=structure)
    truth = fit(copy.deepcopy(half).float(), batches(x.float()), structure=structure)
    assert la.curvature.matrix.dtype == la.posterior.mean.dtype == torch.float32
    expected = truth.curvature.dense()
    assert (la.curvature.dense() - expected).norm() < tolerance * expected.norm()
    p, q = la.predict(x[:6]), truth.predict(x[:6].float())
    assert p.probs.dtype == torch.float32
    assert (p.probs - q.probs).abs().max() < tolerance
    assert (p.epistemic / q.epistemic - 1).abs().max() < 5 * tolerance
    assert (p.novelty / q.novelty - 1).abs().max() < 0.2
    assert abs(float(la.log_evidence() - truth.log_evidence())) < 10 * tolerance
    assert half[0].weight.dtype == dtype


def test_half_precision_sums_do_not_stall() -> None:
    """4,096 times 49 in fp16: a sum in half precision would overflow."""
    model = nn.Linear(1, 1, bias=False).half()
    x = torch.full((4096, 1), 7.0).half()
    la = fit(model, [(x, x)], "regression", structure="diag")
    assert la.curvature.dense().item() == pytest.approx(4096 * 49.0)


def test_the_default_dtype_does_not_matter() -> None:
    la = fit(structure="kron")
    p = la.predict(X[:4])
    torch.set_default_dtype(torch.float64)
    try:
        again = fit(la.module, structure="kron")
        q = again.predict(X[:4])
        fields = ("probs", "entropy", "epistemic", "novelty")
        values = {field: getattr(q, field) for field in fields}
        evidence = again.log_evidence()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(evidence, la.log_evidence())
    for field, value in values.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, getattr(p, field)), field


def test_autocast_around_a_fit_does_not_lower_its_precision_silently() -> None:
    """Autocast is the user's wish about the forward pass; what is accumulated stays float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        la = fit(structure="kron")
        p = la.predict(X[:4])
        assert p.probs.dtype == torch.float32
    assert la.curvature.matrix.dtype == torch.float32
    truth = fit(structure="kron")
    assert (la.curvature.dense() - truth.curvature.dense()).norm() < 2e-2 * truth.curvature.dense().norm()


@pytest.mark.parametrize("scale", [30.0, 100.0, 1000.0, 1e5])
@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s != "lowrank"])
def test_confident_networks_have_finite_curvature(scale: float, structure: str) -> None:
    """Logit gaps beyond 88, where probabilities leave the range of float32, against the same network in float64."""
    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.weight.copy_(torch.arange(12).reshape(4, 3).sin() * scale)
        model.bias.zero_()
    x = X * 2
    assert (model(x).softmax(-1) < torch.finfo(torch.float32).tiny).any()
    la = fit(model, batches(x), structure=structure)
    truth = fit(copy.deepcopy(model).double(), batches(x.double()), structure=structure)
    expected = truth.curvature.dense()
    assert (la.curvature.dense() - expected).abs().max() <= 1e-3 * expected.abs().max() + 1e-30
    assert la.predict(x[:4]).probs.isfinite().all()
    assert la.log_evidence().isfinite()
