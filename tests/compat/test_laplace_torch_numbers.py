"""Every number that laplace-torch's classes hand out, against the dense posterior of the same weights."""

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from lapwing.compat import laplace_torch as lt
from lapwing.compat.laplace_torch import functions
from lapwing.compat.laplace_torch.extractor import FeatureExtractor, FeatureReduction
from lapwing.compat.laplace_torch.masks import LargestMagnitudeSubnetMask, ModuleNameSubnetMask, ParamNameSubnetMask
from lapwing.compat.laplace_torch.matrix import Kron
from tests.dense import assert_same, build, flat, ggn, jacobian, outputs, randn

SIGMA, PRIOR, MEAN = 0.7, 1.7, 0.3


def network() -> nn.Sequential:
    return build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def loader(n: int = 12) -> DataLoader:
    return DataLoader(TensorDataset(randn(n, 3, seed=1), randn(n, 2, seed=2)), batch_size=5)


def fitted(structure: str, prior=PRIOR, subset: str = "all", **options):
    la = lt.Laplace(
        network(), "regression", subset, structure, sigma_noise=SIGMA, prior_precision=prior, prior_mean=MEAN, **options
    )
    la.fit(loader())
    return la


def dense_ggn() -> torch.Tensor:
    x = loader().dataset.tensors[0]
    return ggn(jacobian(network(), x), torch.eye(2, dtype=torch.float64).expand(len(x), 2, 2))


def curvature(structure: str) -> torch.Tensor:
    """The curvature that a structure keeps: all of the GGN, its diagonal, or Kronecker factors (Lapwing's own)."""
    if structure == "kron":
        own = lapwing.Kron("expand", "separate")
        return lapwing.fit(network(), loader(), lapwing.Gaussian(noise=1.0), structure=own).curvature.dense()
    return dense_ggn().diagonal().diag() if structure == "diag" else dense_ggn()


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
def test_density_and_evidence_are_those_of_the_dense_posterior(structure: str) -> None:
    la, theta = fitted(structure), flat(network())
    eye = torch.eye(len(theta), dtype=torch.float64)
    precision = curvature(structure) / SIGMA**2 + PRIOR * eye
    law, point = MultivariateNormal(theta, precision_matrix=precision), theta + 0.1 * randn(len(theta), seed=5)
    assert_same(la.log_prob(point), law.log_prob(point), 1e-8)
    away = point - theta
    assert_same(la.log_prob(point, normalized=False), -away @ precision @ away / 2, 1e-8)
    assert_same(la.log_det_prior_precision, (PRIOR * eye).logdet(), 1e-9)
    assert_same(la.log_det_posterior_precision, precision.logdet(), 1e-9)
    assert_same(la.log_det_ratio, precision.logdet() - (PRIOR * eye).logdet(), 1e-8)
    assert_same(la.scatter, PRIOR * (theta - MEAN).square().sum(), 1e-9)
    x, y = loader().dataset.tensors
    log_likelihood = torch.distributions.Normal(outputs(network(), x), SIGMA).log_prob(y).sum()
    assert_same(la.log_likelihood, log_likelihood, 1e-8)
    assert_same(la.log_marginal_likelihood(), log_likelihood - (la.log_det_ratio + la.scatter) / 2, 1e-8)
    other = la.log_marginal_likelihood(torch.tensor([0.9]), torch.tensor([0.5]))
    again = lt.Laplace(network(), "regression", "all", structure, sigma_noise=0.5, prior_precision=0.9, prior_mean=MEAN)
    again.fit(loader())
    assert_same(other, again.log_marginal_likelihood(), 1e-8)


def test_matrices_of_the_posterior() -> None:
    full, diagonal, low = fitted("full"), fitted("diag"), fitted("lowrank")
    precision = dense_ggn() / SIGMA**2 + PRIOR * torch.eye(26, dtype=torch.float64)
    assert_same(full.posterior_precision, precision, 1e-9)
    assert_same(full.posterior_covariance, precision.inverse(), 1e-9)
    assert_same(full.posterior_scale @ full.posterior_scale.mT, precision.inverse(), 1e-9)
    assert_same(diagonal.posterior_scale.square(), 1 / precision.diagonal(), 1e-9)
    (vectors, values), prior = low.posterior_precision
    assert_same(vectors @ values.diag() @ vectors.mT + prior.diag(), precision, 1e-8)


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_before_a_fit_the_curvature_is_zero_and_the_density_is_that_of_the_prior(structure: str) -> None:
    la = lt.Laplace(network(), "regression", "all", structure, prior_precision=PRIOR, prior_mean=MEAN)
    zero = la.H.to_matrix() if structure == "kron" else la.H
    assert not zero.any()
    point = randn(26, seed=5)
    law = torch.distributions.Normal(torch.full_like(point, MEAN), PRIOR**-0.5)
    assert_same(la.log_prob(point), law.log_prob(point).sum(), 1e-8)
    la.fit(loader())
    assert la.loss > 0
    la._init_H()
    assert la.loss == 0.0
    assert not (la.H.to_matrix() if structure == "kron" else la.H).any()


@pytest.mark.parametrize("prior", [PRIOR, torch.linspace(0.5, 2, 4), torch.linspace(0.5, 2, 26)])
def test_a_prior_per_tensor_or_per_weight(prior) -> None:
    la, sizes = fitted("full", prior), torch.tensor([12, 4, 8, 2])
    each = torch.as_tensor(prior, dtype=torch.float64).reshape(-1)
    each = each.repeat_interleave(sizes) if len(each) == 4 else each.expand(26)
    assert_same(la.prior_precision_diag, each, 1e-6)
    assert_same(la.posterior_precision, dense_ggn() / SIGMA**2 + each.diag(), 1e-6)
    assert_same(functions.expand_prior_precision(la.prior_precision, la.model), each, 1e-6)


@pytest.mark.parametrize("prior", [PRIOR, torch.linspace(0.5, 2, 3)])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_a_subnetwork(structure: str, prior) -> None:
    picked = torch.tensor([1, 13, 25])
    la = fitted(structure, prior, "subnetwork", subnetwork_indices=picked)
    H = dense_ggn()[picked][:, picked]
    H = H.diagonal().diag() if structure == "diag" else H
    each = torch.as_tensor(prior, dtype=torch.float64).expand(3)
    law = MultivariateNormal(flat(network())[picked], precision_matrix=H / SIGMA**2 + each.diag())
    point = randn(26, seed=5)
    assert_same(la.log_prob(point), law.log_prob(point[picked]), 1e-6)
    assert_same(la.log_prob(point[picked]), law.log_prob(point[picked]), 1e-6)
    draws = la.sample(5)
    others = [k for k in range(26) if k not in picked.tolist()]
    assert torch.equal(draws[:, others], flat(network())[others].expand(5, -1))
    assert bool((draws[:, picked].std(0) > 0).all())
    assert torch.equal(la.subnetwork_indices, picked)
    assert la.H.shape == ((3, 3) if structure == "full" else (3,))


def test_kronecker_matrices() -> None:
    G, A, B = (m @ m.mT for m in (randn(2, 3), randn(3, 4, seed=1), randn(2, 2, seed=2)))
    diagonal = randn(2, seed=3).square()
    kron = Kron([[G, A], [B], [diagonal]])
    dense = torch.block_diag(torch.kron(G, A), B, diagonal.diag())
    assert_same(kron.to_matrix(), dense, 1e-12)
    assert_same(kron.diag(), dense.diagonal(), 1e-12)
    assert_same((kron * 3.0).to_matrix(), 3 * dense, 1e-12)
    assert_same((kron + kron).to_matrix(), torch.block_diag(4 * torch.kron(G, A), 2 * B, 2 * diagonal.diag()), 1e-12)
    v = randn(5, 10, seed=4)
    assert_same(kron.bmm(v), v @ dense, 1e-12)
    shifts = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    shifted, whole = kron.decompose() + shifts, dense + shifts.repeat_interleave(torch.tensor([6, 2, 2])).diag()
    assert_same(kron.logdet(), dense.logdet(), 1e-9)
    assert_same(shifted.logdet(), whole.logdet(), 1e-9)
    assert_same(shifted.diag(), whole.diagonal(), 1e-9)
    assert_same(shifted.diag(exponent=-1), whole.inverse().diagonal(), 1e-9)
    assert_same(shifted.bmm(v), v @ whole.inverse(), 1e-9)
    assert not (shifted + shifts.clone().requires_grad_()).detach().deltas.requires_grad
    for wrong, match in (
        (lambda: kron + 1.0, "only a Kron"),
        (lambda: kron * torch.ones(3), "a number only"),
        (lambda: kron.bmm(v, exponent=-1), "need the decomposition"),
        (lambda: shifted + torch.ones(2), "one per block"),
        (lambda: Kron([[G * torch.nan]]).decompose(), "not finite"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()


def test_functions_of_utils() -> None:
    M = randn(4, 4) @ randn(4, 4).mT + torch.eye(4)
    root = functions.invsqrt_precision(M)
    assert_same(root @ root.mT, M.inverse(), 1e-9)
    assert_same(functions.diagonal_add_scalar(M, 2.0), M + 2 * torch.eye(4), 1e-12)
    assert_same(functions.block_diag([M, M]), torch.block_diag(M, M), 1e-12)
    assert_same(functions.kron(M, M.mT), torch.einsum("ij,lk->ikjl", M, M).reshape(16, 16), 1e-12)
    assert functions.parameters_per_layer(network()) == [12, 4, 8, 2]
    probs, y = randn(6, 3).softmax(-1), torch.arange(6) % 3
    assert_same(functions.get_nll(probs, y), -probs[torch.arange(6), y].log().mean(), 1e-12)
    assert_same(functions.RunningNLLMetric()(probs, y), functions.get_nll(probs, y), 1e-12)
    mean, var = randn(1, 2), randn(1, 2, 2) @ randn(1, 2, 2).mT + torch.eye(2)
    draws = functions.normal_samples(mean, var, 40_000, torch.Generator().manual_seed(0))[:, 0]
    assert_same(draws.mT.cov(), var[0], 0.05)  # Monte Carlo: the standard error is about 1 %
    alone = functions.normal_samples(mean, var.diagonal(dim1=-2, dim2=-1), 40_000, torch.Generator().manual_seed(0))
    assert_same(alone[:, 0].var(0), var[0].diagonal(), 0.05)
    with pytest.raises(ValueError, match="expected a mean"):
        functions.normal_samples(mean, var[0, 0], 3)
    with pytest.raises(ValueError, match="'scalar', 'layerwise' or 'diag'"):
        functions.fix_prior_prec_structure(1.0, "unit", 2, 3, torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
def test_the_evidence_chooses_a_prior_where_its_gradient_vanishes(structure: str) -> None:
    la = fitted("full")
    la.optimize_prior_precision(n_steps=400, lr=0.1, prior_structure=structure)
    assert len(la.prior_precision) == {"scalar": 1, "layerwise": 4, "diag": 26}[structure]
    free = la.prior_precision.clone().log().requires_grad_()
    (slope,) = torch.autograd.grad(la.log_marginal_likelihood(free.exp()), free)
    assert slope.abs().max() < (0.05 if structure != "diag" else 0.5)  # a weight may want a precision without bound


def test_training_with_the_evidence() -> None:
    torch.manual_seed(0)
    x = randn(40, 3, seed=1)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * randn(40, 1, seed=2)), batch_size=20)
    model = build(lambda: nn.Linear(3, 1))
    la, same, margliks, losses = lt.marglik_training(
        model, data, "regression", "full", optimizer_kwargs={"lr": 0.05, "weight_decay": 0.1}, n_epochs=60,
        scheduler_cls=torch.optim.lr_scheduler.ConstantLR, scheduler_kwargs={"factor": 1.0}, n_epochs_burnin=5,
    )  # fmt: skip
    assert same is model
    assert len(losses) == 60
    assert margliks[-1] < margliks[0] - 10
    assert float(la.sigma_noise) == pytest.approx(0.1, rel=0.5)
    assert float(la.log_marginal_likelihood()) == pytest.approx(-min(margliks), abs=0.5)
    with pytest.raises(lapwing.BadData, match="takes a DataLoader"):
        lt.marglik_training(model, [(x, x)], "regression")


def test_features_with_positions() -> None:
    model, x = build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), randn(5, 6, 3)
    whole = model[:2](x)
    picks = {"pick_first": whole[:, 0], "pick_last": whole[:, -1], "average": whole.mean(1)}
    for name, expected in picks.items():
        out, found = FeatureExtractor(model, feature_reduction=name).forward_with_features(x)
        assert_same(found, expected.detach(), 1e-12)
        assert_same(out, model(x), 1e-12)
    assert set(picks) == {kind.value for kind in FeatureReduction}


def test_what_cannot_be_used_is_refused() -> None:
    la, model = fitted("full"), network()
    x = randn(2, 3)
    state, other = la.state_dict(), lt.FullLaplace(build(lambda: nn.Linear(3, 2)), "regression")
    wrong_layer = FeatureExtractor(model, "2")
    mask = LargestMagnitudeSubnetMask(model, 3)
    cases = [
        (lambda: lt.Laplace(model, "classification", sigma_noise=2.0), "for likelihood='regression'"),
        (lambda: lt.Laplace(model, "counts", "all"), "likelihood is one of"),
        (lambda: lt.Laplace(model, "regression", "all", prior_mean=torch.zeros(5)), "prior_mean has 5 entries"),
        (lambda: lt.Laplace(model, "regression", "all", prior_precision="1"), "a number or a tensor"),
        (lambda: lt.Laplace(model, "regression", "all", prior_mean=torch.zeros(2, 2)), "a number or a vector"),
        (lambda: lt.Laplace(model, "regression", "all", sigma_noise=torch.ones(2)), "sigma_noise is one number"),
        (lambda: lt.Laplace(model, "regression", "last_layer", asdl_fisher_kwargs={}), "not for a posterior over"),
        (lambda: la(x, pred_type="gp"), "pred_type is one of"),
        (lambda: la(x, link_approx="exact"), "link_approx is one of"),
        (lambda: la(x, generator=1), "generator is a torch.Generator"),
        (lambda: la.functional_variance(torch.zeros(2, 2, 5)), "Jacobians have the shape"),
        (lambda: la.optimize_prior_precision(method="cv"), "'marglik' or 'gridsearch'"),
        (lambda: la.optimize_prior_precision(method="gridsearch"), "needs held-out data"),
        (lambda: fitted("lowrank").fit(loader(), override=False), "cannot add data"),
        (lambda: fitted("gp", n_subset=5).fit(loader(), override=False), "cannot add data"),
        (lambda: fitted("gp", n_subset=500), "but there are 12 data"),
        (lambda: other.load_state_dict(state), "the state has 26 weights, the model 8"),
        (lambda: lt.DiagLaplace(model, "regression").load_state_dict(state), "not of a DiagLaplace"),
        (lambda: lt.FullLaplace(model, "classification").load_state_dict(state), "the state has likelihood"),
        (lambda: fitted("full", subset="subnetwork", subnetwork_indices=torch.tensor([1.0])), "vector of positions"),
        (lambda: fitted("full", subset="subnetwork", subnetwork_indices=torch.tensor([1, 1])), "distinct positions"),
        (lambda: FeatureExtractor(model, "1"), "must be nn.Linear"),
        (lambda: wrong_layer.find_last_layer(x), "already known"),
        (lambda: FeatureExtractor(nn.Linear(3, 2)).find_last_layer(x.float()), "one module only"),
        (lambda: LargestMagnitudeSubnetMask(model, 99), "a number of weights up to 26"),
        (lambda: ParamNameSubnetMask(model, ["3.weight"]).select(), "it has no"),
        (lambda: ModuleNameSubnetMask(model, []).select(), "name at least one module"),
        (lambda: (mask.select(), mask.select()), "already chosen"),
    ]
    for wrong, match in cases:
        with pytest.raises(ValueError, match=match):
            wrong()
    with pytest.raises(lapwing.BadData, match="written by laplace-torch itself"):
        la.load_state_dict({key: value for key, value in state.items() if key != "posterior"})
    with pytest.warns(UserWarning, match="does not read val_loader"):
        la.optimize_prior_precision(val_loader=loader(), n_steps=1)
