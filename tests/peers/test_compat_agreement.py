"""`lapwing.compat.laplace_torch` against laplace-torch 0.3 itself, call by call, where that is right.

It has an environment of its own: see benchmarks/README.md.
"""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lapwing.compat import laplace_torch as ours
from tests.dense import assert_same, build, randn, seeded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it decorates with the deprecated torch.jit.script
    try:
        from laplace.curvature import BackPackGGN, CurvlinopsEF, CurvlinopsGGN

        import laplace as theirs
    except ImportError as missing:
        pytest.skip(
            f"laplace-torch is not installed here ({missing}): use .venv-peers, see benchmarks/README.md",
            allow_module_level=True,
        )

pytestmark = pytest.mark.filterwarnings("ignore")  # what the peer warns of is not ours
LIKELIHOODS, STRUCTURES, SUBSETS = ["regression", "classification"], ["full", "kron", "diag"], ["all", "last_layer"]


@pytest.fixture(autouse=True)
def double():
    """It makes identities and noise in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def network():
    return build(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))


def convolutional():
    return build(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)
        )
    )


def loader(likelihood, x=None, outputs=3, n=20):
    x = randn(n, 3, seed=1) if x is None else x
    y = randn(len(x), outputs, seed=2)
    y = y if likelihood == "regression" else torch.randint(outputs, (len(x),), generator=seeded(2))
    return DataLoader(TensorDataset(x, y), batch_size=7)


def both(module, data, likelihood, subset, structure, **options):
    """A fitted object of each library, each on a copy of the module."""
    if likelihood == "regression":
        options.setdefault("sigma_noise", 0.6)
    made = []
    for library in (theirs, ours):
        la = library.Laplace(copy.deepcopy(module), likelihood, subset, structure, **options)
        la.fit(data)
        made.append(la)
    return made


def assert_same_predictions(their, our, new, likelihood):
    if likelihood == "regression":
        for joint in (False, True):
            for expected, found in zip(their(new, joint=joint), our(new, joint=joint), strict=True):
                assert_same(found, expected, 1e-6)
        assert_same(our(new, diagonal_output=True)[1], their(new, diagonal_output=True)[1], 1e-6)
    else:
        assert_same(our(new, link_approx="probit"), their(new, link_approx="probit"), 1e-5)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_posterior_prediction_and_evidence(subset, structure, likelihood, temperature):
    data, new = loader(likelihood), randn(6, 3, seed=5)
    their, our = both(network(), data, likelihood, subset, structure, prior_precision=0.4, temperature=temperature)
    assert type(our).__name__ == type(their).__name__
    assert (our.n_params, our.n_layers, our.n_data, our.n_outputs) == (
        their.n_params, their.n_layers, their.n_data, their.n_outputs,
    )  # fmt: skip
    for name in ("mean", "prior_precision", "prior_precision_diag", "sigma_noise", "loss", "log_likelihood"):
        assert_same(torch.as_tensor(getattr(our, name)), torch.as_tensor(getattr(their, name)), 1e-10)
    for name in ("scatter", "log_det_ratio", "log_det_posterior_precision", "log_det_prior_precision"):
        assert_same(getattr(our, name), getattr(their, name), 1e-8)
    assert_same(our.log_marginal_likelihood(), their.log_marginal_likelihood(), 1e-9)
    assert_same_predictions(their, our, new, likelihood)
    theta = our.sample(1, generator=seeded(1))[0]
    assert_same(our.log_prob(theta), their.log_prob(theta), 1e-8)
    dense = (lambda m: m.to_matrix()) if structure == "kron" else (lambda m: m)
    assert_same(dense(our.H), dense(their.H), 1e-8)
    assert_same(dense(our.posterior_precision), dense(their.posterior_precision), 1e-8)
    if structure == "kron":
        for mine, other in zip(our.H_facs.kfacs, their.H_facs.kfacs, strict=True):
            assert_same(torch.kron(*mine) if len(mine) == 2 else mine[0],
                        torch.kron(*other) if len(other) == 2 else other[0], 1e-8)  # fmt: skip
    else:
        name = "posterior_covariance" if structure == "full" else "posterior_variance"
        assert_same(getattr(our, name), getattr(their, name), 1e-8)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_convolutional_network(structure, likelihood):
    data, new = loader(likelihood, randn(9, 2, 4, 4, seed=1)), randn(4, 2, 4, 4, seed=6)
    their, our = both(convolutional(), data, likelihood, "all", structure)
    assert_same(our.log_marginal_likelihood(), their.log_marginal_likelihood(), 1e-8)
    assert_same_predictions(their, our, new, likelihood)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diag"])
def test_prior_by_evidence(structure, prior):
    """The same steps of Adam lead to the same precisions."""
    if (structure, prior) == ("kron", "diag"):
        return
    their, our = both(network(), loader("classification"), "classification", "all", structure)
    for la in (their, our):
        la.optimize_prior_precision(method="marglik", prior_structure=prior, n_steps=30)
    assert_same(our.prior_precision, their.prior_precision, 1e-6)
    assert_same_predictions(their, our, randn(6, 3, seed=5), "classification")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_of_the_evidence(structure):
    their, our = both(network(), loader("regression"), "regression", "all", structure)
    found = []
    for la in (their, our):
        log_prior, log_sigma = torch.zeros(6, requires_grad=True), torch.zeros(1, requires_grad=True)
        la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp()).backward()
        found.append((log_prior.grad, log_sigma.grad))
    assert_same(found[1][0], found[0][0], 1e-7)
    up, down = (our.log_marginal_likelihood(torch.ones(6), torch.tensor(math.exp(h))) for h in (1e-5, -1e-5))
    assert_same(found[1][1], (up - down).reshape(1) / 2e-5, 1e-6)
    if structure != "kron":  # theirs passes the noise through math.pow, which drops its gradient
        assert_same(found[1][1], found[0][1], 1e-7)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_more_data(structure):
    x = randn(20, 3, seed=1)
    their, our = both(network(), loader("regression", x[:12]), "regression", "all", structure)
    for la in (their, our):
        la.fit(loader("regression", x[12:]), override=False)
    assert our.n_data == their.n_data == 20
    assert_same(our.log_marginal_likelihood(), their.log_marginal_likelihood(), 1e-8)
    assert_same_predictions(their, our, randn(6, 3, seed=5), "regression")


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_a_subnetwork_in_any_order(structure):
    indices = torch.tensor([40, 3, 17, 0, 28, 70])
    options = {"subnetwork_indices": indices, "prior_precision": 0.7}
    their, our = both(network(), loader("regression"), "regression", "subnetwork", structure, **options)
    assert_same(our.H, their.H, 1e-8)
    assert_same(our.log_marginal_likelihood(), their.log_marginal_likelihood(), 1e-8)
    assert_same_predictions(their, our, randn(6, 3, seed=5), "regression")


def test_priors_with_a_mean():
    center = 0.3 * randn(sum(p.numel() for p in network().parameters()), seed=4)
    for structure in STRUCTURES:
        their, our = both(network(), loader("regression"), "regression", "all", structure, prior_mean=center)
        assert_same(our.log_marginal_likelihood(), their.log_marginal_likelihood(), 1e-8)


def test_backends_choose_the_factor():
    for backend in (CurvlinopsGGN, BackPackGGN, CurvlinopsEF):
        their = theirs.DiagLaplace(network(), "classification", backend=backend)
        name = backend.__name__
        own = getattr(__import__("lapwing.compat.laplace_torch.backends", fromlist=[name]), name)
        our = ours.DiagLaplace(network(), "classification", backend=own)
        for la in (their, our):
            la.fit(loader("classification"))
        assert_same(our.H, their.H, 1e-8)


def test_function_space_of_one_output():
    module = build(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))
    data = loader("regression", outputs=1)
    for n_subset in (20, 12):
        their, our = both(module, data, "regression", "all", "gp", n_subset=n_subset, prior_precision=0.4)
        for expected, found in zip(their(randn(6, 3, seed=5)), our(randn(6, 3, seed=5)), strict=True):
            assert_same(found.reshape(expected.shape), expected, 1e-6)


class Rewards(nn.Module):
    """Pairs (B, 2, d) to (B, 2), items (B, d) to (B, 1)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        rewards = self.net(x.reshape(-1, 3))
        return rewards.reshape(len(x), 2) if x.ndim == 3 else rewards


def test_reward_modeling():
    data = loader("classification", randn(12, 2, 3, seed=1), outputs=2)
    their, our = both(build(Rewards), data, "reward_modeling", "all", "diag", prior_precision=0.5)
    items = randn(5, 3, seed=5)
    for expected, found in zip(their(items), our(items), strict=True):
        assert_same(found, expected, 1e-6)
    assert_same(our.log_marginal_likelihood(), their.log_marginal_likelihood(), 1e-7)


def test_kronecker_factors_of_a_reward_model():
    """A layer sees both items of a pair as rows. Theirs divides the sum over rows by the number of pairs."""
    data = loader("classification", randn(12, 2, 3, seed=1), outputs=2)
    their, our = both(build(Rewards), data, "reward_modeling", "all", "kron")
    for mine, other in zip(our.H_facs.kfacs, their.H_facs.kfacs, strict=True):
        if len(mine) == 2:
            assert_same(2 * torch.kron(*mine), torch.kron(*other), 1e-8)
        else:
            assert_same(mine[0], other[0], 1e-8)
    full = ours.FullLaplace(build(Rewards), "reward_modeling")
    full.fit(data)
    exact = full.H[:18, :18].trace()
    assert 0.8 < our.H.to_matrix()[:18, :18].trace() / exact < 1.5
    assert their.H.to_matrix()[:18, :18].trace() / exact > 2


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_training_with_the_evidence(structure, likelihood):
    found = []
    for library in (theirs, ours):
        module = network()
        backend = {"backend": CurvlinopsGGN} if library is theirs else {}
        options = {"n_epochs": 6, "n_hypersteps": 3, "marglik_frequency": 2, "optimizer_kwargs": {"lr": 0.02}}
        options["fix_sigma_noise"] = structure == "kron"  # see test_gradients_of_the_evidence
        found.append(
            library.marglik_training(
                module, loader(likelihood), likelihood=likelihood, hessian_structure=structure, **options, **backend
            )
        )
    (their, _, their_margliks, their_losses), (our, _, our_margliks, our_losses) = found
    assert_same(torch.tensor(our_losses), torch.tensor(their_losses), 1e-7)
    assert_same(torch.tensor(our_margliks), torch.tensor(their_margliks), 1e-6)
    assert_same(our.prior_precision, their.prior_precision, 1e-6)
    assert_same(our.sigma_noise, their.sigma_noise, 1e-6)


def test_a_search_without_its_averages():
    """Each candidate scored alone by the real library, with a new metric: the choice of our grid search."""
    module, data, held = network(), loader("classification"), loader("classification", randn(30, 3, seed=9))
    their, our = both(module, data, "classification", "all", "diag")
    interval = torch.logspace(-4, 4, 21)
    scores = []
    for tau in interval:
        their.prior_precision = tau
        x, y = held.dataset.tensors
        scores.append(-their(x).gather(1, y[:, None]).log().mean().item())
    our.optimize_prior_precision(method="gridsearch", val_loader=held, grid_size=21)
    assert our.prior_precision.item() == pytest.approx(interval[scores.index(min(scores))].item(), rel=1e-6)


def test_float32_models():
    torch.set_default_dtype(torch.float32)
    for structure in STRUCTURES:
        data = DataLoader(
            TensorDataset(randn(20, 3, seed=1).float(), torch.randint(3, (20,), generator=seeded(2))), batch_size=7
        )
        their, our = both(network().float(), data, "classification", "last_layer", structure)
        assert_same(our.log_marginal_likelihood(), their.log_marginal_likelihood(), 1e-5)
        assert_same(our(randn(6, 3, seed=5).float()), their(randn(6, 3, seed=5).float()), 1e-5)
        assert our.H is not None
