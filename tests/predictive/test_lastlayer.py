"""The short path of a last layer: the same numbers as the general one, from one forward pass."""

import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.predictive import predict_targets

STRUCTURES = ("diag", "kron", "ekfac", "full", "blockdiag", "lowrank")
TASKS = {
    "classification": (3, lambda n, k: torch.randint(k, (n,))),
    "two classes": (2, lambda n, k: torch.randint(k, (n,))),
    "regression": (2, lambda n, k: torch.randn(n, k)),
    "binary": (1, lambda n, k: torch.randint(2, (n,)).float()),
    "labels": (3, lambda n, k: torch.randint(2, (n, k)).float()),
    "counts": (1, lambda n, k: torch.poisson(torch.ones(n, k))),
}
OTHER_TASKS = {"heteroscedastic": (2, lambda n, k: torch.randn(n, 1))}
LIKELIHOODS = {"two classes": "classification", "labels": "binary"}


class Net(nn.Module):
    """Convolutions and a linear last layer, with or without a bias, and what follows it."""

    def __init__(self, outputs: int, bias: bool = True, tail: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 7), nn.Tanh())
        self.last = nn.Linear(7, outputs, bias=bias)
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        f = self.last(self.body(x))
        return f if self.tail is None else self.tail(f)


def fitted(
    task: str = "classification", structure: str = "kron", net: nn.Module | None = None, **options: object
) -> tuple[lapwing.Laplace, Tensor]:
    torch.manual_seed(0)
    outputs, targets = (TASKS | OTHER_TASKS)[task]
    net = Net(outputs) if net is None else net
    x = torch.randn(40, 1, 6, 6)
    data = (x, targets(40, outputs))
    structure = lapwing.LowRank(10) if structure == "lowrank" else structure
    la = lapwing.fit(
        net, data, LIKELIHOODS.get(task, task), structure=structure, select="last_layer", progress=False, **options
    )
    return la, x[:6]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", TASKS)
def test_covariances_are_those_of_the_general_path(task: str, structure: str) -> None:
    la, x = fitted(task, structure, prior=2.0)
    assert la._predictive.last_layer is not None
    short, general = la.predict(x).function, la._predictive.linearized(x).function(x)
    torch.testing.assert_close(short.mean, general.mean)
    torch.testing.assert_close(short.covariance, general.covariance, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(short.variance, general.variance, rtol=1e-4, atol=1e-6)
    other = predict_targets(general, la.likelihood, scalar=la.options.scalar)
    torch.testing.assert_close(la.predict(x).mean, other.mean, rtol=0, atol=1e-3)  # points in other directions


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", TASKS)
def test_a_predictor_gives_the_numbers_of_predict(task: str, structure: str) -> None:
    la, x = fitted(task, structure, prior=2.0)
    la = la.replace(logit_temperature=1.5) if la.likelihood.has_logits else la
    names = ("mean", "epistemic", "aleatoric", "total", "entropy", "novelty")
    predictor, p = la.predictor(*names), la.predict(x)
    found = predictor(x)
    assert set(found) == set(names)
    for name in names:
        torch.testing.assert_close(found[name], getattr(p, name), rtol=1e-4, atol=1e-5, msg=name)


def test_a_predictor_has_sensible_outputs_by_default() -> None:
    assert set(fitted()[0].predictor()(torch.randn(2, 1, 6, 6))) == {"probs", "epistemic"}
    assert set(fitted("regression")[0].predictor()(torch.randn(2, 1, 6, 6))) == {"mean", "variance"}


def test_a_layer_without_a_bias_and_inputs_of_zero() -> None:
    la, x = fitted(net=Net(3, bias=False))
    assert la._predictive.last_layer is not None
    assert la.params.names == ("last.weight",)
    torch.testing.assert_close(
        la.predict(x).function.covariance, la._predictive.linearized(x).function(x).covariance, rtol=1e-4, atol=1e-6
    )
    assert bool(torch.isfinite(la.predict(torch.zeros_like(x)).probs).all())


TAILS = {
    "scale": lambda f: 0.5 * f,
    "slice": lambda f: f[:, :2],
    "relu": lambda f: f.relu(),
    "clamp": lambda f: f.clamp(-50, 50),
    "log-probabilities": lambda f: f.log_softmax(-1),
    "centered": lambda f: f - f.mean(-1, keepdim=True),
}


class Tail(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, f: Tensor) -> Tensor:
        return TAILS[self.name](f)


AFFINE = ("scale", "slice", "centered")


@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
@pytest.mark.parametrize("name", AFFINE)
def test_an_affine_map_after_the_last_layer_keeps_the_short_path(name: str, structure: str) -> None:
    la, x = fitted("two classes" if name == "slice" else "classification", structure, Net(3, tail=Tail(name)))
    assert la._predictive.last_layer is not None
    short, general = la.predict(x), la._predictive.linearized(x).function(x)
    torch.testing.assert_close(short.function.mean, general.mean)
    torch.testing.assert_close(short.function.covariance, general.covariance, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(short.function.variance, general.variance, rtol=1e-4, atol=1e-6)
    other = predict_targets(general, la.likelihood)
    torch.testing.assert_close(short.probs, other.probs, rtol=0, atol=1e-3)
    found = la.predictor("probs", "novelty")(x)
    torch.testing.assert_close(found["probs"], short.probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["novelty"], la._predictive.novelty(x, general.mean), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in TAILS if name not in AFFINE])
@pytest.mark.filterwarnings("ignore")  # about networks that do not return logits
def test_a_network_with_something_else_after_its_last_layer_takes_the_general_path(name: str) -> None:
    la, x = fitted(net=Net(3, tail=Tail(name)))
    assert la._predictive.last_layer is None
    assert bool(torch.isfinite(la.predict(x).probs).all())
    with pytest.raises(lapwing.UnsupportedOperation, match="last_layer"):
        la.predictor()


class Twice(Net):
    """Calls its last layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x)) + self.last(self.body(-x))


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_that_is_called_twice(bias: bool) -> None:
    la, x = fitted(net=Twice(3, bias=bias))
    assert la._predictive.last_layer is None
    torch.testing.assert_close(la.predict(x).function.mean, la.network.module(x))


def test_half_precision() -> None:
    la, x = fitted(net=Net(3).bfloat16())
    x = x.bfloat16()
    short, general = la.predict(x).function, la._predictive.linearized(x).function(x)
    torch.testing.assert_close(short.mean, general.mean, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(short.covariance.float(), general.covariance.float(), rtol=5e-2, atol=2e-2)


def test_another_prior_shares_the_copy_of_the_network() -> None:
    la, x = fitted()
    other = la.replace(prior=50.0)
    _ = la.predict(x), other.predict(x)
    assert la._predictive.last_layer.body is other._predictive.last_layer.body  # type: ignore[union-attr]
    general = other._predictive.linearized(x).function(x)
    torch.testing.assert_close(other.predict(x).function.covariance, general.covariance, rtol=1e-4, atol=1e-6)


def test_all_weights_have_no_predictor() -> None:
    torch.manual_seed(0)
    la = lapwing.fit(Net(3), (torch.randn(20, 1, 6, 6), torch.randint(3, (20,))), "classification", progress=False)
    with pytest.raises(lapwing.UnsupportedOperation, match="last_layer"):
        la.predictor()


def test_tokens() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    x, y = torch.randint(11, (30, 3)), torch.randint(4, (30, 3))
    la = lapwing.fit(net, (x, y), "classification", structure="kron", select="last_layer", progress=False)
    assert la._predictive.last_layer is not None
    short, general = la.predict(x[:4]), la._predictive.linearized(x[:4]).function(x[:4])
    torch.testing.assert_close(short.function.covariance, general.covariance, rtol=1e-4, atol=1e-6)
    assert short.probs.shape == (4, 3, 4)
    torch.testing.assert_close(la.predictor("probs")(x[:4])["probs"], short.probs)


class Residual(Net):
    """Adds something to the scaled outputs of its last layer that is another constant at every input."""

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        self.skip = nn.Linear(36, outputs).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x) + self.skip(x.flatten(1))


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_residual_connection_around_the_last_layer(structure: str) -> None:
    """It moves the outputs, and leaves their covariance alone."""
    la, x = fitted(structure=structure, net=Residual(3))
    p, general = la.predict(x), la._predictive.linearized(x).function(x)
    assert la._predictive.last_layer is not None
    assert la._predictive.last_layer.read(x) is not None
    torch.testing.assert_close(p.function.mean, la.network.module(x))
    torch.testing.assert_close(p.function.covariance, general.covariance, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(la.predictor("probs")(x)["probs"], p.probs, rtol=0, atol=1e-6)


class PerToken(nn.Module):
    """A class per token, from a linear layer with something after it."""

    def __init__(self, tail: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.last, self.tail = nn.Embedding(11, 6), nn.Linear(6, 4), tail

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.tail(self.last(self.body(x).tanh()))
        return f


OVER_TOKENS: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "temperature": (True, lambda f: f / 1.7),
    "slice": (True, lambda f: f[..., 1:]),
    "a scale per position": (False, lambda f: f * torch.arange(1.0, 4.0)[:, None]),
    "the mean over positions": (False, lambda f: f.mean(1, keepdim=True).expand_as(f)),
    "sums over earlier positions": (False, lambda f: f.cumsum(1)),
}


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag"])
@pytest.mark.parametrize("name", OVER_TOKENS)
def test_an_affine_map_of_each_token(name: str, structure: str) -> None:
    short_path, tail = OVER_TOKENS[name]
    torch.manual_seed(0)
    net, x = PerToken(tail), torch.randint(11, (30, 3))
    data = (x, torch.randint(3, (30, 3)))
    options: dict[str, object] = {"structure": structure, "progress": False}
    la = lapwing.fit(net, data, "classification", select="last_layer", **options)
    assert (la._predictive.last_layer is not None) == short_path
    net.last.forward = lambda a: nn.functional.linear(a, net.last.weight, net.last.bias) * 1.0  # type: ignore[method-assign]
    general = lapwing.fit(net, data, "classification", select="last.*", **options)
    if short_path:
        assert general._predictive.last_layer is None
        torch.testing.assert_close(la.predictor("probs")(x[:4])["probs"], la.predict(x[:4]).probs)
    torch.testing.assert_close(la.curvature.dense(), general.curvature.dense(), rtol=1e-4, atol=1e-5)
    p, q = la.predict(x[:4]), general.predict(x[:4])
    torch.testing.assert_close(p.function.mean, q.function.mean)
    torch.testing.assert_close(p.function.covariance, q.function.covariance, rtol=1e-4, atol=1e-6)


def test_a_predictor_keeps_its_weights_and_a_changed_module_is_refused() -> None:
    net = Net(3)
    la, x = fitted(net=net)
    predictor = la.predictor("probs")
    before = predictor(x)["probs"].clone()
    with torch.no_grad():
        net.last.weight.mul_(2)
    torch.testing.assert_close(predictor(x)["probs"], before, rtol=0, atol=0)
    with pytest.raises(lapwing.LapwingError):
        la.predict(x)


def certain() -> Net:
    """Return a network that never gives its last class."""
    torch.manual_seed(1)
    net = Net(3)
    with torch.no_grad():
        net.last.bias[2] -= 30
    return net


@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_item_alone_gets_the_numbers_of_a_batch(structure: str) -> None:
    """Two classes of three matter, so that single items are worked out in plain numbers; with a logit temperature."""
    la, x = fitted(structure=structure, net=certain(), prior=10.0)
    la = la.replace(logit_temperature=1.3)
    names = ("probs", "entropy", "epistemic", "aleatoric", "label", "confidence")
    predictor, whole = la.predictor(*names), la.predict(x)
    assert la.predict(x[:1])._law.parts is not None  # the short way, which this test is about
    for k in range(len(x)):
        alone, served = la.predict(x[k : k + 1]), predictor(x[k : k + 1])
        for name in names:
            torch.testing.assert_close(getattr(alone, name), getattr(whole, name)[k : k + 1], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(served[name], getattr(alone, name))
        torch.testing.assert_close(alone.log_prob(torch.tensor([0])), whole.log_prob(torch.zeros(6).long())[k : k + 1])


@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch about its own parts
def test_derivatives_of_one_item_are_those_of_a_batch(structure: str) -> None:
    la, x = fitted(structure=structure, net=certain(), prior=10.0)
    assert la.predict(x[:1])._law.parts is not None
    predictor = la.predictor("epistemic")

    def score(x: Tensor) -> Tensor:
        return predictor(x)["epistemic"].sum()

    inputs = x[:2].clone().requires_grad_()
    (want,) = torch.autograd.grad(score(inputs), inputs)
    alone = x[:1].clone().requires_grad_()
    direction = torch.ones_like(alone)
    ways = {
        "backward": torch.autograd.grad(score(alone), alone)[0],
        "torch.func.grad": torch.func.grad(score)(x[:1]),
    }
    for found in ways.values():
        torch.testing.assert_close(found, want[:1], rtol=1e-3, atol=1e-8)
        assert float(found.abs().max()) > 0
    pushed = torch.func.jvp(score, (x[:1],), (direction,))[1]
    torch.testing.assert_close(pushed, want[:1].sum(), rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("task", TASKS)
def test_an_input_that_is_nan_is_answered_by_nan_and_disturbs_no_other(task: str, structure: str) -> None:
    la, x = fitted(task, structure)
    predictor = la.predictor("mean", "epistemic", "entropy", "novelty")
    broken = x.clone()
    broken[2, 0, 1] = torch.nan
    found, expected = predictor(broken), predictor(x)
    for name in found:
        assert bool(found[name][2].isnan().all()), name
        others = [0, 1, 3, 4, 5]
        torch.testing.assert_close(found[name][others], expected[name][others], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("classes", [3, 70])
def test_a_batch_without_items(classes: int, structure: str) -> None:
    la, x = fitted(structure=structure, net=Net(classes))
    shapes = {name: tuple(value.shape) for name, value in la.predictor("probs", "epistemic")(x[:0]).items()}
    assert shapes == {"probs": (0, classes), "epistemic": (0,)}


def test_threads_get_the_numbers_of_one_by_one() -> None:
    la, _ = fitted()
    x = torch.randn(64, 1, 6, 6)
    predictor = la.predictor("probs", "epistemic")
    expected = [predictor(x[i : i + 1]) for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: (predictor(x[i : i + 1]), la.predict(x[i : i + 1]).probs), range(64)))
    for one, (own, probs) in zip(expected, found, strict=True):
        torch.testing.assert_close(own["probs"], one["probs"], rtol=0, atol=0)
        torch.testing.assert_close(own["epistemic"], one["epistemic"], rtol=0, atol=0)
        torch.testing.assert_close(probs, one["probs"], rtol=1e-5, atol=1e-6)


STRANGER = """
import sys
import torch
program, saved, names = sys.argv[1:]
sys.modules["lapwing"] = None  # an import would fail
stored = torch.load(saved, weights_only=True)
found = torch.export.load(program).module()(stored["x"])
for name in names.split(","):
    torch.testing.assert_close(found[name], stored[name], rtol=1e-5, atol=1e-5)
print("equal")
"""


def slow(*cases: tuple[str, str]) -> list:
    """Parameters of which all but the first are for `make test-slow`: PyTorch takes seconds for every export."""
    return [cases[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[1:])]


@pytest.mark.parametrize(
    ("task", "structure"),
    slow(("classification", "kron"), ("classification", "full"), ("regression", "kron"), ("binary", "full")),
)
def test_an_exported_file_runs_where_nothing_of_ours_is(task: str, structure: str, tmp_path: Path) -> None:
    la, _ = fitted(task, structure, prior=2.0)
    names = ("mean", "epistemic", "novelty")
    la.export(tmp_path / "model.pt2", torch.randn(2, 1, 6, 6), outputs=names)
    x = torch.randn(9, 1, 6, 6)
    p = la.predict(x)
    torch.save({"x": x} | {name: getattr(p, name) for name in names}, tmp_path / "expected.pt")
    command = [sys.executable, "-c", textwrap.dedent(STRANGER)]
    arguments = [tmp_path / "model.pt2", tmp_path / "expected.pt", ",".join(names)]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "equal", done.stderr


STRANGER_ONNX = """
import sys
import numpy
import onnxruntime
program, saved, names = sys.argv[1:]
sys.modules["lapwing"] = sys.modules["torch"] = None  # an import would fail
stored = numpy.load(saved)
session = onnxruntime.InferenceSession(program)
assert [output.name for output in session.get_outputs()] == names.split(",")
for rows in (slice(None), slice(0, 1)):
    found = session.run(None, {session.get_inputs()[0].name: stored["x"][rows]})
    for name, value in zip(names.split(","), found, strict=True):
        numpy.testing.assert_allclose(value, stored[name][rows], rtol=1e-5, atol=1e-5, err_msg=name)
print("equal")
"""

EVERY_STRUCTURE = tuple((task, structure) for task in ("classification", "regression") for structure in STRUCTURES)


@pytest.mark.parametrize(
    ("task", "structure"),
    slow(("classification", "full"), *EVERY_STRUCTURE, ("two classes", "full"), ("labels", "kron"), ("counts", "full")),
)
def test_an_onnx_file_runs_in_onnx_runtime(task: str, structure: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    la, _ = fitted(task, structure, prior=2.0)
    names = ("mean", "epistemic", "novelty")
    la.export(tmp_path / "model.onnx", torch.randn(2, 1, 6, 6), outputs=names)
    x = torch.randn(9, 1, 6, 6)
    p = la.predict(x)
    arrays = {"x": x.numpy()} | {name: getattr(p, name).numpy() for name in names}
    numpy.savez(tmp_path / "expected.npz", **arrays)
    command = [sys.executable, "-c", STRANGER_ONNX]
    arguments = [tmp_path / "model.onnx", tmp_path / "expected.npz", ",".join(names)]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "equal", done.stderr


class Named(Net):
    """Takes its inputs by name, one of which is no tensor."""

    def forward(self, image: Tensor, shift: Tensor, twice: bool = False) -> Tensor:  # type: ignore[override]
        return super().forward((2 if twice else 1) * image + shift)


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def test_a_file_takes_inputs_by_their_names(suffix: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = {"shift": torch.randn(40, 1, 1, 1), "image": torch.randn(40, 1, 6, 6), "twice": True}
    data = [(x, torch.randint(3, (40,)))]
    la = lapwing.fit(Named(3), data, "classification", select="last_layer", progress=False)
    few, some = ({k: v[:n] if isinstance(v, Tensor) else v for k, v in x.items()} for n in (2, 5))
    la.export(tmp_path / f"model{suffix}", few)
    if suffix == ".pt2":
        probs = torch.export.load(tmp_path / "model.pt2").module()(**some)["probs"]
    else:
        session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "model.onnx")
        (probs,) = session.run(["probs"], {name: some[name].numpy() for name in ("image", "shift")})
    torch.testing.assert_close(torch.as_tensor(probs), la.predict(some).probs, rtol=0, atol=1e-5)


def test_what_no_file_can_hold_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for task, words in (("counts", "entropy of counts"), ("heteroscedastic", "heteroscedastic regression")):
        la, x = fitted(task)
        with pytest.raises(lapwing.UnsupportedOperation, match=f"{words} cannot be exported"):
            la.export(tmp_path / "model.pt2", x[:2], outputs=("mean", "entropy"))
    assert not list(tmp_path.iterdir())
    assert not [note for note in caplog.records if note.levelno >= logging.WARNING]
    assert capfd.readouterr() == ("", "")


def test_an_onnx_file_of_doubles_runs_for_one_item(tmp_path: Path) -> None:
    """ONNX Runtime has no error function of doubles, which the probabilities of classes are made of."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    x, y = torch.randn(40, 5, dtype=torch.float64), torch.randint(3, (40,))
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    la = lapwing.fit(model, (x, y), "classification", select="last_layer", structure="full", progress=False)
    la.export(tmp_path / "model.onnx", x[:2])
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (probs, *_) = session.run(["probs"], {session.get_inputs()[0].name: x[:1].numpy()})
    assert abs(probs - la.predict(x[:1]).probs.numpy()).max() < 1e-5


def test_an_onnx_file_is_written_without_the_exporters_notes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")
    la, x = fitted()
    la.export(tmp_path / "model.onnx", x[:2])
    assert not [note for note in caplog.records if note.levelno >= logging.WARNING]
    assert capfd.readouterr() == ("", "")


def test_a_missing_exporter_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    la, x = fitted()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'lapwing-torch\[onnx\]'"):
        la.export(tmp_path / "model.onnx", x[:2])


def test_wrong_suffixes_and_examples_are_refused(tmp_path: Path) -> None:
    la, x = fitted()
    with pytest.raises(lapwing.UnsupportedOperation, match=r"\.pt2"):
        la.export(tmp_path / "model.bin", x)
    with pytest.raises(lapwing.BadData, match="two items"):
        la.export(tmp_path / "model.pt2", x[:1])
    assert not list(tmp_path.iterdir())


def test_unknown_outputs_are_refused() -> None:
    with pytest.raises(lapwing.BadData, match="no 'nonsense': use mean"):
        fitted()[0].predictor("nonsense")
    with pytest.raises(lapwing.BadData, match="no 'variance'"):
        fitted()[0].predictor("variance")


class Branching(Net):
    """Decides by numbers what to do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.sum()) > -1e9 else -x)


def test_what_pytorch_cannot_export_is_one_error(tmp_path: Path) -> None:
    la, x = fitted(net=Branching(3))
    with pytest.raises(lapwing.UnsupportedOperation, match=r"operation of the network.*torch\.export"):
        la.export(tmp_path / "model.pt2", x[:2])
    assert not list(tmp_path.iterdir())


class Gated(Net):
    """Multiplies its outputs by `by` where the first pixel is large, or adds something that depends on the input."""

    def __init__(self, by: float, residual: bool = False) -> None:
        super().__init__(3)
        self.by, self.residual = by, residual

    def forward(self, x: Tensor) -> Tensor:
        f = super().forward(x)
        if self.residual:
            return f + x[:, 0, 0, :3]
        return torch.where(x[:, 0, 0, :1] > 2.5, self.by * f, f)


def test_a_predictor_refuses_inputs_that_take_another_way_to_the_outputs() -> None:
    la, x = fitted(net=Gated(2.0))
    x = x.clamp(max=2.0)
    predictor = la.predictor("probs")
    torch.testing.assert_close(predictor(x)["probs"], la.predict(x).probs)
    x[1, 0, 0, 0] = 3.0
    with pytest.raises(lapwing.UnsupportedOperation, match=r"another way.*la\.predict"):
        predictor(x)


def test_a_predictor_takes_outputs_that_are_shifted_by_the_input() -> None:
    la, x = fitted("labels", net=Gated(1.0, residual=True))
    general = predict_targets(la._predictive.linearized(x).function(x), la.likelihood)
    found = la.predictor("mean", "epistemic")(x)
    torch.testing.assert_close(found["mean"], general.mean)
    torch.testing.assert_close(found["epistemic"], general.epistemic, rtol=1e-4, atol=1e-6)


class Masked(nn.Module):
    """Logits that are limited, and a class that is masked by a very large number."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        f = self.last(x).clamp(-3, 3)
        return torch.cat([f[:, :3], torch.full_like(f[:, :1], -1e9)], -1)


def test_a_masked_class_does_not_hide_a_limit_of_the_others() -> None:
    torch.manual_seed(0)
    net, x, y = Masked(), torch.randn(30, 4), torch.randint(3, (30,))
    la = lapwing.fit(net, (x, y), "classification", structure="full", select="last_layer", progress=False)
    far = 20 * x[:5]
    outputs = net(far)
    assert bool((outputs[:, :3].abs() == 3).any())
    limited = outputs.abs() >= 3
    variance = la.predict(far).function.variance
    assert bool((variance[limited] == 0).all())  # ∂f/∂θ = 0 there
    assert bool((variance[~limited] > 0).all())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("bias", [True, False])
def test_the_spread_of_classes_is_that_of_the_covariance(structure: str, bias: bool) -> None:
    """Variances of differences come from the features directly; by definition they are those of the covariance."""
    la, x = fitted(structure=structure, net=Net(3, bias))
    function = la.replace(logit_temperature=1.7).predict(x).function
    spread, covariance = function.spread, function.contrast_covariance
    pivot = torch.tensor([[0], [2], [1], [2], [0], [1]])
    for each, items in ((spread, slice(None)), (spread.take(torch.tensor([4])), slice(4, 5))):
        own, p = covariance[items], pivot[items]
        row = own.gather(1, p[:, :, None].expand(-1, 1, 3))[:, 0]
        diagonal = own.diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(each.apart(p), diagonal + diagonal.gather(1, p) - 2 * row, rtol=1e-4, atol=1e-6)
        root = each.root(p)
        torch.testing.assert_close(root.square().sum(-1), each.apart(p), rtol=1e-4, atol=1e-5)


def test_one_output_may_be_named_by_a_string(tmp_path: Path) -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    la = lapwing.fit(nn.Linear(3, 1), (x, x[:, :1]), "regression", select="last_layer", progress=False)
    la.export(tmp_path / "mean.pt2", x[:2], outputs="mean")
    found = torch.export.load(tmp_path / "mean.pt2").module()(x)
    assert list(found) == ["mean"]
    torch.testing.assert_close(found["mean"], la.predict(x).mean)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_the_covariance_of_many_outputs_is_that_of_the_weights(structure: str) -> None:
    """Of more than 64 outputs it is formed a few items at a time; the truth is J Σ Jᵀ with a dense Σ."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 70)).double()
    data = torch.randn(60, 3).double(), torch.arange(60) % 70
    la = lapwing.fit(net, data, "classification", structure=structure, select="last_layer", progress=False)
    x = torch.randn(5, 3).double()
    a = torch.cat([net[:2](x), torch.ones(5, 1)], 1).detach()
    eye = torch.eye(70, dtype=torch.float64)
    rows = torch.cat([torch.einsum("ko,ni->nkoi", eye, a[:, :4]).flatten(2), eye.expand(5, -1, -1)], 2)  # weight, bias
    expected = rows @ torch.linalg.inv(la.posterior.precision.dense()) @ rows.mT
    function = la.predict(x).function
    torch.testing.assert_close(function.covariance, expected)
    centered = expected - expected.mean(-1, keepdim=True)
    centered = centered - centered.mean(-2, keepdim=True)
    torch.testing.assert_close(function.contrast_covariance, centered)
