"""Pruning: scores against the quadratic, smaller networks against masked ones, idle inputs found."""

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.errors import BadData, UnsupportedModel, UnsupportedOperation


def images(n: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.randint(3, (n,), generator=generator)


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Sigmoid(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))


def conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Sigmoid(), nn.MaxPool2d(2)),
        nn.Conv2d(5, 6, 3, bias=False), nn.GELU(), nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


@pytest.mark.parametrize("make", [dense, conv])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.6, 0.95])
def test_the_smaller_network_computes_what_the_masked_one_does(make: type, sparsity: float) -> None:
    torch.manual_seed(0)
    model, (x, y) = make().eval(), images()
    la = lapwing.fit(model, (x, y), "classification", structure="kron")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    pruned = lapwing.prune(la, sparsity, structured=True)
    with torch.no_grad():
        torch.testing.assert_close(pruned.module(x), pruned.masked(x), rtol=1e-5, atol=1e-6)
    gone = sum(len(units) for units in pruned.removed.values())
    layers = [m for m in pruned.module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    old = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert sum(a.weight.shape[0] - b.weight.shape[0] for a, b in zip(old, layers, strict=True)) == gone
    assert min(m.weight.shape[0] for m in layers) >= 1
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert 0 <= pruned.sparsity < 1
    assert (gone > 0) == (sparsity > 0)
    again = lapwing.fit(pruned.module, (x, y), "classification", structure="kron")
    assert again.params.size == sum(p.numel() for p in pruned.module.parameters())


def test_scores_are_what_the_quadratic_loses() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(30, 3).double(), torch.randint(2, (30,))
    la = lapwing.fit(model, (x, y), "classification", structure="full", prior=0.5)
    h, theta = la.posterior.precision.dense(), la.params.flat
    found = lapwing.prune(la, 0.5).scores["0.weight"].reshape(-1)
    for p in range(12):
        step = torch.zeros_like(theta)
        step[p] = -theta[p]
        assert found[p].item() == pytest.approx((step @ h @ step).item())
    signal = lapwing.prune(la, 0.5, by="signal").scores["0.weight"].reshape(-1)
    for p in range(12):  # the others follow: minimize ½dᵀHd subject to d_p = −θ_p
        others = [k for k in range(len(theta)) if k != p]
        step = torch.zeros_like(theta)
        step[p] = -theta[p]
        step[others] = torch.linalg.solve(h[others][:, others], h[others, p] * theta[p])
        assert signal[p].item() == pytest.approx((step @ h @ step).item())


@pytest.mark.parametrize("by", ["posterior", "signal", "magnitude", "random"])
def test_exactly_so_many_weights_are_zero_and_the_lowest(by: str) -> None:
    torch.manual_seed(0)
    model, data = dense().eval(), images()
    la = lapwing.fit(model, data, "classification", structure="diag")
    pruned = lapwing.prune(la, 0.7, by=by, generator=torch.Generator().manual_seed(0))
    weights = [(n, p) for n, p in pruned.module.named_parameters() if p.ndim > 1]
    total = sum(p.numel() for _, p in weights)
    assert sum(int((p == 0).sum()) for _, p in weights) == round(0.7 * total)
    gone = torch.cat([pruned.scores[n][~pruned.masks[n]] for n, _ in weights])
    kept = torch.cat([pruned.scores[n][pruned.masks[n]] for n, _ in weights])
    assert gone.max() <= kept.min()
    with torch.no_grad():
        pruned.module[1].weight.add_(1.0)
    pruned.apply(pruned.module)
    assert bool((pruned.module[1].weight[~pruned.masks["1.weight"]] == 0).all())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x + self.a(x).tanh())


def test_what_is_no_stack_is_refused_with_the_module() -> None:
    x, y = torch.randn(8, 4), torch.randint(2, (8,))
    with pytest.raises(UnsupportedModel, match="Residual"):
        lapwing.prune(lapwing.fit(Residual(), (x, y), "classification"), 0.5, structured=True)
    normed = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    with pytest.raises(UnsupportedModel, match="LayerNorm"):
        lapwing.prune(lapwing.fit(normed, (x, y), "classification"), 0.5, structured=True)
    la = lapwing.fit(nn.Sequential(nn.Linear(4, 2)), (x, y), "classification")
    with pytest.raises(UnsupportedModel, match="at least two"):
        lapwing.prune(la, 0.5, structured=True)
    with pytest.raises(UnsupportedOperation, match="by is one of"):
        lapwing.prune(la, 0.5, by="luck")
    with pytest.raises(BadData, match="sparsity"):
        lapwing.prune(la, 1.0)


def test_relevance_is_the_effective_number_of_each_column() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(20, 3).double() * torch.tensor([1.0, 1e-8, 0.3]).double(), torch.randint(2, (20,))
    la = lapwing.fit(model, (x, y), "classification", structure="full", prior=0.5)
    ggn, prior = la.curvature.dense(), 0.5 * torch.eye(8).double()
    share = torch.linalg.solve(ggn + prior, ggn).diagonal()[:6].reshape(2, 3)
    torch.testing.assert_close(lapwing.relevance(la), share.sum(0))
    assert lapwing.relevance(la)[1] < 1e-10
    with pytest.raises(BadData, match="columns"):
        lapwing.relevance(la, "bias")


def test_inputs_that_carry_nothing_are_found() -> None:
    torch.manual_seed(0)
    x = torch.randn(150, 6).double()
    y = x[:, :1] * 1.5 + (2 * x[:, 1:2]).sin() + 0.1 * torch.randn(150, 1).double()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    trained = lapwing.train(
        model, (x, y), "regression", epochs=600, batch_size=150, prior="input", structure="diag", every=20, burnin=100,
        keep="last", optimizer=lambda p: torch.optim.Adam(p, 3e-2),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 600),
    )  # fmt: skip
    found = lapwing.relevance(trained.laplace)  # of 8 weights each
    assert found[:2].min() > 7
    assert found[2:].max() < 1.5


def test_the_share_of_weights_that_are_gone() -> None:
    torch.manual_seed(0)
    model, (x, y) = dense(), images()
    la = lapwing.fit(model, (x, y), "classification", structure="diag")
    pruned = lapwing.prune(la, 0.25, by="magnitude")
    matrices = [p for p in pruned.module.parameters() if p.ndim > 1]  # biases are not pruned, but they count
    zeros, size = sum(int((p == 0).sum()) for p in matrices), sum(p.numel() for p in matrices)
    assert zeros == pytest.approx(0.25 * size, abs=1)
    assert pruned.sparsity == pytest.approx(zeros / sum(p.numel() for p in model.parameters()))


def test_what_cannot_be_pruned_is_refused() -> None:
    torch.manual_seed(0)
    model, (x, y) = dense(), images()
    single = lapwing.fit(model, (x, y), "classification", structure="full", select=lapwing.subnetwork(5))
    with pytest.raises(UnsupportedOperation, match="over single weights"):
        lapwing.prune(single, 0.5)
    biases = lapwing.fit(model, (x, y), "classification", structure="diag", select=["*.bias"])
    with pytest.raises(UnsupportedOperation, match="there is nothing to prune"):
        lapwing.prune(biases, 0.5)
    last = lapwing.fit(model, (x, y), "classification", structure="diag", select="last_layer")
    with pytest.raises(UnsupportedOperation, match="nothing to take units from"):
        lapwing.prune(last, 0.5, structured=True)
    grouped = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3))
    la = lapwing.fit(grouped, (x, y), "classification", structure="diag")
    with pytest.raises(UnsupportedModel, match="has groups or a padding mode"):
        lapwing.prune(la, 0.5, structured=True)
