"""Agreement with BackPACK's KFRA on one batch, which is its data set. See benchmarks/README.md for the environment."""

import copy
import warnings

import pytest
import torch
from torch import nn

import lapwing
from tests.dense import assert_same, build, randn, seeded
from tests.noise import unit_noise

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from backpack import backpack, extend
        from backpack.extensions import KFRA
    except ImportError as missing:
        pytest.skip(
            f"BackPACK is not installed here ({missing}): use .venv-peers, see benchmarks/README.md",
            allow_module_level=True,
        )

pytestmark = pytest.mark.filterwarnings("ignore")  # what the peer warns of is not ours


@pytest.fixture(autouse=True)
def double():
    """It makes identities of the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid, nn.Tanh])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_kfra(activation, likelihood):
    module = build(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(6, 5), activation(), nn.Linear(5, 4), activation(), nn.Linear(4, 3)
        )
    )
    x, n = randn(20, 2, 3, seed=1), 20
    y = randn(n, 3, seed=2) if likelihood == "regression" else torch.randint(3, (n,), generator=seeded(2))
    # MSELoss has twice the Hessian of −log N(y; f, 1)
    loss = nn.MSELoss(reduction="sum") if likelihood == "regression" else nn.CrossEntropyLoss(reduction="sum")
    scale = 0.5 if likelihood == "regression" else 1.0
    theirs = extend(copy.deepcopy(module))
    with backpack(KFRA()):
        extend(loss)(theirs(x), y).backward()
    la = lapwing.fit(module, (x, y), unit_noise(likelihood), structure="kron", factor="kfra")
    dense, at = la.curvature.dense(), 0
    for p in theirs.parameters():
        part = slice(at, at := at + p.numel())
        factors = p.kfra  # (B, A) of a weight, B of a bias: it keeps them apart
        expected = torch.kron(*(m.contiguous() for m in factors)) if len(factors) == 2 else factors[0]
        assert_same(dense[part, part], scale * expected)
