"""The user's module, random state and gradients are the same after every call, also after one that failed."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import Laplace
from tests.laplace.small import STRUCTURES, X, Y, batches, bump, fit, net, seeded


class Watched(nn.Module):
    """Something of everything that could be disturbed: train and eval parts, frozen weights, hooks, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1))
        self.note = {"any": "attribute"}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.drop(self.norm(self.inner(x)))
        return self.head(self.encoder(h[:, None])[:, 0]) * self.scale


def watched() -> Watched:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Watched()
        model(X).square().sum().backward()
    model.drop.eval()
    model.encoder.eval()
    model.inner.bias.requires_grad_(False)
    model.head.register_forward_hook(lambda *_: None)
    model.norm.register_full_backward_hook(lambda *_: None)
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a module, tensors as copies and objects by identity."""
    seen: dict[str, Any] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        gradient = None if p.grad is None else (id(p.grad), p.grad.clone())
        seen[f"parameter {name}"] = (id(p), p.data_ptr(), p._version, p.detach().clone(), p.requires_grad, gradient)
    for name, b in model.named_buffers(remove_duplicate=False):
        seen[f"buffer {name}"] = (id(b), b.detach().clone(), b.requires_grad)
    for name, m in model.named_modules():
        seen[f"module {name}"] = (id(m), m.training)
        for key, value in vars(m).items():
            seen[f"attribute {name}.{key}"] = (id(value), len(value)) if isinstance(value, dict) else id(value)
    return seen


def world() -> dict[str, Any]:
    """Global state that others rely on."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "torch random": torch.get_rng_state(),
        "python random": random.getstate(),
        "numpy random": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "dtype": torch.get_default_dtype(),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "attention": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def differences(a: Any, b: Any) -> list[str]:
    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor):
            return x.dtype == y.dtype and torch.equal(x, y)
        if isinstance(x, tuple):
            return len(x) == len(y) and all(map(same, x, y))
        return x == y

    return [key for key in a.keys() | b.keys() if key not in a or key not in b or not same(a[key], b[key])]


class Unchanged:
    """A block after which module and world are bit for bit what they were, also when it raises."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.before = snapshot(self.model), world()

    def __exit__(self, *_: object) -> None:
        after = snapshot(self.model), world()
        assert differences(self.before[0], after[0]) == []
        assert differences(self.before[1], after[1]) == []


def test_the_watch_notices() -> None:
    model = watched()
    changes: list[Callable[[], object]] = [
        lambda: model.calls.add_(1),
        lambda: model.scale.requires_grad_(),
        lambda: model.drop.train(),
        lambda: model.inner.weight.grad.add_(1),
        lambda: setattr(model, "new", 1),
        lambda: model.head.register_forward_hook(print),
        lambda: torch.rand(1),
    ]
    for change in changes:
        with pytest.raises(AssertionError), Unchanged(model):
            change()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_fit_gives_the_module_back(structure: str) -> None:
    model = watched()
    with Unchanged(model):
        fit(model, structure=structure, generator=seeded())


@pytest.mark.parametrize(
    "options",
    [
        {"factor": "mc"},
        {"factor": "empirical"},
        {"select": "last_layer"},
        {"structure": "full", "select": lapwing.subnetwork(5, by="random")},
    ],
    ids=["mc", "empirical", "last layer", "subnetwork"],
)
def test_fit_with_options_gives_the_module_back(options: dict[str, Any]) -> None:
    model = watched()
    with Unchanged(model):
        fit(model, generator=seeded(), **({"structure": "kron"} | options))


@pytest.fixture(scope="module")
def posterior() -> Laplace:
    return fit(watched(), structure="kron")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"generator": seeded()},
        {"method": "sampled"},
        {"joint": True},
        {"differentiable": True},
        {"method": "sampled", "differentiable": True},
        {"link": "probit"},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_predict_gives_the_module_back(posterior: Laplace, options: dict[str, Any]) -> None:
    x = X[:4].clone().requires_grad_()
    with Unchanged(posterior.module):
        p = posterior.predict(x, **options)
        for field in ("probs", "entropy", "epistemic", "novelty"):
            getattr(p, field)
        p.function.sample(2)
        p.sample(2)
        if options.get("differentiable"):
            p.entropy.sum().backward()
            assert x.grad is not None


@pytest.mark.filterwarnings("ignore:tuning by the evidence")
def test_everything_else_gives_the_module_back(posterior: Laplace, tmp_path: Any) -> None:
    with Unchanged(posterior.module):
        posterior.tune(batches(), learn="prior", grid={"prior": [0.1, 1.0]})
        posterior.tune(method="evidence")
        posterior.update(batches())
        posterior.ensemble(2).predict(X[:2])
        posterior.summary()
        posterior.save(tmp_path / "a")
        lapwing.load(tmp_path / "a", posterior.module).predict(X[:2])
        next(posterior.predict_loader(batches()))


def test_many_outputs_give_the_module_back() -> None:
    model = net(70)
    la = fit(model, structure="kron")
    with Unchanged(model):
        _ = la.predict(X[:2], samples=3).probs


class Interrupt:
    """A forward hook that raises at the n-th call."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [1, 2, 4, 6, 9])
def test_an_interrupted_fit_gives_the_module_back(at: int) -> None:
    model = watched()
    model.encoder.register_forward_hook(Interrupt(at))
    with Unchanged(model), pytest.raises(KeyboardInterrupt):
        fit(model, structure="ekfac", generator=seeded())


@pytest.mark.parametrize("options", [{}, {"method": "sampled"}, {"differentiable": True}], ids=str)
def test_an_interrupted_prediction_gives_the_module_back(options: dict[str, Any]) -> None:
    model = watched()
    la = fit(model, structure="kron")
    model.encoder.register_forward_hook(Interrupt(1))
    with Unchanged(model), pytest.raises(KeyboardInterrupt):
        la.predict(X[:2], **options)


class Broken:
    """Data that fail in the middle."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield X[:8], Y[:8]
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("data", "error"),
    [(Broken(), OSError), (batches(y=torch.cat([Y[:12], Y[12:] + 9])), lapwing.BadData)],
    ids=["a broken loader", "a bad target"],
)
def test_bad_data_give_the_module_back(posterior: Laplace, data: Any, error: type[Exception]) -> None:
    for use in (lambda: fit(posterior.module, data, structure="kron"), lambda: posterior.tune(data)):
        with Unchanged(posterior.module), pytest.raises(error):
            use()
    with Unchanged(posterior.module), pytest.raises(lapwing.BadData, match="does not take inputs of shape"):
        posterior.predict(torch.ones(2, 7), differentiable=True)


def test_gradients_of_predictions_stay_out_of_the_weights() -> None:
    model = net()
    la = fit(model, structure="kron")
    x = X[:4].clone().requires_grad_()
    la.predict(x, differentiable=True).entropy.sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in model.parameters())


class Remembering(nn.Module):
    """Keeps features, counts its calls and caches by size, as many networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls, self.cache, self.sizes = 0, None, {}

    def forward(self, x: Tensor) -> Tensor:
        self.features = x * 2
        self.calls += 1
        if self.cache is None or len(self.cache) != len(x):
            self.cache = torch.ones(len(x), 1)
        self.sizes[len(x)] = True
        return self.layer(x) * self.cache


class Reassigning(nn.Module):
    """A buffer that is replaced instead of changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.layer(x)


def test_what_a_forward_pass_writes_is_no_change(tmp_path: Any) -> None:
    model = Remembering()
    la = fit(model, structure="kron")
    probs = la.predict(X[:2]).probs
    model.eval()(X[:7])
    assert torch.equal(la.predict(X[:2]).probs, probs)
    la.save(tmp_path / "a")
    model(X[:5])
    assert torch.equal(lapwing.load(tmp_path / "a", model).predict(X[:2]).probs, probs)
    bump(model.layer.weight)
    with pytest.raises(lapwing.UnsupportedModel):
        la.predict(X[:2])


def test_buffers_that_are_replaced_are_put_back() -> None:
    model = Reassigning()
    seen = model.seen
    la = fit(model, structure="kron")
    for _ in range(2):
        la.predict(X[:2])
    assert model.seen is seen
    assert seen == 0
