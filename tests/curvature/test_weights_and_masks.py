"""Samples that do not count, and samples that count little: what is left must be the curvature of the others."""

import pytest
import torch
from torch import nn

import lapwing

N = 10


@pytest.fixture(params=["linear", "convolutional"])
def network(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    if request.param == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)).double()


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(N, 1, 6, 6, dtype=torch.float64, generator=generator),
        torch.randint(0, 3, (N,), generator=generator),
    )


STRUCTURES = [
    "diag",
    "full",
    "kron",
    "ekfac",
    lapwing.Kron(sharing="expand"),
    lapwing.EKFAC(sharing="expand"),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_ignored_samples_are_as_if_they_were_not_there(structure, network, data):
    x, y = data
    hidden = y.clone()
    hidden[[2, 3, 8]] = -100
    kept = hidden != -100
    without = lapwing.fit(network, (x[kept], y[kept]), "classification", structure=structure, progress=False)
    with_them = lapwing.fit(network, (x, hidden), "classification", structure=structure, progress=False)
    torch.testing.assert_close(with_them.curvature.dense(), without.curvature.dense())
    torch.testing.assert_close(with_them.log_evidence(), without.log_evidence())


def test_ignored_samples_in_the_recursion(data):
    torch.manual_seed(0)
    network, (x, y) = nn.Sequential(nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3)).double(), data
    x, hidden = x.flatten(1), y.clone()
    hidden[[2, 3, 8]] = -100
    kept = hidden != -100
    fits = [
        lapwing.fit(network, pair, "classification", structure="kron", factor="kfra", progress=False)
        for pair in ((x[kept], y[kept]), (x, hidden))
    ]
    torch.testing.assert_close(fits[1].curvature.dense(), fits[0].curvature.dense())


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("weight", [1e-3, 0.5, 3.0])
def test_a_common_weight_scales_the_curvature(structure, weight, network, data):
    x, y = data
    weights = torch.full((N,), weight, dtype=torch.float64)
    plain = lapwing.fit(network, (x, y), "classification", structure=structure, progress=False)
    weighted = lapwing.fit(
        network,
        [(x, y, weights)],
        "classification",
        structure=structure,
        split=lambda b: b,
        n_data=None,
        progress=False,
    )
    torch.testing.assert_close(weighted.curvature.dense(), weight * plain.curvature.dense())


def test_data_without_a_target_that_counts_have_no_curvature(network, data):
    x, y = data
    la = lapwing.fit(network, (x, torch.full_like(y, -100)), "classification", structure="kron", progress=False)
    assert not la.curvature.dense().any()
    torch.testing.assert_close(la.posterior.variance, torch.ones_like(la.posterior.variance))


def test_a_basis_without_kronecker_factors_is_refused(network, data):
    with pytest.raises(lapwing.UnsupportedOperation, match="Hessian"):
        lapwing.fit(network, data, "classification", structure=lapwing.EKFAC(basis=lapwing.Hessian()), progress=False)


def test_samples_with_some_ignored_tokens_keep_all_their_inputs():
    """B adds up what counts; A is the mean over all positions of every sample that counts at all."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 3, 5, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 2, (4, 3), generator=generator)
    y[0, 1:], y[1] = -100, -100  # the second sample does not count
    torch.manual_seed(0)
    network = nn.Linear(5, 2, bias=False).double()
    la = lapwing.fit(network, (x, y), "classification", structure="kron", progress=False)
    left, right, count = torch.zeros(2, 2).double(), torch.zeros(5, 5).double(), 0
    for n in (0, 2, 3):
        for t in range(3):
            right, count = right + torch.outer(x[n, t], x[n, t]), count + 1
            if y[n, t] >= 0:
                p = network(x[n, t]).softmax(-1).detach()
                left += torch.diag(p) - torch.outer(p, p)
    torch.testing.assert_close(la.curvature.dense(), torch.kron(left, right / count))
    assert la.n_data == 4  # N counts samples as they were read


def test_no_datum_that_counts():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    nothing = [(x, torch.zeros(4, dtype=torch.long), torch.zeros(4))]
    with pytest.raises(lapwing.BadData, match="no datum counts"):
        lapwing.fit(model, nothing, "classification", split=lambda batch: batch, progress=False)
