"""KFRA: against a recursion written out with loops, the exact GGN of one datum, and everything it must refuse."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.dense import assert_same, build, ggn, jacobian, outputs, randn, seeded, softmax_hessian
from tests.noise import unit_noise
from torch import Tensor, nn

import lapwing
from lapwing import EKFAC, KFRA, UnsupportedModel, UnsupportedOperation
from lapwing.curvature import resume

SLOPES = {
    "tanh": (nn.Tanh, lambda h: 1 - h.tanh() ** 2),
    "relu": (nn.ReLU, lambda h: (h > 0).to(h)),
    "sigmoid": (nn.Sigmoid, lambda h: h.sigmoid() * (1 - h.sigmoid())),
    "none": (nn.Identity, torch.ones_like),
}


def mlp(
    activation: type[nn.Module] = nn.Tanh, outputs: int = 3, bias: bool = True, sizes: tuple = (4, 6, 5)
) -> nn.Module:
    parts: list[nn.Module] = []
    for a, b in pairwise(sizes):
        parts += [nn.Linear(a, b, bias=bias), activation()]
    return nn.Sequential(*parts, nn.Linear(sizes[-1], outputs, bias=bias))


def data(n: int = 17, outputs: int = 3, likelihood: str = "classification", seed: int = 1) -> tuple[Tensor, Tensor]:
    x = 1.5 * randn(n, 4, seed=seed)
    if likelihood == "classification":
        return x, torch.randint(outputs, (n,), generator=seeded(seed))
    if likelihood == "regression":
        return x, randn(n, outputs, seed=seed + 1)
    y = torch.randint(2 if likelihood == "binary" else 5, (n, outputs), generator=seeded(seed))
    return x, y.double()


def output_curvature(likelihood: str, f: Tensor) -> Tensor:
    """Λ (N, C, C)."""
    if likelihood == "classification":
        return softmax_hessian(f)
    if likelihood == "regression":
        return torch.eye(f.shape[1], dtype=f.dtype).expand(len(f), -1, -1)
    return torch.diag_embed(f.sigmoid() * (1 - f.sigmoid()) if likelihood == "binary" else f.exp())


def recursion(module: nn.Module, name: str, x: Tensor, lam: Tensor, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    """[(B_l, A_l)] by the definition, one datum and one entry at a time."""
    layers, (activation, slope) = linears(module), SLOPES[name]
    inputs, slopes = [[] for _ in layers], [[] for _ in layers]
    for datum in x:
        a = datum
        for k, layer in enumerate(layers):
            inputs[k].append(a if layer.bias is None else torch.cat([a, a.new_ones(1)]))
            h = layer.weight.detach() @ a + (0 if layer.bias is None else layer.bias.detach())
            slopes[k].append(slope(h))
            a = activation()(h)
    mean = lambda terms: sum(w * torch.outer(t, t) for w, t in zip(weights, terms, strict=True)) / weights.sum()  # noqa: E731
    left = sum(w * one for w, one in zip(weights, lam, strict=True))
    found = []
    for k in reversed(range(len(layers))):
        if k < len(layers) - 1:
            w, e = layers[k + 1].weight.detach(), mean(slopes[k])
            size = w.shape[1]
            new = torch.zeros(size, size, dtype=w.dtype)
            for i in range(size):
                for j in range(size):
                    new[i, j] = (w[:, i] @ left @ w[:, j]) * e[i, j]
            left = new
        found.insert(0, (left, mean(inputs[k])))
    return found


def dense(pairs: list[tuple[Tensor, Tensor]], layers: list[nn.Linear]) -> Tensor:
    """The block-diagonal matrix in the flat order of weights, then bias, of each layer."""
    blocks = []
    for (left, right), layer in zip(pairs, layers, strict=True):
        o, i = layer.weight.shape
        block = torch.kron(left, right)
        where = torch.arange(len(block)).reshape(o, -1)
        order = torch.cat([where[:, :i].flatten(), where[:, i:].flatten()])
        blocks.append(block[order][:, order])
    return torch.block_diag(*blocks)


def linears(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear)]


def fit(module: nn.Module, pair: object, likelihood: object = "classification", **options) -> lapwing.Laplace:
    return lapwing.fit(module, pair, unit_noise(likelihood), **{"structure": "kron", "factor": KFRA()} | options)


@pytest.mark.parametrize("likelihood", ["classification", "regression", "binary", "counts"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", list(SLOPES))
def test_recursion_is_the_definition(name: str, bias: bool, likelihood: str) -> None:
    module, (x, y) = build(lambda: mlp(SLOPES[name][0], bias=bias)), data(likelihood=likelihood)
    lam = output_curvature(likelihood, outputs(module, x))
    expected = dense(recursion(module, name, x, lam, torch.ones(len(x)).double()), linears(module))
    la = fit(module, (x, y), likelihood)
    assert_same(la.curvature.dense(), expected)
    j, score = jacobian(module, x), torch.zeros(len(x), 3, dtype=torch.float64)
    if likelihood == "classification":
        score = nn.functional.one_hot(y, 3) - outputs(module, x).softmax(-1)
        assert_same(la.curvature.gradient, torch.einsum("ndp,nd->p", j, score))


def test_weighted_samples_and_n_data() -> None:
    module, (x, y) = build(mlp), data()
    w = torch.rand(len(x), generator=seeded(3)).double() / 40  # less than one datum in all
    expected = recursion(module, "tanh", x, output_curvature("classification", outputs(module, x)), w)
    split = lambda b: (b[0], b[1], b[2])  # noqa: E731
    la = fit(module, [(x[:9], y[:9], w[:9]), (x[9:], y[9:], w[9:])], split=split)
    assert_same(la.curvature.dense(), dense(expected, linears(module)))
    plain = fit(module, (x, y))
    assert_same(fit(module, (x, y), n_data=170).curvature.dense(), 10 * plain.curvature.dense())
    weighted = fit(module, [(x, y, torch.full((len(x),), 3.0))], split=split)
    assert_same(weighted.curvature.dense(), 3 * plain.curvature.dense())


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Softplus, nn.Hardtanh, nn.LeakyReLU])
def test_one_datum_is_exact(activation: type[nn.Module]) -> None:
    """Equal to the blocks of the GGN, whatever the activation, dropout, fixed scaling or reshaping between layers."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)
            self.norm, self.drop, self.act = nn.BatchNorm1d(6, affine=False), nn.Dropout(0.5), activation()

        def forward(self, x: Tensor) -> Tensor:
            h = self.drop(self.act(self.norm(self.a(x)))) * 2 + 1
            return 3 * self.c(torch.relu_(self.b(h.reshape(-1, 2, 3).flatten(1))))

    module = build(Net)
    module.norm.running_mean, module.norm.running_var = randn(6), randn(6, seed=1).square() + 0.5
    x, y = data(1)
    la = fit(module.eval(), (x, y))
    exact, at = ggn(jacobian(module, x), softmax_hessian(outputs(module, x))), 0
    for layer in linears(module):
        part = slice(at, at := at + layer.weight.numel() + layer.bias.numel())
        assert_same(la.curvature.dense()[part, part], exact[part, part])


def test_last_layer_is_that_of_kfac_and_whatever_comes_after_is_exact() -> None:
    """Λ is pulled back to the last selected layer by autograd: for it, and only for it, KFAC's factors result."""
    module = build(lambda: nn.Sequential(*mlp(), nn.Softmax(-1), nn.Linear(3, 4)))
    module[6].requires_grad_(False)
    x, y = data(outputs=4)
    kfra, kfac = fit(module, (x, y)).curvature.dense(), fit(module, (x, y), factor="ggn").curvature.dense()
    last = slice(-18, None)
    assert_same(kfra[last, last], kfac[last, last])
    assert (kfra - kfac).norm() > 1e-3 * kfac.norm()


def test_does_not_depend_on_how_data_are_cut() -> None:
    module, (x, y) = build(mlp), data(23)
    whole = fit(module, (x, y))
    cuts = [[23 // 2, 12], [1] * 23, [3, 20]]
    for cut in cuts:
        parts = fit(module, list(zip(x.split(cut), y.split(cut), strict=True)))
        assert_same(parts.curvature.dense(), whole.curvature.dense())
        assert_same(parts.log_evidence(), whole.log_evidence())
    tiny = fit(module, (x, y), memory=40_000)  # pieces of a batch, a few directions at a time
    assert_same(tiny.curvature.dense(), whole.curvature.dense())


def test_update_is_a_fit_on_all() -> None:
    module, (x, y) = build(mlp), data(23)
    la = fit(module, (x[:9], y[:9]), n_data=18).update((x[9:], y[9:]))
    expected = fit(module, (x, y), n_data=32)
    assert_same(la.curvature.dense(), expected.curvature.dense())


def test_calls_written_as_functions_and_single_outputs() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Parameter(torch.randn(5, 1))
            self.first, self.shift = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.addmm(self.shift, x, self.first).tanh() @ self.second).squeeze(-1)

    module, x = build(Functional), data(1)[0]
    la = fit(module, (x, randn(1)), lapwing.Gaussian(1.0))
    exact = ggn(jacobian(module, x))
    exact[:5, 5:] = exact[5:, :5] = 0
    assert_same(la.curvature.dense(), exact)


def test_float32_noise_temperature_and_front_door() -> None:
    module, (x, y) = build(mlp, dtype=torch.float32), data(likelihood="regression")
    la = fit(module, (x.float(), y.float()), lapwing.Gaussian(noise=0.5), factor="kfra", structure="auto", prior=2.0)
    assert "kron, factor KFRA" in la.summary()
    assert "recursion" in la.summary()
    lam = output_curvature("regression", y)
    pairs = recursion(module.double(), "tanh", x, lam, torch.ones(len(x)).double())
    expected = dense(pairs, linears(module))
    eye = torch.eye(len(expected)).double()
    assert_same(la.posterior.precision.dense(), 4 * expected + 2 * eye, 1e-4)
    tempered = la.replace(temperature=0.25, prior=1.0)
    assert_same(tempered.posterior.precision.dense(), expected + eye, 1e-4)


def test_half_precision() -> None:
    module, (x, y) = build(mlp, dtype=torch.bfloat16), data()
    found = fit(module, (x.bfloat16(), y)).curvature.dense()
    assert found.dtype == torch.float32
    assert_same(found, fit(module.double(), (x.bfloat16().double(), y)).curvature.dense(), 5e-2)


def test_evidence_and_its_gradient_are_those_of_the_dense_matrix() -> None:
    module, (x, y) = build(mlp), data()
    log_tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    la = fit(module, (x, y))
    value = la.replace(prior=log_tau.exp()).log_evidence()
    (slope,) = torch.autograd.grad(value, log_tau)
    h, theta = la.curvature.dense(), la.posterior.mean
    tau = log_tau.exp()
    size = len(theta)
    expected = (
        la.log_likelihood
        - 0.5 * tau * theta @ theta
        + 0.5 * size * log_tau
        - 0.5 * torch.logdet(h + tau * torch.eye(size).double())
    )
    (expected_slope,) = torch.autograd.grad(expected, log_tau)
    assert_same(value.detach(), expected.detach())
    assert_same(slope, expected_slope)


def test_tunes_predicts_and_round_trips(tmp_path: Path) -> None:
    module, (x, y) = build(mlp), data(130)
    la = fit(module, (x[:100], y[:100])).tune((x[100:], y[100:]))
    assert torch.isfinite(la.predict(x).probs).all()
    assert_same(la.tune(method="evidence").predict(x).probs.sum(-1), torch.ones(130).double())
    la.save(tmp_path / "a.lapwing")
    back = lapwing.load(tmp_path / "a.lapwing", module)
    assert isinstance(back.curvature.factor, KFRA)
    assert torch.equal(back.predict(x).probs, la.predict(x).probs)
    again = [one.update((x[100:], y[100:])).curvature.dense() for one in (la, back)]
    assert torch.equal(*again)


def test_goes_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "EVERY", 2)
    monkeypatch.setattr(resume, "SECONDS", 0.0)
    module, (x, y) = build(mlp), data(40)
    batches = list(zip(x.split(4), y.split(4), strict=True))

    class Stops(list):
        def __iter__(self):
            yield from batches[:7]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(module, Stops(batches), checkpoint=tmp_path)
    assert list(tmp_path.iterdir())
    resumed = fit(module, batches, checkpoint=tmp_path)
    assert torch.equal(resumed.curvature.dense(), fit(module, batches, checkpoint=tmp_path / "b").curvature.dense())


def test_a_basis_for_ekfac() -> None:
    module, (x, y) = build(mlp), data(30)
    la = lapwing.fit(module, (x, y), "classification", structure=EKFAC(basis=KFRA()))
    exact, kfra = ggn(jacobian(module, x), softmax_hessian(outputs(module, x))), fit(module, (x, y)).curvature.matrix
    assert_same(la.curvature.dense().trace(), exact.trace())
    for ours, theirs in zip(la.curvature.matrix.blocks, kfra.blocks, strict=True):
        turned = ours.left[0].T @ theirs.left[0] @ ours.left[0]
        assert_same(torch.diag(turned.diagonal()), turned)


@pytest.mark.parametrize(
    "structure", ["diag", "full", "blockdiag", "lowrank", "functional", "nystrom", "ekfac", "valla"]
)
def test_other_structures_are_refused(structure: str) -> None:
    with pytest.raises(UnsupportedOperation, match="KFRA.*kron" if structure != "nystrom" else "ggn"):
        fit(build(mlp), data(), structure=structure)


class Wired(nn.Module):
    """Two or three linear layers, wired by a function."""

    def __init__(self, wire, width: int = 4, second: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, width), nn.Linear(second, 4), nn.Linear(4, 3)
        self.wire = wire

    def forward(self, x: Tensor) -> Tensor:
        return self.wire(self, x)


def mix_some(h: Tensor) -> Tensor:
    """Elementwise for most samples only."""
    return torch.where(h[:, :1] > 1.3, h.flip(1), h).tanh()


REFUSED = {
    "tied": (lambda m, x: m.c(m.b(m.b(m.a(x)).tanh()).tanh()), "b.bias is used 2 times"),
    "to the outputs": (lambda m, x: m.c(m.b(h := m.a(x)).tanh()) + h[:, :3], "outputs come from a.bias"),
    "softmax": (
        lambda m, x: m.c(m.b(m.a(x).softmax(-1)).tanh()),
        "between a.weight, a.bias and b.weight, b.bias mixes",
    ),
    "norm": (lambda m, x: m.c(nn.functional.layer_norm(m.b(m.a(x).relu()), (4,))), "between b.weight.* mixes units"),
    "permuted": (lambda m, x: m.c(m.b(m.a(x).tanh().flip(1))), "mixes units"),
    "rolled linear": (lambda m, x: m.c(m.b(m.a(x).cumsum(1))), "mixes units"),
    "some samples": (lambda m, x: m.c(m.b(mix_some(m.a(x)))), "mixes units"),
    "with the inputs": (lambda m, x: m.c(m.b(torch.cat([x[:, :2], m.a(x)[:, :2].tanh()], 1))), "mixes units"),
    "detached": (lambda m, x: m.c(m.b(m.a(x).detach().tanh()).tanh()), "no selected layer|a.weight"),
    "positions": (lambda m, x: m.c(m.b(m.a(x[:, None].expand(-1, 2, -1))).tanh()).sum(1), "2 positions"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_no_chain_is_refused(name: str) -> None:
    wire, message = REFUSED[name]
    module = build(lambda: Wired(wire))
    with pytest.raises(UnsupportedModel, match=message) as found:
        fit(module, data(60))
    assert "factor='ggn'" in str(found.value)
    assert fit(module, data(60), factor="ggn").posterior is not None  # which serves it


def test_mixing_is_noticed_in_whichever_batch() -> None:
    module, (x, y) = build(lambda: Wired(REFUSED["some samples"][0])), data(200)
    with torch.no_grad():
        order = (module.a(x)[:, 0] > 1.3).long().argsort(stable=True)
    assert 0 < int((module.a(x)[:, 0] > 1.3).sum()) < 50
    x, y = x[order], y[order]
    fit(module, (x[:100], y[:100]))
    with pytest.raises(UnsupportedModel, match="mixes units"):
        fit(module, list(zip(x.split(50), y.split(50), strict=True)))


MODULES = {
    "grouped convolution": (
        (nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 2, groups=2), nn.Flatten(), nn.Linear(2, 3)),
        "parameter of conv1d",
    ),
    "transposed convolution": (
        (nn.Unflatten(1, (1, 4)), nn.ConvTranspose1d(1, 2, 2), nn.Flatten(), nn.Linear(10, 3)),
        "parameter of conv_transpose1d",
    ),
    "overlapping pool": (
        (nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 1), nn.AvgPool1d(2, 1), nn.Conv1d(3, 3, 3), nn.Flatten()),
        "mixes units",
    ),
    "circular padding": (
        (
            nn.Unflatten(1, (1, 4)),
            nn.Conv1d(1, 3, 1),
            nn.Conv1d(3, 2, 3, padding=1, padding_mode="circular"),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        "mixes units",
    ),
    "layer norm": ((nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)), "parameter of layer_norm"),
    "batch norm": ((nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), "parameter of batch_norm"),
    "prelu": ((nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3)), "parameter of prelu"),
    "tokens": ((nn.Unflatten(1, (2, 2)), nn.Linear(2, 3)), "positions"),
    "flattened after a pool": (
        (nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 1), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(4, 3)),
        "mixes units",
    ),
    "pooled": (
        (nn.Linear(4, 6), nn.Unflatten(1, (1, 6)), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(3, 3)),
        "mixes units",
    ),
}


@pytest.mark.parametrize("name", list(MODULES))
def test_other_layers_are_refused(name: str) -> None:
    parts, message = MODULES[name]
    x, y = data()
    with pytest.raises(UnsupportedModel, match=message):
        fit(nn.Sequential(*parts).double(), (x, torch.stack([y, y], 1) if name == "tokens" else y))


def test_a_frozen_layer_between_selected_ones_is_refused_and_one_before_them_is_not() -> None:
    module, pair = build(mlp), data()
    with pytest.raises(UnsupportedModel, match="was not selected"):
        fit(module, pair, select=["0.weight", "0.bias", "4.weight", "4.bias"])
    with pytest.raises(UnsupportedModel, match=r"2.bias is the parameter of linear"):
        fit(module, pair, select=["2.bias", "4.weight"])
    whole, upper = (fit(module, pair, select=s).curvature.dense() for s in ("all", ["2.*", "4.*"]))
    assert_same(upper, whole[30:, 30:])
    assert_same(fit(module, pair, select="last_layer").curvature.dense(), whole[-18:, -18:])


def test_single_weights_and_nonfinite_slopes_are_refused() -> None:
    with pytest.raises(UnsupportedOperation, match="single weights"):
        fit(build(mlp), data(), select=lapwing.subnetwork(5, by="magnitude"))
    module = build(lambda: nn.Sequential(nn.Linear(4, 4, bias=False), Root(), nn.Linear(4, 3)))
    x, y = data(12)
    x[9] = 0
    with pytest.raises(lapwing.BadData, match=r"batch [23].*0.weight is not finite"):
        fit(module, list(zip(x.split(4), y.split(4), strict=True)))


class Root(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.abs().sqrt()


def test_the_self_check_compares_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the recursion wrong, the fit would say so."""
    from lapwing.extras.kfra import RecursiveSums

    right = RecursiveSums._mean
    monkeypatch.setattr(RecursiveSums, "_mean", lambda self, name: right(self, name) * (1.1 if "slopes" in name else 1))
    with pytest.raises(UnsupportedModel, match="for one sample the recursion gives a matrix of norm"):
        fit(build(mlp), data())


def test_the_module_is_given_back_as_it_was() -> None:
    module, pair = build(mlp).train(), data()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    fit(module, pair)
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
