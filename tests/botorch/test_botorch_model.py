"""`lapwing.botorch.LaplaceModel` against dense algebra over the weights, and inside BoTorch itself."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    UpperConfidenceBound,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
)
from botorch.generation import MaxPosteriorSampling
from botorch.models import ModelList, SingleTaskGP
from botorch.models.transforms import Log, Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import IIDNormalSampler, SobolQMCNormalSampler
from gpytorch.kernels import LinearKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ZeroMean
from torch import Tensor, nn

import lapwing
from lapwing import botorch as door
from lapwing.botorch import LaplaceModel

NOISE, PRIOR = 0.3, 1.7


def network(m: int = 1, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(m)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, m)).to(dtype)


def fitted(m: int = 1, dtype: torch.dtype = torch.float64, noise: Any = NOISE, **options: Any) -> lapwing.Laplace:
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(15, 2, generator=generator, dtype=dtype)
    y = torch.randn(15, m, generator=generator, dtype=dtype)
    options = {"structure": "full", "prior": PRIOR, "progress": False} | options
    return lapwing.fit(network(m, dtype), (x, y), lapwing.Gaussian(noise=noise), **options)


def rows(la: lapwing.Laplace, x: Tensor) -> tuple[Tensor, Tensor]:
    """f (n, m) and ∂f/∂θ (n·m, P) of the selected weights, by torch.func."""
    values = {name: p.detach() for name, p in la.module.named_parameters()}
    call: Callable = lambda own: torch.func.functional_call(la.module, {**values, **own}, (x,)).flatten()  # noqa: E731
    parts = torch.func.jacrev(call)({name: values[name] for name in la.params.names})
    return call(values).reshape(len(x), -1), torch.cat([parts[name].flatten(1) for name in la.params.names], 1)


def points(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def refitted(la: lapwing.Laplace, x: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance over the weights of the linearized model with more data, by dense algebra."""
    f, j = rows(la, x)
    precision = la.posterior.precision.dense() + j.T @ (j / noise.reshape(-1, 1))
    mean = torch.linalg.solve(precision, j.T @ ((y - f).reshape(-1) / noise.reshape(-1)))
    return mean, torch.linalg.inv(precision)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.detach().abs().max()))


# --- the posterior ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["all", "last_layer"])
@pytest.mark.parametrize("m", [1, 2])
def test_the_posterior_of_a_full_fit_is_that_of_the_weights(m: int, select: str) -> None:
    la = fitted(m, select=select)
    x = points(3, 4, 2)
    data = la.options.data[0]
    _, seen = rows(la, data)
    covariance = torch.linalg.inv(seen.T @ seen / NOISE**2 + PRIOR * torch.eye(la.params.size, dtype=torch.float64))
    found = LaplaceModel(la).posterior(x)
    assert found.mean.shape == found.variance.shape == (3, 4, m)
    for k in range(3):
        f, j = rows(la, x[k])
        close(found.mean[k], f)
        close(found.distribution.covariance_matrix[k], j @ covariance @ j.T)


@pytest.mark.parametrize("select", ["all", "last_layer"])
@pytest.mark.parametrize(
    "structure", ["diag", "blockdiag", "kron", "ekfac", "lowrank", "functional", "nystrom", "matrixfree"]
)
def test_every_structure_answers(structure: str, select: str) -> None:
    la = fitted(2, structure=structure, select=select)
    x, more, y = points(2, 3, 2), points(4, 2, seed=1), points(4, 2, seed=2)
    f, j = rows(la, x[1])
    model = LaplaceModel(la)
    eye = torch.eye(la.params.size, dtype=torch.float64)
    covariance = torch.linalg.inv(la.posterior.precision.matvec(eye))
    close(model.posterior(x).distribution.covariance_matrix[1], j @ covariance @ j.T, 1e-8)
    far, seen = rows(la, more)
    inside = seen @ covariance @ seen.T + NOISE**2 * torch.eye(8, dtype=torch.float64)
    gain = j @ covariance @ seen.T @ torch.linalg.inv(inside)
    after = model.condition_on_observations(more, y).posterior(x)
    close(after.mean[1], f + (gain @ (y - far).flatten()).reshape(f.shape), 1e-8)
    close(after.distribution.covariance_matrix[1], j @ covariance @ j.T - gain @ seen @ covariance @ j.T, 1e-8)


@pytest.mark.parametrize("select", ["all", "last_layer"])
def test_gradients_in_the_points_are_those_of_the_dense_formula(select: str) -> None:
    la = fitted(2, structure="kron", select=select)
    covariance = torch.linalg.inv(la.posterior.precision.dense())
    x = points(2, 3, 2).requires_grad_()
    model = LaplaceModel(la).condition_on_observations(points(2, 2, seed=1), points(2, 2, seed=2))
    weight = points(6, 6, seed=3)
    found = model.posterior(x)
    (got,) = torch.autograd.grad(found.mean.sum() + (found.distribution.covariance_matrix * weight).sum(), x)

    noise = torch.full((4,), NOISE**2, dtype=torch.float64)
    mean, covariance = refitted(la, points(2, 2, seed=1), points(2, 2, seed=2), noise)
    total = torch.zeros((), dtype=torch.float64)
    for k in range(2):
        f, j = rows(la, x[k])
        total = total + f.sum() + (j @ mean).sum() + (j @ covariance @ j.T * weight).sum()
    close(got, torch.autograd.grad(total, x)[0], 1e-8)


def test_a_batch_is_joint_over_q_and_never_over_batches() -> None:
    model = LaplaceModel(fitted(1))
    x = points(5, 3, 2)
    assert model.posterior(x).distribution.covariance_matrix.shape == (5, 3, 3)
    alone = torch.stack([model.posterior(x[k]).distribution.covariance_matrix for k in range(5)])
    close(model.posterior(x).distribution.covariance_matrix, alone)
    deep = model.posterior(x.reshape(5, 1, 3, 2).expand(5, 2, 3, 2))
    close(deep.distribution.covariance_matrix[:, 1], alone)


def test_many_batches_are_computed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = LaplaceModel(fitted(2)), points(7, 2, 3, 2)
    whole = model.posterior(x)
    monkeypatch.setattr(door, "AT_ONCE", 1)
    parts = model.posterior(x)
    close(parts.mean, whole.mean)
    close(parts.distribution.covariance_matrix, whole.distribution.covariance_matrix)


def test_noise_is_added_when_it_is_asked_for() -> None:
    model, x = LaplaceModel(fitted(2, noise=[0.1, 0.7])), points(3, 2)
    plain, noisy = model.posterior(x), model.posterior(x, observation_noise=True)
    close(noisy.variance - plain.variance, torch.tensor([0.01, 0.49], dtype=torch.float64).expand(3, 2))
    given = points(3, 2, seed=4)
    close(model.posterior(x, observation_noise=given).variance - plain.variance, given)
    off = noisy.distribution.covariance_matrix - plain.distribution.covariance_matrix
    assert torch.equal(off, torch.diag(off.diagonal()))


def test_outputs_can_be_picked() -> None:
    la = fitted(3, noise=[0.1, 0.2, 0.3])
    model, x = LaplaceModel(la), points(2, 4, 2)
    model = model.condition_on_observations(points(2, 2, seed=1), points(2, 3, seed=2))
    whole = model.posterior(x, observation_noise=True)
    for found in (model.subset_output([2, 0]).posterior(x, observation_noise=True),
                  model.posterior(x, output_indices=[-1, 0], observation_noise=True)):  # fmt: skip
        close(found.mean, whole.mean[..., [2, 0]])
        close(found.variance, whole.variance[..., [2, 0]])
    assert model.subset_output([1]).num_outputs == 1
    single = model.subset_output([1]).condition_on_observations(points(1, 2, seed=3), points(1, 1, seed=4))
    noise = torch.tensor([0.01, 0.04, 0.09] * 2, dtype=torch.float64)
    mean, covariance = refitted(la, points(2, 2, seed=1), points(2, 3, seed=2), noise)
    f, j = rows(la, points(1, 2, seed=3))
    seen, variance = j[1], j[1] @ covariance @ j[1] + 0.04
    error = points(1, 1, seed=4)[0, 0] - f[0, 1] - seen @ mean
    g, k = rows(la, x[0])
    wanted = g + (k @ (mean + covariance @ seen * error / variance)).reshape(g.shape)
    close(single.posterior(x).mean[0, :, 0], wanted[:, 1], 1e-8)


# --- conditioning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["all", "last_layer"])
@pytest.mark.parametrize("m", [1, 2])
def test_conditioning_is_a_refit_of_the_linearized_model(m: int, select: str) -> None:
    la = fitted(m, select=select, noise=[0.3, 0.2][:m])
    x, y, test = points(5, 2, seed=1), points(5, m, seed=2), points(2, 4, 2)
    noise = torch.tensor([0.09, 0.04][:m], dtype=torch.float64).expand(5, m)
    mean, covariance = refitted(la, x, y, noise)
    model = LaplaceModel(la)
    once = model.condition_on_observations(x, y)
    twice = model.condition_on_observations(x[:2], y[:2]).condition_on_observations(x[2:], y[2:])
    for conditioned in (once, twice):
        found = conditioned.posterior(test)
        for k in range(2):
            f, j = rows(la, test[k])
            close(found.mean[k], f + (j @ mean).reshape(f.shape), 1e-8)
            close(found.distribution.covariance_matrix[k], j @ covariance @ j.T, 1e-8)
    assert model.batch_shape == once.batch_shape == ()
    close(model.posterior(test).mean, torch.stack([rows(la, part)[0] for part in test]))  # it stays as it was


def test_conditioning_has_the_covariance_of_an_update() -> None:
    la = fitted(1)
    x, y = points(6, 2, seed=1), points(6, 1, seed=2)
    found = LaplaceModel(la).condition_on_observations(x, y).posterior(points(5, 2))
    updated = la.update((x, y)).predict(points(5, 2), joint=True).function
    close(found.distribution.covariance_matrix, updated.covariance.reshape(5, 5), 1e-8)


def test_targets_count_as_often_as_the_temperature_says() -> None:
    la = fitted(1, temperature=2.5)
    x, y, test = points(4, 2, seed=1), points(4, 1, seed=2), points(3, 2)
    mean, covariance = refitted(la, x, y, torch.full((4, 1), NOISE**2 / 2.5, dtype=torch.float64))
    found = LaplaceModel(la).condition_on_observations(x, y).posterior(test)
    f, j = rows(la, test)
    close(found.mean, f + (j @ mean)[:, None], 1e-8)
    close(found.distribution.covariance_matrix, j @ covariance @ j.T, 1e-8)


def test_a_noise_of_ones_own() -> None:
    la = fitted(1)
    x, y, test, noise = points(4, 2, seed=1), points(4, 1, seed=2), points(3, 2), points(4, 1, seed=3)
    mean, _ = refitted(la, x, y, noise)
    f, j = rows(la, test)
    model = LaplaceModel(la).condition_on_observations(x, y, noise=noise)
    close(model.posterior(test).mean[:, 0], f[:, 0] + j @ mean, 1e-8)


def test_fantasies_are_batches_of_their_own() -> None:
    la = fitted(2)
    model, x, test = LaplaceModel(la), points(3, 2, 2, seed=1), points(3, 5, 2)
    sampler = IIDNormalSampler(torch.Size([4]), seed=1)
    fantasy = model.fantasize(x, sampler)
    drawn = sampler(model.posterior(x, observation_noise=True))  # the sampler keeps its base samples
    assert fantasy.batch_shape == (4, 3)
    found = fantasy.posterior(test)
    assert found.mean.shape == (4, 3, 5, 2)
    for s, b in ((0, 0), (3, 2)):
        mean, covariance = refitted(la, x[b], drawn[s, b], torch.full((4,), NOISE**2, dtype=torch.float64))
        f, j = rows(la, test[b])
        close(found.mean[s, b], f + (j @ mean).reshape(f.shape), 1e-8)
        close(found.distribution.covariance_matrix[s, b], j @ covariance @ j.T, 1e-8)
    again = fantasy.fantasize(points(1, 2, seed=7), IIDNormalSampler(torch.Size([2]), seed=2))
    assert again.posterior(test).mean.shape == (2, 4, 3, 5, 2)
    assert model.fantasize(x[:, :0], sampler).posterior(test).mean.shape == (4, 3, 5, 2)


# --- against a Gaussian process -----------------------------------------------------------------------------------


def test_a_linear_network_is_the_gaussian_process_with_its_kernel() -> None:
    x, y = points(12, 3), points(12, 1, seed=1)
    parts = {"likelihood": GaussianLikelihood(), "covar_module": LinearKernel(), "mean_module": ZeroMean()}
    gp = SingleTaskGP(x, y, **parts, outcome_transform=None).double()
    gp.covar_module.variance = 1 / PRIOR
    gp.likelihood.noise = NOISE**2
    net = nn.Linear(3, 1, bias=False).double()
    precision = x.T @ x / NOISE**2 + PRIOR * torch.eye(3, dtype=torch.float64)
    net.weight.data = torch.linalg.solve(precision, x.T @ y / NOISE**2).T.contiguous()
    model = LaplaceModel(fit_linear(net, x, y))
    test = points(2, 4, 3, seed=2)
    more, seen = points(3, 3, seed=3), points(3, 1, seed=4)
    gp.posterior(test)  # fills its caches, which conditioning needs
    for mine, theirs in ((model, gp), tuple(each.condition_on_observations(more, seen) for each in (model, gp))):
        for noise in (False, True):
            found, wanted = (each.posterior(test, observation_noise=noise) for each in (mine, theirs))
            close(found.mean, wanted.mean, 1e-6)
            got, dense = found.distribution.covariance_matrix, wanted.distribution.covariance_matrix
            torch.testing.assert_close(got, dense, rtol=1e-6, atol=1e-7)


def fit_linear(net: nn.Module, x: Tensor, y: Tensor) -> lapwing.Laplace:
    return lapwing.fit(net, (x, y), lapwing.Gaussian(noise=NOISE), structure="full", prior=PRIOR, progress=False)


# --- inside BoTorch -----------------------------------------------------------------------------------------------

BOUNDS = torch.stack([torch.zeros(2), torch.ones(2)]).double()


def test_expected_improvement_is_its_closed_form() -> None:
    model = LaplaceModel(fitted(1))
    x = points(6, 1, 2)
    found = model.posterior(x)
    mean, deviation = found.mean.flatten(), found.variance.sqrt().flatten()
    normal, best = torch.distributions.Normal(0.0, 1.0), 0.1
    z = (mean - best) / deviation
    wanted = deviation * (z * normal.cdf(z) + normal.log_prob(z).exp())
    close(LogExpectedImprovement(model, best_f=best)(x), wanted.log(), 1e-6)


@pytest.mark.parametrize("select", ["all", "last_layer"])
def test_acquisitions_are_optimized(select: str) -> None:
    model = LaplaceModel(fitted(1, dtype=torch.float32, select=select))
    torch.manual_seed(0)
    grid = torch.cartesian_prod(*(torch.linspace(0, 1, 21).double(),) * 2)[:, None]
    for acquisition, q in (
        (LogExpectedImprovement(model, best_f=0.1), 1),
        (UpperConfidenceBound(model, beta=4.0), 1),
        (qLogExpectedImprovement(model, best_f=0.1, sampler=SobolQMCNormalSampler(torch.Size([32]), seed=0)), 2),
        (qLogNoisyExpectedImprovement(model, points(5, 2), sampler=SobolQMCNormalSampler(torch.Size([32]), seed=0)), 2),
    ):
        chosen, value = optimize_acqf(acquisition, BOUNDS, q=q, num_restarts=3, raw_samples=16, options={"maxiter": 30})
        assert chosen.shape == (q, 2)
        assert chosen.dtype == torch.float64
        assert bool(((chosen >= 0) & (chosen <= 1)).all())
        with torch.no_grad():
            assert float(value) >= float(acquisition(grid.expand(-1, q, 2)).max()) - 1e-3


def test_thompson_samples_are_joint_draws() -> None:
    model, x = LaplaceModel(fitted(1, select="last_layer")), points(40, 2)  # 40 points of a posterior over 7 weights
    draws = model.posterior(x).rsample(torch.Size([4000]))
    wanted = model.posterior(x).distribution.covariance_matrix
    torch.testing.assert_close(draws[..., 0].T.cov(), wanted, rtol=0, atol=0.1 * float(wanted.max()))
    chosen = MaxPosteriorSampling(model, replacement=False)(x, num_samples=3)
    assert chosen.shape == (3, 2)
    assert all(bool((x == each).all(-1).any()) for each in chosen)


def test_the_knowledge_gradient_runs_and_has_gradients() -> None:
    model = LaplaceModel(fitted(1))
    acquisition = qKnowledgeGradient(model, num_fantasies=4)
    x = points(2, 5, 2).requires_grad_()  # one candidate and the maximizer of each fantasy
    (gradient,) = torch.autograd.grad(acquisition(x).sum(), x)
    step = 1e-6
    for index in ((0, 0, 1), (1, 3, 0)):
        moved = torch.zeros_like(x)
        moved[index] = step
        with torch.no_grad():
            slope = (acquisition(x + moved).sum() - acquisition(x - moved).sum()) / (2 * step)
        assert math.isclose(float(gradient[index]), float(slope), rel_tol=1e-4, abs_tol=1e-8)
    torch.manual_seed(0)
    chosen, _ = optimize_acqf(acquisition, BOUNDS, q=1, num_restarts=2, raw_samples=4, options={"maxiter": 5})
    assert chosen.shape == (1, 2)


def test_it_stands_in_a_list_beside_other_models() -> None:
    x = points(6, 2)
    models = ModelList(LaplaceModel(fitted(1)), LaplaceModel(fitted(2)), SingleTaskGP(x, points(6, 1, seed=1)))
    assert models.posterior(points(2, 3, 2)).mean.shape == (2, 3, 4)


# --- transforms and types -----------------------------------------------------------------------------------------


def test_transforms_lead_to_the_original_units() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 10 + 5 * torch.rand(15, 2, generator=generator, dtype=torch.float64)
    y = 100 + 20 * torch.randn(15, 1, generator=generator, dtype=torch.float64)
    inputs, outcomes = Normalize(2), Standardize(1)
    small, flat = inputs(x), outcomes(y)[0]
    la = lapwing.fit(network(), (small, flat), lapwing.Gaussian(noise=NOISE), structure="full", progress=False)
    model, bare = LaplaceModel(la, input_transform=inputs, outcome_transform=outcomes), LaplaceModel(la)
    test = 10 + 5 * points(3, 4, 2)
    scale, shift = y.std(), y.mean()
    more, seen = 10 + 5 * points(2, 2, seed=1), 100 + 20 * points(2, 1, seed=2)
    pairs = [(model, bare)]
    conditioned = bare.condition_on_observations(inputs(more), (seen - shift) / scale)
    pairs += [(model.condition_on_observations(more, seen), conditioned)]
    for mine, plain in pairs:
        for noise in (False, True):
            found = mine.posterior(test, observation_noise=noise)
            wanted = plain.posterior(inputs(test), observation_noise=noise)
            close(found.mean, shift + scale * wanted.mean)
            close(found.variance, scale**2 * wanted.variance)
    fantasy = model.fantasize(more, IIDNormalSampler(torch.Size([3]), seed=0))
    assert 50 < float(fantasy.posterior(test).mean.mean()) < 150


def test_an_outcome_transform_that_is_not_linear() -> None:
    outcomes = Log()
    y = 1 + points(15, 1)
    la = lapwing.fit(network(), (points(15, 2), outcomes(y)[0]), lapwing.Gaussian(noise=NOISE), progress=False)
    found = LaplaceModel(la, outcome_transform=outcomes).posterior(points(4, 2))
    plain = LaplaceModel(la).posterior(points(4, 2))
    close(found.mean, (plain.mean + plain.variance / 2).exp(), 1e-6)


def test_types_follow_the_points() -> None:
    wide, narrow = LaplaceModel(fitted(1)), LaplaceModel(fitted(1, dtype=torch.float32))
    x = points(2, 3, 2)
    for model in (wide, narrow):
        for dtype in (torch.float64, torch.float32):
            found = model.posterior(x.to(dtype))
            assert found.mean.dtype == found.variance.dtype == found.rsample().dtype == dtype
    torch.testing.assert_close(narrow.posterior(x).variance, wide.posterior(x).variance, rtol=0.5, atol=0.1)
    with torch.inference_mode():
        close(wide.posterior(x.clone()).mean.clone(), wide.posterior(x).mean.clone())


def test_nothing_of_the_network_changes() -> None:
    la = fitted(1)
    before = {name: value.clone() for name, value in la.module.state_dict().items()}
    model = LaplaceModel(la)
    x = points(2, 3, 2).requires_grad_()
    model.condition_on_observations(x[0], points(3, 1)).posterior(x).rsample().sum().backward()
    assert all(torch.equal(before[name], value) for name, value in la.module.state_dict().items())
    assert all(p.grad is None for p in la.module.parameters())
    assert x.grad is not None


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_bare_posterior_points_to_the_door() -> None:
    with pytest.raises(AttributeError, match=r"lapwing\.botorch\.LaplaceModel\(la\)"):
        LogExpectedImprovement(fitted(1), best_f=0.0)


def test_wrong_arguments_get_one_clear_error() -> None:
    la = fitted(2)
    model = LaplaceModel(la)
    with pytest.raises(lapwing.BadData, match=r"expected a posterior made by lapwing\.fit, got Sequential"):
        LaplaceModel(la.module)
    with pytest.raises(lapwing.BadData, match=r"targets of shape \(\.\.\., 3, 2\)"):
        model.condition_on_observations(points(3, 2), points(3, 1))
    with pytest.raises(lapwing.BadData, match="not finite"):
        model.condition_on_observations(points(1, 2), torch.full((1, 2), math.nan).double())
    with pytest.raises(lapwing.BadData, match=r"X of shape \(\.\.\., q, d\)"):
        model.posterior(points(2))
    with pytest.raises(lapwing.BadData, match="inputs hold nan"):
        model.posterior(torch.full((1, 2), math.nan).double())
    with pytest.raises(lapwing.BadData, match=r"output indices \[2\]"):
        model.subset_output([2])
    with pytest.raises(lapwing.BadData, match="input_transform has not been fitted"):
        LaplaceModel(la, input_transform=Normalize(2))
    with pytest.raises(lapwing.BadData, match="must be positive"):
        model.posterior(points(1, 2), observation_noise=torch.zeros(1, 2))


def test_likelihoods_without_noise_in_the_outputs() -> None:
    x, labels = points(12, 2), torch.arange(12) % 2
    classifier = lapwing.fit(network(2), (x, labels), "classification", progress=False)
    model = LaplaceModel(classifier)
    assert model.posterior(x[None]).mean.shape == (1, 12, 2)
    for ask in (lambda: model.posterior(x, observation_noise=True), lambda: model.condition_on_observations(x, x)):
        with pytest.raises(lapwing.UnsupportedOperation, match="are for regression"):
            ask()
    counts = lapwing.fit(network(1), (x, labels[:, None]), "counts", progress=False)
    with pytest.raises(lapwing.UnsupportedOperation, match="not predictions of the target"):
        LaplaceModel(counts)


def test_a_fit_that_is_too_large_says_so() -> None:
    la = fitted(1)
    narrow = dataclasses.replace(la, options=dataclasses.replace(la.options, memory=1000))
    with pytest.raises(lapwing.TooLarge, match="select='last_layer'"):
        LaplaceModel(narrow).posterior(points(5, 2))


def test_a_loaded_posterior_serves(tmp_path: Any) -> None:
    la = fitted(2)
    la.save(tmp_path / "posterior.lapwing")
    loaded = LaplaceModel(lapwing.load(tmp_path / "posterior.lapwing", la.module))
    close(loaded.posterior(points(3, 2)).variance, LaplaceModel(la).posterior(points(3, 2)).variance)


def test_without_botorch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    monkeypatch.setitem(sys.modules, "botorch.models.model", None)
    monkeypatch.delitem(sys.modules, "lapwing.botorch")
    with pytest.raises(ImportError, match=r"lapwing-torch\[botorch\]"):
        importlib.import_module("lapwing.botorch")
