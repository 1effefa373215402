"""Random small networks against brute force. LAPWING_FUZZ=1000 draws more of them, and other ones each time."""

import os

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import lapwing
from tests.noise import unit_noise

from ..zoo import oracle
from ..zoo.cases import Snapshot, assert_same
from .networks import networks

MORE = int(os.environ.get("LAPWING_FUZZ", "0"))
HALVES = 2  # two tests, so that two workers share them


@st.composite
def splits(draw):
    """(samples, length of their sequences) of every batch."""
    return tuple(
        draw(st.lists(st.tuples(st.sampled_from([3, 1, 2, 4, 5, 9]), st.integers(1, 3)), min_size=1, max_size=3))
    )


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of a first layer, to those who watch it
@pytest.mark.parametrize("half", range(HALVES))
def test_random_network(half):
    @settings(
        max_examples=MORE or 35,
        derandomize=not MORE,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(networks(), splits(), st.sampled_from(["regression", "classification"]))
    def run(network, splits, likelihood):
        assume(network.seed % HALVES == half)
        check(network, *zip(*splits, strict=True), likelihood)

    run()


def check(network, sizes, lengths, likelihood):
    module, rtol = network.build(), network.rtol
    parameters = sum(p.numel() for p in module.parameters())
    assume(0 < parameters <= 400)
    xs = network.batches(sizes, lengths)
    fs, js = [oracle.outputs(module, x) for x in xs], [oracle.jacobian(module, x) for x in xs]
    assume(all(f.shape[1:].numel() <= 12 for f in fs))
    assume(max(j.abs().max() for j in js) > 1e-6)  # a norm over one feature is constant: its shift alone has a gradient
    if likelihood == "regression":
        lams, ys = [oracle.hessian_gaussian(f) for f in fs], [f + 0.1 for f in fs]
    else:
        lams, ys = [oracle.hessian_categorical(f) for f in fs], [f.argmin(-1) for f in fs]
    exact = sum(oracle.ggn(j, lam) for j, lam in zip(js, lams, strict=True))
    assume(exact.abs().max() > 1e-8)
    batches = list(zip(xs, ys, strict=True))
    before = Snapshot(module)
    for structure, expected in {"full": exact, "diag": exact.diag().diag()}.items():
        la = lapwing.fit(module, batches, unit_noise(likelihood), structure=structure)
        assert_same(la.curvature.dense(), expected, rtol, structure)
    la = lapwing.fit(module, batches, unit_noise(likelihood), structure="ekfac")
    assert_same(la.curvature.dense().trace(), exact.trace(), rtol, "trace of ekfac")
    sigma = torch.linalg.inv(la.curvature.dense() + torch.eye(parameters, dtype=torch.float64))
    v = torch.randn(2, parameters, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for x, f, j in zip(xs, fs, js, strict=True):
        variance = (j @ sigma @ j.mT).diagonal(dim1=1, dim2=2).reshape(f.shape)
        assert_same(la.predict(x).function.variance, variance, 10 * rtol, "variance of the outputs")
        pushed = torch.einsum("ndp,sp->snd", j, v).reshape(2, *f.shape)
        assert_same(la.network.jvp(x, v)[1], pushed, 10 * rtol, "products")
    before.check(module)
