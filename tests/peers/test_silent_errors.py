"""Every error that laplace-torch and curvlinops make without a word, as a test that it is not made here.

One test an error, named after it and quoting its description; the truth is dense algebra, autograd or a closed form
written below.
"""

import json
import math
import pickle
import struct
import zipfile
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import lapwing
from tests.dense import (
    assert_same,
    build,
    covariance,
    flat,
    gaussian_log_density,
    ggn,
    jacobian,
    outputs,
    randn,
    relative,
    seeded,
    softmax_hessian,
)
from tests.noise import unit_noise

STRUCTURES = ("diag", "blockdiag", "kron", "ekfac", "full", "lowrank")
SAME = ("full", "functional", "matrixfree")  # one posterior in weight space, in function space and without a matrix


class Calls(nn.Module):
    """A module from its parts and a function of them."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.call(self, x)


def mlp(*sizes, seed=0, dtype=torch.float64):
    def make():
        layers = []
        for a, b in pairwise(sizes):
            layers += [nn.Linear(a, b), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    return build(make, seed, dtype)


def eye(size, scale=1.0):
    return scale * torch.eye(size, dtype=torch.float64)


def classes(n, c, seed=1):
    return torch.randint(c, (n,), generator=seeded(seed))


def snapshot(module):
    """Every tensor of a module, by name, with the storage it lives in."""
    every = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (t.data_ptr(), t.detach().clone()) for name, t in every.items()}


def assert_untouched(module, before):
    after = snapshot(module)
    assert after.keys() == before.keys()
    for name, (place, value) in before.items():
        assert after[name][0] == place, f"{name} lives elsewhere"
        assert torch.equal(after[name][1], value), f"{name} has changed"


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_grid_search_averages_over_earlier_candidates(structure, likelihood):
    """ "grid search averages over earlier candidates": each candidate has its own NLL, whatever comes before it."""
    module, x, held = mlp(3, 5, 4), randn(20, 3), randn(15, 3, seed=2)
    y = randn(20, 4, seed=3) if likelihood == "regression" else classes(20, 4)
    target = randn(15, 4, seed=4) if likelihood == "regression" else classes(15, 4, seed=5)
    la = lapwing.fit(module, (x, y), unit_noise(likelihood), structure=structure)
    grid = [100.0, 0.01, 3.0, 30.0, 0.3]
    f, j = outputs(module, held), jacobian(module, held)

    def nll(tau):
        v = covariance(j, la.curvature.dense() + eye(j.shape[-1], tau))
        if likelihood == "regression":
            logs = [gaussian_log_density(t, m, c + eye(4)) for t, m, c in zip(target, f, v, strict=True)]
            return -torch.stack(logs).mean().item()
        scaled = f / (1 + math.pi / 8 * v.diagonal(dim1=1, dim2=2)).sqrt()  # probit
        return F.cross_entropy(scaled, target).item()

    link = "auto" if likelihood == "regression" else "probit"
    for order in (grid, grid[::-1], sorted(grid), grid[:1], grid[3:]):
        tuning = la.tune((held, target), learn="prior", grid={"prior": order}, link=link).tuning
        scored = dict(zip([s.narrow for s in tuning.settings], tuning.scores.tolist(), strict=True))
        for tau in order:  # variances come from a rational approximation in τ, good to about 1e-6
            found = min(scored.items(), key=lambda item: abs(math.log(item[0] / tau)))[1]
            assert found == pytest.approx(nll(tau), rel=5e-6), f"candidate {tau} of {order}"
    assert len({round(nll(tau), 6) for tau in grid}) == len(grid)  # an average would be told apart


@pytest.mark.parametrize("structure", sorted({*STRUCTURES, *SAME}))
def test_multi_output_gp_beyond_one_hidden_layer_has_negative_variances(structure):
    """ "multi-output gp beyond one hidden layer (negative variances)"."""
    module, x, new = mlp(3, 5, 4, 5, 3), randn(25, 3), 3 * randn(6, 3, seed=2)
    la = lapwing.fit(module, (x, classes(25, 3)), "classification", structure=structure, prior=0.1)
    j = jacobian(module, new)
    if structure not in SAME:
        precision = la.curvature.dense() + eye(j.shape[-1], 0.1)
    else:
        precision = ggn(jacobian(module, x), softmax_hessian(outputs(module, x))) + eye(j.shape[-1], 0.1)
    rows = j.reshape(18, -1)
    joint = rows @ torch.linalg.inv(precision) @ rows.T
    function = la.predict(new, joint=True).function
    found = function.covariance.reshape(18, 18)
    assert_same(found, joint, 1e-9)
    assert (function.variance > 0).all()
    assert torch.linalg.eigvalsh(found).min() > -1e-12 * found.abs().max()
    assert_same(la.predict(new).function.covariance, covariance(j, precision), 1e-9)


@pytest.mark.parametrize("structure", SAME)
@pytest.mark.parametrize("outputs_", [1, 3])
def test_gp_evidence_differs_from_the_exact_one(outputs_, structure):
    """ "gp evidence −13.77 where −25.65 is exact": log N(y; f̂ − Jθ̂, σ²I + JΠ⁻¹Jᵀ), in function space."""
    sigma, tau = 0.6, 1.7
    module, x, y = mlp(2, 6, 5, outputs_), randn(12, 2), randn(12, outputs_, seed=3)
    la = lapwing.fit(module, (x, y), lapwing.Gaussian(noise=sigma), structure=structure, prior=tau)
    j, theta = jacobian(module, x).flatten(0, 1), flat(module)
    kernel = j @ j.T / tau
    mean = outputs(module, x).reshape(-1) - j @ theta
    exact = gaussian_log_density(y.reshape(-1), mean, kernel + eye(len(j), sigma**2))
    assert_same(la.log_evidence(at="linear-mode"), exact, 1e-10)


@pytest.mark.parametrize("structure", SAME)
def test_gp_evidence_of_a_linear_model_at_its_mode(structure):
    """The same at the mode of a linear model: log N(y; 0, σ²I + JΠ⁻¹Jᵀ), where θ̂ needs no correction."""
    sigma, tau, x, y = 0.5, 2.0, randn(10, 3), randn(10, 1, seed=3)
    j = torch.cat([x, torch.ones(10, 1, dtype=torch.float64)], 1)
    theta = torch.linalg.solve(j.T @ j / sigma**2 + eye(4, tau), j.T @ y[:, 0] / sigma**2)
    module = build(lambda: nn.Linear(3, 1))
    with torch.no_grad():
        module.weight.copy_(theta[None, :3])
        module.bias.copy_(theta[3:])
    la = lapwing.fit(module, (x, y), lapwing.Gaussian(noise=sigma), structure=structure, prior=tau)
    exact = gaussian_log_density(y[:, 0], torch.zeros(10).double(), j @ j.T / tau + eye(10, sigma**2))
    assert_same(la.log_evidence(), exact, 1e-11)


def kron_dense(module, layer, x, roots, sharing, bias=True):
    """KFAC of one linear or convolution by its definition, dense in the order (weight, bias) of the layer.

    A = mean over rows of ā āᵀ, G = Σ g gᵀ; a row is a (sample, position), or a sample with inputs averaged and
    gradients summed over its positions ("reduce").
    """
    seen = {}
    handle = layer.register_forward_hook(lambda _, args, out: seen.update(inputs=args[0].detach(), out=out))
    f = module(x)
    handle.remove()
    conv = isinstance(layer, nn.Conv2d)
    groups = layer.groups if conv else 1
    if conv:
        h = layer.padding[0]
        mode = {"zeros": "constant"}.get(layer.padding_mode, layer.padding_mode)
        padded = F.pad(seen["inputs"], (h, h, h, h), mode=mode)
        a = F.unfold(padded, layer.kernel_size, stride=layer.stride, dilation=layer.dilation).mT  # (n, t, I·k)
    else:
        a = seen["inputs"][:, None]
    n, t = a.shape[:2]
    a = a.reshape(n, t, groups, -1)
    if bias:
        a = torch.cat([a, torch.ones(n, t, groups, 1, dtype=a.dtype)], -1)
    G, o = 0, layer.weight.shape[0] // groups
    for s in roots:
        (g,) = torch.autograd.grad((f * s).sum(), seen["out"], retain_graph=True)
        g = g.flatten(2).mT.reshape(n, t, groups, o) if conv else g.reshape(n, 1, 1, o)
        g = g.sum(1, keepdim=True) if sharing == "reduce" else g
        G = G + torch.einsum("ntqo,ntqp->qop", g, g)
    a = a.mean(1, keepdim=True) if sharing == "reduce" else a
    A = torch.einsum("ntqi,ntqj->qij", a, a) / (a.shape[0] * a.shape[1])
    i = A.shape[-1] - bias
    size = groups * o * (i + bias)
    place = torch.empty(groups, o, i + bias, dtype=torch.long)  # (q, o, i) -> flat
    place[..., :i] = torch.arange(groups * o * i).reshape(groups, o, i)
    if bias:
        place[..., i] = groups * o * i + torch.arange(groups * o).reshape(groups, o)
    dense = torch.zeros(size, size, dtype=A.dtype)
    for q in range(groups):
        at = place[q].reshape(-1)
        dense[at[:, None], at] = torch.kron(G[q], A[q])
    return dense


def unit_roots(n, c):
    """The columns of S for regression: one output each."""
    return [eye(c)[k].expand(n, c) for k in range(c)]


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_damping_true_does_nothing(temperature):
    """ "`damping=True` does nothing": (√(c/n)·G + √τ I) ⊗ (√(c·n)·A + √τ I), which is not c·G ⊗ A + τI."""
    tau, sigma, n = 0.7, 0.8, 9
    module, x, y = mlp(3, 4, 2), randn(9, 3), randn(9, 2, seed=2)
    la = lapwing.fit(
        module, (x, y), lapwing.Gaussian(noise=sigma), structure="kron", prior=tau, temperature=temperature
    )
    c = temperature / sigma**2
    seen = []
    h = torch.tanh(module[0](x)).detach()
    for a, back in ((x, module[2].weight[None] * (1 - h**2)[:, None]), (h, eye(2).expand(n, 2, 2))):
        ones = torch.cat([a, torch.ones(n, 1, dtype=a.dtype)], 1)
        seen.append((torch.einsum("nro,nrp->op", back, back).detach(), ones.T @ ones / n))
    start = 0
    for G, A in seen:
        o, i = len(G), len(A)
        root = math.sqrt(tau)
        damped = torch.kron(G * math.sqrt(c / n) + eye(o, root), A * math.sqrt(c * n) + eye(i, root))
        exact = c * torch.kron(G, A) + eye(o * i, tau)
        # ours has the weights first and then the biases; (o, i) has the bias as its last column
        place = torch.cat([torch.arange(o * (i - 1)).reshape(o, i - 1), o * (i - 1) + torch.arange(o)[:, None]], 1)
        at = start + place.reshape(-1)
        assert_same(la.posterior.precision.dense()[at[:, None], at], exact)
        assert_same(la.damping("exact").posterior.precision.dense()[at[:, None], at], exact)
        assert_same(la.damping("factored").posterior.precision.dense()[at[:, None], at], damped)
        start += o * i
    j = jacobian(module, x)
    view = la.damping("factored")
    assert_same(view.predict(x).function.covariance, covariance(j, view.posterior.precision.dense()), 1e-9)
    assert relative(view.predict(x).function.variance, la.predict(x).function.variance) > 0.05


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_empirical_fisher_twice_too_large_for_regression(structure):
    """ "empirical Fisher twice too large for regression": Σ ∇log p ∇log pᵀ, by autograd on the log-density itself."""
    sigma = 0.7
    module, x, y = mlp(3, 4, 2), randn(8, 3), randn(8, 2, seed=2)
    la = lapwing.fit(module, (x, y), lapwing.Gaussian(noise=sigma), factor="empirical", structure=structure, prior=0.5)
    exact = 0
    for n in range(8):
        log_p = torch.distributions.Normal(module(x[n]), sigma).log_prob(y[n]).sum()
        s = torch.cat([g.flatten() for g in torch.autograd.grad(log_p, list(module.parameters()))])
        exact = exact + torch.outer(s, s)
    exact = exact if structure == "full" else exact.diag().diag()
    assert_same(la.posterior.precision.dense(), exact + eye(len(exact), 0.5))


def conv_net(groups=1, padding_mode="zeros", channels=4, out=4, seed=0):
    return build(
        lambda: nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1, groups=groups, padding_mode=padding_mode),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(out * 4, 3),
        ),
        seed,
    )


def check_convolution(module, n=4, channels=4):
    """kron by its definition, in both kinds of sharing; the exact structures and the trace of EKFAC by brute force."""
    x, y = randn(n, channels, 4, 4), randn(n, 3, seed=2)
    whole = ggn(jacobian(module, x))
    first = module[0].weight.numel() + module[0].bias.numel()
    for sharing in ("expand", "reduce"):
        la = lapwing.fit(module, (x, y), lapwing.Gaussian(1.0), structure=lapwing.Kron(sharing=sharing))
        dense = kron_dense(module, module[0], x, unit_roots(n, 3), sharing)
        assert_same(la.curvature.dense()[:first, :first], dense)
        head = kron_dense(module, module[-1], x, unit_roots(n, 3), sharing)
        assert_same(la.curvature.dense()[first:, first:], head)
    diag = lapwing.fit(module, (x, y), lapwing.Gaussian(1.0), structure="diag").curvature.dense()
    assert_same(diag.diag(), whole.diag())
    assert_same(lapwing.fit(module, (x, y), lapwing.Gaussian(1.0), structure="full").curvature.dense(), whole)
    block = lapwing.fit(module, (x, y), lapwing.Gaussian(1.0), structure="blockdiag").curvature.dense()
    assert_same(block[:first, :first], whole[:first, :first])
    ekfac = lapwing.fit(module, (x, y), lapwing.Gaussian(1.0), structure="ekfac").curvature.dense()
    assert_same(ekfac[:first, :first].trace(), whole[:first, :first].trace())
    return whole, first


@pytest.mark.parametrize("groups", [2, 4])
def test_kron_for_grouped_convolutions(groups):
    """ "kron for grouped convolutions (trace 0.40 of the truth)"."""
    check_convolution(conv_net(groups))


def test_kron_for_grouped_convolutions_is_exact_for_one_sample_without_sharing():
    """One position, one sample: G ⊗ A is the group's own block of the GGN, and the trace is the truth's."""
    module = build(lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)))
    x = randn(1, 4, 3, 3)
    exact = ggn(jacobian(module, x))
    found = lapwing.fit(module, (x, randn(1, 3)), lapwing.Gaussian(1.0), structure="kron").curvature.dense()
    size = module[0].weight.numel()
    for q in range(2):
        weights = torch.arange(q * size // 2, (q + 1) * size // 2)
        at = torch.cat([weights, size + 3 * q + torch.arange(3)])
        assert_same(found[at[:, None], at], exact[at[:, None], at])
    assert_same(found.trace(), exact.trace())


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_modes_other_than_zeros(mode):
    """ "kron for … padding modes other than zeros"."""
    whole, _ = check_convolution(conv_net(padding_mode=mode))
    zeros = ggn(jacobian(conv_net(), randn(4, 4, 4, 4)))
    assert relative(whole.diag(), zeros.diag()) > 0.01  # the mode makes a difference here


@pytest.mark.parametrize("structure", ["diag", "blockdiag", "kron", "ekfac", "full"])
def test_a_weight_reused_through_its_transpose_ignored(structure):
    """ "a weight reused through `F.linear(h, W.T)` ignored"."""
    module = build(
        lambda: Calls(lambda s, x: F.linear(torch.tanh(F.linear(x, s.W, s.b)), s.W.T),
                      W=nn.Parameter(torch.randn(4, 3)), b=nn.Parameter(torch.randn(4)))
    )  # fmt: skip
    x, y = randn(6, 3), randn(6, 3, seed=2)
    j = jacobian(module, x)
    exact = ggn(j)
    la = lapwing.fit(module, (x, y), lapwing.Gaussian(1.0), structure=structure, prior=0.5)
    found = la.curvature.dense()
    if structure in ("full", "blockdiag"):
        at = slice(0, 12) if structure == "blockdiag" else slice(None)
        assert_same(found[at, at], exact[at, at])
    elif structure == "diag":
        assert_same(found.diag(), exact.diag())
    elif structure == "ekfac":
        assert_same(found.trace(), exact.trace())
    else:  # no product of two matrices is exact for a weight used both ways: Σ over its uses of tr A · tr G
        h = F.linear(x, module.W, module.b)
        z = torch.tanh(h)
        f = F.linear(z, module.W.T)
        back = sum(torch.autograd.grad(f[:, k].sum(), h, retain_graph=True)[0].square().sum() for k in range(3))
        uses = (x.square().sum() / 6 + 1) * back + z.square().sum() / 6 * (3 * 6)
        assert_same(found.trace(), uses.detach())
    assert_same(la.predict(x).function.covariance, covariance(j, found + eye(16, 0.5)), 1e-9)


@pytest.mark.parametrize("structure", ["blockdiag", "kron", "ekfac", "full"])
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_an_operation_after_the_last_linear(structure, likelihood):
    """ "an operation after the last Linear (5·out) leaves last-layer variance 96 % off"."""
    module = build(
        lambda: Calls(lambda s, x: 5 * s.head(torch.tanh(s.body(x))), body=nn.Linear(3, 4), head=nn.Linear(4, 2))
    )
    x, new = randn(8, 3), randn(5, 3, seed=3)
    y = randn(8, 2, seed=2) if likelihood == "regression" else classes(8, 2)
    la = lapwing.fit(module, (x, y), unit_noise(likelihood), structure=structure, select="last_layer", prior=0.5)
    names = ("head.weight", "head.bias")
    assert la.params.names == names
    j = jacobian(module, x, names)
    exact = ggn(j, None if likelihood == "regression" else softmax_hessian(outputs(module, x)))
    if structure in ("kron", "ekfac") and likelihood == "classification":
        exact = la.curvature.dense()  # no Kronecker product is exact here; the rows of the prediction still must be
        j5 = jacobian(module, x, names)
        assert_same(exact.trace(), ggn(j5, softmax_hessian(outputs(module, x))).trace(), 0.5)
    assert_same(la.curvature.dense(), exact)
    truth = covariance(jacobian(module, new, names), exact + eye(10, 0.5))
    assert_same(la.predict(new).function.covariance, truth, 1e-9)
    assert_same(la.predict(new).function.mean, outputs(module, new))


@pytest.mark.parametrize("shape", ["column", "vector"])
def test_one_logit_classification_gives_h_zero_and_p_one(shape):
    """ "one-logit classification gives H = 0 and p = 1": refused; "binary" has H = Σ p(1−p)JJᵀ and p = E[sigmoid]."""
    net = mlp(3, 4, 1)
    module = net if shape == "column" else Calls(lambda s, x: s.net(x)[:, 0], net=net)
    x, y, new = randn(12, 3), classes(12, 2), 2 * randn(5, 3, seed=4)
    with pytest.raises(lapwing.BadData, match=r"single logit.*binary|binary.*one logit"):
        lapwing.fit(module, (x, y), "classification")
    la = lapwing.fit(module, (x, y), "binary", structure="full", prior=0.3)
    j, p = jacobian(net, x), outputs(net, x).sigmoid()
    exact = ggn(j, (p * (1 - p))[..., None])
    assert_same(la.curvature.dense(), exact)
    assert exact.trace() > 1
    m = outputs(net, new)[:, 0]
    v = covariance(jacobian(net, new), exact + eye(len(exact), 0.3))[:, 0, 0]
    z = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    truth = torch.trapezoid((m[:, None] + v.sqrt()[:, None] * z).sigmoid() * density, z)
    probs = la.predict(new).probs
    assert probs.shape == ((5,) if shape == "vector" else (5, 1))
    assert_same(probs.reshape(-1), truth, 1e-6)


def test_nchw_segmentation_takes_softmax_over_width():
    """ "NCHW segmentation takes softmax over width"."""
    c, h, w = 3, 4, 5
    module = build(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, c, 1)))
    x, y = randn(3, 2, h, w), torch.randint(c, (3, h, w), generator=seeded(1))
    with pytest.raises(lapwing.BadData, match="targets have shape"):
        lapwing.fit(module, (x, y), "classification")
    la = lapwing.fit(module, (x, y), lapwing.Categorical(class_dim=1), structure="full", prior=0.5)
    j = jacobian(module, x).reshape(3, c, h * w, -1)
    f = outputs(module, x)
    lam = softmax_hessian(f.flatten(2).mT)  # (n, pixel, c, c)
    exact = torch.einsum("nckp,nkcd,ndkq->pq", j, lam, j)
    assert_same(la.curvature.dense(), exact)
    assert_same(la.log_likelihood, -F.cross_entropy(f, y, reduction="sum").double())
    p = la.predict(x)
    assert p.probs.shape == (3, h, w, c)
    assert_same(p.probs.sum(-1), torch.ones(3, h, w).double())
    sigma = torch.linalg.inv(exact + eye(len(exact), 0.5))
    truth = torch.einsum("nckp,pq,ndkq->nkcd", j, sigma, j).reshape(3, h, w, c, c)
    assert_same(p.function.covariance, truth, 1e-9)


def negative_pair(sigma, module, x):
    """Two of the inputs whose outputs have a correlation close to −0.23."""
    rows = jacobian(module, x)[:, 0]
    joint = rows @ sigma @ rows.T
    deviation = joint.diag().sqrt()
    off = (joint / deviation[:, None] / deviation + 0.23).abs().fill_diagonal_(9)
    a, b = divmod(off.argmin().item(), len(x))
    pair = joint[[a, b]][:, [a, b]]
    return x[[a, b]], pair, (pair[0, 1] / pair.diag().prod().sqrt()).item()


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_samples_at_several_inputs_have_correlation_one(structure):
    """ "samples at several inputs have correlation 1.0 where −0.23 is true"."""
    module, x, y = mlp(2, 6, 1), randn(10, 2), randn(10, 1, seed=2)
    la = lapwing.fit(module, (x, y), lapwing.Gaussian(noise=0.5), structure=structure, prior=0.5)
    sigma = torch.linalg.inv(la.curvature.dense() / 0.25 + eye(25, 0.5))
    new, pair, truth = negative_pair(sigma, module, 2 * randn(60, 2, seed=5))
    assert truth == pytest.approx(-0.23, abs=0.02)
    n = 20_000
    error = 4 * (1 - truth**2) / math.sqrt(n)  # four standard errors of a correlation
    p = la.predict(new, joint=True)
    draws = p.function.sample(n, generator=seeded(1))[..., 0]
    assert torch.corrcoef(draws.T)[0, 1].item() == pytest.approx(truth, abs=error)
    assert_same(p.function.covariance.reshape(2, 2), pair, 1e-9)
    targets = p.sample(n, generator=seeded(2))[..., 0]  # the noise of y is not shared
    noisy = (pair[0, 1] / (pair.diag() + 0.25).prod().sqrt()).item()
    assert torch.corrcoef(targets.T)[0, 1].item() == pytest.approx(noisy, abs=error)
    alone = la.predict(new).function.sample(n, generator=seeded(3))[..., 0]  # without joint: independent inputs
    assert torch.corrcoef(alone.T)[0, 1].item() == pytest.approx(0.0, abs=error)


def test_samples_of_weights_correlate_inputs_as_the_posterior_does():
    """The same through sampled networks, exactly linear here: J_i Σ J_jᵀ between inputs."""
    module, x, y = build(lambda: nn.Linear(3, 1)), randn(10, 3), randn(10, 1, seed=2)
    la = lapwing.fit(module, (x, y), lapwing.Gaussian(1.0), structure="full", prior=0.5)
    sigma = torch.linalg.inv(ggn(jacobian(module, x)) + eye(4, 0.5))
    new, pair, truth = negative_pair(sigma, module, 2 * randn(60, 3, seed=5))
    n = 5_000
    draws = torch.stack([torch.func.functional_call(module, w, (new,)) for w in la.ensemble(n, seeded(1))])[..., 0]
    assert torch.corrcoef(draws.T)[0, 1].item() == pytest.approx(truth, abs=4 / math.sqrt(n))
    assert_same(torch.cov(draws.T), pair, 0.1)


def test_generator_ignored():
    """ "`generator=` ignored": the draws follow it, and it alone, and the global state is left where it was."""
    module, x, y = mlp(3, 4, 3), randn(9, 3), classes(9, 3)
    la = lapwing.fit(module, (x, y), "classification", structure="kron")
    mc = lapwing.fit(module, (x, y), "classification", factor="mc", structure="full", generator=seeded())
    every = {
        "posterior.sample": lambda g: la.posterior.sample(3, generator=g),
        "function.sample": lambda g: la.predict(x).function.sample(3, generator=g),
        "joint sample": lambda g: la.predict(x, joint=True).function.sample(3, generator=g),
        "prediction.sample": lambda g: la.predict(x).sample(5, generator=g),
        "monte carlo link": lambda g: la.predict(x, link="mc", samples=20, generator=g).probs,
        "sampled": lambda g: la.predict(x, method="sampled", samples=5, generator=g).probs,
        "ensemble": lambda g: la.ensemble(3, generator=g).weights,
        "mc fisher": lambda g: lapwing.fit(
            module, (x, y), "classification", factor="mc", structure="full", generator=g
        ).curvature.dense(),
        "update": lambda g: mc.update((x, y), generator=g).curvature.dense(),
        "subnetwork": lambda g: lapwing.fit(
            module, (x, y), "classification", structure="full", select=lapwing.subnetwork(6, by="random"), generator=g
        ).params.index,
    }  # fmt: skip
    for name, draw in every.items():
        torch.manual_seed(0)
        before = torch.get_rng_state()
        first = draw(seeded(7))
        assert torch.equal(before, torch.get_rng_state()), f"{name} moves the global state"
        torch.manual_seed(1)
        assert torch.equal(first, draw(seeded(7))), f"{name} depends on more than the generator"
        assert not torch.equal(first, draw(seeded(8))), f"{name} ignores the generator"
        moving = seeded(7)
        draw(moving)
        assert not torch.equal(first, draw(moving)), f"{name} does not advance the generator"


@pytest.mark.parametrize("how", ["drop_last", "sampler"])
@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "full"])
def test_n_wrong_with_drop_last_or_a_sampler(how, structure):
    """ "N wrong with `drop_last` or a sampler": counted from the batches that came."""
    module, x, y = mlp(3, 4, 2), randn(11, 3), randn(11, 2, seed=2)
    data = TensorDataset(x, y)
    if how == "drop_last":
        loader, used = DataLoader(data, batch_size=4, drop_last=True), torch.arange(8)
    else:
        used = torch.tensor([1, 4, 5, 9, 10])
        loader = DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(used.tolist(), generator=seeded()))
    la = lapwing.fit(module, loader, lapwing.Gaussian(noise=0.5), structure=structure, prior=0.5)
    assert la.n_data == len(used)
    z, t = x[used], y[used]
    j = jacobian(module, z)
    residual = (t - outputs(module, z)).square().sum()
    log_p = -0.5 * (residual / 0.25 + t.numel() * math.log(2 * math.pi * 0.25))
    assert_same(la.log_likelihood, log_p)
    exact = ggn(j)
    if structure in ("diag", "full"):
        assert_same(la.curvature.dense(), exact if structure == "full" else exact.diag().diag())
    same = lapwing.fit(module, (z, t), lapwing.Gaussian(noise=0.5), structure=structure, prior=0.5)
    assert_same(la.curvature.dense(), same.curvature.dense(), 1e-9)
    head = la.curvature.dense()[16:, 16:]  # a Kronecker product is exact for the last layer of a regression
    assert_same(head.trace(), exact[16:, 16:].trace())
    assert_same(la.log_evidence(), log_p - 0.5 * 0.5 * flat(module).square().sum()
                - 0.5 * torch.linalg.slogdet(la.curvature.dense() / 0.25 / 0.5 + eye(26))[1], 1e-9)  # fmt: skip


def test_training_stays_in_eval_mode_after_the_first_fit():
    """ "training stays in eval mode after the first fit": every flag is as it was, also when a fit fails."""
    module = build(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))
    )
    x, y = randn(8, 3), classes(8, 2)
    module(x)  # gives the batch norm statistics of its own
    for frozen in ([], [1], [1, 2]):
        module.train()
        for k in frozen:
            module[k].eval()
        flags = [m.training for m in module.modules()]
        before = snapshot(module)
        la = lapwing.fit(module, [(x, y)], "classification", structure="kron")
        steps = (
            lambda la=la: la.predict(x).probs,
            lambda la=la: la.predict(x, method="sampled", samples=3).probs,
            lambda la=la: la.tune((x, y), learn="prior", grid={"prior": [1.0, 10.0]}),
            lambda la=la: la.update((x, y)),
            lambda la=la: la.ensemble(2).predict(x).probs,
        )
        for step in steps:
            step()
            assert [m.training for m in module.modules()] == flags
        with pytest.raises(lapwing.BadData):
            lapwing.fit(module, [(x, y), (x, y + 5)], "classification", structure="kron")
        assert [m.training for m in module.modules()] == flags
        assert_untouched(module, before)
        module.eval()  # and it is eval mode that was used: no dropout, moving averages
        assert_same(la.predict(x).function.mean, outputs(module, x))


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "full"])
def test_nan_or_bf16_calls_exit(structure):
    """ "NaN or bf16 calls `exit()`": NaN is an error that names its place; bf16 is accumulated in float32."""
    module, x, y = mlp(3, 4, 2), randn(6, 3), classes(6, 2)
    bad = x.clone()
    bad[4, 1] = float("nan")
    with pytest.raises(lapwing.BadData, match=r"batch 1.*nan"):
        lapwing.fit(module, [(x[:3], y[:3]), (bad[3:], y[3:])], "classification", structure=structure)
    la = lapwing.fit(module, (x, y), "classification", structure=structure)
    with pytest.raises(lapwing.BadData, match="nan"):
        la.predict(bad)
    broken = mlp(3, 4, 2)
    with torch.no_grad():
        broken[2].weight[0, 0] = float("inf")
    with pytest.raises(lapwing.BadData, match=r"'2\.weight'"):
        lapwing.fit(broken, (x, y), "classification", structure=structure)

    half = mlp(3, 4, 2, dtype=torch.bfloat16)
    x = x.bfloat16()
    la = lapwing.fit(half, (x, y), "classification", structure=structure, prior=0.5)
    wide = mlp(3, 4, 2)
    with torch.no_grad():
        for p, q in zip(wide.parameters(), half.parameters(), strict=True):
            p.copy_(q)
    exact = ggn(jacobian(wide, x.double()), softmax_hessian(outputs(wide, x.double())))
    dense = la.curvature.dense()
    assert dense.dtype == torch.float32
    if structure in ("diag", "full"):
        assert_same(dense, exact if structure == "full" else exact.diag().diag(), 0.05)
    probs = la.predict(x).probs
    assert probs.isfinite().all()
    assert_same(probs.sum(-1), torch.ones(6), 1e-5)


@pytest.mark.parametrize("select", ["last_layer", "all"])
def test_last_layer_functional_samples_overwrite_the_users_weights(select):
    """ "last-layer functional samples overwrite the user's weights"."""
    module = build(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))).eval()
    x, y = randn(8, 3), classes(8, 3)
    before = snapshot(module)
    f = outputs(module, x)
    la = lapwing.fit(module, (x, y), "classification", structure="full", select=select)
    for use in (
        lambda: la.posterior.sample(5),
        lambda: la.predict(x).function.sample(5),
        lambda: la.predict(x, joint=True).sample(5),
        lambda: la.predict(x, method="sampled", samples=5).probs,
        lambda: la.predict(x, method="sampled", samples=5).function.sample(5),
        lambda: la.ensemble(5).predict(x).probs,
        lambda: [torch.func.functional_call(module, w, (x,)) for w in la.ensemble(2)],
        lambda: next(iter(la.ensemble(1)))[la.params.names[0]].zero_(),
        lambda: la.posterior.mean.clone().zero_(),
    ):
        use()
        assert_untouched(module, before)
        assert torch.equal(outputs(module, x), f)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_float64_models_computed_at_float32_accuracy(structure):
    """ "float64 models computed at float32 accuracy"."""
    module, x, y = mlp(3, 5, 3), randn(12, 3), classes(12, 3)
    structure = lapwing.LowRank(40) if structure == "lowrank" else structure  # as many as there are directions
    la = lapwing.fit(module, (x, y), "classification", structure=structure, prior=1e-3)
    j = jacobian(module, x)
    exact = ggn(j, softmax_hessian(outputs(module, x)))
    found = la.curvature.dense()
    assert found.dtype == torch.float64
    if structure in ("full", "diag") or isinstance(structure, lapwing.LowRank):
        assert_same(found, exact.diag().diag() if structure == "diag" else exact, 1e-13)
    truth = covariance(j, found + eye(len(exact), 1e-3))
    p = la.predict(x)
    assert p.probs.dtype == p.function.covariance.dtype == la.posterior.sample(1).dtype == torch.float64
    assert_same(p.function.mean, outputs(module, x), 1e-15)
    assert_same(p.function.covariance, truth, 1e-10)  # the condition number is 1e5: float32 would be wrong at 1e-2


def read_safetensors(path):
    """Header and raw body of a file, by the format's definition alone: 8 bytes of length, JSON, bytes of tensors."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


@pytest.mark.parametrize("structure", [*STRUCTURES, "functional", "nystrom"])
def test_the_checkpoint_of_a_gp_holds_the_whole_data_loader(structure, tmp_path):
    """ "the checkpoint of a gp holds the whole DataLoader": numbers and JSON, and not a row of the data."""
    module, path = mlp(3, 4, 2), tmp_path / "small.lapwing"
    n = 300 if structure == "functional" else 2000
    x, y = randn(n, 3), randn(n, 2, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=100)
    lapwing.fit(module, loader, lapwing.Gaussian(1.0), structure=structure).save(path)
    header, body = read_safetensors(path)
    meta = header.pop("__metadata__")
    json.loads(meta["lapwing"])
    ends = [entry["data_offsets"] for entry in header.values()]
    assert max(stop for _, stop in ends) == len(body) == sum(stop - start for start, stop in ends)
    if structure != "functional":  # which keeps the rows of its kernel: data × outputs × weights
        assert path.stat().st_size < 40_000 < 8 * x.numel()
    for row in (x[0], x[n // 2], y[7]):
        assert row.numpy().tobytes() not in path.read_bytes()
    with pytest.raises((pickle.UnpicklingError, ValueError)):  # neither pickle nor torch's zip
        pickle.loads(path.read_bytes())
    assert not zipfile.is_zipfile(path)
    assert list(tmp_path.iterdir()) == [path]
    la = lapwing.load(path, module)
    new = randn(5, 3, seed=9)
    truth = covariance(jacobian(module, new), la.curvature.dense() + eye(26))
    assert_same(la.predict(new).function.covariance, truth, 1e-9)


def test_loading_onto_a_model_with_other_weights_is_silent(tmp_path):
    """ "loading onto a model with other weights is silent"."""
    make = lambda seed: build(  # noqa: E731
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)), seed
    )
    module, x, y = make(0), randn(8, 3), classes(8, 2)
    path = tmp_path / "net.lapwing"
    la = lapwing.fit(module, (x, y), "classification", structure="kron", select="last_layer")
    la.save(path)
    twin = make(0)
    assert_same(lapwing.load(path, twin).predict(x).probs, la.predict(x).probs, 1e-14)

    others = {"other weights": make(1)}
    for name in ("0.weight", "1.running_mean", "3.bias"):  # frozen body, buffer, selected: all that the forward reads
        others[name] = make(0)
        with torch.no_grad():
            others[name].state_dict()[name].view(-1)[0] += 1e-3
    others["other names"] = build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    others["other shapes"] = build(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    )
    for other in others.values():
        with pytest.raises(lapwing.UnsupportedModel, match=r"net\.lapwing"):
            lapwing.load(path, other)
    with torch.no_grad():
        module[0].weight.add_(1e-3)  # and a module that changes afterwards is noticed too
    with pytest.raises(lapwing.UnsupportedModel, match="changed since the fit"):
        la.predict(x)


def test_depthwise():
    """curvlinops: "Silently wrong: depthwise"."""
    check_convolution(conv_net(groups=4, out=8))


def test_circular_padding():
    """curvlinops: "Silently wrong: … circular padding", here for a depthwise convolution at once."""
    check_convolution(conv_net(groups=4, padding_mode="circular"))


def test_tied_linear():
    """curvlinops: "Silently wrong: … tied Linear" (traces 0.3–3.2 of the truth)."""
    module = build(
        lambda: Calls(
            lambda s, x: s.head(torch.tanh(s.fc(torch.tanh(s.fc(x))))), fc=nn.Linear(4, 4), head=nn.Linear(4, 3)
        )
    )
    x, y = randn(7, 4), classes(7, 3)
    exact = ggn(jacobian(module, x), softmax_hessian(outputs(module, x)))
    own = slice(0, 20)
    fit = lambda structure: lapwing.fit(module, (x, y), "classification", structure=structure).curvature.dense()  # noqa: E731
    assert_same(fit("full"), exact)
    assert_same(fit("diag").diag(), exact.diag())
    assert_same(fit("blockdiag")[own, own], exact[own, own])
    assert_same(fit("ekfac")[own, own].trace(), exact[own, own].trace())
    assert_same(fit("ekfac")[20:, 20:].trace(), exact[20:, 20:].trace())

    # KFAC by its definition: the two uses are two positions of one layer
    a = torch.stack([x, torch.tanh(module.fc(x)).detach()], 1)
    a = torch.cat([a, torch.ones(7, 2, 1, dtype=a.dtype)], -1)
    h1 = module.fc(x)
    h2 = module.fc(torch.tanh(h1))
    f = module.head(torch.tanh(h2))
    p = f.detach().softmax(-1)
    roots = p.sqrt().diag_embed() - p[:, :, None] * p.sqrt()[:, None]  # S Sᵀ = diag(p) − p pᵀ
    g = [torch.stack(torch.autograd.grad((f * roots[..., r]).sum(), (h1, h2), retain_graph=True), 1) for r in range(3)]
    place = torch.cat([torch.arange(16).reshape(4, 4), 16 + torch.arange(4)[:, None]], 1).reshape(-1)
    for sharing in ("expand", "reduce"):
        rows = a.mean(1, keepdim=True) if sharing == "reduce" else a
        A = torch.einsum("nti,ntj->ij", rows, rows) / (rows.shape[0] * rows.shape[1])
        back = [each.sum(1, keepdim=True) if sharing == "reduce" else each for each in g]
        G: Tensor = sum(torch.einsum("nto,ntp->op", each, each) for each in back)
        found = fit(lapwing.Kron(sharing=sharing))[own, own]
        assert_same(found[place[:, None], place], torch.kron(G, A))
