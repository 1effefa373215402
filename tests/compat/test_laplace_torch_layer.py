"""`lapwing.compat.laplace_torch` against dense algebra and forward passes; the real library is asked in tests/peers."""

import importlib
import pickle
import sys
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from lapwing.compat import laplace_torch as lt
from lapwing.compat.laplace_torch import backends, masks
from lapwing.compat.laplace_torch.backends import CurvlinopsEF, CurvlinopsGGN
from lapwing.compat.laplace_torch.extractor import FeatureExtractor
from lapwing.compat.laplace_torch.functions import RunningNLLMetric, validate
from lapwing.compat.laplace_torch.masks import LargestMagnitudeSubnetMask, LastLayerSubnetMask
from tests.dense import assert_same, build, flat, ggn, jacobian, outputs, randn, seeded, softmax_hessian


def network(outputs=3, seed=0):
    return build(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)), seed)


def regression(n=16, outputs=3):
    return DataLoader(TensorDataset(randn(n, 3, seed=1), randn(n, outputs, seed=2)), batch_size=5)


def classes(n=16, seed=1):
    labels = torch.randint(3, (n,), generator=seeded(2))
    return DataLoader(TensorDataset(randn(n, 3, seed=seed), labels), batch_size=5)


@pytest.fixture
def installed():
    """Lapwing as module `laplace`, for one test."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "laplace"}
    lt.install()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "laplace"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("installed")
def test_install_puts_in_every_module():
    assert importlib.util.find_spec("laplace") is not None
    from laplace.baselaplace import FullLaplace
    from laplace.curvature import AsdlGGN, BackPackGGN
    from laplace.curvature.curvlinops import CurvlinopsGGN as Curvlinops
    from laplace.lllaplace import KronLLLaplace
    from laplace.marglik_training import marglik_training as same
    from laplace.subnetlaplace import FullSubnetLaplace
    from laplace.utils import ModuleNameSubnetMask, RunningNLLMetric, validate
    from laplace.utils.enums import PredType

    import laplace
    from laplace import Laplace, marglik_training

    assert (Laplace, marglik_training, FullLaplace) == (lt.Laplace, lt.marglik_training, lt.FullLaplace)
    assert same is marglik_training
    assert laplace.utils.matrix.Kron is importlib.import_module("lapwing.compat.laplace_torch.matrix").Kron
    assert PredType.GLM == "glm"
    for name in (AsdlGGN, BackPackGGN, Curvlinops, KronLLLaplace, FullSubnetLaplace, ModuleNameSubnetMask):
        assert isinstance(name, type)
    assert callable(validate)
    assert issubclass(RunningNLLMetric, nn.Module)


def test_full_posterior_under_changing_settings():
    module, data = network(), regression()
    la = lt.Laplace(module, "regression", "all", "full", sigma_noise=0.5)
    la.fit(data)
    x, y = data.dataset.tensors
    H = ggn(jacobian(module, x))
    assert_same(la.H, H, 1e-10)
    new = randn(4, 3, seed=5)
    J, theta = jacobian(module, new), flat(module)
    for tau, sigma, t in ((1.0, 0.5, 1.0), (0.2, 0.5, 1.0), (0.2, 1.3, 1.0), (0.2, 1.3, 3.0)):
        la.prior_precision, la.sigma_noise, la.temperature = tau, sigma, t
        precision = H / sigma**2 / t + tau * torch.eye(len(H), dtype=torch.float64)
        mean, covariance = la(new)
        assert_same(mean, outputs(module, new), 1e-12)
        assert_same(covariance, J @ torch.linalg.inv(precision) @ J.mT, 1e-8)
        assert_same(la.functional_variance(J), covariance, 1e-8)
        assert_same(la.functional_covariance(J), la(new, joint=True)[1], 1e-8)
        assert_same(la.posterior_precision, precision, 1e-10)
        ratio = torch.logdet(precision) - len(H) * torch.tensor(tau, dtype=torch.float64).log()
        residual = (outputs(module, x) - y).square().sum() / 2
        noise = y.numel() * torch.tensor(sigma * (2 * torch.pi) ** 0.5, dtype=torch.float64).log()
        expected = -residual / sigma**2 / t - noise - 0.5 * (ratio + tau * theta @ theta)
        assert_same(la.log_marginal_likelihood(), expected, 1e-9)


def test_layerwise_priors_of_a_kronecker_posterior():
    module, data = network(), classes()
    la = lt.KronLaplace(module, "classification")
    la.fit(data)
    values = torch.tensor([0.3, 2.0, 5.0, 0.1], dtype=torch.float64)
    la.prior_precision = values
    H = la.H_facs.to_matrix()
    precision = H + torch.diag(la.prior_precision_diag)
    assert_same(la.posterior_precision.to_matrix(), precision, 1e-9)
    assert_same(la.posterior.posterior.precision.dense(), precision, 1e-9)
    J = jacobian(module, randn(4, 3, seed=5))
    covariance = J @ torch.linalg.inv(precision) @ J.mT
    kappa = 1 / (1 + torch.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt()
    probs = (kappa * outputs(module, randn(4, 3, seed=5))).softmax(-1)
    assert_same(la(randn(4, 3, seed=5)), probs, 1e-8)
    with pytest.raises(ValueError, match="prior_precision has 38"):
        la.prior_precision = torch.ones(38)


def test_damping_has_an_effect_and_agrees_with_itself():
    module, data = network(), classes()
    plain, damped = (lt.KronLaplace(module, "classification", damping=d, prior_precision=0.5) for d in (False, True))
    for la in (plain, damped):
        la.fit(data)
    J = jacobian(module, randn(4, 3, seed=5))
    block = damped.posterior_precision.to_matrix()[:15, :15]
    G, A = damped.H_facs.kfacs[0]
    eye, root, n = torch.eye, 0.5**0.5, damped.n_data**0.5
    expected = torch.kron(G / n + root * eye(5, dtype=G.dtype), A * n + root * eye(3, dtype=A.dtype))
    assert_same(block, expected, 1e-9)
    assert bool((damped.functional_variance(J).diagonal(dim1=1, dim2=2)
                 < plain.functional_variance(J).diagonal(dim1=1, dim2=2)).all())  # fmt: skip


def test_samples_are_joint_and_follow_the_generator():
    la = lt.Laplace(network(1), "regression", "all", "full")
    la.fit(regression(outputs=1))
    x = torch.tensor([[-2.0, 0.0, 1.0], [2.0, 0.5, -1.0]], dtype=torch.float64)
    draws = la.functional_samples(x, n_samples=6000, generator=seeded(1))
    assert torch.equal(draws, la.functional_samples(x, n_samples=6000, generator=seeded(1)))
    _, covariance = la(x, joint=True)
    assert_same(torch.cov(draws[..., 0].T), covariance, 0.06)
    torch.manual_seed(3)
    first = la.functional_samples(x, n_samples=3), la.sample(2), la(x, pred_type="nn", link_approx="mc")[0]
    torch.manual_seed(3)
    again = la.functional_samples(x, n_samples=3), la.sample(2), la(x, pred_type="nn", link_approx="mc")[0]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_many_outputs_are_drawn_by_weights():
    la = lt.Laplace(network(), "classification", "all", "full")
    la.fit(classes())
    x = randn(400, 3, seed=8)  # more outputs than a joint covariance is made for
    draws = la.functional_samples(x, n_samples=800, generator=seeded(1))
    _, covariance = la._glm_predictive_distribution(x[:1])
    assert_same(torch.cov(draws[:, 0].T), covariance[0], 0.25)
    assert_same(la.predictive_samples(x, n_samples=4).sum(-1), torch.ones(4, 400, dtype=torch.float64), 1e-12)


def test_diagonal_output_draws_outputs_independently():
    la = lt.Laplace(network(), "regression", "all", "full", sigma_noise=0.3)
    la.fit(regression())
    x = randn(2, 3, seed=5)
    draws = la.functional_samples(x, n_samples=8000, diagonal_output=True, generator=seeded(1))
    joint = la(x, joint=True)[1].reshape(2, 3, 2, 3)
    for c in range(3):
        assert_same(torch.cov(draws[..., c].T), joint[:, c, :, c], 0.08)
    assert abs(torch.corrcoef(draws[:, 0].T)[0, 1].item()) < 0.05


def test_networks_with_sampled_weights():
    module = network()
    la = lt.Laplace(module, "classification", "all", "diag")
    la.fit(classes())
    x = randn(4, 3, seed=5)
    draws = la.posterior.posterior.sample(6, seeded(4))
    expected = torch.stack(
        [functional_call(module, la.posterior.params.unflatten(theta), (x,)) for theta in draws]
    ).softmax(-1)
    found = la.predictive_samples(x, pred_type="nn", n_samples=6, generator=seeded(4))
    assert_same(found, expected, 1e-10)
    assert_same(la(x, pred_type="nn", link_approx="mc", n_samples=6, generator=seeded(4)), expected.mean(0), 1e-10)
    with pytest.raises(ValueError, match="link_approx='mc'"):
        la(x, pred_type="nn")


def test_grid_search_scores_every_candidate_alone():
    la = lt.Laplace(network(), "classification", "all", "full")
    la.fit(classes())
    held = classes(30, seed=9)
    x, y = held.dataset.tensors
    grid = torch.logspace(-4, 4, 17)
    scores = []
    for tau in grid:
        la.prior_precision = tau
        scores.append(-la(x).gather(1, y[:, None]).log().mean().item())
    best = grid[scores.index(min(scores))].item()
    for loss in (None, RunningNLLMetric(), lambda probs, labels: nn.functional.nll_loss(probs.log(), labels)):
        la.optimize_prior_precision(method="gridsearch", val_loader=held, grid_size=17, loss=loss)
        assert la.prior_precision.item() == pytest.approx(best, rel=1e-6)
    metric = RunningNLLMetric()
    assert validate(la, held, metric) == pytest.approx(validate(la, held, metric), rel=1e-12)


def test_grid_search_of_a_regression_sees_the_variance():
    la = lt.Laplace(network(1), "regression", "all", "full", sigma_noise=0.5)
    la.fit(regression(outputs=1))
    held = DataLoader(TensorDataset(3 * randn(20, 3, seed=7), 3 * randn(20, 1, seed=8)), batch_size=20)
    la.optimize_prior_precision(method="gridsearch", val_loader=held, grid_size=9)
    x, y = held.dataset.tensors
    scores = {}
    for tau in torch.logspace(-4, 4, 9):
        la_tau = la.posterior.replace(prior=float(tau))
        scores[float(tau)] = -la_tau.predict(x).log_prob(y).mean().item()
    assert la.prior_precision.item() == pytest.approx(min(scores, key=scores.get), rel=1e-6)


def test_data_are_counted_and_the_model_is_left_alone():
    module = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    x, y = randn(16, 3), torch.randint(3, (16,), generator=seeded(2))
    data = DataLoader(TensorDataset(x, y), batch_size=5, drop_last=True)
    for subset in ("all", "last_layer"):
        la = lt.Laplace(module, "classification", subset, "kron")
        la.fit(data)
        assert la.n_data == 15
        la.functional_samples(x[:2], pred_type="nn", n_samples=3)
        la(x[:1])
    assert module.training
    assert all(m.training for m in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(m._forward_hooks for m in module.modules())


class OfMapping(nn.Module):
    """Takes a whole mapping, as wrappers of Hugging Face models do for laplace-torch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, data):
        assert isinstance(data, UserDict)
        return self.net(data["features"])


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_mappings(subset):
    module = build(OfMapping)
    x, y = randn(10, 3), torch.randint(3, (10,), generator=seeded(2))
    data = [UserDict(features=x[k : k + 5], target=y[k : k + 5]) for k in (0, 5)]
    la = lt.Laplace(module, "classification", subset, "kron", dict_key_x="features", dict_key_y="target")
    la.fit(data)
    plain = lt.Laplace(module.net, "classification", subset, "kron")
    plain.fit(DataLoader(TensorDataset(x, y), batch_size=5))
    assert_same(la(data[0]), plain(x[:5]), 1e-10)
    assert_same(la.log_marginal_likelihood(), plain.log_marginal_likelihood(), 1e-10)
    assert la(data[0], pred_type="nn", link_approx="mc", n_samples=3).shape == (5, 3)
    wrong = lt.Laplace(module, "classification", subset, "kron")
    with pytest.raises(KeyError, match="dict_key_y='labels'"):
        wrong.fit(data)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "gp"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_states_and_pickles(subset, structure, tmp_path):
    module, x = network(), randn(4, 3, seed=5)
    more = {"n_subset": 10} if structure == "gp" else {}
    la = lt.Laplace(module, "regression", subset, structure, sigma_noise=0.4, **more)
    la.fit(regression())
    la.prior_precision = 0.3
    torch.save(la.state_dict(), tmp_path / "state.bin")
    state = torch.load(tmp_path / "state.bin")
    again = lt.Laplace(module, "regression", subset, structure, **more)
    again.load_state_dict(state)
    third = pickle.loads(pickle.dumps(la))
    for other in (again, third):
        for a, b in zip(other(x), la(x), strict=True):
            assert_same(a, b, 1e-12)
        assert_same(other.log_marginal_likelihood(), la.log_marginal_likelihood(), 1e-12)
    other = lt.Laplace(network(seed=1), "regression", subset, structure, **more)
    with pytest.raises(ValueError, match="other weights"):
        other.load_state_dict(state)


def test_gradients_reach_the_inputs():
    module = network()
    for subset in ("all", "last_layer"):
        la = lt.Laplace(module, "regression", subset, "kron", enable_backprop=True)
        la.fit(regression())
        x = randn(2, 3, seed=5).requires_grad_()
        (found,) = torch.autograd.grad(la(x)[1].sum(), x)
        step = 1e-6 * randn(2, 3, seed=6)
        with torch.no_grad():
            change = la(x + step)[1].sum() - la(x - step)[1].sum()
        assert_same((found * step).sum(), change / 2, 1e-4)


def test_masks_give_the_last_layer():
    module, data = network(), classes()
    mask = LastLayerSubnetMask(module)
    mask.select(data)
    assert torch.equal(mask.indices, torch.arange(20, 38))
    la = lt.Laplace(module, "classification", "subnetwork", "full", subnetwork_indices=mask.indices)
    last = lt.Laplace(module, "classification", "last_layer", "full")
    for each in (la, last):
        each.fit(data)
    assert_same(la.H, last.H, 1e-10)
    assert_same(la(randn(4, 3, seed=5)), last(randn(4, 3, seed=5)), 1e-9)
    largest = LargestMagnitudeSubnetMask(module, 4)
    largest.select()
    assert set(largest.indices.tolist()) == set(flat(module).abs().topk(4).indices.tolist())


def test_masks_by_name_at_random_and_by_variance():
    module, data = network(), classes()
    assert torch.equal(masks.ParamNameSubnetMask(module, ["0.bias"]).select(), torch.arange(15, 20))
    chosen = masks.RandomSubnetMask(module, 7).select()
    assert len(set(chosen.tolist())) == 7
    x = torch.cat([x for x, _ in data])
    diagonal = ggn(jacobian(module, x), softmax_hessian(outputs(module, x))).diagonal() + 1.0
    la = lt.Laplace(module, "classification", "all", "diag")
    found = masks.LargestVarianceDiagLaplaceSubnetMask(module, 6, la).select(data)
    assert set(found.tolist()) == set((1 / diagonal).topk(6).indices.tolist())
    spread = masks.LargestVarianceSWAGSubnetMask(module, 5, swag_n_snapshots=2, swag_lr=0.01)
    assert len(spread.select(data)) == 5


def test_jacobians_and_quadratic_forms_of_a_backend():
    module, x = network(), randn(4, 3, seed=5)
    J = jacobian(module, x)
    assert_same(backends.AsdlEF(module, "classification").jacobians(x)[0], J)
    last = backends.BackPackEF(FeatureExtractor(module, "2"), "classification")
    assert_same(last.last_layer_jacobians(x)[0], J[..., 20:])
    la = lt.Laplace(module, "classification", "all", "kron")
    la.fit(classes())
    precision = la.posterior_precision
    covariance = torch.linalg.inv(precision.to_matrix())
    assert_same(precision.inv_square_form(J), J @ covariance @ J.mT, 1e-9)
    assert_same(la.functional_variance_fast(x)[1], (J @ covariance * J).sum(-1), 1e-9)


def test_classes_are_the_kinds_that_they_are_in_laplace_torch():
    """Packages ask `isinstance(la, KronLaplace)` of a posterior over the last layer or a subnetwork too."""
    kinds = {"full": lt.FullLaplace, "kron": lt.KronLaplace, "diag": lt.DiagLaplace}
    every = (*kinds.values(), lt.LLLaplace, lt.SubnetLaplace, lt.FunctionalLaplace)
    chosen = {"subnetwork_indices": torch.arange(4)}
    cases = [("last_layer", name, {kind, lt.LLLaplace}, {}) for name, kind in kinds.items()]
    cases += [("subnetwork", name, {kinds[name], lt.SubnetLaplace}, chosen) for name in ("full", "diag")]
    cases += [("last_layer", "gp", {lt.LLLaplace, lt.FunctionalLaplace}, {"n_subset": 5})]
    cases += [("all", name, {kind}, {}) for name, kind in kinds.items()]
    for subset, name, expected, options in cases:
        la = lt.Laplace(network(), "classification", subset, name, **options)
        assert isinstance(la, lt.ParametricLaplace)
        assert {kind for kind in every if isinstance(la, kind)} == expected, (subset, name)
    for interface in (lt.ParametricLaplace, lt.LLLaplace):
        with pytest.raises(TypeError, match="abstract"):
            interface(network(), "classification")


def test_what_a_kind_of_posterior_needs_is_named():
    with pytest.raises(ValueError, match=r"needs subnetwork_indices.*LargestMagnitudeSubnetMask"):
        lt.Laplace(network(), "classification", "subnetwork", "full")
    with pytest.raises(TypeError, match="needs n_subset"):
        lt.Laplace(network(), "classification", "all", "gp")


def test_layers_without_kronecker_products():
    """A norm and grouped convolutions: dense blocks in H, and the same predictions and evidence as Lapwing's own."""
    module = build(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
        )
    )
    x, y = randn(6, 2, 3, 3), torch.randint(3, (6,), generator=seeded(2))
    la = lt.Laplace(module, "classification", "all", "kron", prior_precision=0.4)
    la.fit([(x, y)])
    own = lapwing.fit(module, (x, y), "classification", structure=lapwing.Kron("expand", "separate"), prior=0.4)
    assert_same(la.H_facs.to_matrix(), own.curvature.dense(), 1e-10)
    assert_same(la.log_marginal_likelihood(), own.log_evidence(), 1e-10)
    assert_same(la(x), own.predict(x, link="probit").probs, 1e-10)


def test_backends_and_structures_that_do_not_go_together():
    module, data = network(), regression()
    la = lt.DiagLaplace(module, "regression", backend=CurvlinopsEF)
    la.fit(data)
    x, y = data.dataset.tensors
    scores = torch.einsum("ncp,nc->np", jacobian(module, x), y - outputs(module, x))
    assert_same(la.H, scores.square().sum(0), 1e-9)
    drawn = lt.FullLaplace(module, "regression", backend=CurvlinopsGGN, backend_kwargs={"stochastic": True})
    drawn.fit(data)
    assert drawn.H.shape == (38, 38)
    with pytest.raises(ValueError, match="no posterior for"):
        lt.Laplace(module, "regression", "subnetwork", "kron", subnetwork_indices=torch.tensor([1]))


def test_what_cannot_be_used():
    module = network()
    la = lt.Laplace(module, "regression", "all", "full")
    with pytest.raises(AttributeError, match="not fitted"):
        la(randn(2, 3))
    with pytest.raises((lapwing.LapwingError, StopIteration)):
        la.fit([])
    with pytest.raises(lapwing.BadData, match="nan"):
        la.fit([(torch.full((2, 3), torch.nan, dtype=torch.float64), randn(2, 3))])
    with pytest.raises(ValueError, match="dimensions"):
        lt.Laplace(network(1), "regression", "all", "full").fit([(randn(4, 3), randn(4))])
    for p in module[0].parameters():
        p.requires_grad_(False)
    frozen = lt.Laplace(module, "regression", "all", "full")
    frozen.fit(regression())
    assert frozen.n_params == frozen.H.shape[0] == 18


def test_frozen_networks_and_names_that_look_alike():
    """The last layer of a frozen network; a body that has a layer of the same name inside a module `model`."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.ModuleDict({"fc": nn.Linear(3, 3)})
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(self.model["fc"](x).tanh())

    module = build(Nested).requires_grad_(False)
    for options in ({}, {"last_layer_name": "fc"}):
        la = lt.Laplace(module, "classification", "last_layer", "full", **options)
        la.fit(classes())
        assert la.posterior.params.names == ("fc.weight", "fc.bias")
        assert la.model.last_layer.weight.shape == (3, 3)
    assert not any(p.requires_grad for p in module.parameters())


def test_data_that_can_be_read_once_are_refused():
    la = lt.Laplace(network(), "classification", "all", "full")
    with pytest.raises(lapwing.NotReiterable, match="only once"):
        la.fit(batch for batch in classes())
    assert pickle.loads(pickle.dumps(la)).n_params == 38
    with pytest.raises(ValueError, match="Nystrom"):
        lt.Laplace(network(), "classification", "all", "gp", functional_approximation="nystrom")


def test_half_precision_computes_in_float32():
    module = network().half()
    x, y = randn(12, 3, seed=1).half(), randn(12, 3, seed=2).half()
    la = lt.Laplace(module, "regression", "all", "diag")
    la.fit([(x, y)])
    wide = lt.Laplace(network().half().float(), "regression", "all", "diag")
    wide.fit([(x.float(), y.float())])
    assert la(x)[1].dtype == la.H.dtype == la.log_marginal_likelihood().dtype == torch.float16
    assert_same(la.H, wide.H, 1e-2)
    assert_same(la.log_marginal_likelihood(), wide.log_marginal_likelihood(), 1e-2)


def test_rewards_of_single_items():
    class Rewards(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 1)

        def forward(self, x):
            return self.net(x)[..., 0] if x.ndim == 3 else self.net(x)

    module = build(Rewards)
    x, y = randn(10, 2, 3), torch.randint(2, (10,), generator=seeded(2))
    la = lt.Laplace(module, "reward_modeling", "all", "kron")
    la.fit([(x, y)])
    mean, covariance = la(x[:, 0])
    assert_same(mean, outputs(module, x[:, 0]), 1e-12)
    assert covariance.shape == (10, 1, 1)
    assert bool((la.predictive_samples(x[:, 0], n_samples=5, generator=seeded(1)).std(0) > 0).all())
    la.optimize_prior_precision(method="gridsearch", val_loader=[(x, y)], grid_size=3)
    own = lapwing.fit(module, (x, y), "preference", structure=lapwing.Kron("expand", "separate"), prior=1.0)
    la.prior_precision = 1.0
    assert_same(la.log_marginal_likelihood(), own.log_evidence(), 1e-10)
    assert_same(la(x, fitting=True).sum(-1), torch.ones(10, dtype=torch.float64), 1e-12)


def test_submodules_have_the_names_of_laplace_torch():
    utils = importlib.import_module("lapwing.compat.laplace_torch.utils")
    curvature = importlib.import_module("lapwing.compat.laplace_torch.curvature")
    training = importlib.import_module("lapwing.compat.laplace_torch.marglik_training")
    assert utils.LargestMagnitudeSubnetMask is LargestMagnitudeSubnetMask
    assert curvature.CurvlinopsGGN is CurvlinopsGGN
    assert training.marglik_training is lt.marglik_training
    assert callable(lt.marglik_training)


def test_a_loader_without_batches_is_refused():
    with pytest.raises(lapwing.BadData, match="train_loader holds no batches"):
        lt.Laplace(network(), "classification").fit([])


def test_training_on_a_list_of_batches_is_refused():
    with pytest.raises(lapwing.BadData, match=r"takes a DataLoader.*got a list"):
        lt.marglik_training(network(), [(randn(4, 3), torch.arange(4) % 3)], likelihood="classification")
