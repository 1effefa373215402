"""Targets and likelihoods of every kind through fit and predict, against autograd, dense algebra and quadrature."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lapwing
from tests.dense import assert_same, build, covariance, flat, ggn, jacobian, outputs, randn, seeded, softmax_hessian
from tests.noise import unit_noise


def net(out=2):
    return build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out)))


def eye(size, scale=1.0):
    return scale * torch.eye(size, dtype=torch.float64)


class Column(nn.Module):
    """A network that returns (B,)."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[:, 0]


def normal_expectation(function, mean, variance):
    """E[function(f)], f ~ N(mean, variance), by a fine trapezoid: exact to rounding for smooth functions."""
    z = torch.linspace(-12, 12, 24001, dtype=torch.float64)
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return torch.trapezoid(function(mean[..., None] + variance.sqrt()[..., None] * z) * density, z)


def evidence(log_p, module, precision, tau):
    return log_p - 0.5 * tau * flat(module).square().sum() - 0.5 * torch.linalg.slogdet(precision / tau)[1]


@pytest.mark.parametrize("shape", ["column", "vector"])
@pytest.mark.parametrize("likelihood", ["regression", "binary", "counts"])
def test_one_output_a_sample(likelihood, shape):
    """(B, 1) and (B,) give the same posterior; predictions have the shape of the targets."""
    inner, x, new = net(1), randn(10, 3), 2 * randn(5, 3, seed=4)
    module = inner if shape == "column" else Column(inner)
    f = outputs(inner, x)
    if likelihood == "regression":
        y, lam, law = randn(10, 1, seed=2), torch.ones(10, 1, 1).double(), torch.distributions.Normal(f, 1.0)
    elif likelihood == "binary":
        y = torch.randint(2, (10, 1), generator=seeded(1)).double()
        p = f.sigmoid()
        lam, law = (p * (1 - p))[..., None], torch.distributions.Bernoulli(logits=f)
    else:
        y = torch.randint(5, (10, 1), generator=seeded(1)).double()
        lam, law = f.exp()[..., None], torch.distributions.Poisson(f.exp())
    data = (x, y if shape == "column" else y[:, 0])
    la = lapwing.fit(module, data, unit_noise(likelihood), structure="full", prior=0.5)
    exact = ggn(jacobian(inner, x), lam)
    precision = exact + eye(len(exact), 0.5)
    assert_same(la.curvature.dense(), exact)
    assert_same(la.log_likelihood, law.log_prob(y).sum())
    assert_same(la.log_evidence(), evidence(law.log_prob(y).sum(), module, precision, 0.5))
    m, v = outputs(inner, new)[:, 0], covariance(jacobian(inner, new), precision)[:, 0, 0]
    link = {"regression": lambda t: t, "binary": torch.sigmoid, "counts": torch.exp}[likelihood]
    mean = normal_expectation(link, m, v)
    p = la.predict(new)
    expected = (5, 1) if shape == "column" else (5,)
    assert p.mean.shape == expected
    assert_same(p.mean.reshape(-1), mean, 1e-5)
    assert p.sample(3, seeded()).shape == (3, *expected)
    assert p.entropy.shape == (5,)
    target = torch.ones(5, dtype=torch.float64)
    density = {
        "regression": lambda t: torch.distributions.Normal(t, 1.0).log_prob(torch.ones((), dtype=t.dtype)).exp(),
        "binary": torch.sigmoid,
        "counts": lambda t: (t - t.exp()).exp(),  # p(1 | rate)
    }[likelihood]
    found = p.log_prob(target.reshape(expected))
    assert found.shape == (5,)
    assert_same(found, normal_expectation(density, m, v).log(), 1e-5)


def test_several_labels():
    """One Bernoulli a class: Λ = diag p(1−p), every label with its own probability."""
    module, x = net(3), randn(10, 3)
    y = torch.randint(2, (10, 3), generator=seeded(1))
    la = lapwing.fit(module, (x, y), "binary", structure="full", prior=0.5)
    p = outputs(module, x).sigmoid()
    exact = ggn(jacobian(module, x), torch.diag_embed(p * (1 - p)))
    assert_same(la.curvature.dense(), exact)
    assert_same(la.log_likelihood, -F.binary_cross_entropy(p, y.double(), reduction="sum"))
    new = 2 * randn(5, 3, seed=4)
    m, v = outputs(module, new), covariance(jacobian(module, new), exact + eye(len(exact), 0.5))
    found = la.predict(new)
    assert_same(found.probs, normal_expectation(torch.sigmoid, m, v.diagonal(dim1=1, dim2=2)), 1e-6)
    assert torch.equal(found.label, (found.probs > 0.5).long())
    assert found.entropy.shape == (5, 3)
    # labels of one item share f: their joint probability is the expectation of the product
    noise = randn(200_000, 3, seed=9)
    labels = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    for k in range(2):
        f = m[k] + noise @ torch.linalg.cholesky(v[k]).T
        product = torch.where(labels > 0, f.sigmoid(), (-f).sigmoid()).prod(-1)
        error = 5 * product.std() / math.sqrt(len(noise)) / product.mean()
        assert found.log_prob(labels.expand(5, 3))[k].item() == pytest.approx(
            product.mean().log().item(), abs=error.item() + 2e-3
        )


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_soft_and_one_hot_labels(structure):
    """Σ q log p; one-hot is the index; the curvature of a softmax does not depend on the target."""
    module, x = net(3), randn(10, 3)
    y = torch.randint(3, (10,), generator=seeded(1))
    q = randn(10, 3, seed=5).softmax(-1)
    hard = lapwing.fit(module, (x, y), "classification", structure=structure, prior=0.5)
    for target in (F.one_hot(y, 3), F.one_hot(y, 3).double()):
        same = lapwing.fit(module, (x, target), "classification", structure=structure, prior=0.5)
        assert_same(same.curvature.dense(), hard.curvature.dense(), 1e-14)
        assert_same(same.log_evidence(), hard.log_evidence(), 1e-14)
        assert_same(same.log_evidence(at="linear-mode"), hard.log_evidence(at="linear-mode"), 1e-12)
    soft = lapwing.fit(module, (x, q), "classification", structure=structure, prior=0.5)
    f = outputs(module, x)
    if structure == "full":
        assert_same(soft.curvature.dense(), ggn(jacobian(module, x), softmax_hessian(f)))
    assert_same(soft.log_likelihood, (q * f.log_softmax(-1)).sum())
    gradient = torch.einsum("nc,ncp->p", q - f.softmax(-1), jacobian(module, x)) - 0.5 * flat(module)
    gain = 0.5 * gradient @ torch.linalg.solve(soft.curvature.dense() + eye(31, 0.5), gradient)
    assert soft.stationarity == pytest.approx(gain.item(), rel=1e-9)
    p = soft.predict(x)
    assert_same(p.log_prob(q), (q * p.probs.log()).sum(-1))
    assert_same(p.log_prob(y), p.probs.log().gather(-1, y[:, None])[:, 0])


@pytest.mark.parametrize("ignore", [-100, 2])
@pytest.mark.parametrize("layout", ["tokens", "pixels"])
def test_targets_that_do_not_count(layout, ignore):
    """Curvature, likelihood and score only of the positions that count; N is the number of samples."""
    if layout == "tokens":
        module = net(3)
        x, shape, class_dim = randn(6, 4, 3), (6, 4), -1
    else:
        module = build(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)))
        x, shape, class_dim = randn(6, 2, 3, 2), (6, 3, 2), 1
    y = torch.randint(3 if ignore < 0 else 2, shape, generator=seeded(1))
    y[torch.rand(shape, generator=seeded(2)) < 0.4] = ignore
    y[2] = ignore  # a sample of which nothing counts
    likelihood = lapwing.Categorical(class_dim=class_dim, ignore_index=ignore)
    la = lapwing.fit(module, [(x[:4], y[:4]), (x[4:], y[4:])], likelihood, structure="full", prior=0.5)
    f = outputs(module, x)
    j = jacobian(module, x)
    if layout == "pixels":
        f = f.movedim(1, -1)
        j = j.reshape(6, 3, 6, -1).movedim(1, 2)
    f, j, t = f.reshape(-1, 3), j.reshape(len(y.flatten()), 3, -1), y.flatten()
    counts = t != ignore
    exact = ggn(j[counts], softmax_hessian(f[counts]))
    assert la.n_data == 6
    assert_same(la.curvature.dense(), exact)
    assert_same(la.log_likelihood, -F.cross_entropy(f, t, ignore_index=ignore, reduction="sum"))
    one_hot = F.one_hot(t[counts], 3)
    gradient = torch.einsum("nc,ncp->p", one_hot - f[counts].softmax(-1), j[counts]) - 0.5 * flat(module)
    gain = 0.5 * gradient @ torch.linalg.solve(exact + eye(len(exact), 0.5), gradient)
    assert la.stationarity == pytest.approx(gain.item(), rel=1e-9)
    p = la.predict(x)
    scores = p.log_prob(y)
    assert (scores[y == ignore] == 0).all()
    kept = p.probs.log().reshape(-1, 3)[counts].gather(-1, t[counts][:, None])[:, 0]
    assert_same(scores[y != ignore], kept)
    with pytest.raises(lapwing.BadData, match=r"target 7"):
        lapwing.fit(module, (x, y.masked_fill(y == ignore, 7)), likelihood, structure="full")


@dataclass(frozen=True, eq=False)
class Waiting(lapwing.Likelihood):
    """Exponential waiting times with log-rate f: torch knows the divergence, and the Fisher information of f is 1."""

    def conditional(self, f):
        return torch.distributions.Exponential(f[..., 0].exp())


@dataclass(frozen=True, eq=False)
class Ordinal(lapwing.Likelihood):
    """Four ordered grades from one output and fixed thresholds."""

    def conditional(self, f):
        cuts = torch.tensor([-1.0, 0.2, 1.5], dtype=f.dtype)
        below = torch.sigmoid(cuts - f)
        ends = torch.zeros_like(f), torch.ones_like(f)
        return torch.distributions.Categorical(probs=torch.cat([below, ends[1]], -1) - torch.cat([ends[0], below], -1))


@dataclass(frozen=True, eq=False)
class Robust(lapwing.Likelihood):
    """Student's t: no divergence in torch and no finite support, so the curvature is that of the data seen."""

    df: float = 4.0

    def conditional(self, f):
        return torch.distributions.StudentT(self.df, f, 0.5)


def fisher(law_of, f, support):
    """Σ_y p(y) ∇log p ∇log pᵀ by autograd, (N, C, C)."""
    total = 0
    for y in support:
        z = f.clone().requires_grad_()
        logs = law_of(z).log_prob(torch.full(f.shape[:1], y))
        (s,) = torch.autograd.grad(logs.sum(), z)
        total = total + logs.detach().exp()[:, None, None] * s[:, :, None] * s[:, None]
    return total


def test_own_likelihood_with_a_known_divergence(tmp_path):
    module, x, new = net(1), randn(10, 3), randn(5, 3, seed=4)
    y = -torch.rand(10, dtype=torch.float64, generator=seeded(2)).log()
    la = lapwing.fit(module, (x, y), Waiting(), structure="full", prior=2.0)
    exact = ggn(jacobian(module, x))
    precision = exact + eye(len(exact), 2.0)
    assert_same(la.curvature.dense(), exact, 1e-9)
    f = outputs(module, x)[:, 0]
    log_p = (f - y * f.exp()).sum()
    assert_same(la.log_likelihood, log_p)
    assert_same(la.log_evidence(), evidence(log_p, module, precision, 2.0))
    m, v = outputs(module, new)[:, 0], covariance(jacobian(module, new), precision)[:, 0, 0]
    p = la.predict(new)
    mean, spread = (-m + v / 2).exp(), (-2 * m + 2 * v).exp()  # of a log-normal
    assert_same(p.mean, mean, 5e-3)
    assert_same(p.aleatoric, spread, 2e-2)
    assert_same(p.epistemic, spread - mean.square(), 5e-2)
    assert_same(p.log_prob(torch.ones(5).double()), normal_expectation(lambda t: (t - t.exp()).exp(), m, v).log(), 5e-3)
    la.save(tmp_path / "own.lapwing")
    with pytest.raises(lapwing.LapwingError, match="likelihood="):
        lapwing.load(tmp_path / "own.lapwing", module)
    again = lapwing.load(tmp_path / "own.lapwing", module, likelihood=Waiting())
    assert_same(again.predict(new).mean, p.mean, 1e-14)


@pytest.mark.parametrize("structure", ["full", "diag", "blockdiag"])
def test_own_likelihood_over_classes(structure):
    module, x, new = net(1), randn(10, 3), randn(5, 3, seed=4)
    y = torch.randint(4, (10,), generator=seeded(2))
    la = lapwing.fit(module, (x, y), Ordinal(), structure=structure, prior=0.5)
    f = outputs(module, x)
    law = Ordinal().conditional
    exact = ggn(jacobian(module, x), fisher(law, f, range(4)))
    if structure == "diag":
        exact = exact.diag().diag()
    elif structure == "blockdiag":
        exact[:16, 16:] = exact[16:, :16] = 0
    assert_same(la.curvature.dense(), exact, 1e-9)
    assert_same(la.log_likelihood, law(f).log_prob(y).sum())
    m, v = outputs(module, new)[:, 0], covariance(jacobian(module, new), exact + eye(len(exact), 0.5))[:, 0, 0]
    truth = torch.stack(
        [normal_expectation(lambda t, k=k: law(t[..., None]).probs[..., k], m, v) for k in range(4)], -1
    )
    p = la.predict(new)
    assert_same(p.probs, truth, 5e-3)
    assert p.label.shape == (5,)
    assert_same(p.log_prob(torch.zeros(5, dtype=torch.long)), p.probs[:, 0].log())


def test_own_likelihood_with_neither_divergence_nor_support():
    """The observed Hessian, with what is negative of it set to zero, as its docstring says."""
    module, x = net(2), randn(10, 3)
    y = outputs(module, x) + 0.6 * randn(10, 2, seed=2)
    la = lapwing.fit(module, (x, y), Robust(), structure="full", prior=0.5)
    f = outputs(module, x)
    r2 = ((y - f) / 0.5).square()
    second = 5 / 0.25 * (4 - r2) / (4 + r2).square()  # −∂² log t₄
    assert (second < 0).any()  # the cut is put to use here
    assert_same(la.curvature.dense(), ggn(jacobian(module, x), torch.diag_embed(second.clamp(min=0))), 1e-9)
    assert_same(la.log_likelihood, torch.distributions.StudentT(4.0, f, 0.5).log_prob(y).sum())
    p = la.predict(x)
    assert p.mean.shape == p.variance.shape == (10, 2)
    v = covariance(jacobian(module, x), la.curvature.dense() + eye(26, 0.5)).diagonal(dim1=1, dim2=2)
    assert_same(p.variance, v + 0.25 * 4 / 2, 2e-2)


def test_own_likelihood_with_other_options_is_another_one(tmp_path):
    module, x, y = net(2), randn(10, 3), randn(10, 2, seed=2)
    la = lapwing.fit(module, (x, y), Robust(), structure="full")
    la.replace(likelihood=Robust(4.0))
    with pytest.raises(lapwing.UnsupportedOperation, match="Fit again"):
        la.replace(likelihood=Robust(50.0))
    la.save(tmp_path / "robust.lapwing")
    lapwing.load(tmp_path / "robust.lapwing", module, likelihood=Robust())
    with pytest.raises(lapwing.LapwingError):
        lapwing.load(tmp_path / "robust.lapwing", module, likelihood=Robust(50.0))
