"""Linear models with Gaussian noise and prior: posterior, evidence and predictive have a closed form, written here."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from tests.dense import assert_same, build, gaussian_log_density, randn, seeded

N, D = 14, 3
EXACT = ("full", "blockdiag", "kron", "ekfac", "lowrank")  # a single linear layer is all of them; diag is not
NOISE = {"scalar": lambda k: 0.6, "vector": lambda k: torch.linspace(0.3, 1.5, k, dtype=torch.float64)}
TEMPERATURE = {"bayes": 1.0, "likelihood": 0.4, "both": lapwing.Tempered(2.5, prior=True)}


@dataclass(frozen=True)
class Model:
    """y_n = J_n θ + ε, ε ~ N(0, diag σ²), θ ~ N(μ₀, Π⁻¹): everything about p(D|θ)^T p(θ) from one solve."""

    j: Tensor  # (N, K, P)
    y: Tensor  # (N, K)
    sigma: Tensor  # (K,)
    center: Tensor  # (P,)
    precision: Tensor  # (P,), already times T where the prior is tempered too
    T: float

    @property
    def hessian(self) -> Tensor:
        scaled = self.j / self.sigma[:, None]
        return self.T * torch.einsum("nkp,nkq->pq", scaled, scaled) + self.precision.diag()

    @property
    def covariance(self) -> Tensor:
        return torch.linalg.inv(self.hessian)

    @property
    def mode(self) -> Tensor:
        pull = self.T * torch.einsum("nkp,nk->p", self.j, self.y / self.sigma**2) + self.precision * self.center
        return torch.linalg.solve(self.hessian, pull)

    @property
    def log_evidence(self) -> Tensor:
        """Log ∫ p(D|θ)^T p(θ) dθ, with N(y; f, σ²)^T = N(y; f, σ²/T) · (2πσ²)^((1−T)/2) / √T."""
        rows = self.j.flatten(0, 1)
        noise = self.sigma.square().repeat(len(self.y))
        kernel = rows @ (rows / self.precision).T + (noise / self.T).diag()
        surplus = 0.5 * ((1 - self.T) * (2 * math.pi * noise).log() - math.log(self.T)).sum()
        return gaussian_log_density(self.y.reshape(-1), rows @ self.center, kernel) + surplus


def jacobian(x: Tensor, outputs: int) -> Tensor:
    """Rows of nn.Linear: (N, K, K·D + K), the weight first, then the bias."""
    eye = torch.eye(outputs, dtype=x.dtype)
    weights = torch.einsum("kl,nd->nkld", eye, x).flatten(2)
    return torch.cat([weights, eye.expand(len(x), -1, -1)], -1)


def priors(kind: str, size: int, outputs: int):
    """(what the user writes, μ₀, diag Π)."""
    generator = seeded(11)
    ones, zeros = torch.ones(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    if kind == "scalar":
        return 0.7, zeros, 0.7 * ones
    if kind == "mean":
        center = torch.randn(size, dtype=torch.float64, generator=generator)
        return lapwing.Prior(0.7, center), center, 0.7 * ones
    if kind == "bias apart":
        values = torch.cat([0.7 * ones[:-outputs], 2.0 * ones[-outputs:]])
        return lapwing.Prior({"bias": 2.0, "*": 0.7}, 0.2), zeros + 0.2, values
    values = torch.rand(size, dtype=torch.float64, generator=generator) + 0.2
    return values, zeros, values


def fitted(structure, noise="scalar", prior="scalar", temperature="bayes", outputs=2, at_mode=True):
    """Our object and the closed form, with weights at the mode or at random."""
    size = outputs * (D + 1)
    x, y = randn(N, D, seed=1), randn(N, outputs, seed=2)
    level, tempered = NOISE[noise](outputs), TEMPERATURE[temperature]
    T, both = (tempered.T, tempered.prior) if isinstance(tempered, lapwing.Tempered) else (tempered, False)
    written, center, precision = priors(prior, size, outputs)
    sigma = torch.as_tensor(level, dtype=torch.float64).expand(outputs)
    model = Model(jacobian(x, outputs), y, sigma, center, precision * (T if both else 1.0), T)
    module = build(lambda: nn.Linear(D, outputs))
    if at_mode:
        with torch.no_grad():
            module.weight.copy_(model.mode[:-outputs].reshape(outputs, D))
            module.bias.copy_(model.mode[-outputs:])
    la = lapwing.fit(module, (x, y), lapwing.Gaussian(level), structure=structure, prior=written, temperature=tempered)
    return la, model


def check(la, model):
    """Posterior, evidence and predictive at the mode."""
    outputs = model.y.shape[1]
    assert_same(la.posterior.mean, model.mode, 1e-14)
    assert_same(la.posterior.precision.dense(), model.hessian)
    assert_same(la.posterior.covariance(), model.covariance)
    assert_same(la.log_evidence(), model.log_evidence)
    assert_same(la.log_evidence(at="linear-mode"), model.log_evidence)
    assert abs(la.stationarity) < 1e-10
    new, target = 2 * randn(5, D, seed=6), randn(5, outputs, seed=7)
    j = jacobian(new, outputs)
    mean, f = j @ model.mode, j @ model.covariance @ j.mT
    y = f + model.sigma.square().diag()
    p = la.predict(new)
    assert_same(p.mean, mean)
    assert_same(p.function.covariance, f)
    assert_same(p.variance, y.diagonal(dim1=1, dim2=2))
    assert_same(p.epistemic, f.diagonal(dim1=1, dim2=2))
    assert_same(p.aleatoric, model.sigma.square().expand(5, outputs))
    exact = torch.stack([gaussian_log_density(*row) for row in zip(target, mean, y, strict=True)])
    assert_same(p.log_prob(target), exact)
    entropy = 0.5 * (torch.linalg.slogdet(2 * math.pi * y)[1] + outputs)
    assert_same(p.entropy, entropy)
    half = 1.959963984540054 * y.diagonal(dim1=1, dim2=2).sqrt()
    for bound, truth in zip(p.interval(0.95), (mean - half, mean + half), strict=True):
        assert_same(bound, truth, 1e-8)
    rows = j.flatten(0, 1)
    joint = la.predict(new, joint=True).function.covariance.reshape(len(rows), len(rows))
    assert_same(joint, rows @ model.covariance @ rows.T)


@pytest.mark.parametrize("temperature", TEMPERATURE)
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("structure", EXACT)
def test_closed_form_at_the_mode(structure, noise, temperature):
    for outputs, prior in itertools.product((1, 3), ("scalar", "mean")):
        check(*fitted(structure, noise, prior, temperature, outputs))


@pytest.mark.parametrize("temperature", TEMPERATURE)
@pytest.mark.parametrize("structure", ["full", "blockdiag", "lowrank"])
def test_closed_form_with_a_precision_for_each_weight(structure, temperature):
    for outputs, noise in itertools.product((1, 3), NOISE):
        check(*fitted(structure, noise, "per weight", temperature, outputs))


@pytest.mark.parametrize("structure", ["full", "blockdiag", "kron", "lowrank"])
def test_closed_form_with_a_precision_for_the_bias_alone(structure):
    for outputs, noise in itertools.product((1, 3), NOISE):
        check(*fitted(structure, noise, "bias apart", "likelihood", outputs))


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_a_precision_for_each_weight_is_refused_where_it_has_no_eigenbasis(structure):
    with pytest.raises(lapwing.IncompatiblePrior, match=r"weight.*(layerwise|diag|full)"):
        fitted(structure, prior="per weight")


@pytest.mark.parametrize("temperature", TEMPERATURE)
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("structure", EXACT)
def test_evidence_away_from_the_mode(structure, noise, temperature):
    """`at="linear-mode"` is exact at any weights; the plain one is short of it by ½gᵀΣg."""
    for outputs in (1, 3):
        la, model = fitted(structure, noise, "mean", temperature, outputs, at_mode=False)
        assert_same(la.log_evidence(at="linear-mode"), model.log_evidence)
        offset = la.posterior.mean - model.mode
        gap = 0.5 * offset @ model.hessian @ offset
        assert gap > 1
        assert_same(la.log_evidence(), model.log_evidence - gap)
        assert la.stationarity == pytest.approx(gap.item(), rel=1e-9)


@pytest.mark.parametrize("structure", EXACT)
def test_evidence_has_the_derivatives_of_the_closed_form(structure):
    """In log τ, the prior mean and log σ, away from the mode of any of them."""
    la, model = fitted(structure, "vector", "mean", at_mode=False)
    values = [torch.tensor(0.3), torch.tensor(-0.2), torch.tensor(0.1)]
    values = [value.double().requires_grad_() for value in values]

    def exact(log_tau, center, log_scale):
        size = len(model.center)
        moved = Model(
            model.j, model.y, model.sigma * log_scale.exp(), center.expand(size), log_tau.exp().expand(size), 1.0
        )
        return moved.log_evidence

    def ours(log_tau, center, log_scale):
        likelihood = lapwing.Gaussian(model.sigma * log_scale.exp())
        return la.replace(prior=lapwing.Prior(log_tau.exp(), center), likelihood=likelihood).log_evidence("linear-mode")

    assert_same(ours(*values).detach(), exact(*values).detach())
    found, truth = (torch.stack(torch.autograd.grad(f(*values), values)) for f in (ours, exact))
    assert truth.abs().min() > 0.1
    assert_same(found, truth, 1e-9)


def test_networks_that_return_one_number_a_sample():
    """(B,) outside, (B, 1) inside: the same numbers, and y's own shape in every field."""

    class Scalar(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)[:, 0]

    la, model = fitted("full", outputs=1)
    x, y = randn(N, D, seed=1), randn(N, 1, seed=2)
    scalar = lapwing.fit(Scalar(la.module), (x, y[:, 0]), lapwing.Gaussian(0.6), structure="full", prior=0.7)
    assert_same(scalar.log_evidence(), model.log_evidence)
    new, target = randn(5, D, seed=6), randn(5, seed=7)
    j = jacobian(new, 1)[:, 0]
    variance = ((j @ model.covariance) * j).sum(-1) + 0.36
    p = scalar.predict(new)
    for found, truth in ((p.mean, j @ model.mode), (p.variance, variance), (p.stddev, variance.sqrt())):
        assert_same(found, truth)
    assert_same(p.log_prob(target), torch.distributions.Normal(j @ model.mode, variance.sqrt()).log_prob(target))
    assert p.sample(4, seeded()).shape == (4, 5)
    assert p.function.mean.shape == (5, 1)
    assert [bound.shape for bound in p.interval()] == [(5,), (5,)]


def test_diag_is_exact_for_orthogonal_features():
    q = torch.linalg.qr(randn(N, D + 1, seed=3))[0] * 3
    y = randn(N, 1, seed=2)
    module = build(lambda: nn.Linear(D + 1, 1, bias=False))
    ones = torch.ones(D + 1, dtype=torch.float64)
    model = Model(q[:, None], y, 0.6 * ones[:1], 0 * ones, 0.7 * ones, 1.0)
    with torch.no_grad():
        module.weight.copy_(model.mode[None])
    la = lapwing.fit(module, (q, y), lapwing.Gaussian(0.6), structure="diag", prior=0.7)
    assert_same(la.log_evidence(), model.log_evidence)
    assert_same(la.posterior.covariance(), model.covariance)


@pytest.mark.parametrize("prior", [0.7, {"weight": 2.0, "bias": 0.3}, lapwing.Prior(0.7, 0.2)], ids=str)
def test_the_evidence_of_a_curvature_is_that_of_the_fitted_object(tmp_path: Path, prior: Any) -> None:
    """As the contract writes it: lapwing.log_evidence(curvature, prior, likelihood), also after loading."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(20, 3, dtype=torch.float64)
    la = lapwing.fit(
        model, (x, torch.randn(20, 2, dtype=torch.float64)), lapwing.Gaussian(1.0), structure="full", prior=prior
    )
    got = lapwing.log_evidence(la.curvature, prior, lapwing.Gaussian(0.5))
    assert got == la.replace(likelihood=lapwing.Gaussian(0.5)).log_evidence()
    la.save(tmp_path / "a.lapwing")
    back = lapwing.load(tmp_path / "a.lapwing", model)
    assert lapwing.log_evidence(back.curvature, prior, "regression") == la.log_evidence()


def test_the_summary_says_when_the_weights_are_no_mode() -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 3, dtype=torch.float64)
    y = x @ torch.randn(3, 1, dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False).double()
    la = lapwing.fit(model, (x, y), lapwing.Gaussian(1.0), structure="full")
    assert f"log joint {la.stationarity:.4g} nats below that of the linearized model" in la.summary()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(x.T @ x + torch.eye(3), x.T @ y).T)
    assert "no mode" not in lapwing.fit(model, (x, y), lapwing.Gaussian(1.0), structure="full").summary()
