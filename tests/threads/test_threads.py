"""Threads: any number may predict, fit and score beside others that call the module itself, which nobody touches.

Each way of predicting runs in several threads at once, beside threads that call the plain module. Every number must be
the one that a single thread computed before, and the module and PyTorch's global switches must be as they were.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import lapwing

THREADS = 6
ROUNDS = 3


class Image(nn.Module):
    """Convolution, batch norm, dropout, a tied weight, a cache and a hook: what a copy could lose."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, classes)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.features = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.gain * self.head(self.drop(self.features))


class Tokens(nn.Module):
    """An encoder, whose fast path is a global switch, and a recurrent layer, whose kernels are."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.recurrent = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.encoder(x))[0][:, -1])


def make(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    classes = 70 if kind == "many" else 3
    module = Tokens() if kind == "tokens" else Image(classes)
    x = torch.randn(12, 5, 8) if kind == "tokens" else torch.randn(12, 1, 6, 6)
    if kind != "tokens":
        module.train()
        module(x)  # statistics of its own
    return module.eval(), x, torch.randint(classes, (12,))


def snapshot(module: nn.Module) -> list:
    """Everything that a pass may not leave changed."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [
        [(name, t.clone(), t.requires_grad, t.grad) for name, t in tensors],
        [(m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()],
    ]


def switches() -> tuple:
    return (
        torch.backends.mha.get_fastpath_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cudnn.enabled,
        torch.is_grad_enabled(),
        list(warnings.filters),
    )


def same(before: list, after: list) -> bool:
    tensors = all(
        name == other and torch.equal(t, u) and flag == wanted and g is h
        for (name, t, flag, g), (other, u, wanted, h) in zip(before[0], after[0], strict=True)
    )
    return tensors and before[1] == after[1]


def together(jobs: list[Callable[[], None]]) -> None:
    """Run all jobs at once; raise what any of them raised."""
    failed: list[BaseException] = []
    gate = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        try:
            gate.wait()
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    """Threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def repeated(compute: Callable[[], Tensor], expected: Tensor, rounds: int = ROUNDS) -> Callable[[], None]:
    def job() -> None:
        for _ in range(rounds):
            torch.testing.assert_close(compute(), expected, rtol=1e-5, atol=1e-6)

    return job


def stress(module: nn.Module, x: Tensor, ways: list[Callable[[], Tensor]], rounds: int = ROUNDS) -> None:
    """All ways at once, in several threads each, beside plain calls of the module."""
    with torch.no_grad():
        plain = module(x)
    expected = [way() for way in ways]
    torch.testing.assert_close(plain, plain)  # its first call imports sympy, which adds a filter of warnings
    before, flags = snapshot(module), switches()
    times = max(1, THREADS // len(ways))
    jobs = [repeated(way, value, rounds) for way, value in zip(ways, expected) for _ in range(times)]

    def call() -> Tensor:
        with torch.no_grad():
            return module(x)

    together([*jobs, repeated(call, plain, 40), repeated(call, plain, 40)])
    assert same(before, snapshot(module))
    assert switches() == flags


WAYS: dict[str, Callable[[lapwing.Laplace, Tensor], Tensor]] = {
    "linearized": lambda la, x: la.predict(x).probs,
    "probit": lambda la, x: la.predict(x, link="probit").probs,
    "jvp": lambda la, x: la.predict(x, link="jvp").probs,
    "sampled": lambda la, x: la.predict(x, method="sampled", samples=4).probs,
    "ensemble": lambda la, x: la.ensemble(3).predict(x).probs,
    "joint": lambda la, x: la.predict(x, joint=True).function.covariance,
    "covariance": lambda la, x: la.predict(x).function.covariance,
    "variance": lambda la, x: la.predict(x).function.variance,
    "differentiable": lambda la, x: la.predict(x, differentiable=True).function.covariance.detach(),
    "novelty": lambda la, x: la.predict(x).novelty,
    "epistemic": lambda la, x: la.predict(x).epistemic,
    "loader": lambda la, x: torch.cat([p.probs for p in la.predict_loader([x[:5], x[5:]])]),
    "summary": lambda la, x: torch.tensor(float(len(la.summary()))),
}


@pytest.mark.filterwarnings("ignore:.*sampled.*")
@pytest.mark.parametrize("kind", ["image", "tokens"])
@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_predicting_in_threads(way: str, kind: str) -> None:
    module, x, y = make(kind)
    la = lapwing.fit(module, (x, y), "classification", structure="kron", progress=False)
    stress(module, x, [lambda: WAYS[way](la, x)])


@pytest.mark.filterwarnings("ignore:.*sampled.*")
def test_all_ways_at_once() -> None:
    module, x, y = make("image")
    la = lapwing.fit(module, (x, y), "classification", structure="kron", progress=False)
    stress(module, x, [lambda way=way: way(la, x) for way in WAYS.values()])  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore:the probabilities of")
@pytest.mark.parametrize("structure", ["nystrom", "matrixfree", "functional", "diag", "ekfac"])
def test_products_with_many_outputs_in_threads(structure: str) -> None:
    module, x, y = make("many")
    chosen = lapwing.Nystrom(5) if structure == "nystrom" else structure
    la = lapwing.fit(module, (x, y), "classification", structure=chosen, progress=False)
    stress(module, x[:4], [lambda: la.predict(x[:4]).probs], rounds=2)


@pytest.mark.parametrize("kind", ["image", "tokens"])
def test_fits_beside_predictions_and_plain_calls(kind: str) -> None:
    module, x, y = make(kind)
    la = lapwing.fit(module, (x, y), "classification", structure="kron", progress=False)
    ways = [
        lambda: lapwing.fit(module, (x, y), "classification", structure="diag", progress=False).posterior.variance,
        lambda: lapwing.fit(module, (x, y), "classification", structure="ekfac", progress=False).log_evidence(),
        lambda: lapwing.fit(module, (x, y), "classification", structure="kron", select="last_layer").log_evidence(),
        lambda: la.predict(x).probs,
        lambda: la.tune((x, y)).predict(x).probs,
        lambda: la.update((x, y)).log_evidence(),
    ]
    stress(module, x, ways)


def test_evaluation_and_temperature_scaling_beside_plain_calls() -> None:
    module, x, y = make("image")
    scaled = lapwing.TemperatureScaled.fit(module, (x, y))
    la = lapwing.fit(module, (x, y), "classification", structure="diag", progress=False)

    def nll() -> Tensor:
        report = lapwing.evaluate({"a": module, "b": scaled, "c": la}, (x, y)).to_dict()
        return torch.tensor(report["models"]["c"]["nll"])

    stress(module, x, [nll], rounds=1)


def test_training_mode_of_the_user_is_kept_while_others_predict() -> None:
    """The module is in training mode, with gradients and hooks: predictions are those of eval mode, nothing fires."""
    module, x, y = make("image")
    la = lapwing.fit(module, (x, y), "classification", structure="diag", progress=False)
    expected, seen = la.predict(x).probs, []
    module.drop.train()  # what the user does in another thread, say
    module.conv.weight.register_hook(lambda g: seen.append(g))
    before = snapshot(module)
    together([repeated(lambda: la.predict(x).probs, expected) for _ in range(THREADS)])
    assert same(before, snapshot(module))
    assert module.drop.training
    assert not seen
