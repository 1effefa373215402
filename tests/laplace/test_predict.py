"""Predictions against Jacobians and loops by hand: shapes, inputs, links, draws, gradients, dense outputs."""

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from lapwing import Laplace, Prediction
from lapwing.predictive.function import CLOSED_FORM

STRUCTURES = ("diag", "blockdiag", "kron", "ekfac", "full", "lowrank")
X = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) * 7 % 3
VALUES = X.sin() @ torch.tensor([[1.0], [2.0], [-1.0]], dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def net(outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def fit(likelihood: Any = "classification", outputs: int = 3, y: Tensor = Y, **options: Any) -> Laplace:
    options.setdefault("structure", "kron")
    return lapwing.fit(net(outputs), (X, y), likelihood, **options)


def jacobian(la: Laplace, *inputs: Tensor) -> Tensor:
    """∂f/∂θ of what the module returns, (B, *outputs, P), one sample at a time."""

    def f(theta: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
        return functional_call(la.module, la.params.unflatten(theta), rows)[0]

    samples = zip(*(x[:, None] for x in inputs))
    return torch.stack([jacrev(f)(la.params.flat, rows) for rows in samples])


FITS: dict[str, Callable[[], Laplace]] = {
    "classes": lambda: fit(),
    "two classes": lambda: fit(outputs=2, y=Y % 2),
    "one logit": lambda: fit("binary", 1, Y % 2),
    "labels": lambda: fit("binary", 2, torch.stack([Y % 2, Y // 2], 1)),
    "values": lambda: fit(lapwing.Gaussian(0.3), 1, VALUES),
    "two values": lambda: fit(lapwing.Gaussian([0.3, 0.6]), 2, X[:, :2]),
    "counts": lambda: fit("counts", 1, Y),
    "heteroscedastic": lambda: fit("heteroscedastic", 2, VALUES),
    "preference": lambda: fit("preference", 2, Y % 2),
}
FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("classes", "two classes", "one logit", "labels", "preference"), ("probs", "confidence")),
    **dict.fromkeys(("values", "two values", "counts", "heteroscedastic"), ("variance", "stddev")),
}
COMMON = ("mean", "entropy", "epistemic", "aleatoric", "total", "novelty")


@pytest.fixture(scope="module", params=FITS)
def case(request: pytest.FixtureRequest) -> tuple[str, Laplace]:
    return request.param, FITS[request.param]()


# --- shapes and batches ---------------------------------------------------------------------------------------------


def test_shapes_follow_the_batch(case: tuple[str, Laplace]) -> None:
    name, la = case
    whole = la.predict(X[:5])
    for field in COMMON + FIELDS[name]:
        value = getattr(whole, field)
        assert value.isfinite().all()
        assert getattr(la.predict(X[:1]), field).shape == (1, *value.shape[1:])
        assert value.shape[0] == 5
    assert whole.entropy.ndim == (2 if name == "labels" else 1)
    assert whole.function.covariance.shape == (*whole.function.mean.shape, whole.function.mean.shape[-1])
    assert whole.sample(7).shape[:2] == (7, 5)
    assert torch.allclose(whole.total, whole.aleatoric + whole.epistemic, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"method": "sampled"}], ids=["linearized", "sampled"])
def test_the_batch_split_does_not_matter(case: tuple[str, Laplace], options: dict[str, Any]) -> None:
    name, la = case
    whole = la.predict(X[:9], **options)
    parts = [la.predict(X[a:b], **options) for a, b in pairwise((0, 1, 4, 9))]
    for field in COMMON + FIELDS[name]:
        assert torch.allclose(torch.cat([getattr(p, field) for p in parts]), getattr(whole, field), rtol=1e-9), field
    y = whole.sample(1)[0]
    ends = pairwise((0, 1, 4, 9))
    pieces = [part.log_prob(y[a:b]) for part, (a, b) in zip(parts, ends)]
    assert torch.allclose(torch.cat(pieces), whole.log_prob(y), rtol=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_batch_split_does_not_matter_for_any_structure(structure: str) -> None:
    la = fit(structure=structure)
    whole = la.predict(X[:9])
    for field in ("probs", "epistemic", "novelty"):
        parts = torch.cat([getattr(la.predict(X[a:b]), field) for a, b in pairwise((0, 1, 4, 9))])
        assert torch.allclose(parts, getattr(whole, field), rtol=1e-9)


class Line(nn.Module):
    """Returns (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, 0]


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [("regression", VALUES[:, 0]), ("binary", Y % 2), ("counts", Y)],
    ids=["values", "logit", "counts"],
)
def test_one_dimensional_outputs_have_one_dimensional_answers(likelihood: str, y: Tensor) -> None:
    p = lapwing.fit(Line(), (X, y), likelihood).predict(X[:4])
    assert p.function.mean.shape == (4, 1)
    for field in COMMON:
        assert getattr(p, field).shape == (4,), field
    assert p.sample(3).shape == (3, 4)
    assert p.log_prob(y[:4]).shape == (4,)
    if likelihood == "regression":
        assert [bound.shape for bound in p.interval(0.9)] == [(4,), (4,)]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(lapwing.BadData, match="empty"):
        fit().predict(X[:0])


# --- inputs ---------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(2, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.first(a).tanh() + self.second(b)


def test_tuples_lists_and_dicts_are_the_same() -> None:
    model = Pair().double()
    a, b = X, X[:, :2] ** 2
    tuples = lapwing.fit(model, ((a, b), Y), "classification", structure="kron")
    dicts = lapwing.fit(model, [{"a": a, "b": b, "labels": Y}], "classification", structure="kron")
    assert torch.equal(tuples.log_evidence(), dicts.log_evidence())
    truth = tuples.predict((a[:3], b[:3])).probs
    inputs: list[Any] = [[a[:3], b[:3]], {"a": a[:3], "b": b[:3]}, {"b": b[:3], "a": a[:3], "labels": Y[:3]}]
    for x in inputs:
        assert torch.equal(dicts.predict(x).probs, truth)
    covariance = tuples.predict((a[:3], b[:3])).function.covariance
    j = jacobian(tuples, a[:3], b[:3])
    assert torch.allclose(covariance, torch.einsum("ncp,pq,ndq->ncd", j, tuples.posterior.covariance(), j), rtol=1e-10)


def test_arguments_named_as_labels_reach_the_model() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x) * y[:, None]

    model = Named().double()
    data = [{"x": X, "y": X[:, 0], "truth": Y}]
    la = lapwing.fit(model, data, "classification", split=lambda b: ({"x": b["x"], "y": b["y"]}, b["truth"]))
    p = la.predict({"x": X[:2], "y": X[:2, 0]})
    assert torch.equal(p.function.mean, model(X[:2], X[:2, 0]))
    assert torch.allclose(next(la.predict_loader(data)).probs[:2], p.probs, rtol=1e-10)  # another batch size rounds


def test_integer_inputs() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    ids = torch.arange(48).reshape(24, 2) % 7
    la = lapwing.fit(model, (ids, Y), "classification", structure="full")
    j = jacobian(la, ids[:4])
    truth = torch.einsum("ncp,pq,ndq->ncd", j, la.posterior.covariance(), j)
    assert torch.allclose(la.predict(ids[:4]).function.covariance, truth, rtol=1e-9)
    assert torch.equal(la.predict(ids[:4].int()).probs, la.predict(ids[:4]).probs)


@pytest.mark.parametrize("x", [None, "text", 3.0, [[1.0, 2.0, 3.0]]], ids=["none", "text", "number", "list"])
def test_inputs_of_another_kind(x: Any) -> None:
    with pytest.raises(lapwing.BadData, match="expected a tensor, a tuple of tensors or a dict"):
        fit().predict(x)


def test_wrong_arguments() -> None:
    la = fit()
    for samples in (0, -1, 2.5):
        for method in ("linearized", "sampled"):
            with pytest.raises(lapwing.BadData, match="samples is a positive whole number"):
                la.predict(X[:2], method=method, samples=samples)
    with pytest.raises(lapwing.BadData, match="members of an ensemble must be a whole number of at least 1"):
        la.ensemble(0)
    with pytest.raises(lapwing.UnsupportedOperation, match="method is 'linearized' or 'sampled', got 'glm'"):
        la.predict(X[:2], method="glm")
    with pytest.raises(lapwing.UnsupportedOperation, match=r"softmax.* is not possible .* 'mc', 'probit'"):
        la.predict(X[:2], link="softmax")
    with pytest.raises(lapwing.UnsupportedOperation, match="joint=True needs method='linearized'"):
        la.predict(X[:2], joint=True, method="sampled")
    with pytest.raises(AttributeError, match=r"\.variance is for regression"):
        _ = la.predict(X[:2]).variance
    with pytest.raises(lapwing.BadData, match=r"targets have shape \(3,\)"):
        la.predict(X[:2]).log_prob(Y[:3])


@pytest.mark.parametrize(
    "data",
    [
        (X[:8], Y[:8]),
        [X[:3], X[3:8]],
        [(X[:3], Y[:3]), (X[3:8], Y[3:8])],
        [[X[:3]], [X[3:8]]],
        DataLoader(TensorDataset(X[:8], Y[:8]), batch_size=3),
        DataLoader(TensorDataset(X[:8]), batch_size=3),
    ],
    ids=["pair", "inputs", "batches", "lists of one", "loader", "loader of inputs"],
)
def test_predict_loader_streams(data: Any) -> None:
    la = fit()
    stream = la.predict_loader(data, link="probit")
    assert iter(stream) is stream
    assert torch.allclose(torch.cat([p.probs for p in stream]), la.predict(X[:8], link="probit").probs, rtol=1e-12)


def test_predict_loader_reads_only_what_is_asked_for() -> None:
    read = []

    def data() -> Any:
        for k in range(4):
            read.append(k)
            yield X[k : k + 1]

    next(fit().predict_loader(data()))
    assert read == [0]


# --- draws ----------------------------------------------------------------------------------------------------------


def test_sampled_is_a_loop_over_drawn_networks() -> None:
    la = fit()
    p = la.predict(X[:4], method="sampled", samples=6, generator=seeded(5))
    drawn = la.posterior.sample(6, seeded(5))
    outputs = torch.stack([functional_call(la.module, la.params.unflatten(w), (X[:4],)) for w in drawn])
    probs = outputs.softmax(-1)
    assert torch.allclose(p.probs, probs.mean(0), rtol=1e-12)
    assert torch.allclose(p.function.mean, outputs.mean(0), rtol=1e-12)
    assert torch.allclose(p.function.variance, outputs.var(0, correction=0), rtol=1e-10)
    entropies = -(probs * probs.log()).sum(-1)
    assert torch.allclose(p.aleatoric, entropies.mean(0), rtol=1e-10)
    assert torch.allclose(p.log_prob(Y[:4]), probs.mean(0).log().gather(1, Y[:4, None])[:, 0], rtol=1e-10)


def test_sampled_values_are_a_mixture() -> None:
    la = fit(lapwing.Gaussian(0.3), 1, VALUES)
    p = la.predict(X[:4], method="sampled", samples=6, generator=seeded(5))
    drawn = la.posterior.sample(6, seeded(5))
    outputs = torch.stack([functional_call(la.module, la.params.unflatten(w), (X[:4],)) for w in drawn])
    assert torch.allclose(p.epistemic, outputs.var(0, correction=0), rtol=1e-10)
    assert torch.allclose(p.aleatoric, torch.full((4, 1), 0.09, dtype=torch.float64), rtol=1e-10)
    density = torch.distributions.Normal(outputs, 0.3).log_prob(VALUES[:4]).logsumexp(0)[:, 0] - math.log(6)
    assert torch.allclose(p.log_prob(VALUES[:4]), density, rtol=1e-10)


def test_an_ensemble_is_the_same_networks_everywhere() -> None:
    la = fit()
    ensemble = la.ensemble(5, seeded(3))
    assert len(ensemble) == 5
    outputs = torch.stack([functional_call(la.module, weights, (X[:6],)).softmax(-1) for weights in ensemble])
    assert torch.allclose(ensemble.predict(X[:6]).probs, outputs.mean(0), rtol=1e-12)
    parts = [ensemble.predict(X[:2]).probs, ensemble.predict(X[2:6]).probs]
    assert torch.allclose(torch.cat(parts), outputs.mean(0), rtol=1e-12)
    assert torch.equal(la.ensemble(5, seeded(3)).weights, ensemble.weights)
    assert not torch.equal(la.ensemble(5, seeded(4)).weights, ensemble.weights)


@pytest.mark.parametrize("options", [{}, {"method": "sampled"}, {"link": "mc"}, {"joint": True}], ids=str)
def test_generators_decide(options: dict[str, Any]) -> None:
    la = fit()

    def answer(seed: int | None, reverse: bool = False) -> dict[str, Tensor]:
        p = la.predict(X[:3], generator=None if seed is None else seeded(seed), **options)
        fields = ("probs", "entropy", "epistemic")
        return {field: getattr(p, field) for field in (reversed(fields) if reverse else fields)}

    first, again, other = answer(1), answer(1, reverse=True), answer(2)
    for field, value in first.items():
        assert torch.equal(value, again[field])
        assert not torch.equal(value, other[field])
        assert (value - other[field]).abs().max() < 0.2
    with torch.random.fork_rng():
        fixed = answer(None)
        torch.manual_seed(99)
        assert torch.equal(answer(None)["probs"], fixed["probs"])


def test_draws_of_targets_follow_the_prediction() -> None:
    p = fit(lapwing.Gaussian(0.3), 1, VALUES, prior=0.1).predict(X[:3])
    y = p.sample(20_000, seeded(1))
    assert (y.mean(0) - p.mean).abs().max() < 4 * p.stddev.max() / math.sqrt(20_000)
    assert (y.var(0) / p.variance - 1).abs().max() < 0.05
    low, high = p.interval(0.8)
    assert ((y > low) & (y < high)).double().mean().item() == pytest.approx(0.8, abs=0.01)
    classes = fit(prior=0.1).predict(X[:3])
    drawn = nn.functional.one_hot(classes.sample(20_000, seeded(1)), 3).double().mean(0)
    assert (drawn - classes.probs).abs().max() < 0.02


# --- the distribution of f ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_covariances_are_those_of_the_weights(structure: str) -> None:
    la = fit(structure=structure, prior=0.7, temperature=0.4)
    j, sigma = jacobian(la, X[:4]), la.posterior.covariance()
    truth = torch.einsum("ncp,pq,mdq->ncmd", j, sigma, j)
    joint = la.predict(X[:4], joint=True).function
    assert torch.allclose(joint.covariance, truth, rtol=1e-9, atol=1e-12)
    f = la.predict(X[:4]).function
    blocks = torch.stack([truth[n, :, n] for n in range(4)])
    assert torch.equal(f.mean, la.module(X[:4]))
    assert torch.allclose(f.covariance, blocks, rtol=1e-9, atol=1e-12)
    assert torch.allclose(f.variance, blocks.diagonal(dim1=1, dim2=2), rtol=1e-9)
    assert torch.allclose(joint.variance, f.variance, rtol=1e-9)
    assert torch.allclose(la.predict(X[:4], joint=True).probs, la.predict(X[:4]).probs, rtol=1e-9)


def test_joint_draws_are_correlated_as_they_should_be() -> None:
    la = fit(structure="full", prior=0.5)
    f = la.predict(X[:3], joint=True).function
    draws = f.sample(40_000, seeded(2)).reshape(40_000, -1)
    truth = f.covariance.reshape(9, 9)
    scale = truth.diagonal().sqrt()
    assert (torch.cov(draws.T) - truth).abs().div(scale[:, None] * scale).max() < 0.03
    alone = la.predict(X[:3]).function.sample(40_000, seeded(2)).reshape(40_000, -1)
    between = torch.corrcoef(alone.T)[:3, 3:6]
    assert between.abs().max() < 0.03  # without joint=True, inputs are independent


def test_novelty_does_not_depend_on_what_is_tuned() -> None:
    la = fit(lapwing.Gaussian(0.3), 1, VALUES)
    other = la.replace(prior=50.0, temperature=0.1, likelihood=lapwing.Gaussian(3.0))
    far = torch.cat([X[:4], X[:4] + 30])
    assert torch.equal(la.predict(far).novelty, other.predict(far).novelty)
    assert not torch.equal(la.predict(far).epistemic, other.predict(far).epistemic)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_novelty_is_what_the_data_leave_open(structure: str) -> None:
    """½ log |I + Λ J A⁻¹ Jᵀ/4| with A = H + 10⁻⁴ tr(H)/P, of the structure's own H, Λ at half the logits."""
    la = fit(structure=structure)
    j, h = jacobian(la, X[:4]), la.curvature.dense()
    floor = 1e-4 * h.trace() / len(h) * torch.eye(len(h), dtype=h.dtype)
    v = torch.einsum("ncp,pq,ndq->ncd", j, torch.linalg.inv(h + floor), j)
    p = (la.module(X[:4]).detach() / 2).softmax(-1)
    information = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / 4
    truth = torch.logdet(torch.eye(3, dtype=h.dtype) + information @ v) / 2
    assert torch.allclose(la.predict(X[:4]).novelty, truth, rtol=1e-8)


def test_a_sharp_prior_gives_the_network_back() -> None:
    la = fit(prior=1e12)
    assert torch.allclose(la.predict(X).probs, la.module(X).softmax(-1), atol=1e-9)
    assert la.predict(X).epistemic.max() < 1e-9
    assert la.predict(X, method="sampled").probs.sub(la.module(X).softmax(-1)).abs().max() < 1e-5


# --- links ----------------------------------------------------------------------------------------------------------


def test_probit_is_the_formula() -> None:
    p = fit().predict(X[:5], link="probit")
    f = p.function
    expected = (f.mean / (1 + math.pi / 8 * f.variance).sqrt()).softmax(-1)
    assert torch.allclose(p.probs, expected, rtol=1e-10)


def test_monte_carlo_is_the_expectation() -> None:
    p = fit(prior=0.05).predict(X[:5], link="mc")
    root = torch.linalg.cholesky(p.function.covariance)
    noise = torch.randn(100_000, 5, 3, dtype=torch.float64, generator=seeded(7))
    probs = (p.function.mean + torch.einsum("ncd,snd->snc", root, noise)).softmax(-1)
    assert (p.probs - probs.mean(0)).abs().max() < 0.005
    assert (p.aleatoric + torch.special.xlogy(probs, probs).sum(-1).mean(0)).abs().max() < 0.01
    bridge = fit(prior=0.05).predict(X[:5], link="bridge")
    assert bridge.link == "bridge"
    assert torch.allclose(bridge.probs.sum(-1), torch.ones(5, dtype=torch.float64))
    assert (bridge.probs - p.probs).abs().max() < 0.3


def test_one_logit_is_integrated_exactly() -> None:
    p = fit("binary", 1, Y % 2, prior=0.1).predict(X[:3])
    assert p.link == "quadrature"
    for k in range(3):
        law = stats.norm(p.function.mean[k].item(), p.function.variance[k].sqrt().item())
        truth, _ = integrate.quad(lambda f, law=law: law.pdf(f) / (1 + math.exp(-f)), *law.interval(1 - 1e-13))
        assert p.probs[k].item() == pytest.approx(truth, abs=1e-8)


def test_values_have_noise_and_doubt() -> None:
    la = fit(lapwing.Gaussian([0.3, 0.6]), 2, X[:, :2], structure="full")
    p = la.predict(X[:4])
    assert torch.allclose(p.variance, p.function.variance + torch.tensor([0.09, 0.36]), rtol=1e-7)
    assert torch.allclose(p.epistemic, p.function.variance)
    covariance = p.function.covariance + torch.diag(torch.tensor([0.3, 0.6], dtype=torch.float64).square())
    law = torch.distributions.MultivariateNormal(p.mean, covariance)
    assert torch.allclose(p.log_prob(X[:4, :2]), law.log_prob(X[:4, :2]), rtol=1e-9)
    assert torch.allclose(p.entropy, law.entropy(), rtol=1e-9)
    low, high = p.interval(0.95)
    assert torch.allclose((high - low) / 2, stats.norm.ppf(0.975) * p.stddev, rtol=1e-7)
    assert torch.allclose((high + low) / 2, p.mean)


# --- gradients ------------------------------------------------------------------------------------------------------


def slope(function: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences."""
    result = torch.zeros_like(x)
    for k in range(x.numel()):
        shift = torch.zeros(x.numel(), dtype=x.dtype)
        shift[k] = step
        shift = shift.reshape(x.shape)
        result.view(-1)[k] = (function(x + shift) - function(x - shift)) / (2 * step)
    return result


def require_gradient(la: Laplace, ask: Callable[[Prediction], Tensor], **options: Any) -> None:
    x = X[:2].clone().requires_grad_()
    value = ask(la.predict(x, differentiable=True, **options))
    plain = ask(la.predict(X[:2], **options))
    assert not plain.requires_grad
    assert torch.allclose(value, plain, rtol=1e-9)
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
    (gradient,) = torch.autograd.grad((weights * value).sum(), x)
    expected = slope(lambda z: (weights * ask(la.predict(z, **options))).sum(), X[:2])
    assert (gradient - expected).abs().max() < 1e-6 * expected.abs().max()
    assert all(p.grad is None for p in la.module.parameters())


def test_gradients_of_every_likelihood(case: tuple[str, Laplace]) -> None:
    name, la = case
    for field in ("mean", "entropy", "epistemic", *FIELDS[name][:1]):
        if not (name == "labels" and field == "confidence"):
            require_gradient(la, lambda p, field=field: getattr(p, field))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_of_every_structure(structure: str) -> None:
    la = fit(structure=structure)
    require_gradient(la, lambda p: p.entropy)
    require_gradient(la, lambda p: p.function.covariance)


@pytest.mark.parametrize(
    "options", [{"link": "probit"}, {"link": "bridge"}, {"method": "sampled", "samples": 5}, {"joint": True}], ids=str
)
def test_gradients_of_every_way(options: dict[str, Any]) -> None:
    require_gradient(fit(), lambda p: p.probs, **options)
    require_gradient(fit(), lambda p: p.function.covariance, **options)


def test_gradients_for_bayesian_optimization() -> None:
    """An upper bound and the expected improvement, joint over two candidates; and second derivatives."""
    la = fit(lapwing.Gaussian(0.1), 1, VALUES, structure="full")
    require_gradient(la, lambda p: p.interval(0.9)[1])
    require_gradient(la, lambda p: p.log_prob(VALUES[:2]))

    def improvement(p: Prediction) -> Tensor:
        doubt = p.function.variance.sqrt()
        z = (p.function.mean - 0.3) / doubt
        normal = torch.distributions.Normal(0.0, 1.0)
        return doubt * (z * normal.cdf(z) + normal.log_prob(z).exp())

    require_gradient(la, improvement)
    x = X[:1].clone().requires_grad_()
    (first,) = torch.autograd.grad(la.predict(x, differentiable=True).variance.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[0, 0], x)

    def partial(z: Tensor) -> Tensor:
        z = z.clone().requires_grad_()
        return torch.autograd.grad(la.predict(z, differentiable=True).variance.sum(), z)[0][0, 0]

    assert torch.allclose(second, slope(partial, X[:1]), rtol=1e-5, atol=1e-8)


def test_gradients_with_respect_to_the_prior() -> None:
    la = fit(lapwing.Gaussian(0.3), 1, VALUES)
    precision = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    p = la.replace(prior=precision).predict(X[:2], differentiable=True)
    (gradient,) = torch.autograd.grad(p.variance.sum(), precision)
    expected = slope(lambda t: la.replace(prior=t[0]).predict(X[:2]).variance.sum(), precision.detach()[None])
    assert gradient.item() == pytest.approx(expected.item(), rel=1e-6)


# --- outputs with event dimensions, and many of them ----------------------------------------------------------------


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@pytest.fixture(scope="module")
def segmented() -> tuple[Laplace, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model, x = Segmenter().double(), torch.randn(6, 2, 4, 5, dtype=torch.float64)
    y = torch.arange(120).reshape(6, 4, 5) % 3
    y[0, 0, 0] = -100
    return lapwing.fit(model, (x, y), lapwing.Categorical(class_dim=1), structure="kron"), x, y


def test_segmentation(segmented: tuple[Laplace, Tensor, Tensor]) -> None:
    la, x, y = segmented
    with torch.no_grad():
        loss = cross_entropy(la.module(x), y, reduction="sum")
    assert la.log_likelihood.item() == pytest.approx(-loss.item(), rel=1e-10)
    assert la.n_data == 6
    p = la.predict(x[:2])
    assert p.probs.shape == (2, 4, 5, 3)
    for field in ("label", "confidence", "entropy", "epistemic", "novelty"):
        assert getattr(p, field).shape == (2, 4, 5)
    j = jacobian(la, x[:2]).movedim(1, -2)  # (n, h, w, c, p)
    truth = torch.einsum("nhwcp,pq,nhwdq->nhwcd", j, la.posterior.covariance(), j)
    assert torch.allclose(p.function.covariance, truth, rtol=1e-9, atol=1e-12)
    assert torch.allclose(p.function.variance, truth.diagonal(dim1=-2, dim2=-1), rtol=1e-9)
    density = p.log_prob(y[:2])
    assert density[0, 0, 0] == 0
    assert torch.allclose(density[1], p.probs[1].log().gather(-1, y[1, ..., None])[..., 0])
    assert torch.allclose(la.predict(x[1:2]).probs[0], p.probs[1], rtol=1e-9)
    expected = (p.function.mean / (1 + math.pi / 8 * truth.diagonal(dim1=-2, dim2=-1)).sqrt()).softmax(-1)
    assert torch.allclose(la.predict(x[:2], link="probit").probs, expected, rtol=1e-9)
    joint = la.predict(x[:2], joint=True).function.covariance
    whole = torch.einsum("nhwcp,pq,mijdq->nhwcmijd", j, la.posterior.covariance(), j)
    assert torch.allclose(joint, whole, rtol=1e-9, atol=1e-12)


def test_tokens() -> None:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    ids = torch.arange(40).reshape(8, 5) * 7 % 9
    y = ids % 4
    y[:, -1] = -100
    la = lapwing.fit(model, (ids, y), "classification", structure="full")
    assert la.n_data == 8
    p = la.predict(ids[:2])
    j = jacobian(la, ids[:2])
    truth = torch.einsum("ntcp,pq,ntdq->ntcd", j, la.posterior.covariance(), j)
    assert torch.allclose(p.function.covariance, truth, rtol=1e-9, atol=1e-12)
    assert p.probs.shape == (2, 5, 4)
    assert (p.log_prob(y[:2])[:, -1] == 0).all()
    assert la.predict(ids[:2, :3]).probs.shape == (2, 3, 4)  # another length than the fit's
    assert torch.allclose(la.predict(ids[:2, :3]).function.covariance, truth[:, :3], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_many_classes(structure: str) -> None:
    """200 outputs: covariances, draws by forward-mode products and probabilities against dense algebra."""
    y = torch.arange(24) * 8
    la = fit(outputs=200, y=y, structure=structure, prior=0.5)
    p = la.predict(X[:2])
    assert p.function.mean[0].numel() > CLOSED_FORM
    j = jacobian(la, X[:2])
    truth = torch.einsum("ncp,pq,ndq->ncd", j, la.posterior.covariance(), j)
    assert torch.allclose(p.function.covariance, truth, rtol=1e-8, atol=1e-12)
    assert torch.allclose(p.function.variance, truth.diagonal(dim1=1, dim2=2), rtol=1e-9)
    draws = p.function.sample(600, seeded(4)) - p.function.mean
    scale = truth.diagonal(dim1=1, dim2=2).sqrt()
    z = (torch.einsum("snc,snd->ncd", draws, draws) / 600 - truth) / (scale[:, :, None] * scale[:, None, :])
    assert z.abs().max() < 6 * math.sqrt(2 / 600)  # 80,000 entries, each within √(2/600) of the truth
    assert z.square().mean().sqrt() < 1.2 / math.sqrt(600) * math.sqrt(2)
    root = torch.linalg.cholesky(truth + 1e-10 * torch.eye(200))
    probs = [
        (p.function.mean[n] + torch.randn(4000, 200, dtype=torch.float64, generator=seeded(n)) @ root[n].T).softmax(-1)
        for n in range(2)
    ]
    for n in range(2):
        error = (p.probs[n] - probs[n].mean(0)) / (probs[n].std(0) * math.sqrt(1 / 1024 + 1 / 4000))
        assert error.abs().max() < 8  # probabilities of 200 classes have long tails
        assert error.square().mean() < 2
    assert torch.allclose(p.probs.sum(-1), torch.ones(2, dtype=torch.float64))
    assert torch.allclose(la.predict(X[1:2]).probs[0], p.probs[1], rtol=1e-9)


def test_a_wide_prior_does_not_drown_probabilities_in_rounding() -> None:
    """What all logits share has a variance of 10⁷ here; float32 must still tell the classes apart as float64 does."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    x, y = torch.randn(60, 3), torch.randint(4, (60,))
    exact = copy.deepcopy(net).double()
    options = {"structure": "kron", "prior": 1e-6, "temperature": 1e4}
    rough = lapwing.fit(net, (x, y), "classification", **options).predict(x)
    truth = lapwing.fit(exact, (x.double(), y), "classification", **options).predict(x.double())
    assert truth.function.variance.max() > 1e6
    torch.testing.assert_close(rough.probs.double(), truth.probs, rtol=0, atol=2e-3)
