"""Posterior and linearized predictive against dense algebra with the curvature of the same structure."""

import pytest
import torch

import lapwing

from . import oracle
from .architectures import ZOO
from .cases import assert_same, case, fit
from .test_curvature import fit_or_refuse

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
STRUCTURES = ("diag", "blockdiag", "kron", "ekfac", "full")
NAMES = list(ZOO)
# Each architecture meets two structures here, all five in turn; the small set meets all of them.
TURNS = [(name, STRUCTURES[(k + s) % 5]) for k, name in enumerate(NAMES) for s in (0, 2)]
SMALL = [
    "mlp_tanh",
    "conv2d_groups",
    "layer_norm",
    "tensor_in_two_modules",
    "tokens_linear",
    "scalar_output",
    "attention",
    "unet",
    "lora_merged",
]


def likelihood_of(k):
    return ("classification", "regression")[k % 2]


def check_prediction(la, truth, tau, temperature=1.0, dispersion=1.0):
    p = truth.j.shape[-1]
    precision = temperature / dispersion * la.curvature.dense() + tau * torch.eye(p, dtype=torch.float64)
    sigma = torch.linalg.inv(precision)
    tolerance = max(1e-9, 10 * truth.tolerance)
    assert_same(la.posterior.covariance(), sigma, tolerance, "covariance of the weights")
    assert_same(la.posterior.variance, sigma.diag(), tolerance, "marginal variances of the weights")
    function = la.predict(truth.x).function
    n, c = truth.f.shape[0], truth.f.shape[-1]
    for tensor in (function.mean, function.variance, function.covariance):
        assert not tensor.requires_grad, "a prediction holds on to the graph of the network"
    assert_same(function.mean, truth.f, tolerance, "mean")
    v = truth.j @ sigma @ truth.j.mT  # (N, D, D)
    d = v.shape[-1]
    variance = v.diagonal(dim1=1, dim2=2).reshape(truth.f.shape)
    assert_same(function.variance, variance, tolerance, "variance of the outputs")
    events = d // c
    own = torch.stack([v.view(n, events, c, events, c)[:, e, :, e] for e in range(events)], 1)
    assert_same(function.covariance, own.reshape(*truth.f.shape, c), tolerance, "covariance of the outputs")
    if d == c:
        joint = la.predict(truth.x, joint=True).function.covariance
        rows = truth.j.reshape(n * d, p)
        assert_same(joint.reshape(n * d, n * d), rows @ sigma @ rows.T, tolerance, "joint covariance of the outputs")


@pytest.mark.parametrize(("name", "structure"), TURNS)
def test_linearized_covariance(name, structure):
    truth = case(name, likelihood_of(NAMES.index(name) + STRUCTURES.index(structure)))
    la = fit_or_refuse(truth, structure, prior=0.7)
    check_prediction(la, truth, 0.7)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("name", SMALL)
def test_temperature_prior_and_noise_need_no_data(name, likelihood, structure):
    truth = case(name, likelihood)
    la = fit(truth, structure, prior=2.0)
    changed = la.replace(prior=0.3, temperature=0.5)
    check_prediction(changed, truth, 0.3, temperature=0.5)
    check_prediction(la, truth, 2.0)  # the first object has not moved
    if likelihood == "regression":
        check_prediction(la.replace(likelihood=lapwing.Gaussian(noise=0.5)), truth, 2.0, dispersion=0.25)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_prediction_does_not_depend_on_the_batch(structure):
    truth = case("conv2d_stride", "classification")
    la = fit(truth, structure)
    whole = la.predict(truth.x)
    for n in range(5):
        alone = la.predict(oracle.take(truth.x, slice(n, n + 1)))
        assert_same(alone.function.covariance, whole.function.covariance[n : n + 1], 1e-9)
        assert_same(alone.probs, whole.probs[n : n + 1], 1e-9)


@pytest.mark.parametrize(
    ("name", "likelihood"),
    [("mlp_tanh", "classification"), ("attention", "regression"), ("conv2d_groups", "classification")],
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_samples_have_the_posterior_covariance(name, likelihood, structure):
    truth = case(name, likelihood)
    la = fit(truth, structure, prior=1.5)
    draws = la.posterior.sample(4000, generator=torch.Generator().manual_seed(0))
    centered = draws - la.posterior.mean
    sigma = la.posterior.covariance()
    standard = (torch.outer(sigma.diag(), sigma.diag()) + sigma.square()).div(4000).sqrt()
    z = (centered.T @ centered / 4000 - sigma) / standard
    assert z.abs().max() < 6
    assert z.square().mean() < 1.5
