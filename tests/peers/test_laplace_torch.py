"""Agreement with laplace-torch 0.3 where it is right. It has an environment of its own: see benchmarks/README.md."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from tests.dense import assert_same, build, randn, seeded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it decorates with the deprecated torch.jit.script
    try:
        from laplace.curvature import BackPackGGN, CurvlinopsEF, CurvlinopsGGN

        import laplace
    except ImportError as missing:
        pytest.skip(
            f"laplace-torch is not installed here ({missing}): use .venv-peers, see benchmarks/README.md",
            allow_module_level=True,
        )

pytestmark = pytest.mark.filterwarnings("ignore")  # what the peer warns of is not ours
SIGMA = 0.6
# It multiplies float32 identities and adds jitter of its own, so float64 models agree to about float32's accuracy.
CLOSE = 2e-5


def network(bias):
    sizes = ((3, 5), (5, 4), (4, 3))
    layers = lambda: [part for a, b in sizes for part in (nn.Linear(a, b, bias=bias), nn.Tanh())]  # noqa: E731
    return build(lambda: nn.Sequential(*layers()[:-1]))


def problem(likelihood, n=20, bias=True):
    module, x = network(bias), randn(n, 3, seed=1)
    y = randn(n, 3, seed=2) if likelihood == "regression" else torch.randint(3, (n,), generator=seeded(2))
    return module, x, y


def peer(module, x, y, likelihood, subset, structure, *, batch=7, **options):
    """A fitted object of theirs, on a copy of the module: it changes what it is given."""
    if likelihood == "regression":
        options.setdefault("sigma_noise", SIGMA)
    la = laplace.Laplace(
        copy.deepcopy(module), likelihood, subset_of_weights=subset, hessian_structure=structure, **options
    )
    la.fit(DataLoader(TensorDataset(x, y), batch_size=batch))
    return la


def ours(module, x, y, likelihood, structure, **options):
    family = lapwing.Gaussian(noise=SIGMA) if likelihood == "regression" else likelihood
    data = [(x[k : k + 7], y[k : k + 7]) for k in range(0, len(x), 7)]
    return lapwing.fit(module, data, family, structure=structure, **options)


def assert_same_predictions(mine, theirs, likelihood, new, tolerance=CLOSE):
    p = mine.predict(new)
    mean, variance = theirs._glm_predictive_distribution(new)
    assert_same(p.function.mean, mean, tolerance)
    assert_same(p.function.covariance, variance, tolerance)
    if likelihood == "classification":
        probs = theirs(new, pred_type="glm", link_approx="probit")
        assert_same(mine.predict(new, link="probit").probs, probs, tolerance)
    else:
        assert_same(p.variance, variance.diagonal(dim1=1, dim2=2) + SIGMA**2, tolerance)
        joint = theirs(new, pred_type="glm", joint=True)[1]
        size = mean.numel()
        assert_same(mine.predict(new, joint=True).function.covariance.reshape(size, size), joint, tolerance)


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_diag_full_and_last_layer(subset, structure, likelihood):
    module, x, y = problem(likelihood)
    mine = ours(module, x, y, likelihood, structure, select=subset, prior=0.4)
    theirs = peer(module, x, y, likelihood, subset, structure, prior_precision=0.4)
    dense = mine.curvature.dense()
    assert_same(dense if structure == "full" else dense.diag(), theirs.H, CLOSE)
    precision = mine.posterior.precision
    assert_same(precision.dense() if structure == "full" else precision.diagonal(), theirs.posterior_precision, CLOSE)
    assert_same(mine.posterior.mean, theirs.mean, 1e-12)
    assert_same(mine.log_likelihood, theirs.log_likelihood, 1e-6)
    assert_same(mine.log_evidence(), theirs.log_marginal_likelihood(), 1e-6)
    assert_same_predictions(mine, theirs, likelihood, randn(6, 3, seed=5))
    theta = mine.posterior.sample(1, seeded(1))[0]
    assert_same(mine.posterior.log_prob(theta), theirs.log_prob(theta), CLOSE)


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("structure", ["diag", "full"])
def test_prior_noise_and_temperature_after_the_fit(structure, likelihood):
    """Their temperature is 1/T; their tempered evidence leaves the normalizer of the Gaussian alone."""
    module, x, y = problem(likelihood)
    mine = ours(module, x, y, likelihood, structure)
    theirs = peer(module, x, y, likelihood, "all", structure, temperature=1 / 0.3)
    new = randn(6, 3, seed=5)
    for tau in (0.02, 30.0):
        theirs.prior_precision = tau
        changed = mine.replace(prior=tau, temperature=0.3)
        assert_same_predictions(changed, theirs, likelihood, new, 5e-5)
        surplus = 0.0
        if likelihood == "regression":
            surplus = (1 - 0.3) * y.numel() * math.log(SIGMA * math.sqrt(2 * math.pi))
        assert changed.log_evidence().item() == pytest.approx(
            theirs.log_marginal_likelihood().item() + surplus, rel=CLOSE
        )
    if likelihood == "regression":
        theirs = peer(module, x, y, likelihood, "all", structure)
        for sigma in (0.1, 2.0):
            value = theirs.log_marginal_likelihood(torch.tensor(3.0), torch.tensor(sigma))
            changed = mine.replace(prior=3.0, likelihood=lapwing.Gaussian(noise=sigma))
            assert_same(changed.log_evidence(), value, CLOSE)


@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("kind", ["per tensor", "per weight"])
def test_priors_with_several_precisions_and_a_mean(kind, structure):
    module, x, y = problem("regression")
    names = [name for name, _ in module.named_parameters()]
    sizes = [p.numel() for p in module.parameters()]
    generator = seeded(4)
    center = 0.3 * torch.randn(sum(sizes), dtype=torch.float64, generator=generator)
    if kind == "per tensor":
        values = torch.rand(len(sizes), dtype=torch.float64, generator=generator) + 0.1
        prior = lapwing.Prior(dict(zip(names, values.tolist(), strict=True)), center)
    else:
        values = torch.rand(sum(sizes), dtype=torch.float64, generator=generator) + 0.1
        prior = lapwing.Prior(values, center)
    mine = ours(module, x, y, "regression", structure, prior=prior)
    theirs = peer(module, x, y, "regression", "all", structure, prior_precision=values, prior_mean=center)
    assert_same(mine.log_evidence(), theirs.log_marginal_likelihood(), 1e-6)
    assert_same_predictions(mine, theirs, "regression", randn(6, 3, seed=5))


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("backend", [CurvlinopsGGN, BackPackGGN])
def test_kron_without_biases(likelihood, backend):
    """The same factors, so the same posterior, evidence and predictions. (Theirs keeps biases apart, ours does not.)"""
    module, x, y = problem(likelihood, bias=False)
    mine = ours(module, x, y, likelihood, "kron", prior=0.4)
    theirs = peer(module, x, y, likelihood, "all", "kron", prior_precision=0.4, backend=backend)
    start = 0
    for (G, A), layer in zip(theirs.H_facs.kfacs, module[::2], strict=True):
        size = layer.weight.numel()
        block = mine.curvature.dense()[start : start + size, start : start + size]
        assert_same(block, torch.kron(G, A), CLOSE)
        start += size
    assert start == mine.params.size
    assert_same(mine.log_evidence(), theirs.log_marginal_likelihood(), 1e-6)
    assert_same_predictions(mine, theirs, likelihood, randn(6, 3, seed=5))
    theta = mine.posterior.sample(1, seeded(1))[0]
    assert_same(mine.posterior.log_prob(theta), theirs.log_prob(theta), CLOSE)


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_kron_blocks_of_weights_and_of_biases(likelihood):
    """G ⊗ E[ā āᵀ] holds their G ⊗ E[a aᵀ] for the weight and their G for the bias, and what they leave out."""
    module, x, y = problem(likelihood)
    dense = ours(module, x, y, likelihood, "kron").curvature.dense()
    theirs = peer(module, x, y, likelihood, "all", "kron")
    start = 0
    for factors, p in zip(theirs.H_facs.kfacs, module.parameters(), strict=True):
        expected = torch.kron(*factors) if len(factors) == 2 else factors[0]
        block = dense[start : start + p.numel(), start : start + p.numel()]
        assert_same(block, expected, CLOSE)
        start += p.numel()


def test_kron_of_a_convolution():
    """Expanded over positions, with a mean over rows of a aᵀ and a sum of g gᵀ, as theirs."""
    module = build(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3, bias=False)
        )
    )
    x, y = randn(8, 2, 3, 3), torch.randint(3, (8,), generator=seeded(2))
    dense = ours(module, x, y, "classification", lapwing.Kron(sharing="expand")).curvature.dense()
    theirs = peer(module, x, y, "classification", "all", "kron")
    size = module[0].weight.numel()
    assert_same(dense[:size, :size], torch.kron(*theirs.H_facs.kfacs[0]), CLOSE)
    assert_same(dense[size:, size:], torch.kron(*theirs.H_facs.kfacs[1]), CLOSE)


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_covariance_of_posterior_samples(structure):
    module, x, y = problem("classification", bias=False)
    mine = ours(module, x, y, "classification", structure, prior=0.4)
    theirs = peer(module, x, y, "classification", "all", structure, prior_precision=0.4)
    n = 4000
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = theirs.sample(n).double()
    sigma = mine.posterior.covariance()
    standard = ((torch.outer(sigma.diag(), sigma.diag()) + sigma.square()) / n).sqrt()
    for samples in (draws, mine.posterior.sample(n, seeded(3))):
        centered = samples - mine.posterior.mean
        z = (centered.T @ centered / n - sigma) / standard
        assert z.abs().max() < 6
        assert z.square().mean() < 1.3


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_empirical_fisher_of_a_classifier(structure):
    """Theirs is right for classification."""
    module, x, y = problem("classification")
    mine = ours(module, x, y, "classification", structure, factor="empirical")
    theirs = peer(module, x, y, "classification", "all", structure, backend=CurvlinopsEF)
    dense = mine.curvature.dense()
    assert_same(dense if structure == "full" else dense.diag(), theirs.H, CLOSE)
    assert_same_predictions(mine, theirs, "classification", randn(6, 3, seed=5), 1e-4)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_subnetwork(structure):
    module, x, y = problem("regression")
    mine = ours(module, x, y, "regression", structure, select=lapwing.subnetwork(12, by="magnitude"), prior=0.4)
    theirs = peer(
        module, x, y, "regression", "subnetwork", structure, prior_precision=0.4, subnetwork_indices=mine.params.index
    )  # fmt: skip
    dense = mine.curvature.dense()
    assert_same(dense if structure == "full" else dense.diag(), theirs.H, CLOSE)
    assert_same(mine.log_evidence(), theirs.log_marginal_likelihood(), 1e-6)
    assert_same_predictions(mine, theirs, "regression", randn(6, 3, seed=5))


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_more_data_after_the_fit(structure):
    """`la.update(data)` is their `fit(loader, override=False)`."""
    module, x, y = problem("regression", bias=False)
    mine = ours(module, x[:12], y[:12], "regression", structure).update((x[12:], y[12:]))
    theirs = peer(module, x[:12], y[:12], "regression", "all", structure)
    theirs.fit(DataLoader(TensorDataset(x[12:], y[12:]), batch_size=8), override=False)
    assert mine.n_data == theirs.n_data == 20
    assert_same(mine.log_evidence(), theirs.log_marginal_likelihood(), 1e-5)
    assert_same_predictions(mine, theirs, "regression", randn(6, 3, seed=5), 5e-5)


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_prior_of_largest_evidence(prior):
    """Newton's method reaches what a long run of their Adam on the same evidence reaches."""
    module, x, y = problem("regression", n=60, bias=False)
    mine = ours(module, x, y, "regression", "kron").tune(prior=prior)
    theirs = peer(module, x, y, "regression", "all", "kron")
    theirs.optimize_prior_precision(method="marglik", prior_structure=prior, n_steps=600, lr=0.1)
    best = theirs.log_marginal_likelihood().item()
    assert mine.log_evidence().item() == pytest.approx(best, abs=1e-2)
    assert mine.log_evidence().item() > best - 1e-3


def test_function_space_of_one_output():
    """Their gp with all data and one output is the full posterior seen from function space."""
    module = build(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))
    x, y = randn(15, 3, seed=1), randn(15, 1, seed=2)
    mine = ours(module, x, y, "regression", "full", prior=0.4)
    theirs = laplace.Laplace(
        copy.deepcopy(module), "regression", "all", "gp", n_subset=15, sigma_noise=SIGMA, prior_precision=0.4
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=15))
    new = randn(6, 3, seed=5)
    variance = theirs(new, pred_type="gp")[1]
    assert_same(mine.predict(new).function.covariance, variance.reshape(6, 1, 1), 1e-4)
