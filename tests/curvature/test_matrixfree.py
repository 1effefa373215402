"""Matrix-free posteriors against the full matrix, and products against autograd."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.curvature import GGN, pose
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.likelihoods import Gaussian
from lapwing.linalg import DenseRows, Diagonal
from lapwing.linalg.operator import Operator
from lapwing.linalg.solvers import Sketch
from lapwing.model import Batches, Network, Params
from lapwing.model.products import Products
from tests.dense import build, randn
from tests.noise import unit_noise

N = 24


class Attention(nn.Module):
    """Embeds, attends, pools: an encoder layer with its fused paths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 6, batch_first=True)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, outputs))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 4)
    )


CASES = {
    "mlp regression": (lambda: mlp(2), (4,), "regression", 2),
    "mlp heteroscedastic": (lambda: mlp(2), (4,), "heteroscedastic", 1),
    "conv classification": (conv, (1, 6, 6), "classification", 4),
    "attention classification": (Attention, (5, 3), "classification", 3),
    "lstm regression": (Recurrent, (5, 3), "regression", 1),
    "mlp counts": (lambda: mlp(1), (4,), "counts", 1),
}


def problem(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor], str]:
    make, shape, likelihood, k = CASES[name]
    torch.manual_seed(0)
    model = make().double().eval()
    x = torch.randn(N, *shape, dtype=torch.float64)
    if likelihood == "classification":
        y: Tensor = torch.randint(0, k, (N,))
    elif likelihood == "counts":
        y = torch.randint(0, 4, (N, k))
    else:
        y = torch.randn(N, k, dtype=torch.float64)
    return model, (x, y), unit_noise(likelihood)


def pair(name: str, prior: object = 2.0, **options: object) -> tuple[lapwing.Laplace, lapwing.Laplace]:
    model, data, likelihood = problem(name)
    full = lapwing.fit(model, data, likelihood, structure="full", prior=prior)
    structure = MatrixFree(**{"tolerance": 1e-10, "rank": 16, "columns": 50, "probes": 2, "steps": 2, **options})  # type: ignore[arg-type]
    return full, lapwing.fit(model, data, likelihood, structure=structure, prior=prior)


@pytest.mark.parametrize("name", CASES)
class TestAgainstFull:
    def test_products_solves_and_diagonals(self, name: str) -> None:
        full, free = pair(name)
        v = torch.randn(3, full.params.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        a, b = full.posterior.precision, free.posterior.precision
        torch.testing.assert_close(b.matvec(v), a.matvec(v), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(b.solve(v), a.solve(v), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(b.diagonal(), a.diagonal(), rtol=1e-9, atol=1e-9)
        assert float(b.solution(v).residuals.max()) <= 1e-10

    def test_evidence_within_its_error_bar(self, name: str) -> None:
        full, free = pair(name, probes=8, steps=15)
        error = 0.5 * float(free.posterior.precision.ratio_estimate().error)
        truth, found = full.log_evidence(), free.log_evidence()
        assert abs(float(found - truth)) <= 4 * error + 1e-6 * abs(float(truth))
        assert abs(float(found - truth)) < 0.01 * abs(float(truth))
        torch.testing.assert_close(free.log_evidence("linear-mode") - found, full.log_evidence("linear-mode") - truth)

    def test_predictions_are_equal(self, name: str) -> None:
        full, free = pair(name)
        x = problem(name)[1][0][:3]
        one, other = full.predict(x).function, free.predict(x).function
        torch.testing.assert_close(other.covariance, one.covariance, rtol=1e-7, atol=1e-9)
        one, other = full.predict(x, joint=True).function, free.predict(x, joint=True).function
        torch.testing.assert_close(other.covariance, one.covariance, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((name, "solve") for name in CASES if name not in ("lstm regression", "mlp counts")),
        ("mlp regression", "sketch"),
        ("conv classification", "sketch"),
    ],
)
def test_sample_covariance_is_the_inverse(name: str, sampling: str) -> None:
    """Perturb-and-solve for any sketch; the two-part sample where the sketch is exact."""
    full, free = pair(name, sampling=sampling, rank=40 if sampling == "solve" else 200, tolerance=1e-5)
    require_covariance(free, full, 60 if name.startswith("attention") else 200)


def require_covariance(free: lapwing.Laplace, full: lapwing.Laplace, n: int) -> None:
    """E xᵀAx = P over all directions, and the variance along the stiffest ones, within Monte Carlo error."""
    draws = free.posterior.sample(n, torch.Generator().manual_seed(0)) - free.posterior.mean
    precision = full.posterior.precision
    size = draws.shape[-1]
    energy = (draws * precision.matvec(draws)).sum(-1).mean() / size
    assert abs(float(energy) - 1) < 4 * (2 / (size * n)) ** 0.5
    values, vectors = torch.linalg.eigh(precision.dense())
    ratio = (draws @ vectors[:, -20:]).square().mean(0) * values[-20:]
    assert float((ratio - 1).abs().max()) < 5 * (2 / n) ** 0.5


@pytest.mark.parametrize("sketch", ["rows", "nystrom", "none"])
@pytest.mark.parametrize("prior", ["scalar", "layerwise", "per weight"])
def test_every_sketch_and_prior_gives_the_same_posterior(sketch: str, prior: str) -> None:
    name = "mlp regression"
    size = sum(p.numel() for p in problem(name)[0].parameters())
    each = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.5
    chosen = {"scalar": 1.5, "layerwise": {"0.*": 0.5, "*": 3.0}, "per weight": each}[prior]
    full, free = pair(name, chosen, sketch=sketch, probes=8, steps=20)
    v = torch.randn(2, size, dtype=torch.float64)
    torch.testing.assert_close(
        free.posterior.precision.solve(v), full.posterior.precision.solve(v), atol=1e-8, rtol=1e-8
    )
    error = float(free.posterior.precision.ratio_estimate().error)
    assert abs(float(free.posterior.precision.logdet() - full.posterior.precision.logdet())) < 4 * error + 1e-6


def test_an_exact_sketch_leaves_nothing_to_estimate() -> None:
    full, free = pair("conv classification", rank=200)
    precision = free.posterior.precision
    assert precision.solution(torch.randn(2, precision.size, dtype=torch.float64)).iterations <= 2
    torch.testing.assert_close(free.log_evidence(), full.log_evidence(), rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(free.posterior.variance, full.posterior.variance, rtol=1e-7, atol=1e-9)


def test_marginal_variances_within_their_error_bars() -> None:
    full, free = pair("mlp regression", probes=32)
    found = free.posterior.precision.inverse_diagonal_estimate()
    score = (found.value - full.posterior.variance) / found.error.clamp(min=1e-12)
    assert float(score.square().mean()) < 2


def test_gradients_of_the_evidence_in_prior_and_noise() -> None:
    model, data, _ = problem("mlp regression")
    found = []
    for structure in ("full", MatrixFree(rank=64, probes=32, tolerance=1e-10)):
        la = lapwing.fit(model, data, lapwing.Gaussian(1.0), structure=structure)
        tau = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
        noise = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        moved = la.replace(prior={"0.*": tau[0], "*": tau[1]}, likelihood=Gaussian(noise))
        found.append(torch.autograd.grad(moved.log_evidence(), (tau, noise)))
    for one, other in zip(*found):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)


def test_gradients_of_solves_in_prior_and_scale() -> None:
    full, free = pair("mlp regression")
    v = torch.randn(2, full.params.size, dtype=torch.float64)
    found = []
    for matrix in (full.curvature.matrix, free.curvature.matrix):
        c = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        d = torch.linspace(0.5, 2, full.params.size, dtype=torch.float64).requires_grad_()
        w = v.clone().requires_grad_()
        x = (matrix.scale(c) + Diagonal(d)).solve(w)
        found.append(torch.autograd.grad(x.square().sum(), (c, d, w)))
    for one, other in zip(*found):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-8)


def test_products_and_densities_have_gradients_in_the_weights() -> None:
    """A v and log N(θ; θ̂, A⁻¹) are differentiated in v and θ as the dense matrix is."""
    full, free = pair("mlp regression")
    dense = full.posterior.precision.dense()
    v = torch.randn(3, full.params.size, dtype=torch.float64, requires_grad=True)
    image = free.posterior.precision.matvec(v)
    torch.testing.assert_close(image, v @ dense, rtol=1e-8, atol=1e-8)
    (slope,) = torch.autograd.grad(image.square().sum(), v)
    torch.testing.assert_close(slope, 2 * image.detach() @ dense, rtol=1e-8, atol=1e-8)
    (slope,) = torch.autograd.grad(free.posterior.log_prob(v).sum(), v)
    torch.testing.assert_close(slope, -(v.detach() - full.posterior.mean) @ dense, rtol=1e-8, atol=1e-8)


def test_a_root_of_the_joint_covariance() -> None:
    full, free = pair("mlp regression")
    rows = torch.randn(3, 2, full.params.size, dtype=torch.float64)
    white = free.posterior.precision.whiten(DenseRows(rows)).flatten(0, 1)
    flat = rows.flatten(0, 1)
    torch.testing.assert_close(white @ white.T, flat @ full.posterior.covariance() @ flat.T, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(white, white.T)


def test_sampled_and_empirical_factors_keep_their_draws() -> None:
    model, data, likelihood = problem("conv classification")
    la = lapwing.fit(model, data, likelihood, structure=MatrixFree(sketch="none", tolerance=1e-9), factor="mc")
    v = torch.randn(1, la.params.size, dtype=torch.float64)
    precision = la.posterior.precision
    torch.testing.assert_close(precision.matvec(v), precision.matvec(v))
    torch.testing.assert_close(precision.matvec(precision.solve(v)), v, rtol=1e-6, atol=1e-7)
    free = lapwing.fit(
        model, data, likelihood, structure=MatrixFree(tolerance=1e-9, steps=2, probes=2), factor="empirical"
    )
    full = lapwing.fit(model, data, likelihood, structure="full", factor="empirical")
    torch.testing.assert_close(free.posterior.precision.solve(v), full.posterior.precision.solve(v))


def test_tokens_with_ignored_targets() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Tanh(), nn.Linear(5, 7)).double()
    x, y = torch.randint(0, 7, (6, 4)), torch.randint(0, 7, (6, 4))
    y[0, :2] = -100
    full = lapwing.fit(model, (x, y), "classification", structure="full")
    free = lapwing.fit(model, (x, y), "classification", structure=MatrixFree(tolerance=1e-10, steps=2, probes=2))
    v = torch.randn(2, full.params.size, dtype=torch.float64)
    torch.testing.assert_close(
        free.posterior.precision.solve(v), full.posterior.precision.solve(v), atol=1e-8, rtol=1e-8
    )
    require_covariance(free, full, 100)


def test_subnetworks_weights_and_more_data() -> None:
    model, (x, y), likelihood = problem("mlp regression")
    w = torch.rand(N, dtype=torch.float64)
    batches = [(x[:10], y[:10], w[:10]), (x[10:], y[10:], w[10:])]
    options = {"select": lapwing.subnetwork(20, by="magnitude"), "split": lambda batch: batch}
    full = lapwing.fit(model, batches, likelihood, structure="full", **options)
    free = lapwing.fit(model, batches, likelihood, structure=MatrixFree(tolerance=1e-10, steps=2, probes=2), **options)
    v = torch.randn(2, 20, dtype=torch.float64)
    torch.testing.assert_close(free.posterior.precision.solve(v), full.posterior.precision.solve(v))
    more = lapwing.fit(
        model, batches[:1], likelihood, structure=MatrixFree(tolerance=1e-10, steps=2, probes=2), **options
    )
    more = more.update(batches[1:])
    torch.testing.assert_close(more.posterior.precision.solve(v), full.posterior.precision.solve(v))


def test_predictions_by_samples_and_float32() -> None:
    model, (x, y), likelihood = problem("conv classification")
    model, x = model.float(), x.float()
    full = lapwing.fit(model, (x, y), likelihood, structure="full")
    free = lapwing.fit(
        model,
        (x, y),
        likelihood,
        structure=MatrixFree(predictive="samples", samples=300, columns=100, steps=2, probes=2),
    )
    one, other = full.predict(x[:5]).function.variance, free.predict(x[:5]).function.variance
    assert float((other / one - 1).abs().max()) < 5 * (2 / 300) ** 0.5
    sketched = lapwing.fit(model, (x, y), likelihood, structure=MatrixFree(predictive="sketch", rank=200))
    torch.testing.assert_close(sketched.predict(x[:5]).function.variance, one, rtol=1e-3, atol=1e-6)


def test_what_is_refused() -> None:
    model, data, likelihood = problem("mlp regression")
    la = lapwing.fit(model, data, likelihood, prior=1e-6, structure=MatrixFree(sketch="none", iterations=2))
    with pytest.raises(lapwing.NotConverged, match="Allow more iterations"):
        la.posterior.sample(2)
    with pytest.raises(lapwing.BadData, match="rank must be a whole number of at least 1"):
        MatrixFree(rank=0)
    with pytest.raises(lapwing.BadData, match="sampling is one of"):
        MatrixFree(sampling="exact")  # type: ignore[arg-type]
    with pytest.raises(lapwing.NotReiterable):
        lapwing.fit(model, iter([data]), likelihood, structure="matrixfree")
    with pytest.raises(lapwing.TooLarge, match="matrixfree"):
        lapwing.fit(model, data, likelihood, structure="matrixfree", memory=10_000)
    la = lapwing.fit(model, data, likelihood, structure="matrixfree")
    with pytest.raises(lapwing.NotPositiveDefinite, match="add a prior"):
        la.curvature.matrix.solve(torch.ones(la.params.size))


def products(name: str) -> tuple[Products, nn.Module, tuple[Tensor, Tensor]]:
    model, data, _ = problem(name)
    names = tuple(n for n, _ in model.named_parameters())
    network = Network(model, Params.of(model, names), lambda raw: raw)
    halves = [(data[0][:10], data[1][:10]), (data[0][10:], data[1][10:])]
    return Products(network, Batches(halves, model, torch.device("cpu"))), model, data


@pytest.mark.parametrize("name", ["mlp regression", "conv classification", "lstm regression"])
def test_products_are_autograds(name: str) -> None:
    found, model, (x, _) = products(name)
    params = found.network.params
    v = torch.randn(2, params.size, dtype=torch.float64)
    with found.network.borrow(differentiable=True):
        f = model(x)
        leaves = list(model.parameters())
        rows = [torch.autograd.grad(o, leaves, retain_graph=True) for o in f.flatten()]
    dense = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])  # (N·c, P)
    torch.testing.assert_close(found.ggn(v, lambda batch, f, u: u), v @ dense.T @ dense, rtol=1e-9, atol=1e-9)
    inside = torch.cat([image for _, _, image in found.jacobian(v)], 1)
    torch.testing.assert_close(inside.flatten(1), v @ dense.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        found.transposed(lambda batch, f: torch.ones_like(f)[None], 1)[0], dense.sum(0), rtol=1e-9, atol=1e-9
    )


def test_a_joined_operator_is_the_sum() -> None:
    _, free = pair("mlp regression")
    matrix = free.curvature.matrix
    assert isinstance(matrix, Operator)
    double = matrix + matrix.scale(0.5)
    v = torch.randn(2, matrix.size, dtype=torch.float64)
    torch.testing.assert_close(double.matvec(v), 1.5 * matrix.matvec(v))
    assert isinstance(double.sketch, Sketch)


def test_what_a_file_needs_gives_the_same_matrix() -> None:
    model, data, likelihood = problem("conv classification")
    la = lapwing.fit(model, data, likelihood, structure=MatrixFree(rank=12, tolerance=1e-10), n_data=48)
    batches = Batches(data, model, torch.device("cpu"))
    structure, same = la.curvature.structure, pose(la.network, batches, la.likelihood, la.curvature.factor)
    again = structure.restored(*structure.stored(la.curvature.matrix), same)
    v = torch.randn(2, la.params.size, dtype=torch.float64)
    mine, theirs = (m + Diagonal(torch.ones(la.params.size)) for m in (la.curvature.matrix, again))
    torch.testing.assert_close(theirs.solve(v), mine.solve(v))
    torch.testing.assert_close(theirs.logdet(), mine.logdet())
    torch.testing.assert_close(theirs.diagonal(), mine.diagonal())


def test_a_fit_estimates_no_log_determinant() -> None:
    """Samples and solves need none; and a singular precision is refused all the same."""
    _, free = pair("mlp regression")
    assert not any(isinstance(key, tuple) and key[0] == "ratio" for key in free.posterior.precision.memo)
    with pytest.raises(lapwing.NotPositiveDefinite, match="singular"):
        free.curvature.matrix.require_positive_definite()


def test_the_summary_states_cost_and_error_bar() -> None:
    _, free = pair("mlp regression", probes=3, steps=4)
    assert "takes 12 products" in free.summary()
    error = 0.5 * float(free.posterior.precision.ratio_estimate().error)
    assert f"± {error:.2g} (standard error)" in free.summary()


def test_the_limit_of_output_directions_is_for_rows() -> None:
    """Products with Λ go through no directions: tokens × classes do not matter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 4), nn.Linear(4, 30)).double()
    x, y = torch.randint(0, 30, (4, 80)), torch.randint(0, 30, (4, 80))
    with pytest.raises(lapwing.TooLarge, match="directions"):
        lapwing.fit(model, (x, y), "classification", structure="lowrank")
    la = lapwing.fit(model, (x, y), "classification", structure=MatrixFree(tolerance=1e-9))
    assert type(la.curvature.factor) is lapwing.GGN
    v = torch.randn(1, la.params.size, dtype=torch.float64)
    torch.testing.assert_close(la.posterior.precision.matvec(la.posterior.precision.solve(v)), v, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["mlp regression", "mlp counts"])
def test_solves_batch_by_batch(name: str) -> None:
    model, (x, y), likelihood = problem(name)
    batches = [(x[k : k + 7], y[k : k + 7]) for k in range(0, N, 7)]
    options = {"method": "batches", "tolerance": 1e-7, "iterations": 300}
    prior = {"0.*": 1.0, "*": 3.0}
    full = lapwing.fit(model, batches, likelihood, structure="full", prior=prior)
    free = lapwing.fit(model, batches, likelihood, structure=MatrixFree(**options), prior=prior)  # type: ignore[arg-type]
    v = torch.randn(3, full.params.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        free.posterior.precision.solve(v), full.posterior.precision.solve(v), rtol=1e-5, atol=1e-6
    )
    found = free.posterior.precision.solution(v)
    assert found.converged
    assert found.iterations < 300
    short = MatrixFree(method="batches", tolerance=1e-12, iterations=2, unconverged="raise")
    with pytest.raises(lapwing.NotConverged, match="batch-by-batch"):
        lapwing.fit(model, batches, likelihood, structure=short, prior=prior).posterior.precision.solve(v)


def test_batch_by_batch_needs_rows_that_stay() -> None:
    model, data, likelihood = problem("mlp regression")
    la = lapwing.fit(model, data, likelihood, structure=MatrixFree(method="batches"), factor="mc")
    with pytest.raises(lapwing.UnsupportedOperation, match="sampled"):
        la.posterior.sample(1)
    la = lapwing.fit(model, data, likelihood, structure=MatrixFree(method="batches")).update(data)
    with pytest.raises(lapwing.UnsupportedOperation, match="one fit"):
        la.posterior.sample(1)


def test_the_cost_is_stated_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    model, data, likelihood = problem("mlp regression")
    lapwing.fit(model, data, likelihood, structure=MatrixFree(rank=5, probes=3, steps=4), progress=True)
    stated = capsys.readouterr().err
    assert "MB for 5 + 6 × 16 vectors of 182 weights" in stated
    assert "log_evidence() 12 products" in stated
    lapwing.fit(model, data, likelihood, structure=MatrixFree(rank=5), progress=False)
    assert "matrix-free" not in capsys.readouterr().err


class TestLowRank:
    @pytest.mark.parametrize("method", ["rows", "lanczos", "nystrom"])
    @pytest.mark.parametrize("name", ["mlp regression", "conv classification"])
    def test_exact_at_full_rank(self, method: str, name: str) -> None:
        model, data, likelihood = problem(name)
        full = lapwing.fit(model, data, likelihood, structure="full")
        low = lapwing.fit(model, data, likelihood, structure=lapwing.LowRank(150, method))  # type: ignore[arg-type]
        torch.testing.assert_close(low.log_evidence(), full.log_evidence(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(low.curvature.dense(), full.curvature.dense(), rtol=1e-5, atol=1e-5)

    def test_the_largest_eigenvalues_before(self) -> None:
        model, (x, y), likelihood = problem("conv classification")
        dense = lapwing.fit(model, (x, y), likelihood, structure="full").curvature.dense()
        truth = torch.linalg.eigvalsh(dense).flip(0)[:6]
        exact = lapwing.fit(model, (x, y), likelihood, structure=lapwing.LowRank(6, "lanczos")).curvature.matrix
        torch.testing.assert_close(exact.values, truth, rtol=1e-3, atol=0)
        below = lapwing.fit(model, (x, y), likelihood, structure=lapwing.LowRank(6, "nystrom")).curvature.matrix
        assert bool((below.values.sort(descending=True).values <= truth + 1e-9).all())
        half = lapwing.fit(model, (x[:9], y[:9]), likelihood, structure=lapwing.LowRank(100, "lanczos"))
        torch.testing.assert_close(half.update((x[9:], y[9:])).curvature.dense(), dense, rtol=1e-5, atol=1e-5)

    def test_many_outputs_need_no_rows(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(30, 3), nn.Linear(3, 30)).double()
        x, y = torch.randint(0, 30, (3, 80)), torch.randint(0, 30, (3, 80))
        low = lapwing.fit(model, (x, y), "classification", structure=lapwing.LowRank(4, "lanczos"))
        assert "rank 4 by lanczos" in low.summary()
        with pytest.raises(lapwing.BadData, match="lanczos"):
            lapwing.LowRank(4, "power")  # type: ignore[arg-type]


@pytest.mark.parametrize("weighted", [False, True])
def test_products_leave_out_samples_below_the_tolerance(weighted: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 3
    with torch.no_grad():
        model[2].weight *= 20  # most samples are confident
        p = model(x).softmax(-1)
    w = torch.rand(12, dtype=torch.float64) if weighted else torch.ones(12, dtype=torch.float64)
    sizes = (p * (1 - p)).sum(-1) * w
    order = sizes.argsort()
    rows = order[sizes[order].cumsum(0) > 0.1 * sizes.sum()]
    assert 0 < len(rows) < 11

    def fit(structure: object, rows: Tensor | slice, tolerance: float) -> lapwing.Laplace:
        data = [(x[rows], y[rows], w[rows])]
        return lapwing.fit(
            model, data, "classification", structure=structure, factor=GGN(tolerance=tolerance), split=lambda b: b
        )

    everything = slice(0, 12)
    loose, tight = (fit(MatrixFree(rank=2), everything, t).curvature.matrix.product for t in (0.1, 0.0))
    v = torch.randn(5, loose.size, dtype=torch.float64)
    exact = fit("full", everything, 0.0).curvature.matrix
    part = fit("full", rows, 0.0).curvature.matrix
    torch.testing.assert_close(tight.matvec(v), exact.matvec(v))
    for block in (v, v[:1]):
        torch.testing.assert_close(loose.matvec(block), part.matvec(block))
    drawn = loose.draw(4000, torch.Generator().manual_seed(1))
    torch.testing.assert_close(drawn.T @ drawn / 4000, part.dense(), rtol=0.2, atol=0.05 * float(part.dense().max()))


def test_a_prior_with_the_same_sums_is_another_prior() -> None:
    """Precisions of layers in a row that are mirror images."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).double()
    x = torch.randn(9, 3, dtype=torch.float64)
    whole, free = (lapwing.fit(model, (x, x), lapwing.Gaussian(1.0), structure=s) for s in ("full", "matrixfree"))
    for high, low in ((16.0, 1 / 16), (1 / 16, 16.0)):
        prior = {"[03].*": high, "*": low}
        new, exact = free.replace(prior=prior), whole.replace(prior=prior)
        torch.testing.assert_close(new.log_evidence(), exact.log_evidence(), rtol=1e-8, atol=0)
        torch.testing.assert_close(new.posterior.variance, exact.posterior.variance, rtol=1e-8, atol=0)


def test_yesterdays_posterior_as_a_prior(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(27, 3, dtype=torch.float64), torch.randn(27, 2, dtype=torch.float64)

    def fitted(structure: str) -> lapwing.Laplace:
        first = lapwing.fit(model, (x[:20], y[:20]), lapwing.Gaussian(1.0), structure=structure, prior=0.5)
        prior = lapwing.Prior.from_posterior(first.posterior)
        return lapwing.fit(model, (x[20:], y[20:]), lapwing.Gaussian(1.0), structure=structure, prior=prior)

    whole, free = fitted("full"), fitted("matrixfree")
    torch.testing.assert_close(free.log_evidence(), whole.log_evidence())
    assert free.effective_parameters == pytest.approx(whole.effective_parameters, rel=1e-8)
    curved, prior = whole.curvature.dense(), whole.belief.resolved_prior[1].dense()
    exact = torch.linalg.solve(curved + prior, curved).trace()
    assert free.effective_parameters == pytest.approx(float(exact), rel=1e-8)
    temperature = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(lapwing.UnsupportedOperation, match="no gradients in temperature"):
        free.replace(temperature=temperature).log_evidence()
    with pytest.raises(lapwing.UnsupportedOperation, match="cannot be stored"):
        free.save(tmp_path / "free.lapwing")


def test_joint_covariances_from_samples() -> None:
    """With predictive="samples" the joint covariance and the factors of the kernel are those of the full posterior."""
    model, x, y = build(lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))), randn(10, 2), randn(10, 1)
    likelihood, count = lapwing.Gaussian(noise=0.5), 4000
    free = lapwing.fit(model, (x, y), likelihood, structure=MatrixFree(predictive="samples", samples=count))
    full = lapwing.fit(model, (x, y), likelihood, structure="full")
    expected = full.predict(x[:3], joint=True).function.covariance.reshape(3, 3)
    scale = expected.diagonal().sqrt().outer(expected.diagonal().sqrt())
    joint = free.predict(x[:3], joint=True).function.covariance.reshape(3, 3)
    _, left, right = free.kernel_factors(x[:3])
    for found in (joint, left[:, 0] @ right[:, 0].mT):
        assert ((found - expected).abs() / scale).max() < 5 * (2 / count) ** 0.5  # five standard errors
