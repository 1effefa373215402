"""Data that hide what the plan must find out, models that mix samples, and a module that must come out unchanged."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from tests.noise import unit_noise

from . import oracle
from .architectures import ZOO
from .architectures.registry import Net
from .cases import Snapshot, assert_same, case, fit, plain

LAYOUTS = [
    "flatten_batch_major",
    "flatten_time_major",
    "flatten_tokens_time_major",
    "windows_before_batch",
    "samples_in_the_middle",
    "samples_last",
    "square_everything",
    "square_matrix_left",
    "swin_windows",
    "video_frames_in_batch",
    "siamese_stacked",
    "vit_class_token_repeated",
    "attention_time_major",
    "lstm_learned_state_expanded",
    "raw_matrix_left",
    "learned_queries",
    "mixture_of_experts_routed",
    "mlp_mixer",
    "lstm_residual_inplace",
    "residual_inplace_tokens",
]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def check(module, batches, likelihood="regression", tolerance=1e-10):
    """full and diag against brute force; the batches may differ in every size but the last."""
    module.eval()
    exact = 0
    for x, _ in batches:
        f = oracle.outputs(module, x)
        lam = oracle.hessian_gaussian(f) if likelihood == "regression" else oracle.hessian_categorical(f)
        exact = exact + oracle.ggn(oracle.jacobian(module, x), lam)
    for structure in ("full", "diag"):
        before = Snapshot(module)
        la = lapwing.fit(module, batches, unit_noise(likelihood), structure=structure)
        before.check(module)
        assert_same(la.curvature.dense(), exact if structure == "full" else exact.diag().diag(), tolerance, structure)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sizes", [(1, 4), (3, 2), (4, 1), (1, 1, 1, 1, 1)])
def test_size_of_the_first_batch_does_not_matter(name, sizes):
    truth = case(name, "regression")
    la = fit(truth, "full", sizes=sizes)
    assert_same(la.curvature.dense(), truth.ggn, truth.tolerance)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("first", ["one sample three times", "zeros"])
def test_first_batch_without_variety(name, first):
    """Equal samples cannot tell batch-major from batch-minor flattening."""
    x = ZOO[name].inputs(3, seed=5)

    def flat(t):
        return t[:1].repeat_interleave(3, 0) if first != "zeros" else torch.zeros_like(t)

    same = tuple(map(flat, x)) if isinstance(x, tuple) else flat(x)
    module = ZOO[name].build().eval()
    batches = [(z, oracle.call(module, z).detach()) for z in (same, ZOO[name].inputs(2, seed=6))]
    check(module, batches)


@pytest.mark.parametrize(
    "name", ["attention", "lstm", "flatten_time_major", "encoder_pre_norm_time_first", "gru_cell_loop_learned_state"]
)
def test_batches_of_different_length(name):
    """Sequences are longer in the second batch."""
    module = ZOO[name].build().eval()
    width = ZOO[name].inputs(1).shape[-1]
    batches = [
        (z, oracle.call(module, z).detach()) for z in (randn(2, 3, width), randn(3, 5, width), randn(1, 2, width))
    ]
    check(module, batches)


def test_images_of_different_size():
    module = ZOO["conv2d_plain"].build().eval()
    batches = [(z, oracle.call(module, z).detach()) for z in (randn(2, 2, 5, 5), randn(1, 2, 7, 4))]
    check(module, batches)


def routed():
    """Two experts of the same shape; every batch calls one linear for the gate and as many as it needs."""

    def call(s, x):
        out = x.new_zeros(x.shape[0], 2)
        for e, expert in enumerate(s.experts):
            mask = (x[:, 0] > 0) == bool(e)
            if mask.any():
                out[mask] = expert(x[mask])
        return out * s.scale

    torch.manual_seed(0)
    scale = nn.Parameter(torch.ones(2))
    return Net(call, experts=nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), scale=scale).double().eval()


def test_routing_changes_between_batches():
    """The same number of the same operations, with other parameters."""
    with torch.random.fork_rng():
        module = routed()
    left, right = randn(3, 3), randn(3, 3, seed=1)
    left[:, 0], right[:, 0] = -1.0, 1.0
    mixed = torch.cat([left[:1], right[:2]])
    check(module, [(left, left[:, :2]), (right, right[:, :2])])
    check(module, [(left, left[:, :2]), (mixed, mixed[:, :2])])
    check(module, [(mixed, mixed[:, :2]), (right, right[:, :2])])


def test_control_flow_changes_between_batches():
    """Another operation at the same place, and the same operation with another argument."""

    def call(s, x):
        if x.shape[0] == 2:
            return s.b(torch.tanh(s.a(x)))
        h = F.conv1d(torch.tanh(s.a(x)).unsqueeze(-1), s.b.weight.unsqueeze(-1)).squeeze(-1)
        return h * s.b.bias

    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Net(call, a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double().eval()
    x = randn(6, 3)
    module_batches = [(x[:2], x[:2, :2]), (x[2:6], x[2:6, :2])]
    exact = 0
    for z, _ in module_batches:
        rows = []
        f = module(z)
        for n in range(z.shape[0]):
            rows.append(torch.stack([oracle.gradient(f[n, c], list(module.parameters())) for c in range(2)]))
        j = torch.stack(rows)
        exact = exact + torch.einsum("ndp,ndq->pq", j, j)
    try:
        la = lapwing.fit(module, module_batches, lapwing.Gaussian(1.0), structure="full")
    except lapwing.LapwingError:
        return  # a model whose function depends on the batch size may be refused, never silently wrong
    assert_same(la.curvature.dense(), exact)


@pytest.mark.parametrize("factor", ["ggn", "mc", "empirical"])
def test_inputs_that_are_overwritten_in_a_later_batch(factor):
    """Autograd has no gradient there, and the tape no inputs any more."""

    def forward(s, x):
        h = x.clone()
        u = s.a(h)
        if x[0, 0] > 10:
            h.mul_(0.1)
        return s.c(torch.tanh(u + s.b(h)))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(3, 4), c=nn.Linear(4, 2)).double()
    x, far = randn(6, 3), randn(6, 3, seed=1)
    far[:, 0] = 11
    la = lapwing.fit(module, [(x, x[:, :2])], lapwing.Gaussian(1.0), structure="full", factor=factor)
    for use in (
        lambda: lapwing.fit(module, [(x, x[:, :2]), (far, far[:, :2])], lapwing.Gaussian(1.0), factor=factor),
        lambda: la.predict(far).function.variance,
    ):
        with pytest.raises(lapwing.UnsupportedModel, match="modified by an inplace operation"):
            use()


MIXING = {
    "batch mean": lambda s, x: s.fc(x - x.mean(0)),
    "batch mean after the layer": lambda s, x: (lambda h: h - h.mean(0))(s.fc(x)),
    "softmax over the batch": lambda s, x: torch.softmax(s.fc(x), 0),
    "batch norm without running statistics": lambda s, x: F.batch_norm(s.fc(x), None, None, training=True),
    "attention over the batch": lambda s, x: torch.softmax(s.fc(x) @ s.fc(x).T, -1) @ x[:, :2],
    "roll over the batch": lambda s, x: s.fc(x) + s.fc(x).roll(1, 0),
    "sum over the batch": lambda s, x: s.fc(x) * s.fc(x).sum(),
}


@pytest.mark.parametrize("how", MIXING)
def test_models_that_mix_samples_are_refused(how):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Net(MIXING[how], fc=nn.Linear(3, 2)).double()
    x = randn(5, 3)
    before = Snapshot(module)
    with pytest.raises(lapwing.UnsupportedModel, match=r"(?i)sample|mix|batch"):
        lapwing.fit(module, [(x, x[:, :2])], lapwing.Gaussian(1.0), structure="full")
    before.check(module)


class Interrupted:
    """Batches that end in an exception."""

    def __init__(self, batches, error):
        self.batches, self.error = batches, error

    def __iter__(self):
        yield from self.batches
        raise self.error


UNCHANGED = [
    "mlp_relu_inplace",
    "resnet_block",
    "lstm",
    "encoder_post_norm_batch_first",
    "pruned_linear",
    "spectral_norm_linear",
]


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag"])
@pytest.mark.parametrize("name", UNCHANGED)
def test_module_is_unchanged_after_an_exception_in_the_data(name, structure):
    truth = case(name, "classification")
    module = ZOO[name].build()
    for k, p in enumerate(module.parameters()):
        p.grad = torch.full_like(p, float(k))
    next(module.parameters()).requires_grad_(False)
    list(module.modules())[-1].eval()
    before = Snapshot(module)
    for batches in (truth.batches()[:2], []):
        with pytest.raises(KeyboardInterrupt):
            lapwing.fit(module, Interrupted(batches, KeyboardInterrupt()), "classification", structure=structure)
        before.check(module)


def test_module_is_unchanged_after_an_exception_in_the_model():
    def call(s, x):
        h = torch.tanh(s.a(x))
        if x.shape[0] == 2 and x[0, 0] == 7:
            raise ArithmeticError("the model does not like seven")
        return s.b(h)

    with torch.random.fork_rng():
        module = Net(call, a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    x = randn(4, 3)
    x[2, 0] = 7
    before = Snapshot(module)
    with pytest.raises(ArithmeticError):
        lapwing.fit(module, [(x[:2], x[:2, :2]), (x[2:], x[2:, :2])], lapwing.Gaussian(1.0), structure="diag")
    before.check(module)


def test_module_is_unchanged_after_bad_numbers():
    module, x = ZOO["mlp_tanh"].build(), randn(4, 3)
    x[3, 1] = float("nan")
    before = Snapshot(module)
    with pytest.raises(lapwing.BadData, match=r"(?i)nan"):
        lapwing.fit(module, [(x[:2], x[:2, :2]), (x[2:], x[2:, :2])], lapwing.Gaussian(1.0), structure="diag")
    before.check(module)


def test_buffers_that_the_forward_writes_are_put_back():
    """A counter and a moving average that move in evaluation mode too."""

    def call(s, x):
        s.count += 1
        s.average.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return s.fc(x)

    count, average = torch.zeros((), dtype=torch.long), torch.zeros(())
    with torch.random.fork_rng():
        module = Net(call, fc=nn.Linear(3, 2), count=count, average=average).double()
    x = randn(4, 3)
    before = Snapshot(module)
    la = lapwing.fit(module, [(x[:2], x[:2, :2]), (x[2:], x[2:, :2])], lapwing.Gaussian(1.0), structure="full")
    before.check(module)
    la.predict(x)
    before.check(module)


def test_predict_leaves_the_module_alone():
    for name in UNCHANGED:
        truth, module = case(name, "classification"), ZOO[name].build()
        la = lapwing.fit(module, truth.batches(), "classification", structure="kron")
        before = Snapshot(module)
        la.predict(truth.x)
        la.predict(truth.x, method="sampled", samples=3, generator=generator())
        before.check(module)


def test_global_random_state_is_left_alone():
    truth, module = case("mlp_gelu_dropout", "classification"), ZOO["mlp_gelu_dropout"].build()
    state = torch.get_rng_state()
    la = lapwing.fit(module, truth.batches(), "classification", structure="kron", factor="mc", generator=generator())
    la.predict(truth.x)
    la.posterior.sample(2, generator=generator())
    assert torch.equal(torch.get_rng_state(), state)


def test_fit_works_under_no_grad():
    truth = case("mlp_tanh", "classification")
    with torch.no_grad():
        la = fit(truth, "full")
        la.predict(truth.x)
    assert_same(la.curvature.dense(), truth.ggn)


def test_forms_of_data_agree():
    truth = case("mlp_tanh", "classification")
    module = ZOO["mlp_tanh"].build()
    loader = DataLoader(TensorDataset(truth.x, truth.y), batch_size=2)
    for data in (loader, (truth.x, truth.y), truth.batches(), [list(b) for b in truth.batches()]):
        la = lapwing.fit(module, data, "classification", structure="full")
        assert_same(la.curvature.dense(), truth.ggn)


SELECTIONS = [
    ("mlp_tanh", "last_layer", ("4.weight", "4.bias")),
    ("after_last_linear_times_five", "last_layer", ("b.weight", "b.bias")),
    ("after_last_linear_log_softmax", "last_layer", ("b.weight", "b.bias")),
    ("raw_matrix_right", "last_layer", ("b",)),
    ("unet", "last_layer", ("out.weight", "out.bias")),
    ("resnet_block", "last_layer", ("head.weight", "head.bias")),
    ("unused", "last_layer", ("b.weight", "b.bias")),
    ("mlp_tanh", "2.*", ("2.weight", "2.bias")),
    ("mlp_tanh", "*.bias", ("0.bias", "2.bias", "4.bias")),
    ("mlp_tanh", ["0.weight", "4.bias"], ("0.weight", "4.bias")),
    ("conv2d_groups", ["conv.weight"], ("conv.weight",)),
    ("conv2d_groups", ["conv.bias"], ("conv.bias",)),
    ("lstm", "rnn.weight_ih_l0", ("rnn.weight_ih_l0",)),
    ("encoder_post_norm_batch_first", "layer.self_attn.in_proj_weight", ("layer.self_attn.in_proj_weight",)),
    ("tensor_in_two_modules", ["a.weight", "b.bias"], ("a.weight", "b.bias")),
    ("batch_norm2d", "norm.*", ("norm.weight", "norm.bias")),
    ("resnet_block", lambda name, p: p.ndim == 4, ("conv1.weight", "conv2.weight", "down.0.weight")),
    ("tiny_gpt", "embed.weight", ("embed.weight",)),
    ("vit_class_token_expanded", ["cls", "pos"], ("cls", "pos")),
]


@pytest.mark.parametrize("structure", ["full", "diag", "blockdiag", "kron"])
@pytest.mark.parametrize(("name", "select", "names"), SELECTIONS)
def test_selection(name, select, names, structure):
    """The curvature of the selection is the selection of the curvature, and so is the prediction."""
    truth = case(name, "classification" if ZOO[name].kind != "image" else "regression")
    index = oracle.positions(ZOO[name].build(), names)
    exact, j = truth.ggn[index.unsqueeze(1), index], truth.j[..., index]
    module = ZOO[name].build()
    before = Snapshot(module)
    la = lapwing.fit(module, truth.batches(), truth.likelihood, structure=structure, select=select)
    before.check(module)
    assert plain(la.params.names) == names
    dense = la.curvature.dense()
    if structure == "full":
        assert_same(dense, exact, truth.tolerance)
    if structure == "diag":
        assert_same(dense, exact.diag().diag(), truth.tolerance)
    sigma = torch.linalg.inv(dense + torch.eye(len(index), dtype=torch.float64))
    variance = (j @ sigma @ j.mT).diagonal(dim1=1, dim2=2).reshape(truth.f.shape)
    assert_same(la.predict(truth.x).function.variance, variance, 1e-9)


def test_frozen_parameters_may_use_what_the_tape_cannot():
    """Only selected parameters are followed."""
    truth = case("custom_function_with_parameters", "regression")
    module = ZOO[truth.name].build()
    la = lapwing.fit(module, truth.batches(), lapwing.Gaussian(1.0), structure="full", select="head.*")
    index = oracle.positions(module, ["head.weight", "head.bias"])
    assert_same(la.curvature.dense(), truth.ggn[index.unsqueeze(1), index])
