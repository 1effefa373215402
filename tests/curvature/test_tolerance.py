"""Directions that are left out, and samples that are brought together: against dense algebra and plain autograd."""

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import GGN, BadData
from lapwing.curvature import onepass
from lapwing.curvature.factor import Directions
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.model.calls import concatenate

CLASSES = 5


def network(scale: float = 1.0) -> nn.Module:
    """Float64; a large scale makes it confident about most inputs and unsure about a few."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, stride=2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, CLASSES)
    ).double()
    net[1].running_mean.normal_()
    net[4].weight.data *= scale
    return net.eval()


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 6, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def root(f: Tensor, y: Tensor) -> Tensor:
    """Columns of the Cholesky factor of diag(p) − ppᵀ by torch: the target first, other classes by decreasing p."""
    p = f.softmax(-1)
    columns = []
    for row, own in zip(p, y, strict=True):
        o = torch.tensor([int(own), *(k for k in row.argsort(descending=True).tolist() if k != own)])
        sorted_p = row[o]
        information = torch.diag(sorted_p) - sorted_p[:, None] * sorted_p[None, :]
        corner = torch.linalg.cholesky(information[:-1, :-1])
        last = torch.linalg.solve_triangular(corner, information[:-1, -1:], upper=False).T
        full = torch.cat([corner, last])
        columns.append(full[o.argsort()])
    return torch.stack(columns)


def brute_force(net: nn.Module, x: Tensor, y: Tensor, tolerance: float, size: int) -> Tensor:
    """Σ Jᵀ s sᵀ J over the columns that are kept, batch by batch; the first of a sample along with any other."""
    params = dict(net.named_parameters())
    total = torch.zeros(1)
    for start in range(0, len(x), size):
        part = x[start : start + size]
        f = net(part)
        s = root(f.detach(), y[start : start + size])
        sizes = s.square().sum(1).flatten()
        ascending = sizes.sort().values
        kept, dropped = sizes > 0, 0.0
        for value in ascending:
            dropped += float(value)
            if dropped > tolerance * float(sizes.sum()):
                kept = sizes >= value
                break
        kept = kept.reshape(len(part), -1)
        for n in range(len(part)):
            for column in range(CLASSES - 1):
                if kept[n, column] or (column == 0 and kept[n].any()):
                    grads = torch.autograd.grad(f[n] @ s[n, :, column], list(params.values()), retain_graph=True)
                    row = torch.cat([g.flatten() for g in grads])
                    total = total + row[:, None] * row[None, :]
    return total


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What every batch was told: True where its samples were brought together with others."""
    answers: list[bool] = []
    plain = onepass.Regrouped.admit

    def admit(self: onepass.Regrouped, *args: object) -> bool:
        answers.append(plain(self, *args))  # type: ignore[arg-type]
        return answers[-1]

    monkeypatch.setattr(onepass.Regrouped, "admit", admit)
    return answers


@pytest.mark.parametrize("tolerance", [0.0, 1e-3, 0.05, 0.5])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_kept_directions(tolerance: float, scale: float) -> None:
    net, (x, y) = network(scale), data()
    batches = [(x[:16], y[:16]), (x[16:32], y[16:32]), (x[32:], y[32:])]
    la = lapwing.fit(net, batches, "classification", structure="full", factor=GGN(tolerance=tolerance))
    truth = brute_force(net, x, y, tolerance, 16)
    assert torch.allclose(la.curvature.dense(), truth, rtol=1e-10, atol=1e-12 * float(truth.abs().max()))


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "blockdiag", "full", "lowrank", "functional"])
def test_bringing_samples_together_changes_nothing(structure: str, admitted: list[bool]) -> None:
    net, (x, y) = network(300.0), data()
    prior = 1.0
    split = lapwing.fit(net, [(x[k::4], y[k::4]) for k in range(4)], "classification", structure=structure, prior=prior)
    assert any(admitted), "no batch was regrouped: the test tests nothing"
    regrouped = len(admitted)
    alone = lapwing.fit(net, [(x[k : k + 1], y[k : k + 1]) for k in range(len(x))], "classification",
                        structure=structure, prior=prior, factor=GGN(tolerance=0.0))  # fmt: skip
    assert not any(admitted[regrouped:])
    truth = alone.curvature.dense()
    assert torch.allclose(split.curvature.dense(), truth, rtol=1e-8, atol=1e-12 * float(truth.abs().max()))
    assert torch.allclose(split.log_evidence(), alone.log_evidence(), rtol=1e-10)
    assert torch.allclose(split.log_evidence(at="linear-mode"), alone.log_evidence(at="linear-mode"), rtol=1e-8)
    assert split.n_data == alone.n_data == len(x)


def test_gradient_of_the_log_likelihood_is_autograds(admitted: list[bool]) -> None:
    net, (x, y) = network(300.0), data()
    la = lapwing.fit(net, [(x[:20], y[:20]), (x[20:], y[20:])], "classification", structure="diag")
    assert any(admitted)
    loss = -nn.functional.cross_entropy(net(x), y, reduction="sum")
    truth = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
    assert torch.allclose(la.curvature.gradient, truth, rtol=1e-10, atol=1e-12)


def test_weights_count_in_what_is_dropped() -> None:
    net, (x, y) = network(3.0), data()
    weights = torch.linspace(0, 2, len(x), dtype=torch.float64)
    split = lambda batch: (batch[0], batch[1], batch[2])  # noqa: E731
    parts = [(x[a : a + 10], y[a : a + 10], weights[a : a + 10]) for a in range(0, 40, 10)]
    la = lapwing.fit(net, parts, "classification", structure="full", split=split)
    single = [(x[k : k + 1], y[k : k + 1], weights[k : k + 1]) for k in range(len(x))]
    truth = lapwing.fit(net, single, "classification", structure="full", split=split, factor=GGN(tolerance=0.0))
    assert torch.allclose(la.curvature.dense(), truth.curvature.dense(), rtol=1e-10, atol=1e-12)


def test_tokens_with_ignored_positions(admitted: list[bool]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    tokens = torch.randint(11, (12, 7))
    targets = torch.randint(CLASSES, (12, 7))
    for row in range(12):
        targets[row, : row // 2] = -100  # from nothing ignored to five of seven
    la = lapwing.fit(net, [(tokens[:6], targets[:6]), (tokens[6:], targets[6:])], "classification", structure="full")
    params = list(net.parameters())
    f = net(tokens)
    truth = torch.zeros(1)
    for n, t in (targets != -100).nonzero().tolist():
        s = root(f[n, t].detach()[None], f[n, t].argmax()[None])[0]
        for column in s.T:
            grads = torch.autograd.grad(f[n, t] @ column, params, retain_graph=True)
            row = torch.cat([g.flatten() for g in grads])
            truth = truth + row[:, None] * row[None, :]
    assert torch.allclose(la.curvature.dense(), truth, rtol=1e-9, atol=1e-12)


def test_equal_directions_are_kept_all() -> None:
    f = torch.randn(6, 3, dtype=torch.float64)
    chosen = GGN(tolerance=0.5).choose(Gaussian(), f, torch.zeros(6, 3))
    assert chosen.needed.tolist() == [3] * 6
    assert chosen.dropped == 0


def test_share_that_is_dropped_is_below_the_tolerance() -> None:
    f = 10 * torch.randn(200, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(200, dtype=torch.long)
    trace = float((f.softmax(-1) * (1 - f.softmax(-1))).sum())
    counts = []
    for tolerance in (1e-4, 1e-2, 0.3):
        chosen = GGN(tolerance=tolerance).choose(Categorical(), f, y)
        assert chosen.total == pytest.approx(trace)
        assert 0 < chosen.dropped <= tolerance * trace
        kept = sum(float(s.square().sum()) for s in chosen.between(0, chosen.count))
        assert kept + chosen.dropped == pytest.approx(trace)
        counts.append(int(chosen.needed.sum()))
    assert counts == sorted(counts, reverse=True)


def test_summary_says_what_was_dropped() -> None:
    net, (x, y) = network(3.0), data()
    la = lapwing.fit(net, (x, y), "classification", structure="diag", factor=GGN(tolerance=0.1))
    assert "leaves out" in la.summary()
    exact = lapwing.fit(net, (x, y), "classification", structure="diag")
    assert "leaves out" not in exact.summary()


@pytest.mark.parametrize("tolerance", [-1e-3, 1.0, float("nan")])
def test_senseless_tolerances(tolerance: float) -> None:
    with pytest.raises(BadData, match="tolerance"):
        GGN(tolerance=tolerance)


@pytest.mark.parametrize("waiting", [2**27, 20_000, 0])
def test_groups_keep_samples_and_directions_together(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every (sample, direction) comes out exactly once, whatever the order."""
    monkeypatch.setattr(onepass, "WAITING", waiting)
    groups = onepass.Regrouped()
    generator = torch.Generator().manual_seed(0)
    came, out = [], []
    for _ in range(7):
        n = 5
        needed = torch.randint(0, 4, (n,), generator=generator)
        needed[0] = 12  # one sample that needs much more, so that the batch is worth splitting
        columns = torch.randn(n, 1, 12, 12, dtype=torch.float64, generator=generator)
        order = torch.arange(12).expand(n, 12)
        x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
        chosen = Directions(columns, needed, (), order)
        assert groups.admit({"x": x, "y": (x,)}, chosen, None, GGN(tolerance=0.0))
        came += [(float(x[k, 0]), float(columns[k, 0, :, c].sum())) for k in range(n) for c in range(needed[k])]
        out += list(groups.full())
        assert sum(part.bytes for parts in groups.waiting.values() for part in parts) <= waiting
    out += list(groups.rest())
    seen = []
    for group in out:
        assert torch.equal(group.inputs["x"], group.inputs["y"][0])
        for s in group.directions.between(0, group.directions.count):
            seen += [(float(a), float(b)) for a, b in zip(group.inputs["x"][:, 0], s.sum(-1), strict=True) if b != 0]
    assert sorted(seen) == sorted(came)


def test_batches_without_any_curvature() -> None:
    """Saturated in float64: all of Λ underflows to zero, and the scores of wrong labels do not."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    net[1].weight.data.zero_()
    net[1].bias.data = torch.tensor([0.0, -2e3, -2e3], dtype=torch.float64)
    x, y = torch.ones(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 0, 1])
    for structure in ("diag", "kron", "ekfac", "full"):
        la = lapwing.fit(net, [(x[:3], y[:3]), (x[3:], y[3:])], "classification", structure=structure)
        assert float(la.curvature.dense().abs().max()) == 0
        assert torch.equal(la.curvature.gradient[-3:], torch.tensor([-3.0, 2.0, 1.0], dtype=torch.float64))


def test_concatenate_keeps_the_build() -> None:
    pieces = [{"a": torch.full((k, 2), float(k)), "b": [torch.full((k,), float(k))], "c": None} for k in (1, 3)]
    whole = concatenate(pieces)
    assert whole["a"].shape == (4, 2)
    assert whole["b"][0].tolist() == [1, 3, 3, 3]
    assert whole["c"] is None


def test_directions_of_tokens_are_the_columns_that_count() -> None:
    """Σ s sᵀ over the directions is Λ of the positions that count; positions ignored by all samples have none."""
    generator = torch.Generator().manual_seed(2)
    f = torch.randn(3, 4, CLASSES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (3, 4), generator=generator)
    y[:, 1], y[0, 2] = -100, -100
    found = torch.stack(list(GGN().directions(Categorical(), f, y))).flatten(2)  # (r, n, positions · classes)
    assert len(found) == 3 * (CLASSES - 1)

    def loss(z: Tensor) -> Tensor:  # torch ignores −100 as well
        return nn.functional.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum")

    exact = torch.autograd.functional.hessian(loss, f).reshape(3, 4 * CLASSES, 3, 4 * CLASSES)
    for n in range(3):
        torch.testing.assert_close(found[:, n].T @ found[:, n], exact[n, :, n], rtol=1e-10, atol=1e-12)
