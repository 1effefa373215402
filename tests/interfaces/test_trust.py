"""What DESIGN.md promises under Trust: costs before memory, errors that say where, a module given back as it was."""

import copy
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from lapwing import Laplace, LowRank

STRUCTURES = ("diag", "blockdiag", "kron", "ekfac", "full", "lowrank")
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) * 7 % 3


def net(outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))


def batches(x: Any = X, y: Any = Y, size: int = 8) -> list:
    return [(x[k : k + size], y[k : k + size]) for k in range(0, len(x), size)]


def fit(model: Any = None, data: Any = "default", likelihood: Any = "classification", **options: Any) -> Laplace:
    data = batches() if isinstance(data, str) else data
    return lapwing.fit(net() if model is None else model, data, likelihood, **options)


# --- costs before memory --------------------------------------------------------------------------------------------


class PeakMemory:
    """Growth of the resident set while the block runs, in bytes, as a thread sees it."""

    def __enter__(self) -> "PeakMemory":
        self.start = self.peak = self._resident()
        self._on = True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.peak - self.start

    def _watch(self) -> None:
        while self._on:
            self.peak = max(self.peak, self._resident())
            time.sleep(0.002)

    @staticmethod
    def _resident() -> int:
        try:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096
        except OSError:
            pytest.skip("the resident set is read from /proc")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_too_large_is_said_in_bytes_with_alternatives(structure: str) -> None:
    with pytest.raises(lapwing.TooLarge, match=rf"structure='{structure}' for 38 weights needs .* MB") as error:
        fit(structure=structure, memory=1)
    assert "memory=" in str(error.value)
    assert "last_layer" in str(error.value)


def test_too_large_is_known_before_memory_is_taken() -> None:
    wide = nn.Sequential(nn.Linear(3, 4000), nn.Tanh(), nn.Linear(4000, 3))  # 28,003 weights: 3.1 GB in float32
    fit(wide, structure="diag")  # what torch itself allocates at first use
    with (
        PeakMemory() as memory,
        pytest.raises(lapwing.TooLarge, match=r"28,003 weights needs .*18\.8 GB.* 1 GB") as error,
    ):
        fit(wide, structure="full", memory=10**9)
    assert memory.growth < 2 * 10**8
    for cheaper in ("ekfac", "kron", "diag"):
        assert f"structure='{cheaper}' (" in str(error.value)


def test_auto_stays_in_the_budget() -> None:
    wide = nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 3))
    assert fit(wide).curvature.structure.name == "functional"  # few data: all their rows are less than any matrix
    assert fit(wide, data=list(batches()) * 30).curvature.structure.name == "ekfac"
    assert fit(wide, data=iter(batches())).curvature.structure.name == "kron"
    small = fit(wide, memory=10**6)
    assert small.curvature.structure.name == "diag"
    assert "memory budget" in small.summary()


def test_the_exact_factor_says_when_directions_are_too_many() -> None:
    words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 300))
    ids, targets = torch.arange(16).reshape(2, 8) % 9, torch.arange(16).reshape(2, 8)
    with pytest.raises(lapwing.TooLarge, match=r"2,400 output directions .*factor='mc'"):
        fit(words, [(ids, targets)], structure="kron")
    la = fit(words, [(ids, targets)], structure="kron", factor="auto")
    assert "Monte Carlo Fisher, because" in la.summary()


def test_covariances_that_do_not_fit_are_refused() -> None:
    la = fit(structure="kron", memory=20_000)
    with pytest.raises(lapwing.TooLarge, match=r"joint covariance .* GB.*\.function\.variance"):
        _ = la.predict(X, joint=True).function.covariance
    assert la.predict(X).function.variance.shape == (24, 3)
    wide = fit(nn.Linear(3, 3000), batches(y=torch.arange(24)), structure="diag", factor="mc")
    with pytest.raises(lapwing.TooLarge, match=r"\.variance, \.sample\(n\)"):
        wide.posterior.covariance(memory=10**8)


# --- data that cannot be used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_inputs_that_are_not_finite_are_located(value: float) -> None:
    x = X.clone()
    x[20, 1] = value
    linear = nn.Linear(3, 3)
    with pytest.raises(lapwing.BadData, match=rf"batch 2: the inputs hold {value} at index \(4, 1\)"):
        fit(linear, batches(x))
    with pytest.raises(lapwing.BadData, match=rf"the inputs hold {value} at index \(0, 1\)"):
        fit(linear).predict(x[20:21])


def test_targets_that_are_not_finite_are_located() -> None:
    y = torch.zeros(24)
    y[10] = math.nan
    with pytest.raises(lapwing.BadData, match=r"batch 1: targets are not finite: nan at index \(2, 0\)"):
        fit(net(1), batches(y=y), "regression")


def test_weights_that_are_not_finite_are_named() -> None:
    model = net()
    with torch.no_grad():
        model[2].weight[1, 1] = math.nan
    with pytest.raises(lapwing.BadData, match=r"parameter '2\.weight' of the network is not finite"):
        fit(model)


class Diverging(nn.Module):
    """Overflows where an input is large: in the middle, or after the last layer."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), last

    def forward(self, x: Tensor) -> Tensor:
        size = 1 + x[:, :1].clamp(min=50).sub(50) * 1e38  # infinite at 100
        h = self.first(x) * (1 if self.last else size)
        return self.second(h) * (size if self.last else 1)


@pytest.mark.parametrize(("last", "where"), [(False, r"layer linear\(second"), (True, "after its last layer")])
def test_outputs_that_are_not_finite_name_batch_and_layer(last: bool, where: str) -> None:
    x = X.clone()
    x[9] = 100
    model = Diverging(last)
    with pytest.raises(lapwing.BadData, match=f"batch 1: the outputs .*{where}"):
        fit(model, batches(x))
    fit(model)


@pytest.mark.parametrize(
    "data", [[], (X[:0], Y[:0]), [(X[:0], Y[:0])] * 3, iter([])], ids=["list", "pair", "batches", "iterator"]
)
def test_no_data(data: Any) -> None:
    with pytest.raises(lapwing.BadData, match="no samples"):
        fit(data=data, structure="kron")


def test_empty_batches_are_passed_over() -> None:
    empty = (X[:0], Y[:0])
    la = fit(data=[empty, (X[:5], Y[:5]), empty, (X[5:], Y[5:]), empty], structure="full")
    assert la.n_data == 24
    assert torch.equal(
        la.curvature.dense(), fit(data=[(X[:5], Y[:5]), (X[5:], Y[5:])], structure="full").curvature.dense()
    )


def test_n_is_what_was_seen() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=7, drop_last=True)
    assert fit(data=loader).n_data == 21
    assert fit(data=(X, Y)).n_data == 24
    assert fit(data=(X, Y), n_data=1000).n_data == 1000


@pytest.mark.parametrize("structure", ["diag", "blockdiag", "kron", "full", "lowrank"])
def test_one_pass_structures_take_a_one_shot_iterator(structure: str) -> None:
    once, often = (fit(data=data, structure=structure) for data in (iter(batches()), batches()))
    assert once.n_data == often.n_data == 24
    assert torch.equal(once.curvature.dense(), often.curvature.dense())
    assert once.update(batch for batch in batches()).n_data == 48


@pytest.mark.parametrize(
    "options",
    [{"structure": "ekfac"}, {"structure": "full", "select": lapwing.subnetwork(5)}],
    ids=["ekfac", "subnetwork by variance"],
)
def test_several_passes_need_data_that_can_be_read_again(options: dict[str, Any]) -> None:
    with pytest.raises(lapwing.NotReiterable, match=r"more than once, but the data is a one-shot .*list\(data\)"):
        fit(data=(batch for batch in batches()), **options)
    with pytest.raises(TypeError):  # the builtin that users may already catch
        fit(data=map(tuple, batches()), **options)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y + 1, r"batch 0: target 3 at index \(2,\) is outside the 3 classes 0…2"),
        (Y - 1, r"target -1 at index \(0,\)"),
        (Y.float(), r"must be integers, got torch\.float32"),
        (Y[:, None], r"targets have shape \(8, 1\)"),
        (torch.ones(24, 3), r"target \[1\.0, 1\.0, 1\.0\] at index \(0,\) .*sum to 1"),
        (torch.ones(24, 4), r"targets have shape \(8, 4\)"),
    ],
    ids=["too large", "negative", "float", "column", "no probabilities", "too wide"],
)
def test_wrong_classes(y: Tensor, message: str) -> None:
    with pytest.raises(lapwing.BadData, match=message):
        fit(data=batches(y=y))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "message"),
    [
        ("regression", 1, torch.zeros(24, 2), r"targets have shape \(8, 2\), but Gaussian .* needs \(8, 1\) or \(8,\)"),
        ("regression", 2, torch.zeros(24), r"targets have shape \(8,\)"),
        ("binary", 1, Y, r"target 2\.0 at index \(2, 0\) is outside \[0, 1\]"),
        ("counts", 1, Y - 1, "target -1"),
        ("counts", 1, Y + 0.5, r"target 0\.5"),
        ("classification", 1, Y, "single logit"),
        ("heteroscedastic", 3, torch.zeros(24), "even last dimension"),
        ("preference", 3, Y, "rewards of two candidates"),
        (lapwing.Gaussian([1.0, 2.0]), 3, torch.zeros(24, 3), "noise has 2 entries, but the network has 3 outputs"),
    ],
)
def test_targets_that_do_not_fit_the_likelihood(likelihood: Any, outputs: int, y: Tensor, message: str) -> None:
    with pytest.raises(lapwing.BadData, match=message):
        fit(net(outputs), batches(y=y), likelihood)


def test_targets_of_any_integer_type_and_one_hot_are_the_same() -> None:
    truth = fit().log_evidence()
    one_hot = nn.functional.one_hot(Y, 3)
    for y in (Y.to(torch.uint8), Y.int()):
        assert torch.equal(fit(data=batches(y=y)).log_evidence(), truth)
    for y in (one_hot, one_hot.double()):  # labels in general: another root of the same curvature
        torch.testing.assert_close(fit(data=batches(y=y)).log_evidence(), truth, rtol=1e-7, atol=0)
    assert torch.equal(fit(data=[(x, y.tolist()) for x, y in batches()]).log_evidence(), truth)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "data is a NoneType"),
        (X, "data is a Tensor; expected a DataLoader"),
        (TensorDataset(X, Y), "data is a TensorDataset; expected a DataLoader"),
        ([(X, Y, Y)], r"tuple of 3 entries; .*split="),
        ([{"pixels": X}], r"keys \['pixels'\] and none of"),
        (["text"], "a batch is a str"),
    ],
    ids=["none", "tensor", "data set", "triple", "dict without labels", "text"],
)
def test_data_of_another_kind(data: Any, message: str) -> None:
    with pytest.raises(lapwing.BadData, match=message):
        fit(data=data)


# --- models that cannot be used -------------------------------------------------------------------------------------


def test_nothing_to_put_a_posterior_on() -> None:
    with pytest.raises(lapwing.BadData, match="no parameters"):
        fit(nn.Tanh())
    frozen = net().requires_grad_(False)
    with pytest.raises(lapwing.BadData, match="every parameter of the model is frozen"):
        fit(frozen)
    with pytest.raises(lapwing.BadData, match=r"select='head\.\*' matches no parameter; there are '0\.weight'"):
        fit(select="head.*")
    with pytest.raises(lapwing.BadData, match=r"torch\.nn\.Module, got"):
        fit(torch.relu)


def test_frozen_parameters_are_left_out() -> None:
    model = net()
    model[0].bias.requires_grad_(False)
    la = fit(model, structure="kron")
    assert la.params.names == ("0.weight", "2.weight", "2.bias")
    assert not model[0].bias.requires_grad
    with pytest.raises(lapwing.BadData, match=r"'0\.bias', which is frozen"):
        fit(model, select=["0.bias"])


@pytest.mark.parametrize("option", [{"structure": "kfac"}, {"factor": "fisher"}, {"structure": lapwing.Kron}], ids=str)
def test_unknown_choices_name_the_known(option: dict[str, Any]) -> None:
    with pytest.raises(lapwing.UnsupportedOperation, match=r"is one of \[.*\] or 'auto'"):
        fit(**option)


@pytest.mark.parametrize("prior", [-1.0, 0.0, math.nan, torch.ones(5), {"nothing.*": 1.0}])
def test_impossible_priors(prior: Any) -> None:
    with pytest.raises(lapwing.IncompatiblePrior):
        fit(prior=prior)


# --- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_float64_is_computed_in_float64(structure: str) -> None:
    """The same numbers from data in a basis in which float32 would round: J of a linear net is known exactly."""
    model = nn.Linear(3, 1).double()
    x = X.double() + 1e-9 * torch.arange(72).reshape(24, 3)
    la = fit(model, [(x, x[:, 0])], lapwing.Gaussian(0.5), structure=structure, prior=3.0)
    rows = torch.cat([x, torch.ones(24, 1)], 1)
    truth = rows.T @ rows
    if structure == "diag":
        truth = truth.diagonal().diag()
    assert la.curvature.matrix.dtype == torch.float64
    assert (la.curvature.dense() - truth).abs().max() < 1e-12 * truth.abs().max()
    f = la.predict(x[:2]).function
    covariance = torch.linalg.inv(truth / 0.25 + 3 * torch.eye(4, dtype=torch.float64))
    assert f.mean.dtype == f.variance.dtype == torch.float64
    assert torch.allclose(f.variance[:, 0], torch.einsum("ni,ij,nj->n", rows[:2], covariance, rows[:2]), rtol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=["bf16", "fp16"])
def test_half_precision_accumulates_in_float32(structure: str, dtype: torch.dtype, tolerance: float) -> None:
    half = net().to(dtype)
    x = X.to(dtype)
    la = fit(half, batches(x), structure=structure)
    truth = fit(copy.deepcopy(half).float(), batches(x.float()), structure=structure)
    assert la.curvature.matrix.dtype == la.posterior.mean.dtype == torch.float32
    expected = truth.curvature.dense()
    assert (la.curvature.dense() - expected).norm() < tolerance * expected.norm()
    p, q = la.predict(x[:6]), truth.predict(x[:6].float())
    assert p.probs.dtype == torch.float32
    assert (p.probs - q.probs).abs().max() < tolerance
    assert (p.epistemic / q.epistemic - 1).abs().max() < 5 * tolerance
    assert (p.novelty / q.novelty - 1).abs().max() < 0.2
    assert abs(float(la.log_evidence() - truth.log_evidence())) < 10 * tolerance
    assert half[0].weight.dtype == dtype


def test_half_precision_sums_do_not_stall() -> None:
    """4,096 times 49 in fp16: a sum in half precision would overflow."""
    model = nn.Linear(1, 1, bias=False).half()
    x = torch.full((4096, 1), 7.0).half()
    la = fit(model, [(x, x)], "regression", structure="diag")
    assert la.curvature.dense().item() == pytest.approx(4096 * 49.0)


def test_the_default_dtype_does_not_matter() -> None:
    la = fit(structure="kron")
    p = la.predict(X[:4])
    torch.set_default_dtype(torch.float64)
    try:
        again = fit(la.module, structure="kron")
        q = again.predict(X[:4])
        fields = ("probs", "entropy", "epistemic", "novelty")
        values = {field: getattr(q, field) for field in fields}
        evidence = again.log_evidence()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(evidence, la.log_evidence())
    for field, value in values.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, getattr(p, field)), field


# --- the user's module, and the user's world ------------------------------------------------------------------------


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


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


# --- modes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_everything_works_without_gradients(structure: str) -> None:
    structure_ = LowRank(7) if structure == "lowrank" else structure
    truth = fit(structure=structure_)
    with torch.no_grad():
        la = fit(structure=structure_)
        assert torch.equal(la.log_evidence(), truth.log_evidence())
        assert torch.equal(la.predict(X[:4]).epistemic, truth.predict(X[:4]).epistemic)
        grid = {"prior": [0.1, 1.0]}
        assert (
            la.tune(batches(), learn="prior", grid=grid).tuning.score
            == truth.tune(batches(), learn="prior", grid=grid).tuning.score
        )
        assert not torch.is_grad_enabled()


def test_training_mode_is_evaluated_in_eval_mode() -> None:
    def model() -> nn.Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))

    training, evaluating = model().train(), model().eval()
    a, b = fit(training, structure="kron"), fit(evaluating, structure="kron")
    assert training[1].training
    assert training[2].training
    assert torch.equal(a.log_evidence(), b.log_evidence())
    assert torch.equal(a.predict(X[:4]).probs, b.predict(X[:4]).probs)
    assert training[1].num_batches_tracked == 0


class Compiled(nn.Module):
    """What torch.compile returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


@pytest.mark.parametrize(
    "wrap", [Compiled, nn.DataParallel, lambda m: Compiled(nn.DataParallel(m)), lambda m: nn.DataParallel(Compiled(m))]
)
def test_wrappers_are_looked_through(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    la, truth = fit(wrap(model), structure="kron"), fit(model, structure="kron")
    assert la.params.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert la.module is model
    assert torch.equal(la.log_evidence(), truth.log_evidence())


def test_autocast_around_a_fit_does_not_lower_its_precision_silently() -> None:
    """Autocast is the user's wish about the forward pass; what is accumulated stays float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        la = fit(structure="kron")
        p = la.predict(X[:4])
        assert p.probs.dtype == torch.float32
    assert la.curvature.matrix.dtype == torch.float32
    truth = fit(structure="kron")
    assert (la.curvature.dense() - truth.curvature.dense()).norm() < 2e-2 * truth.curvature.dense().norm()


# --- a module that has changed since --------------------------------------------------------------------------------


def bump(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] += 0.5


def normed() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a selected weight": lambda m: bump(m[3].weight),
    "selected weights in another order": lambda m: m[3].weight.data.copy_(m[3].weight.data.flip(0).clone()),
    "a frozen weight": lambda m: bump(m[0].weight),
    "a buffer": lambda m: bump(m[1].running_mean),
    "a pass in training mode": lambda m: m.train()(X),
    "a parameter more": lambda m: m.register_parameter("more", nn.Parameter(torch.ones(2))),
    "a parameter less": lambda m: setattr(m[3], "bias", None),
    "an optimizer step": lambda m: step(m),
}


def step(model: nn.Module) -> None:
    model(X).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("select", ["all", "3.*"])
def test_a_changed_module_is_noticed(what: str, select: str) -> None:
    model = normed()
    la = fit(model, structure="kron", select=select)
    uses: list[Callable[[], object]] = [
        lambda: la.predict(X[:2]),
        lambda: la.predict(X[:2], method="sampled"),
        lambda: la.update(batches()),
        lambda: la.tune(batches()),
        lambda: next(la.predict_loader(batches())),
    ]
    uses[0]()
    CHANGES[what](model)
    for use in uses:
        with pytest.raises(lapwing.UnsupportedModel, match="changed since the fit"):
            use()


def test_harmless_changes_are_allowed() -> None:
    model = normed().eval()
    la = fit(model, structure="kron")
    probs = la.predict(X[:2]).probs
    model.train()
    model.requires_grad_(False)
    model[0].weight.grad = torch.ones(5, 3)
    assert torch.equal(la.predict(X[:2]).probs, probs)
    state = copy.deepcopy(model.state_dict())
    bump(model[0].weight)
    model.load_state_dict(state)
    assert torch.equal(la.predict(X[:2]).probs, probs)


def test_what_is_frozen_stays_frozen() -> None:
    la = fit(structure="kron")
    before = la.predict(X[:2]).probs
    la.replace(prior=100.0)
    la.tune(batches(), learn="prior", grid={"prior": [5.0]})
    la.update(batches())
    assert torch.equal(la.predict(X[:2]).probs, before)
    with pytest.raises(AttributeError):
        la.prior = 3.0  # type: ignore[misc,assignment]


# --- also when the outputs do not show it ---------------------------------------------------------------------------


def test_infinite_inputs_are_found_where_the_network_saturates() -> None:
    for row, batch in ((0, 0), (17, 2)):
        x = X.clone()
        x[row, 1] = math.inf
        with pytest.raises(lapwing.BadData, match=rf"batch {batch}: the inputs hold inf at index \({row % 8}, 1\)"):
            fit(data=batches(x))


def test_infinite_weights_are_found_where_the_network_saturates() -> None:
    model = net()
    with torch.no_grad():
        model[0].bias[1] = math.inf
    assert model(X).isfinite().all()
    with pytest.raises(lapwing.BadData, match=r"parameter '0\.bias' of the network is not finite"):
        fit(model)


class Root(nn.Module):
    """No derivative at inputs of zero, where the output is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).abs().sqrt()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_infinite_gradients_name_batch_and_layer(structure: str) -> None:
    x = X.clone()
    x[17] = 0
    with pytest.raises(lapwing.BadData, match=r"batch 2: the gradient .* linear\(layer\.weight\) is not finite"):
        fit(Root(), batches(x), structure=structure)
    x[0] = 0
    with pytest.raises(lapwing.BadData, match=r"the gradient .*'layer\.weight' is not finite"):
        fit(Root(), batches(x), structure=structure)


def test_sample_weights_are_checked() -> None:
    for value in (-1.0, math.nan):
        with pytest.raises(lapwing.BadData, match=f"batch 0: a sample weight is {value}"):
            fit(split=lambda batch, value=value: (*batch, torch.full((8,), value)))
    with pytest.raises(lapwing.BadData, match=r"weights of shape \(3,\) for 8 samples"):
        fit(split=lambda batch: (*batch, torch.ones(3)))


def test_arguments_of_fit_are_checked() -> None:
    with pytest.raises(lapwing.BadData, match="X has 24 samples, y has 5"):
        fit(data=(X, Y[:5]))
    with pytest.raises(lapwing.BadData, match="has no targets"):
        fit(data=[(X, None)])
    with pytest.raises(lapwing.BadData, match="number of bytes, must be positive and finite, got '1GB'"):
        fit(memory="1GB")
    for n_data in (0, -1, math.nan, math.inf):
        with pytest.raises(lapwing.BadData, match="n_data must be positive and finite"):
            fit(n_data=n_data)
    for select in (None, net()[0]):
        with pytest.raises(lapwing.BadData, match="select is 'all', 'last_layer', a glob"):
            fit(select=select)
    with pytest.raises(lapwing.BadData, match="empty list"):
        fit(select=[])
    with pytest.raises(lapwing.LapwingError, match="temperature must be at least 0, got"):
        fit(temperature=-1.0)


@pytest.mark.parametrize("model", [nn.LazyLinear(3), nn.Linear(3, 3, device="meta")], ids=["lazy", "meta"])
def test_weights_without_values(model: nn.Module) -> None:
    with pytest.raises(lapwing.BadData, match="has no values yet"):
        fit(model)


# --- inference mode -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_fits_in_inference_mode(structure: str) -> None:
    model, truth = net(), fit(structure=structure)
    with torch.inference_mode():
        loader = DataLoader(TensorDataset(X, Y), batch_size=8)  # which stacks its batches in this mode
        la = fit(model, loader, structure=structure)
        assert torch.is_inference_mode_enabled()
        assert torch.equal(la.predict(X[:4] + 0).probs, truth.predict(X[:4]).probs)
    assert torch.equal(la.log_evidence(), truth.log_evidence())
    precision = torch.tensor(2.0, requires_grad=True)
    (slope,) = torch.autograd.grad(la.replace(prior=precision).log_evidence(), precision)
    assert slope.isfinite()


@pytest.mark.parametrize(
    "options", [{}, {"method": "sampled"}, {"joint": True}, {"differentiable": True}, {"link": "probit"}], ids=str
)
def test_predicts_in_inference_mode(options: dict[str, Any]) -> None:
    la = fit(structure="kron")
    truth = la.predict(X[:4], **options)
    fresh = fit(structure="kron")  # nothing is cached yet
    with torch.inference_mode():
        p = fresh.predict(X[:4] + 0, **options)
        for field in ("probs", "entropy", "epistemic", "novelty"):
            assert torch.equal(getattr(p, field), getattr(truth, field)), field
        assert torch.equal(fresh.ensemble(3).predict(X[:4] + 0).probs, la.ensemble(3).predict(X[:4]).probs)
        grid = {"prior": [0.1, 1.0]}
        fresh.tune((X + 0, Y + 0), learn="prior", grid=grid)
        fresh.update((X + 0, Y + 0))
    x = X[:4].clone().requires_grad_()  # what was cached in inference mode serves gradients, too
    (slope,) = torch.autograd.grad(fresh.predict(x, differentiable=True).entropy.sum(), x)
    (expected,) = torch.autograd.grad(la.predict(x, differentiable=True).entropy.sum(), x)
    assert torch.equal(slope, expected)


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = net()
    with pytest.raises(lapwing.BadData, match=r"made in torch\.inference_mode"):
        fit(model)


# --- changes that only a close look finds ---------------------------------------------------------------------------


class Plain(nn.Module):
    """Reads a tensor and a number that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 3)
        self.shift, self.factor, self.activation = torch.ones(5), 2.0, nn.Tanh()
        self.register_buffer("mask", torch.tensor([math.inf, -math.inf, math.nan]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.body(x) + self.shift) * self.factor)


SUBTLE: dict[str, Callable[[Plain], object]] = {
    "frozen weights in another order": lambda m: m.body.weight.data.copy_(m.body.weight.data.flip(0).clone()),
    "a plain tensor": lambda m: bump(m.shift),
    "a plain number": lambda m: setattr(m, "factor", 3.0),
    "another activation": lambda m: setattr(m, "activation", nn.ReLU()),
    "another type of the weights": lambda m: m.double(),
}


@pytest.mark.parametrize("what", SUBTLE)
def test_a_subtle_change_is_noticed(what: str, tmp_path: Any) -> None:
    model = Plain()
    la = fit(model, structure="kron", select="head.*")
    ensemble = la.ensemble(2)
    la.save(tmp_path / "before")
    la.predict(X[:2])  # a buffer of NaN and Inf is no change
    SUBTLE[what](model)
    x = X[:2].to(model.head.weight.dtype)
    uses: list[Callable[[], object]] = [
        lambda: la.predict(x),
        lambda: la.ensemble(2),
        lambda: ensemble.predict(x),
        lambda: la.save(tmp_path / "after"),
        lambda: lapwing.load(tmp_path / "before", model),
    ]
    for use in uses:
        with pytest.raises(lapwing.UnsupportedModel):
            use()
    assert not (tmp_path / "after").exists()


def test_rows_of_a_low_rank_stay_in_the_budget() -> None:
    """One batch has 256 · 10 rows of 28,170 weights, 290 MB in float32; the budget is 100 MB."""
    model = nn.Sequential(nn.Linear(64, 376), nn.Tanh(), nn.Linear(376, 10))
    x = torch.randn(256, 64, generator=seeded())
    y = torch.arange(256) % 10
    fit(model, [(x[:4], y[:4])], structure="diag")
    with PeakMemory() as memory:
        fit(model, [(x, y)], structure=LowRank(5), memory=100_000_000)
    assert memory.growth < 150_000_000


# --- networks that write to themselves ------------------------------------------------------------------------------


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


# --- confident networks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [30.0, 100.0, 1000.0, 1e5])
@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s != "lowrank"])
def test_confident_networks_have_finite_curvature(scale: float, structure: str) -> None:
    """Logit gaps beyond 88, where probabilities leave the range of float32, against the same network in float64."""
    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.weight.copy_(torch.arange(12).reshape(4, 3).sin() * scale)
        model.bias.zero_()
    x = X * 2
    assert (model(x).softmax(-1) < torch.finfo(torch.float32).tiny).any()
    la = fit(model, batches(x), structure=structure)
    truth = fit(copy.deepcopy(model).double(), batches(x.double()), structure=structure)
    expected = truth.curvature.dense()
    assert (la.curvature.dense() - expected).abs().max() <= 1e-3 * expected.abs().max() + 1e-30
    assert la.predict(x[:4]).probs.isfinite().all()
    assert la.log_evidence().isfinite()


def test_a_repaired_posterior_tells_its_story() -> None:
    la = fit(structure="full", factor="hessian", prior=1e-3, repair=True)
    assert la.posterior.increase > 0
    assert "raised by" in la.summary()
    assert la.log_evidence().isfinite()
    with pytest.raises(lapwing.NotPositiveDefinite, match="repair=True"):
        fit(structure="full", factor="hessian", prior=1e-3)


def test_errors_of_tune_name_the_batch_and_the_place_in_it() -> None:
    la = fit(structure="diag")
    good = (X, Y)
    bad = Y.clone()
    bad[5] = 8
    with pytest.raises(lapwing.BadData, match=r"batch 1: .*8.*5"):
        la.tune([good, (X, bad)], learn="prior", grid={"prior": [1.0]})
    broken = X.clone()
    broken[2, 0] = float("nan")
    with pytest.raises(lapwing.BadData, match=r"batch 1: the inputs hold nan at index \(2, 0\)"):
        la.tune([good, (broken, Y)], learn="prior", grid={"prior": [1.0]})


def test_one_precision_a_weight_is_not_for_held_out_data() -> None:
    with pytest.raises(lapwing.IncompatiblePrior, match=r"prior='layerwise'.*method='evidence'"):
        fit(structure="diag").tune((X, Y), prior="parameterwise")


class Polar(nn.Module):
    """Complex weights, then real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.out = nn.Linear(3, 4, dtype=torch.complex64), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.turn(x.to(torch.complex64)).abs().tanh())


def test_complex_weights_are_refused_by_name() -> None:
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    with pytest.raises(lapwing.UnsupportedModel, match=r"complex weights \(turn.weight, turn.bias\).*select="):
        lapwing.fit(Polar(), (x, y), "classification", structure="full")
    la = lapwing.fit(Polar(), (x, y), "classification", structure="full", select="last_layer")
    assert la.predict(x).probs.isfinite().all()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("structure", ["diag", "kron", "blockdiag", "full"])
def test_layers_without_units(structure: str) -> None:
    """They add nothing: as without them, with the bias of the next layer."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.arange(8) % 2

    class Widthless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.after, self.real = nn.Linear(3, 0), nn.Linear(0, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.real(x) + self.after(self.none(x))

    class Without(nn.Module):
        def __init__(self, like: Widthless) -> None:
            super().__init__()
            self.bias, self.real = nn.Parameter(like.after.bias.detach().clone()), like.real

        def forward(self, x: Tensor) -> Tensor:
            return self.real(x) + self.bias

    widthless = Widthless()
    la, want = (
        lapwing.fit(model, (x, y), "classification", structure=structure) for model in (widthless, Without(widthless))
    )
    torch.testing.assert_close(la.predict(x).probs, want.predict(x).probs)
    torch.testing.assert_close(la.log_evidence(), want.log_evidence())


def test_properties_in_inference_mode() -> None:
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    la = lapwing.fit(nn.Linear(3, 2), (x, y), "classification", structure="kron")
    want = la.effective_parameters, la.stationarity
    with torch.inference_mode():
        assert (la.effective_parameters, la.stationarity) == want
        lapwing.log_evidence(la.curvature, 1.0, la.likelihood)
    prior = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(la.replace(prior=prior).log_evidence(), prior)
    ahead, behind = (float(la.replace(prior=2 + s).log_evidence()) for s in (1e-5, -1e-5))
    assert float(slope) == pytest.approx((ahead - behind) / 2e-5, rel=1e-5)
