"""Options of the fit that must not change the numbers, or change them in a known way."""

import pytest
import torch

import lapwing

from . import oracle
from .architectures import ZOO
from .cases import assert_same, case, fit

STRUCTURES = ("diag", "blockdiag", "kron", "ekfac", "full")


def assert_agree(structure, a, b, tolerance=1e-10):
    """Equal matrices; for EKFAC equal traces, because its basis is arbitrary where its factors are singular."""
    a, b = a.curvature.dense(), b.curvature.dense()
    assert_same(*((a.trace(), b.trace()) if structure == "ekfac" else (a, b)), tolerance)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["conv2d_stride", "tokens_linear", "embedding_tied_head", "attention"])
def test_small_memory_gives_the_same_numbers(name, structure):
    """A tight budget cuts the directions into chunks; input factors must not be counted once a chunk."""
    truth = case(name, "classification")
    assert_agree(structure, fit(truth, structure, memory=400_000), fit(truth, structure, memory=2**34), 1e-11)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["mlp_tanh", "conv2d_stride", "tokens_linear"])
def test_weight_two_is_the_datum_twice_and_weight_zero_is_none(name, structure):
    truth = case(name, "classification")
    weights = torch.tensor([2.0, 0.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    weighted = [(x, y, w) for (x, y), w in zip(truth.batches(), weights.split((2, 1, 2)), strict=True)]
    module = ZOO[name].build()
    mine = lapwing.fit(module, weighted, truth.likelihood, structure=structure, split=lambda batch: batch)
    index = torch.tensor([0, 0, 2, 3, 4, 4])
    twice = lapwing.fit(module, [(truth.x[index], truth.y[index])], truth.likelihood, structure=structure)
    assert_agree(structure, mine, twice)
    assert float(mine.log_likelihood) == pytest.approx(float(twice.log_likelihood), rel=1e-10)
    assert mine.n_data == pytest.approx(6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_n_data_scales_curvature_and_log_likelihood(structure):
    truth = case("mlp_tanh", "classification")
    plain, scaled = fit(truth, structure), fit(truth, structure, n_data=50)
    assert plain.n_data == 5
    assert scaled.n_data == 50
    assert_same(scaled.curvature.dense(), 10 * plain.curvature.dense(), 1e-11)
    assert float(scaled.log_likelihood) == pytest.approx(10 * float(plain.log_likelihood), rel=1e-11)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_augmented_passes_average(structure):
    """Three passes that stand for one data set: n_data is the number of data, not of draws."""
    truth = case("mlp_tanh", "classification")
    once = fit(truth, structure)
    module = ZOO["mlp_tanh"].build()
    passes = lapwing.fit(module, truth.batches() * 3, truth.likelihood, structure=structure, n_data=5)
    assert_agree(structure, passes, once, 1e-11)


@pytest.mark.parametrize(
    ("name", "likelihood"),
    [
        ("mlp_tanh", "regression"),
        ("mlp_tanh", "classification"),
        ("one_logit", "classification"),
        ("tokens_linear", "classification"),
        ("unet", "classification"),
    ],
)
def test_log_likelihood_is_that_of_torch_distributions(name, likelihood):
    truth = case(name, likelihood)
    if likelihood == "regression":
        expected = torch.distributions.Normal(truth.f, 1.0).log_prob(truth.y).sum()
    elif truth.likelihood == "binary":
        expected = torch.distributions.Bernoulli(logits=truth.f).log_prob(truth.y.double()).sum()
    else:
        expected = torch.distributions.Categorical(logits=truth.f).log_prob(truth.y).sum()
    la = fit(truth, "diag")
    assert float(la.log_likelihood) == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_ignored_targets_do_not_count(structure):
    """Tokens with target −100 add nothing; where a sample has none left, neither does the sample."""
    truth = case("tokens_linear", "classification")
    y = truth.y.clone()
    y[0, 1] = y[2, 0] = -100
    y[3] = -100
    lam = truth.lam.clone().view(5, 3, 2, 3, 2)
    for n, t in (y == -100).nonzero().tolist():
        lam[n, t] = 0
        lam[n, :, :, t] = 0
    exact = oracle.ggn(truth.j, lam.reshape(5, 6, 6))
    la = lapwing.fit(
        ZOO[truth.name].build(), [(truth.x[:2], y[:2]), (truth.x[2:], y[2:])], "classification", structure=structure
    )
    if structure == "full":
        assert_same(la.curvature.dense(), exact)
    if structure == "diag":
        assert_same(la.curvature.dense(), exact.diag().diag())
    log_p = torch.log_softmax(truth.f, -1)
    expected = sum(log_p[n, t, y[n, t]] for n in range(5) for t in range(3) if y[n, t] >= 0)
    assert float(la.log_likelihood) == pytest.approx(float(expected), rel=1e-10)


NARROW = [
    "mlp_tanh",
    "conv2d_circular",
    "batch_norm2d",
    "layer_norm",
    "encoder_pre_norm_batch_first",
    "lstm",
    "embedding_tied_head",
    "weight_norm_linear",
    "conv_transpose2d_stride",
    "custom_function_with_parameters",
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_types(name, dtype, tolerance):
    """float32 to float32's accuracy; bfloat16 models are accumulated in float32."""
    truth = case(name, "regression")

    def cast(x):
        return x.to(dtype) if x.is_floating_point() else x

    module = ZOO[name].build().to(dtype)
    batches = [(cast(x), cast(y)) for x, y in truth.batches()]
    for structure in ("full", "diag", "kron"):
        la = lapwing.fit(module, batches, lapwing.Gaussian(1.0), structure=structure)
        dense = la.curvature.dense()
        assert dense.dtype in (torch.float32, torch.float64)
        assert dense.isfinite().all()
        if structure == "full":
            assert_same(dense.double(), truth.ggn, tolerance)
        if structure == "diag":
            assert_same(dense.double(), truth.ggn.diag().diag(), tolerance)
