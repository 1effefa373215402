"""A distilled predictor: exact where its form is, near its teacher elsewhere, honest about the distance, and apart."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tests import dense
from torch import Tensor, nn

import lapwing
from lapwing import metrics
from lapwing.errors import BadData, UnsupportedModel, UnsupportedOperation
from lapwing.predictive.distilled import perturbed
from lapwing.predictive.distilledlayer import EnergyNetwork, quadratic_weights

TASKS = {
    "classification": (3, lambda f: f.argmax(-1)),
    "two classes": (2, lambda f: f.argmax(-1)),
    "regression": (2, lambda f: f + 0.1 * dense.randn(len(f), 2, dtype=f.dtype)),
    "binary": (1, lambda f: (f[:, 0] > 0).to(f)),
    "labels": (3, lambda f: (f > 0).to(f)),
    "counts": (1, lambda f: f.abs().round()),
}
LIKELIHOODS = {"two classes": "classification", "labels": "binary"}


class Net(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv, self.inner, self.last = nn.Conv2d(1, 3, 3), nn.Linear(48, 9), nn.Linear(9, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.conv(x).relu().flatten(1)).tanh())


def fitted(task: str = "classification", dtype: torch.dtype = torch.float32) -> tuple[lapwing.Laplace, Tensor]:
    outputs, targets = TASKS[task]
    net = dense.build(lambda: Net(outputs), dtype=dtype)
    x = dense.randn(120, 1, 6, 6, dtype=dtype)
    data = (x, targets(dense.outputs(dense.build(lambda: Net(outputs), 1, dtype), x)))
    return lapwing.fit(net, data, LIKELIHOODS.get(task, task), structure="kron", prior=5.0, progress=False), x


def centered_diagonal(covariance: Tensor) -> Tensor:
    """The variances of the outputs minus their average."""
    c = covariance.shape[-1]
    center = torch.eye(c, dtype=covariance.dtype) - 1 / c
    return (center @ covariance @ center).diagonal(dim1=-2, dim2=-1)


def test_what_all_logits_share_does_not_drown_the_rest() -> None:
    """Under a very wide prior the average of the logits varies 1e6 times as much as their differences."""
    net, x = dense.build(lambda: nn.Linear(4, 3)), dense.randn(300, 4)
    data = (x, dense.outputs(dense.build(lambda: nn.Linear(4, 3), 1), x).argmax(-1))
    wide = lapwing.fit(net, data, "classification", structure="full", prior=1e-7, progress=False)
    exact = wide.predict(x).function.covariance
    assert float(exact.mean((1, 2)).median() / centered_diagonal(exact).median()) > 1e5
    narrow = lapwing.fit(
        net.float(), (x.float(), data[1]), "classification", structure="full", prior=1e-7, progress=False
    )
    fast = narrow.distill(x.float())
    ratio = centered_diagonal(fast.predict(x.float()).function.covariance).double() / centered_diagonal(exact)
    assert float(ratio.log().square().mean().sqrt()) < 0.5


def test_variances_of_a_linear_model_are_exact_also_far_away() -> None:
    """Under a diagonal posterior, Var(wᵀx + b) = Σ v_i x_i² + v_b is a quadratic form in the energies."""
    x, w = dense.randn(400, 4), torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    x = x * torch.tensor([1.0, 3.0, 0.3, 1.0], dtype=torch.float64)
    net = dense.build(lambda: nn.Linear(4, 1))
    la = lapwing.fit(net, (x, (x @ w)[:, None]), lapwing.Gaussian(0.5), structure="diag", prior=2.0, progress=False)
    fast = la.distill(x, epochs=0)
    new = 50 * dense.randn(30, 4, seed=9)
    new = torch.cat([new, torch.eye(4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)])
    precision = torch.cat([x.square().sum(0), torch.tensor([400.0], dtype=torch.float64)]) / 0.25 + 2.0
    exact = torch.cat([new, torch.ones(len(new), 1, dtype=torch.float64)], -1).square() @ (1 / precision)
    found = fast.predict(new)
    torch.testing.assert_close(found.function.variance[:, 0], exact, rtol=0.05, atol=0.0)
    torch.testing.assert_close(found.function.mean, dense.outputs(net, new))
    torch.testing.assert_close(found.variance[:, 0], exact + 0.25, rtol=0.05, atol=0.0)


def test_energies_are_mean_squares_of_what_enters_the_layers() -> None:
    net = dense.build(lambda: Net(3))
    x = dense.randn(6, 1, 6, 6)
    f, z = EnergyNetwork(net, lambda raw: raw, x)(x)
    with torch.no_grad():
        flat = net.conv(x).relu().flatten(1)
        inner = net.inner(flat).tanh()
    parts = [x.square().mean((2, 3)), flat.square(), inner.square(), torch.ones(6, 1, dtype=x.dtype)]
    torch.testing.assert_close(z, torch.cat(parts, -1))
    assert torch.equal(f, dense.outputs(net, x))
    assert not net.conv._forward_pre_hooks


def test_weights_of_a_quadratic_form_are_found_again() -> None:
    z = dense.randn(500, 6).square()
    z[:, 5] = 0.0  # never seen
    true = torch.tensor([[1.0, 0.0, 3.0, 0.1, 1.0, 0.0], [0.0, 2.0, 0.0, 1.0, 10.0, 0.0]], dtype=torch.float64)
    found = quadratic_weights(z, z @ true.mT, (3, 2))
    torch.testing.assert_close((z @ found.mT), z @ true.mT, rtol=0.15, atol=0.0)
    assert bool((found >= 0).all())
    found = quadratic_weights(z[:, [0, 1, 5, 2, 3]], z[:, [0, 1, 2, 3]] @ true[:, [0, 1, 2, 3]].mT, (3, 1))
    torch.testing.assert_close(found[:, 2], found[:, :2].mean(-1))  # the unseen one, that of its layer


@pytest.mark.parametrize("task", TASKS)
def test_it_is_near_its_teacher_and_says_how_near(task: str) -> None:
    la, x = fitted(task)
    far = 4 * dense.randn(40, 1, 6, 6, seed=3, dtype=x.dtype)
    fast = la.distill(x, ood={"far": far})
    held = x[96:]  # the last fifth of the batch
    theirs, ours, distance = la.predict(held), fast.predict(held), fast.distances["held out"]
    torch.testing.assert_close(ours.function.mean, theirs.function.mean)
    classes = task in ("classification", "two classes")
    spread = [centered_diagonal(p.function.covariance) if classes else p.function.variance for p in (ours, theirs)]
    ratio = (spread[0] / spread[1]).log() / 2
    assert distance.items == 24
    assert distance.spread == pytest.approx(ratio.square().mean().sqrt().item(), rel=1e-3)
    assert distance.spread < 0.5
    assert distance.epistemic == pytest.approx((ours.epistemic - theirs.epistemic).abs().mean().item(), rel=1e-2)
    areas = [metrics.auroc(p.predict(held).uncertainty, p.predict(far).uncertainty).item() for p in (la, fast)]
    assert fast.distances["far"].auroc == pytest.approx(areas)
    assert "AUROC" in fast.summary()
    assert ours.mean.shape == theirs.mean.shape
    y = TASKS[task][1](theirs.function.mean)
    torch.testing.assert_close(ours.log_prob(y), theirs.log_prob(y), rtol=0.5, atol=0.5)


def test_divergences_are_those_of_the_predictive_distributions() -> None:
    la, x = fitted()
    fast = la.distill(x)
    p, q = la.predict(x[96:]).probs.double(), fast.predict(x[96:]).probs.double()
    assert fast.distances["held out"].divergence == pytest.approx(
        (p * (p / q).log()).sum(-1).mean().item(), rel=1e-3, abs=1e-6
    )
    la, x = fitted("regression", torch.float64)
    fast = la.distill(x)
    p, q = la.predict(x[96:]), fast.predict(x[96:])
    laws = [torch.distributions.Normal(each.mean, each.stddev) for each in (p, q)]
    exact = torch.distributions.kl_divergence(*laws).sum(-1).mean().item()
    assert fast.distances["held out"].divergence == pytest.approx(exact, rel=1e-6)


def test_covariances_are_positive_and_variances_their_diagonal() -> None:
    la, x = fitted(dtype=torch.float64)
    function = la.distill(x).predict(x[:5]).function
    assert bool((torch.linalg.eigvalsh(function.covariance) > 0).all())
    torch.testing.assert_close(function.variance, function.covariance.diagonal(dim1=-2, dim2=-1))
    centered = torch.eye(3, dtype=x.dtype) - 1 / 3
    torch.testing.assert_close(function.contrast_covariance, centered @ function.covariance @ centered)


def test_a_logit_temperature_is_kept() -> None:
    la, x = fitted()
    la = la.replace(logit_temperature=2.5)
    fast = la.distill(x)
    torch.testing.assert_close(fast.predict(x[:4]).function.mean, la.predict(x[:4]).function.mean)
    assert fast.distances["held out"].spread < 0.5
    torch.testing.assert_close(fast.predictor()(x[:4])["probs"], fast.predict(x[:4]).probs)


def test_it_stands_alone() -> None:
    """Later training of the module changes nothing, and neither module nor global random numbers are touched."""
    la, x = fitted()
    state = {name: value.clone() for name, value in la.module.state_dict().items()}
    torch.manual_seed(5)
    fast = la.distill(x)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(state[name], value) for name, value in la.module.state_dict().items())
    assert not any(part._forward_pre_hooks for part in la.module.modules())
    before = fast.predict(x[:3]).probs
    with torch.no_grad():
        la.module.last.weight.add_(1.0)
    assert torch.equal(fast.predict(x[:3]).probs, before)
    assert torch.equal(fast.predictor()(x[:3])["probs"], before)
    torch.testing.assert_close(fast.predict(x[:1]).probs, before[:1])


def test_the_same_data_give_the_same_predictor() -> None:
    la, x = fitted()
    one, other = la.distill([x[:60], x[60:]], epochs=2), la.distill([x[:60], x[60:]], epochs=2)
    assert torch.equal(one.predict(x).epistemic, other.predict(x).epistemic)
    third = la.distill([x[:60], x[60:]], epochs=2, generator=dense.seeded(8))
    assert not torch.equal(one.predict(x).epistemic, third.predict(x).epistemic)


def test_several_inputs_tokens_and_batches_of_one() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.last = nn.Embedding(11, 4), nn.Linear(4, 3)

        def forward(self, tokens: Tensor, shift: Tensor) -> Tensor:
            return self.last(self.embedding(tokens).mean(1) + shift)

    net = dense.build(Pair)
    tokens, shift = torch.randint(11, (60, 5), generator=dense.seeded()), dense.randn(60, 4)
    batches = [((tokens[k : k + 1], shift[k : k + 1]), torch.tensor([k % 3])) for k in range(60)]
    la = lapwing.fit(net, batches, "classification", structure="diag", progress=False)
    fast = la.distill(batches)
    assert fast.distances["held out"].items == 12
    assert fast.predict((tokens[:2], shift[:2])).probs.shape == (2, 3)


def test_perturbed_inputs() -> None:
    x = dense.randn(8, 3, 4)
    noisy, mixed = perturbed(x, dense.seeded())
    assert noisy.shape == x.shape
    assert mixed.shape == (4, 3, 4)
    assert not torch.equal(noisy, x)
    assert bool((mixed.flatten(1).amax(-1) <= x.amax()).all())
    assert perturbed(torch.arange(6)[:, None], dense.seeded()) == []
    noisy, _ = perturbed((x, torch.arange(8)), dense.seeded())
    assert torch.equal(noisy[1], torch.arange(8))


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


def test_refusals() -> None:
    la, x = fitted()
    with pytest.raises(BadData, match="at least 25 inputs"):
        la.distill(x[:10])
    with pytest.raises(BadData, match="epochs"):
        la.distill(x, epochs=-1)
    fast = la.distill(x, epochs=0)
    with pytest.raises(BadData, match="the inputs hold nan"):
        fast.predict(torch.full((1, 1, 6, 6), torch.nan))
    with pytest.raises(BadData, match="empty"):
        fast.predict(x[:0])
    with pytest.raises(UnsupportedOperation, match="novelty"):
        fast.predictor("novelty")
    with pytest.raises(UnsupportedOperation, match="without a novelty score"):
        _ = fast.predict(x[:1]).novelty
    with pytest.raises(UnsupportedOperation, match=r"la\.distill"):
        la.predictor()
    net = dense.build(lambda: Counting(3), dtype=torch.float32)
    counting = lapwing.fit(net, (x, torch.arange(120) % 3), "classification", structure="diag", progress=False)
    with pytest.raises(UnsupportedModel, match="writes to its module"):
        counting.distill(x)
    tokens = dense.build(lambda: nn.Linear(4, 3))
    several = lapwing.fit(
        tokens, (dense.randn(40, 2, 4), torch.zeros(40, 2).long()), "classification", structure="diag"
    )
    with pytest.raises(UnsupportedOperation, match="one row of outputs per input"):
        several.distill(dense.randn(40, 2, 4))


SLOW = ["regression", pytest.param("classification", marks=pytest.mark.slow)]  # PyTorch takes long for an export


@pytest.mark.parametrize("task", SLOW)
def test_a_file_runs_without_lapwing(task: str, tmp_path: Path) -> None:
    la, x = fitted(task)
    fast = la.distill(x, epochs=2)
    fast.export(tmp_path / "model.pt2", x[:2], outputs=("mean", "epistemic"))
    torch.save(
        {"x": x[:7], "mean": fast.predict(x[:7]).mean, "epistemic": fast.predict(x[:7]).epistemic}, tmp_path / "e.pt"
    )
    code = """
        import sys
        sys.modules["lapwing"] = None
        import torch
        expected = torch.load("e.pt")
        found = torch.export.load("model.pt2").module()(expected["x"])
        for name in ("mean", "epistemic"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)
        print("equal")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("task", SLOW)
def test_an_onnx_file_runs_in_onnx_runtime(task: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    la, x = fitted(task)
    fast = la.distill(x, epochs=2)
    fast.export(tmp_path / "model.onnx", x[:2])
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    found = session.run(None, {session.get_inputs()[0].name: x[:5].numpy()})
    expected = fast.predictor()(x[:5])
    for value, name in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(value), expected[name], rtol=1e-4, atol=1e-5)
