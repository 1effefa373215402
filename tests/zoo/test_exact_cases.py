"""Where Kronecker factors are exact: deep linear networks; how far off elsewhere."""

import pytest
import torch
from torch import nn

import lapwing

from . import oracle
from .architectures.registry import Net
from .cases import assert_same, case, fit


def data(*shape, n=6, seed=0):
    return torch.randn(n, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def deep_linear(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2)).double().eval()


def blocks_of(module, la, x):
    j = oracle.jacobian(module, x)
    exact = oracle.ggn(j, oracle.hessian_gaussian(oracle.outputs(module, x)))
    return oracle.keep_blocks(exact, [oracle.positions(module, block) for block in la.curvature.names])


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 2, 3)])
def test_expand_is_exact_for_a_loss_per_token(shape):
    with torch.random.fork_rng():
        module = deep_linear()
    x = data(*shape)
    batches = [(x[:4], module(x[:4]).detach()), (x[4:5], module(x[4:5]).detach()), (x[5:], module(x[5:]).detach())]
    la = lapwing.fit(module, batches, lapwing.Gaussian(1.0), structure=lapwing.Kron(sharing="expand"))
    assert_same(la.curvature.dense(), blocks_of(module, la, x))


def test_reduce_is_exact_for_mean_pooling():
    with torch.random.fork_rng():
        module = nn.Sequential(deep_linear(), Net(lambda s, h: h.mean(1))).eval()
    x = data(5, 3)
    la = lapwing.fit(
        module,
        [(x[:4], x[:4, 0, :2]), (x[4:], x[4:, 0, :2])],
        lapwing.Gaussian(1.0),
        structure=lapwing.Kron(sharing="reduce"),
    )
    assert_same(la.curvature.dense(), blocks_of(module, la, x))


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv1d(2, 3, 2),
        nn.Conv1d(2, 4, 2, groups=2, stride=2),
        nn.Conv1d(2, 2, 3, groups=2, padding=1, padding_mode="circular"),
    ],
)
def test_reduce_is_exact_for_linear_convolution_and_mean_pooling(convolution):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        out = convolution.out_channels
        module = Net(lambda s, x: s.head(s.conv(x).mean(-1)), conv=convolution, head=nn.Linear(out, 2)).double().eval()
    x = data(2, 6)
    la = lapwing.fit(
        module,
        [(x[:4], x[:4, :, 0]), (x[4:], x[4:, :, 0])],
        lapwing.Gaussian(1.0),
        structure=lapwing.Kron(sharing="reduce"),
    )
    if convolution.groups == 1:
        assert_same(la.curvature.dense(), blocks_of(module, la, x))
        return
    # Groups are separate blocks: the factors say nothing about the covariance between them.
    expected = blocks_of(module, la, x)
    for index, block in zip(la.curvature.layout.index, la.curvature.matrix.blocks, strict=True):
        q = getattr(block, "left", torch.zeros(1)).shape[0]
        for piece in index.chunk(q):
            mine = la.curvature.dense()[piece.unsqueeze(1), piece]
            assert_same(mine, expected[piece.unsqueeze(1), piece])


def test_expand_is_exact_for_pointwise_linear_convolution_with_a_loss_per_pixel():
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1)).double().eval()
    x = data(2, 3, 3, n=4)
    la = lapwing.fit(
        module, [(x[:3], x[:3]), (x[3:], x[3:])], lapwing.Gaussian(1.0), structure=lapwing.Kron(sharing="expand")
    )
    assert_same(la.curvature.dense(), blocks_of(module, la, x))


@pytest.mark.parametrize(
    "name", ["conv2d_plain", "conv2d_stride", "conv1d_groups", "conv2d_depthwise", "conv3d", "conv_transpose2d_stride"]
)
def test_trace_of_convolutional_factors_has_the_right_size(name, record_property):
    """EKFAC's trace is the truth; expand and reduce are of the right order (1/N for 1/#rows would not be)."""
    truth = case(name, "classification")
    exact = float(truth.ggn.trace())
    for sharing in ("expand", "reduce"):
        ratio = float(fit(truth, lapwing.Kron(sharing=sharing)).curvature.dense().trace()) / exact
        record_property(f"trace_ratio_{sharing}", ratio)
        assert 0.05 < ratio < 5, f"{sharing}: trace {ratio:.3f} of the truth"
