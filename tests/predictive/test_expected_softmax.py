"""E[softmax(f)] of many classes against brute force, and what is said of its error."""

import math

import numpy as np
import pytest
import torch
from tests import dense
from torch import Tensor, nn

import lapwing
from lapwing.likelihoods import Categorical
from lapwing.predictive import GaussianFunction, function, predict_targets
from lapwing.predictive.function import DenseSpread, SharedSpread
from lapwing.predictive.softmax import expected_softmax


def covariance(kind: str, classes: int, scale: float) -> Tensor:
    """Independent logits; few directions; half of the directions known, half not."""
    basis = torch.linalg.qr(dense.randn(classes, classes, seed=1)).Q
    values = torch.ones(classes, dtype=torch.float64)
    if kind == "few":
        values[8:] = 0
    if kind == "half":
        values[: classes // 2] = 1e-3
    return scale * (torch.diag(values) if kind == "independent" else (basis * values) @ basis.mT)


def brute_force(mean: Tensor, matrix: Tensor, draws: int) -> Tensor:
    """E[softmax(f)] by plain Monte Carlo, float32."""
    values, vectors = torch.linalg.eigh(matrix)
    root = (vectors * values.clamp(min=0).sqrt()).float()
    generator, total, size = dense.seeded(7), torch.zeros(len(mean)).double(), 20_000
    for _ in range(draws // size):
        noise = torch.randn(size, len(mean), generator=generator, dtype=torch.float32)
        total += (mean.float() + noise @ root.mT).softmax(-1).sum(0).double()
    return total / draws


def distance(p: Tensor, q: Tensor) -> float:
    return float((p - q).abs().sum(-1).max() / 2)


@pytest.mark.parametrize("kind", ["independent", "few", "half"])
@pytest.mark.parametrize("scale", [0.3, 10.0])
@pytest.mark.parametrize("classes", [10, 64, 65, 100])
def test_total_variation_is_below_one_percent(kind: str, scale: float, classes: int) -> None:
    mean, matrix = 3 * dense.randn(classes, seed=2), covariance(kind, classes, scale)
    p = predict_targets(GaussianFunction(mean[None].float(), matrix[None].float()), Categorical())
    assert distance(p.probs[0], brute_force(mean, matrix, 400_000)) < 0.01
    assert p.monte_carlo_error is not None
    assert float(p.monte_carlo_error) < 0.01


def test_independent_logits_of_one_mean_are_equally_likely() -> None:
    mean, matrix = torch.zeros(1, 300), 1000 * torch.eye(300)[None]
    found = expected_softmax(mean, DenseSpread(matrix - 1000 / 300), None)
    assert distance(found.log_probs.exp(), torch.full((1, 300), 1 / 300)) < 0.01
    assert float(found.error) < 0.01


@pytest.mark.parametrize("select", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_65_classes_of_a_network(select: str, structure: str) -> None:
    """The case of 64 classes goes on at 65: against the dense covariance and many draws."""
    net = dense.build(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 65)))
    x, y = dense.randn(40, 4, seed=1), torch.randint(65, (40,), generator=dense.seeded(2))
    la = lapwing.fit(net, (x, y), "classification", structure=structure, select=select, prior=0.3)
    at = dense.randn(2, 4, seed=3)
    j = dense.jacobian(net, at, None if select == "all" else ["2.weight", "2.bias"])
    matrices = dense.covariance(j, la.curvature.dense() + 0.3 * torch.eye(j.shape[-1], dtype=torch.float64))
    p, f = la.predict(at), dense.outputs(net, at)
    truth = torch.stack([brute_force(f[n], matrices[n], 200_000) for n in range(2)])
    assert distance(p.probs, truth) < 0.012  # of which 0.007 may be the truth's own
    assert (p.monte_carlo_error < 0.01).all()
    assert (truth.gather(-1, p.label[:, None])[:, 0] > truth.amax(-1) - 2e-3).all()  # the likeliest, or as likely
    torch.testing.assert_close(la.predict(at[1:]).probs[0], p.probs[1], rtol=1e-6, atol=1e-9)


def test_a_shared_root_is_the_same_covariance() -> None:
    root, spread = dense.randn(12, 12), dense.randn(3, 12, seed=1).abs() + 0.1
    matrix = (root * spread.square()[:, None]) @ root.mT
    matrix = matrix - matrix.mean(-1, keepdim=True)
    one, other = SharedSpread(root, spread), DenseSpread(matrix - matrix.mean(-2, keepdim=True))
    torch.testing.assert_close(one.conditional, other.conditional, rtol=1e-6, atol=0)
    z = dense.randn(50_000, 12, seed=2)
    for spread_ in (one, other):
        f, own = spread_.steps(z)[:, 0].mT, spread_.own(z)[:, 0].mT
        f, own = f - f.mean(0), own - own.mean(0)
        torch.testing.assert_close(own.var(0), one.conditional[0], rtol=0.05, atol=0)
        # what is left of f_k is independent of differences between the others
        others = torch.cat([f[:, 1:2] - f[:, 2:3], f[:, 3:4] - f[:, 5:6]], 1)
        correlation = torch.corrcoef(torch.cat([own[:, :1], others], 1).T)[0, 1:]
        assert correlation.abs().max() < 0.03


def test_a_logit_that_others_determine_has_no_variance_of_its_own() -> None:
    matrix = covariance("few", 500, 300.0)
    matrix = matrix - matrix.mean(-1, keepdim=True)
    matrix = (matrix - matrix.mean(-2, keepdim=True)).float()[None]
    assert float(DenseSpread(matrix).conditional.max()) < 1e-6


def test_tiny_probabilities_keep_their_logarithm() -> None:
    mean = torch.tensor([[0.0, -50.0, -300.0, -2000.0]])
    p = predict_targets(GaussianFunction(mean, 0.01 * torch.eye(4)[None]), Categorical())
    log_probs = torch.stack([p.log_prob(torch.tensor([k])) for k in range(4)])[:, 0]
    torch.testing.assert_close(log_probs, mean[0] + 0.01, rtol=1e-3, atol=0.02)


def test_coarse_probabilities_say_so() -> None:
    mean, matrix = torch.zeros(1, 400), covariance("half", 400, 1e4).float()[None]
    p = predict_targets(GaussianFunction(mean, matrix), Categorical())
    with pytest.warns(UserWarning, match="total variation of 0.0[1-9]"):
        _ = p.probs
    few = predict_targets(GaussianFunction(mean, matrix), Categorical(), samples=64)  # asked for: no warning
    assert float(few.monte_carlo_error) > 3 * float(p.monte_carlo_error)


def test_gradients_follow_the_same_points() -> None:
    mean, a = dense.randn(1, 5), dense.randn(1, 5, 5, seed=1)
    weights = dense.randn(5, seed=2)

    def value(m: Tensor, root: Tensor) -> Tensor:
        return (predict_targets(GaussianFunction(m, root @ root.mT), Categorical()).probs @ weights).sum()

    m, root = mean.clone().requires_grad_(), a.clone().requires_grad_()
    found = torch.autograd.grad(value(m, root), (m, root))
    step, direction = 1e-5, (dense.randn(1, 5, seed=3), dense.randn(1, 5, 5, seed=4))
    with torch.no_grad():
        ahead, behind = (value(mean + s * direction[0], a + s * direction[1]) for s in (step, -step))
    along = sum((g * d).sum() for g, d in zip(found, direction, strict=True))
    assert math.isclose(float(ahead - behind) / (2 * step), float(along), rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("deviation", [40.0, 150.0, 3000.0])
def test_very_wide_logits_neither_overflow_nor_underflow(deviation: float, dtype: torch.dtype) -> None:
    """A prior that is far too wide: differences between logits are beyond the range of exp."""
    means, root = torch.zeros(4, 5).double(), deviation * dense.randn(4, 5, 5, seed=3) / math.sqrt(5)
    root = root - root.mean(1, keepdim=True)
    means[1:] = deviation * dense.randn(3, 5, seed=4) / 4
    found = expected_softmax(means.to(dtype), DenseSpread((root @ root.mT).to(dtype)), None)
    spread = SharedSpread(root[0].to(dtype) + 1, torch.ones(1, 5).to(dtype))
    shared = expected_softmax(means[:1].to(dtype), spread, None)
    noise = torch.randn(200_000, 5, generator=dense.seeded(5), dtype=torch.float64)
    truth = torch.stack([(m + noise @ r.mT).softmax(-1).mean(0) for m, r in zip(means, root, strict=True)])
    assert distance(found.probs.double(), truth) < 0.015
    assert distance(shared.probs.double(), truth[:1]) < 0.015


@pytest.mark.parametrize("deviation", [0.3, 0.45, 0.55, 0.8])
def test_the_expected_entropy_of_three_classes(deviation: float) -> None:
    """Its error is far below the mutual information, which is a small difference of two entropies."""
    means = 2 * dense.randn(20, 3, seed=1) * (torch.arange(20) % 2)[:, None]
    root = deviation * dense.randn(20, 3, 3, seed=2) / math.sqrt(3)
    root = root - root.mean(1, keepdim=True)
    found = expected_softmax(means, DenseSpread(root @ root.mT), None)
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(24))
    grid = torch.cartesian_prod(nodes, nodes, nodes)
    mass = torch.cartesian_prod(weights, weights, weights).prod(-1) / math.sqrt(2 * math.pi) ** 3
    logs = (means[:, None] + grid @ root.mT).log_softmax(-1)
    truth = -(logs.exp() * logs).sum(-1) @ mass
    mutual = torch.special.entr(torch.einsum("ngk,g->nk", logs.exp(), mass)).sum(-1) - truth
    error = (found.entropy - truth).abs()
    assert float(error.max()) < 2e-3
    assert float(error.mean()) < 0.01 * float(mutual.mean())


@pytest.mark.parametrize("classes", [4, 70])
def test_items_in_chunks_are_those_alone(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit into memory at once is computed in parts, and each part is right by draws of the logits."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(5, classes, generator=generator, dtype=torch.float64)
    root = torch.randn(5, classes, classes, generator=generator, dtype=torch.float64) / classes**0.5
    alone = [expected_softmax(m[None], DenseSpread((r @ r.mT)[None]), None) for m, r in zip(mean, root)]
    monkeypatch.setattr(function, "ITEMS", 2 * classes**2)
    spread = DenseSpread(root @ root.mT)
    assert spread.chunk == 2
    found = expected_softmax(mean, spread, None)
    for name in ("probs", "entropy", "error", "log_probs"):
        torch.testing.assert_close(getattr(found, name), torch.cat([getattr(each, name) for each in alone]))
    draws = torch.einsum("nij,snj->sni", root, torch.randn(20_000, *mean.shape, generator=generator, dtype=mean.dtype))
    p = (mean + draws).softmax(-1)
    assert bool(((found.probs - p.mean(0)).abs() < 5 * p.std(0) / 20_000**0.5 + 1e-3).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [3, 70])
@pytest.mark.parametrize("sure", [0, 1, 2])
def test_logarithms_in_a_batch_where_one_item_needs_many_points(sure: int, classes: int, dtype: torch.dtype) -> None:
    """Probabilities that underflow get their logarithms from their own item, wherever it stands in the batch."""
    center = torch.eye(classes, dtype=torch.float64) - 1 / classes
    mean = dense.randn(3, classes, seed=3)
    variances = 60 + 60 * (torch.arange(classes) % 3).double().expand(3, -1)
    mean[sure] = torch.linspace(300, -200, classes)
    variances = variances.clone()
    variances[sure] = 1e-4
    covariance = center @ torch.diag_embed(variances) @ center
    found = expected_softmax(mean.to(dtype), DenseSpread(covariance.to(dtype)), None)
    own = mean[sure].log_softmax(-1).to(dtype)  # with hardly any variance
    torch.testing.assert_close(found.log_probs[sure], own, rtol=1e-5, atol=1e-3)
    for k in {0, 1, 2} - {sure}:
        alone = expected_softmax(mean[k : k + 1].to(dtype), DenseSpread(covariance[k : k + 1].to(dtype)), None)
        torch.testing.assert_close(found.log_probs[k], alone.log_probs[0], rtol=1e-4, atol=1e-4)
