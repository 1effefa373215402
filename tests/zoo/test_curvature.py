"""Every architecture, every likelihood, every structure: the curvature against brute force."""

import pytest
import torch

import lapwing

from . import oracle
from .architectures import ZOO
from .cases import CASES, assert_same, case, fit, plain

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
ONCE = [name for name, arch in ZOO.items() if arch.once]


def fit_or_refuse(truth, structure, **options):
    """A fit; a clear refusal is an answer where the architecture says so."""
    try:
        return fit(truth, structure, **options)
    except lapwing.LapwingError as error:
        if ZOO[truth.name].refusal:
            pytest.skip(f"refused: {error}")
        raise


@pytest.mark.parametrize(("name", "likelihood"), CASES)
def test_full(name, likelihood):
    truth = case(name, likelihood)
    la = fit_or_refuse(truth, "full", train=True)
    assert_same(la.curvature.dense(), truth.ggn, truth.tolerance, "full")


@pytest.mark.parametrize(("name", "likelihood"), CASES)
def test_diag(name, likelihood):
    truth = case(name, likelihood)
    la = fit_or_refuse(truth, "diag", train=False)
    assert_same(la.curvature.dense(), truth.ggn.diag().diag(), truth.tolerance, "diag")


@pytest.mark.parametrize(("name", "likelihood"), CASES)
def test_blockdiag(name, likelihood):
    truth = case(name, likelihood)
    la = fit_or_refuse(truth, "blockdiag", train=True)
    blocks = [plain(block) for block in la.curvature.names]
    assert sorted(n for block in blocks for n in block) == sorted(truth.names), "the blocks do not share out the names"
    expected = oracle.keep_blocks(truth.ggn, truth.blocks(blocks))
    assert_same(la.curvature.dense(), expected, truth.tolerance, "blockdiag")


@pytest.mark.parametrize(("name", "likelihood"), CASES)
def test_ekfac(name, likelihood):
    """The trace is exact, and so is the diagonal of each true block in the eigenbasis of the estimate."""
    truth = case(name, likelihood)
    la = fit_or_refuse(truth, "ekfac", train=False)
    exact, dense = truth.ggn, la.curvature.dense()
    assert_same(dense.trace(), exact.trace(), truth.tolerance, "trace")
    layout, matrix = la.curvature.layout, la.curvature.matrix
    for index, block in zip(layout.index, matrix.blocks, strict=True):
        true_block = exact[index.unsqueeze(1), index]
        mine = dense[index.unsqueeze(1), index]
        basis, scale = eigenbasis(block), exact.abs().max()
        if basis is None:
            assert is_exact_or_its_diagonal(mine, true_block, scale, truth.tolerance)
            continue
        assert_same(
            block.values.flatten() / scale, (basis.T @ true_block @ basis).diag() / scale + 0, truth.tolerance * 10
        )
        rebuilt = basis @ block.values.flatten().diag() @ basis.T
        torch.testing.assert_close(mine, rebuilt, rtol=0, atol=float(1e-10 * scale))
    outside = dense - oracle.keep_blocks(dense, layout.index)
    assert outside.abs().max() == 0


def eigenbasis(block):
    """The columns of ⊕_q U_G ⊗ U_A, or None where the block is not Kronecker-factored."""
    if not hasattr(block, "left"):
        return None
    return torch.block_diag(*(torch.kron(u, v) for u, v in zip(block.left, block.right, strict=True))).double()


def is_exact_or_its_diagonal(mine, true_block, scale, tolerance):
    """Norms, raw parameters and fallback rows are dense or diagonal blocks inside kron and ekfac."""
    full = (mine - true_block).abs().max() / scale
    diagonal = (mine - true_block.diag().diag()).abs().max() / scale
    return min(full, diagonal) <= tolerance


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ONCE)
def test_kron_is_exact_for_one_sample_without_sharing(name, sharing, likelihood):
    truth = case(name, likelihood, 1)
    la = fit(truth, lapwing.Kron(sharing=sharing), sizes=(1,))
    exact, dense = truth.ggn, la.curvature.dense()
    factored = 0
    for index, block in zip(la.curvature.layout.index, la.curvature.matrix.blocks, strict=True):
        if not hasattr(block, "left"):
            mine, true_block = dense[index.unsqueeze(1), index], exact[index.unsqueeze(1), index]
            assert is_exact_or_its_diagonal(mine, true_block, exact.abs().max(), truth.tolerance)
            continue
        factored += 1
        for group in index.chunk(block.left.shape[0]):  # the covariance between groups is not kept
            mine, true_block = dense[group.unsqueeze(1), group], exact[group.unsqueeze(1), group]
            assert (mine - true_block).abs().max() <= truth.tolerance * exact.abs().max()
    assert factored > 0, "no block is Kronecker-factored"


@pytest.mark.parametrize(("name", "likelihood"), CASES)
def test_kron_factors_are_merged_over_batches(name, likelihood):
    """The same factors from one batch and from batches of different size; positive semi-definite."""
    truth = case(name, likelihood)
    one = fit_or_refuse(truth, "kron", sizes=(5,), train=False).curvature.dense()
    sizes = (2, 1, 2) if likelihood == "regression" else (1, 1, 1, 1, 1)
    other = fit(truth, "kron", sizes=sizes, train=True).curvature.dense()
    assert_same(other, one, max(1e-9, truth.tolerance), f"batches {sizes}")
    torch.testing.assert_close(one, one.T, rtol=1e-9, atol=1e-12)
    assert torch.linalg.eigvalsh(one).min() >= -1e-9 * one.abs().max()


@pytest.mark.parametrize(
    "name", ["mlp_tanh", "conv2d_stride", "tokens_linear", "scalar_output", "hf_bert_tokens", "lstm"]
)
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("structure", ["full", "diag", "blockdiag"])
def test_empirical_fisher(name, likelihood, structure):
    """PEERS: twice too large for regression elsewhere. Σ_n s_n s_nᵀ with s_n = J_nᵀ ∇ log p(y_n | f_n)."""
    if name not in ZOO:
        pytest.skip("transformers is not installed")
    truth = case(name, likelihood)
    la = fit(truth, structure, factor="empirical")
    exact = oracle.empirical_fisher(truth.j, truth.score)
    if structure == "diag":
        exact = exact.diag().diag()
    if structure == "blockdiag":
        exact = oracle.keep_blocks(exact, truth.blocks([plain(block) for block in la.curvature.names]))
    assert_same(la.curvature.dense(), exact, truth.tolerance)


@pytest.mark.parametrize(
    ("name", "likelihood"),
    [("mlp_tanh", "classification"), ("tokens_linear", "classification"), ("conv1d_plain", "regression")],
)
def test_monte_carlo_fisher_is_unbiased(name, likelihood):
    truth, draws = case(name, likelihood), []
    for seed in range(80):
        la = fit(truth, "diag", factor="mc", generator=torch.Generator().manual_seed(seed))
        draws.append(la.curvature.dense().diag())
    again = fit(truth, "diag", factor="mc", generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.curvature.dense().diag(), draws[0]), "the generator does not fix the draw"
    stack = torch.stack(draws)
    assert stack.std(0).max() > 0
    error = stack.mean(0) - truth.ggn.diag()
    standard = stack.std(0) / len(draws) ** 0.5
    live = standard > 1e-12
    assert (error[~live].abs() <= 1e-9 * truth.ggn.max()).all()
    z = error[live] / standard[live]
    assert z.abs().max() < 5
    assert z.square().mean() < 3
