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
    return tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))


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
    def run(network, sizes, likelihood):
        assume(network.seed % HALVES == half)
        check(network, sizes, likelihood)

    run()


def check(network, sizes, likelihood):
    module = network.build()
    parameters = sum(p.numel() for p in module.parameters())
    assume(0 < parameters <= 400)
    x = network.inputs(sum(sizes))
    f, j = oracle.outputs(module, x), oracle.jacobian(module, x)
    assume(f.shape[1:].numel() <= 12)
    assume(j.abs().max() > 1e-6)  # a norm over one feature is constant, and nothing but its shift has a gradient
    if likelihood == "regression":
        lam, y = oracle.hessian_gaussian(f), f + 0.1
    else:
        lam, y = oracle.hessian_categorical(f), f.argmin(-1)
    exact = oracle.ggn(j, lam)
    assume(exact.abs().max() > 1e-8)
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    before = Snapshot(module)
    for structure, expected in {"full": exact, "diag": exact.diag().diag()}.items():
        la = lapwing.fit(module, batches, unit_noise(likelihood), structure=structure)
        assert_same(la.curvature.dense(), expected, 1e-9, structure)
    la = lapwing.fit(module, batches, unit_noise(likelihood), structure="ekfac")
    assert_same(la.curvature.dense().trace(), exact.trace(), 1e-9, "trace of ekfac")
    sigma = torch.linalg.inv(la.curvature.dense() + torch.eye(parameters, dtype=torch.float64))
    variance = (j @ sigma @ j.mT).diagonal(dim1=1, dim2=2).reshape(f.shape)
    assert_same(la.predict(x).function.variance, variance, 1e-8, "variance of the outputs")
    before.check(module)
