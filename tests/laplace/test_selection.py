"""Which weights take part: globs, lists, predicates, frozen parameters, single weights; against dense algebra."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lapwing
from tests.dense import (
    assert_same,
    build,
    covariance,
    flat,
    ggn,
    jacobian,
    outputs,
    randn,
    seeded,
    softmax_hessian,
)

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
SELECT = {
    "all": ("all", NAMES),
    "glob": ("2.*", NAMES[2:4]),
    "glob of weights": ("*.weight", NAMES[::2]),
    "list": (["4.bias", "0.weight"], ("0.weight", "4.bias")),  # in the order of the module, whatever the list's
    "list of globs": (["0.*", "4.w*"], (*NAMES[:2], "4.weight")),
    "predicate": (lambda name, p: p.ndim == 1 or name.startswith("4"), ("0.bias", "2.bias", "4.weight", "4.bias")),
    "weight without its bias": ("2.weight", ("2.weight",)),
    "bias without its weight": ("0.bias", ("0.bias",)),
    "last layer": ("last_layer", NAMES[4:]),
}


def net(bias=True):
    return build(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3, bias=bias))
    )


def eye(size, scale=1.0):
    return scale * torch.eye(size, dtype=torch.float64)


def classification(module, n=10):
    x, y = randn(n, 3), torch.randint(3, (n,), generator=seeded(1))
    return x, y, softmax_hessian(outputs(module, x))


def blocks(module, names):
    """Positions of each layer's own selected weights, layer by layer."""
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    found, start = {}, 0
    for name in names:
        found.setdefault(name.split(".")[0], []).append(torch.arange(start, start + sizes[name]))
        start += sizes[name]
    return [torch.cat(parts) for parts in found.values()]


@pytest.mark.parametrize("structure", ["diag", "blockdiag", "kron", "ekfac", "full", "lowrank"])
@pytest.mark.parametrize("kind", SELECT)
def test_selection(kind, structure):
    select, names = SELECT[kind]
    module = net()
    x, y, lam = classification(module)
    structure = lapwing.LowRank(60) if structure == "lowrank" else structure
    la = lapwing.fit(module, (x, y), "classification", structure=structure, select=select, prior=0.5)
    assert la.params.names == names
    assert_same(la.posterior.mean, flat(module, names), 1e-15)
    j = jacobian(module, x, names)
    exact, found = ggn(j, lam), la.curvature.dense()
    if structure == "diag":
        assert_same(found, exact.diag().diag())
    elif structure == "full" or isinstance(structure, lapwing.LowRank):
        assert_same(found, exact)
    for at in blocks(module, names):
        mine, truth = found[at[:, None], at], exact[at[:, None], at]
        if structure == "blockdiag":
            assert_same(mine, truth)
        elif structure == "ekfac":
            assert_same(mine.trace(), truth.trace())
        elif structure == "kron":  # no more than Cauchy–Schwarz allows, and never nothing
            assert 0.3 < mine.trace() / truth.trace() < 3
    new = randn(5, 3, seed=3)
    assert_same(
        la.predict(new).function.covariance,
        covariance(jacobian(module, new, names), found + eye(len(found), 0.5)),
        1e-9,
    )
    assert_same(la.predict(new).function.mean, outputs(module, new))


@pytest.mark.parametrize("kind", SELECT)
def test_kron_of_one_sample_is_the_block_of_the_selection(kind):
    """Without sharing and with one sample G ⊗ A is exact, with the bias or without."""
    select, names = SELECT[kind]
    module = net()
    x, y, lam = classification(module, 1)
    found = lapwing.fit(module, (x, y), "classification", structure="kron", select=select).curvature.dense()
    exact = ggn(jacobian(module, x, names), lam)
    for at in blocks(module, names):
        assert_same(found[at[:, None], at], exact[at[:, None], at])


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_frozen_parameters_are_left_out(structure):
    module = net()
    module[2].requires_grad_(False)
    module[4].bias.requires_grad_(False)
    x, y, lam = classification(module)
    names = ("0.weight", "0.bias", "4.weight")
    la = lapwing.fit(module, (x, y), "classification", structure=structure, prior=0.5)
    assert la.params.names == names
    assert [p.requires_grad for p in module.parameters()] == [True, True, False, False, True, False]
    exact = ggn(jacobian(module, x, names), lam)
    found = la.curvature.dense()
    if structure == "kron":
        assert_same(found[16:, 16:], exact[16:, 16:], 0.5)
    else:
        assert_same(found, exact.diag().diag() if structure == "diag" else exact)
    only = lapwing.fit(module, (x, y), "classification", structure=structure, select="*.weight")
    assert only.params.names == ("0.weight", "4.weight")
    with pytest.raises(lapwing.BadData, match=r"'2\.bias'.*frozen"):
        lapwing.fit(module, (x, y), "classification", select=["0.weight", "2.bias"])
    with pytest.raises(lapwing.BadData, match="frozen"):
        lapwing.fit(module, (x, y), "classification", select="2.*")
    module.requires_grad_(False)
    with pytest.raises(lapwing.BadData, match=r"every parameter.*frozen"):
        lapwing.fit(module, (x, y), "classification")


def test_what_selects_nothing_is_refused():
    module = net()
    x, y, _ = classification(module)
    for select in ("head.*", ["0.weight", "nope"], lambda name, p: False, []):
        with pytest.raises(lapwing.BadData, match=r"select"):
            lapwing.fit(module, (x, y), "classification", select=select)


class Head(nn.Module):
    """A last layer that is no nn.Linear, with something after it."""

    def __init__(self, kind):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.kind = kind
        if kind == "raw":
            self.matrix = nn.Parameter(torch.randn(4, 3))
        elif kind == "conv":
            self.conv = nn.Conv1d(4, 3, 1)
        elif kind == "norm":
            self.before = nn.Linear(4, 3)
            self.norm = nn.LayerNorm(3)
        else:
            self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        if self.kind == "raw":
            return (h @ self.matrix) * 2
        if self.kind == "conv":
            return self.conv(h[:, :, None])[:, :, 0] - 1
        if self.kind == "norm":
            return self.norm(self.before(h))
        return F.log_softmax(self.head(h) / 0.3, -1)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("raw", ("matrix",)),
        ("conv", ("conv.weight", "conv.bias")),
        ("norm", ("before.weight", "before.bias", "norm.weight", "norm.bias")),  # the last matrix, and what follows
        ("log-softmax", ("head.weight", "head.bias")),
    ],
)
def test_the_last_layer_is_what_produces_the_output(kind, names):
    module = build(lambda: Head(kind))
    x, y, lam = classification(module)
    la = lapwing.fit(module, (x, y), "classification", structure="full", select="last_layer", prior=0.5)
    assert la.params.names == names
    j = jacobian(module, x, names)
    exact = ggn(j, lam)
    assert_same(la.curvature.dense(), exact)
    assert_same(la.predict(x).function.covariance, covariance(j, exact + eye(len(exact), 0.5)), 1e-9)


@pytest.mark.parametrize("structure", ["full", "diag", "lowrank"])
@pytest.mark.parametrize("by", ["variance", "magnitude", "random"])
@pytest.mark.parametrize("within", ["all", "*.weight"])
def test_subnetwork(by, structure, within):
    k, tau, sigma = 9, 0.4, 0.7
    module, x, y = net(), randn(10, 3), randn(10, 3, seed=2)
    names = NAMES if within == "all" else NAMES[::2]
    chosen = lapwing.LowRank(k) if structure == "lowrank" else structure
    select = lapwing.subnetwork(k, by=by, within=within)
    fit = lambda seed: lapwing.fit(  # noqa: E731
        module, (x, y), lapwing.Gaussian(sigma), structure=chosen, select=select, prior=tau, generator=seeded(seed)
    )
    la = fit(0)
    whole = ggn(jacobian(module, x, names)) / sigma**2
    theta = flat(module, names)
    at = la.params.index
    if by == "random":
        assert torch.equal(at, fit(0).params.index)
        assert not torch.equal(at, fit(1).params.index)
        assert at.unique().numel() == k
        assert at.max() < len(theta)
    else:
        score = 1 / (whole.diag() + tau) if by == "variance" else theta.abs()
        assert set(at.tolist()) == set(score.topk(k).indices.tolist())
    exact = whole[at[:, None], at]
    exact = exact.diag().diag() if structure == "diag" else exact
    precision = exact + eye(k, tau)
    assert_same(la.posterior.mean, theta[at], 1e-15)
    assert_same(la.posterior.precision.dense(), precision)
    new = randn(5, 3, seed=3)
    j = jacobian(module, new, names)[..., at]
    assert_same(la.predict(new).function.covariance, covariance(j, precision), 1e-9)
    assert_same(la.predict(new).function.mean, outputs(module, new))
    log_p = torch.distributions.Normal(outputs(module, x), sigma).log_prob(y).sum()
    bracket = torch.linalg.slogdet(precision / tau)[1]
    assert_same(la.log_evidence(), log_p - 0.5 * tau * theta[at].square().sum() - 0.5 * bracket)
    members = torch.stack([torch.cat([w[name].flatten() for name in names]) for w in la.ensemble(3)])
    left_out = torch.ones(len(theta), dtype=torch.bool).index_fill(0, at, False)
    assert torch.equal(members[:, left_out], theta[left_out].expand(3, -1))
    assert (members[:, at] != theta[at]).all()


def test_a_subnetwork_has_its_own_prior():
    module, x, y = net(), randn(10, 3), randn(10, 3, seed=2)
    select = lapwing.subnetwork(5, by="magnitude")
    values = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    la = lapwing.fit(module, (x, y), lapwing.Gaussian(1.0), structure="full", select=select, prior=values)
    at = la.params.index
    assert_same(la.posterior.precision.dense(), ggn(jacobian(module, x))[at[:, None], at] + values.diag())
    by_name = lapwing.fit(
        module, (x, y), lapwing.Gaussian(1.0), structure="full", select=select, prior={"*.weight": 2.0, "*.bias": 3.0}
    )
    each = torch.cat(
        [torch.full((p.numel(),), 2.0 if n.endswith("weight") else 3.0) for n, p in module.named_parameters()]
    )
    assert_same(
        by_name.posterior.precision.dense(), ggn(jacobian(module, x))[at[:, None], at] + each[at].double().diag()
    )


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_kronecker_structures_refuse_single_weights(structure):
    module, x, y = net(), randn(10, 3), randn(10, 3, seed=2)
    with pytest.raises(lapwing.UnsupportedOperation, match=r"single weights.*full"):
        lapwing.fit(module, (x, y), lapwing.Gaussian(1.0), structure=structure, select=lapwing.subnetwork(5))
    with pytest.raises(lapwing.BadData, match="only 51"):
        lapwing.fit(module, (x, y), lapwing.Gaussian(1.0), structure="full", select=lapwing.subnetwork(500))
    with pytest.raises(lapwing.BadData, match="at least 1"):
        lapwing.subnetwork(0)
    with pytest.raises(lapwing.BadData, match="'variance', 'magnitude' or 'random'"):
        lapwing.subnetwork(3, by="size")
