"""Decompositions within the span of few outer products, against `eigh` and closed forms."""

import pytest
import torch
from torch import nn

import lapwing
from lapwing.linalg.spectrum import Spectrum, eigh_in_place, within_span

F64 = torch.float64


def few(p: int, rank: int, dtype: torch.dtype = F64, batch: tuple[int, ...] = ()) -> torch.Tensor:
    """A sum of `rank` outer products whose sizes span five orders of magnitude."""
    generator = torch.Generator().manual_seed(p + rank)
    rows = torch.randn(*batch, rank, p, dtype=F64, generator=generator)
    rows = (rows * torch.logspace(0, -2.5, rank, dtype=F64)[:, None]).to(dtype)
    return rows.mT @ rows


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_few_outer_products_are_decomposed_within_their_span(batch, dtype):
    matrix = few(60, 7, dtype, batch)
    found, exact = Spectrum(matrix, dtype, rank=7), Spectrum(matrix, dtype)
    assert within_span(matrix.to(F64, copy=True), 15, 64 * torch.finfo(dtype).eps) is not None
    top = exact.values[..., -1:]
    assert bool(((found.values - exact.values).abs() <= 60 * torch.finfo(dtype).eps * top).all())
    assert bool((found.values[..., 1:] >= found.values[..., :-1]).all())
    assert bool((found.values[..., :40] == 0).all())
    assert found.vectors.stride() == exact.vectors.stride()
    vectors = found.vectors.double()
    tight = 1e-13 if dtype == F64 else 1e-6
    eye = torch.eye(60, dtype=F64).expand(*batch, 60, 60)
    torch.testing.assert_close(vectors.mT @ vectors, eye, atol=tight, rtol=0)
    again = vectors * found.values[..., None, :] @ vectors.mT
    torch.testing.assert_close(again, matrix.double(), atol=float(tight * matrix.abs().max() * 10), rtol=0)


def test_a_matrix_that_reaches_beyond_is_decomposed_as_a_whole():
    """A rank that is too small is noticed, also where what it would lose is a thousandth."""
    matrix = few(60, 7) + 1e-3 * few(60, 30)
    assert within_span(matrix.clone(), 15, 1e-6) is None
    found = Spectrum(matrix, F64, rank=7)
    torch.testing.assert_close(found.values, torch.linalg.eigvalsh(matrix).clamp(min=0))


def test_nothing_at_all():
    found = Spectrum(torch.zeros(50, 50, dtype=F64), F64, rank=0)
    assert float(found.values.abs().max()) == 0
    torch.testing.assert_close(found.vectors.mT @ found.vectors, torch.eye(50, dtype=F64))


@pytest.mark.parametrize(
    ("structure", "factor"),  # not EKFAC of sampled targets: those of its second pass leave the span of the first
    [("kron", "ggn"), ("kron", "mc"), ("kron", "empirical"), ("ekfac", "ggn"), ("ekfac", "empirical")],
)
def test_few_data_of_a_wide_network(structure, factor, monkeypatch):
    """Three samples, sixty units: the posterior is that of whole decompositions."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 3)).double()
    x, y = torch.randn(3, 50, dtype=F64), torch.tensor([0, 1, 2])
    calls: list[int] = []
    sketch = within_span
    monkeypatch.setattr("lapwing.linalg.spectrum.within_span", lambda m, k, tol: calls.append(k) or sketch(m, k, tol))

    def fitted() -> lapwing.Laplace:
        generator = torch.Generator().manual_seed(1)
        return lapwing.fit(
            network, (x, y), "classification", structure=structure, factor=factor, generator=generator, progress=False
        )

    found = fitted()
    evidence, covariance = found.log_evidence(), found.predict(x).function.covariance
    assert min(calls) == 3 + 8  # the inputs' side of both layers
    monkeypatch.setattr("lapwing.linalg.spectrum.PAYS", 0.0)
    whole = fitted()
    torch.testing.assert_close(evidence, whole.log_evidence())
    torch.testing.assert_close(covariance, whole.predict(x).function.covariance)


@pytest.mark.parametrize("counted", [True, False])
def test_data_are_added_to_data(counted, monkeypatch):
    """`update` adds to the sums of an earlier fit, and to its count; that of a file that did not count is unknown."""
    torch.manual_seed(0)
    network = nn.Linear(50, 2).double()
    x, y = torch.randn(40, 50, dtype=F64), torch.arange(40) % 2
    first = lapwing.fit(network, (x[:37], y[:37]), "classification", structure="kron", progress=False)
    names = [name for name in first.curvature.state if name.endswith(("inner", "outer"))]
    assert len(names) == 2
    if not counted:
        for name in names:
            del first.curvature.state[name]
    both = first.update((x[37:], y[37:]))
    (block,) = both.curvature.matrix.blocks
    assert (block.left_spectrum.rank, block.right_spectrum.rank) == ((40, 40) if counted else (None, None))
    monkeypatch.setattr("lapwing.linalg.spectrum.PAYS", 0.0)
    whole = lapwing.fit(network, (x, y), "classification", structure="kron", progress=False)
    torch.testing.assert_close(both.log_evidence(), whole.log_evidence())
    torch.testing.assert_close(both.posterior.variance, whole.posterior.variance)


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 2), (0,)])
@pytest.mark.parametrize("p", [0, 1, 9])
def test_vectors_take_the_memory_of_the_matrix(batch, p):
    matrix = few(p, 2 * p, batch=batch)
    matrix = matrix + matrix.mT
    values, vectors = torch.linalg.eigh(matrix)
    given = matrix.clone()
    found = eigh_in_place(given)
    assert found[1].data_ptr() == given.data_ptr()
    assert found[1].stride() == vectors.stride()
    torch.testing.assert_close(found[0], values)
    torch.testing.assert_close((found[1] * found[0][..., None, :]) @ found[1].mT, matrix)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_decomposed_matrix_is_left_alone(dtype):
    matrix = few(9, 12, dtype)
    before = matrix.clone()
    assert Spectrum(matrix, dtype).vectors.data_ptr() != matrix.data_ptr()
    torch.testing.assert_close(matrix, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "first", [torch.inference_mode(), torch.func.grad, torch.func.vmap], ids=["inference", "grad", "vmap"]
)
def test_whoever_asks_first(first):
    """In inference mode or in a transform of `torch.func`; others want gradients later."""
    matrix, v = few(6, 8), torch.linspace(-1, 1, 6, dtype=F64)
    spectrum = Spectrum(matrix, F64)

    def quadratic(scale):
        return ((v @ spectrum.vectors).square() * (scale * spectrum.values)).sum()

    one = torch.ones((), dtype=F64)
    first(quadratic)(one.expand(2) if first is torch.func.vmap else one)
    (gradient,) = torch.autograd.grad(quadratic(one.requires_grad_()), one)
    torch.testing.assert_close(gradient, v @ matrix @ v)


class Tokens(nn.Module):
    """Sequences of any length, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(5, 120), nn.Linear(120, 120), nn.Linear(120, 4)

    def forward(self, x):
        return 3 * self.o(self.b(self.a(x).tanh()).tanh().mean(1))


@pytest.mark.parametrize("seed", [17, 107])
def test_samples_of_other_lengths_that_are_run_again_count_as_they_are(seed):
    """Those of twelve positions wait for each other, while a batch of one position has come in between."""
    torch.manual_seed(seed)
    model = Tokens()
    data = []
    for length in (12, 12, 1):
        x = torch.randn(4, length, 5)
        x[:3] = 30 * x[:3, :1]
        data.append((x, torch.randint(0, 4, (4,))))
    with torch.no_grad():
        model.o.weight.mul_(10)
    structure, factor = lapwing.Kron(sharing="expand"), lapwing.GGN(tolerance=1e-2)
    la = lapwing.fit(model, data, "classification", structure=structure, factor=factor, progress=False)
    for block in la.curvature.matrix.blocks:
        values = torch.linalg.eigvalsh(block.left.double())
        assert block.ranks[0] >= int((values > 1e-6 * values.max()).sum())
        tight = 120 * torch.finfo(torch.float32).eps * float(values.max())
        torch.testing.assert_close(block.left_spectrum.values, values, rtol=0, atol=tight)
