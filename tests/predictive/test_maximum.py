"""E[softmax(f)] of many classes as the law of a maximum, against quadrature and long Monte Carlo."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import dense
from torch import Tensor, nn

import lapwing
from lapwing.predictive.function import DenseSpread, SharedSpread
from lapwing.predictive.maximum import by_maximum
from lapwing.predictive.softmax import SOUND, expected_softmax


def found_by(mean: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The estimate for one item, whose covariance is made free of the average of the logits."""
    matrix = matrix - matrix.mean(-1, keepdim=True)
    matrix = (matrix - matrix.mean(-2, keepdim=True))[None]
    probs, entropy, error = by_maximum(mean[None], matrix.diagonal(dim1=-2, dim2=-1), lambda v: v @ matrix)
    return probs[0], entropy[0], error[0]


def monte_carlo(mean: Tensor, matrix: Tensor, draws: int) -> tuple[Tensor, Tensor, float]:
    """Probabilities and expected entropy by plain mirrored draws, and the total variation that they may be off by."""
    values, vectors = torch.linalg.eigh(matrix.double())
    root = (vectors * values.clamp(min=0).sqrt()).float()
    generator, size = dense.seeded(7), 2000
    sums, squares, entropy = (torch.zeros(len(mean)).double() for _ in range(3))
    for _ in range(draws // (2 * size)):
        step = torch.randn(size, len(mean), generator=generator, dtype=torch.float32) @ root.mT
        logs = [(mean.float() + sign * step).log_softmax(-1) for sign in (1, -1)]
        pair = (logs[0].exp() + logs[1].exp()).double() / 2
        sums, squares = sums + pair.sum(0), squares + pair.square().sum(0)
        entropy = entropy - sum((each.exp() * each).double().sum() for each in logs) / len(mean)
    pairs = draws / 2
    probs = sums / pairs
    deviation = ((squares / pairs - probs.square()).clamp(min=0) / pairs).sqrt()
    return probs, entropy.sum() / draws, float(deviation.sum()) / math.sqrt(2 * math.pi)


def distance(p: Tensor, q: Tensor) -> float:
    return float((p.double() - q.double()).abs().sum()) / 2


def covariance(kind: str, classes: int) -> Tensor:
    """Independent logits of different variances, with a common part or not; groups of ten; some common factors."""
    scales = (0.4 * dense.randn(classes, seed=3)).exp()
    if kind == "independent":
        return torch.diag(scales)
    if kind == "shifted":
        return torch.diag(scales) + 3 + 0.5 * (dense.randn(classes, 1, seed=4) + dense.randn(1, classes, seed=4))
    if kind == "groups":
        group = torch.arange(classes) // 10
        matrix = torch.where(group[:, None] == group, 0.3, 0.0).double().fill_diagonal_(1.0)
        return matrix * (scales[:, None] * scales).sqrt()
    factors = 0.1 * dense.randn(classes, 8, seed=5)
    return torch.diag(scales) + factors @ factors.mT


@pytest.mark.parametrize(("classes", "lead"), [(100, 0.0), (100, 6.0), (300, 0.0), (1000, 0.0)])
@pytest.mark.parametrize("kind", ["independent", "groups", "factors"])
def test_long_monte_carlo_agrees(kind: str, classes: int, lead: float) -> None:
    """Also with a class that leads the others; the stated error holds."""
    mean, matrix = 1.5 * dense.randn(classes, seed=2), covariance(kind, classes)
    mean[0] += lead
    probs, entropy, error = found_by(mean.float(), matrix.float())
    truth, expected, noise = monte_carlo(mean, matrix, 20_000 if classes == 1000 else 40_000)
    assert distance(probs, truth) < float(error) + 1.5 * noise
    assert float(error) < 6e-3
    assert abs(float(entropy - expected)) < 0.01


@pytest.mark.parametrize("scale", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("classes", [4, 10, 40])
@pytest.mark.parametrize("kind", ["independent", "groups", "factors"])
def test_few_classes(kind: str, classes: int, scale: float) -> None:
    """Where the stated error lets few classes do without points, it holds."""
    mean, matrix = 0.7 * scale * dense.randn(classes, seed=2), scale**2 * covariance(kind, classes)
    mean[0] += scale
    probs, entropy, error = found_by(mean.float(), matrix.float())
    truth, expected, noise = monte_carlo(mean, matrix, 200_000)
    assert distance(probs, truth) < float(error) + 1.5 * noise
    assert kind == "groups" or float(error) < SOUND
    assert float(error) > SOUND or abs(float(entropy - expected)) < 0.006


@pytest.mark.parametrize("deviation", [0.0, 0.05, 0.4, 0.6, 1.5, 2.5, 8.0, 60.0])
def test_independent_logits_by_quadrature(deviation: float) -> None:
    """Against the integral over t itself, with distribution functions by many nodes; one class varies half as much."""
    mean, scale = 2 * dense.randn(80, seed=2), torch.full((80,), deviation).double()
    scale[0] /= 2
    probs, _, error = found_by(mean, torch.diag(scale.square()))
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(200))
    gumbel = torch.linspace(-4, 30, 801).double()
    mass = (-gumbel - (-gumbel).exp()).softmax(0)
    t = torch.linspace(float((mean - 6 * scale).max()) - 5, float((mean + 8 * scale).max()) + 25, 401).double()
    log_height, density = [], []
    for m, s in zip(mean, scale, strict=True):
        x = t - m
        if s < 1:
            e = (-(x[:, None] - s * nodes)).clamp(max=50).exp()
            height, own = ((part @ weights) / weights.sum() for part in ((-e).exp(), e * (-e).exp()))
        else:
            u = (x[:, None] - gumbel) / s
            height, own = torch.special.ndtr(u) @ mass, (-u.square() / 2).exp() @ mass / (s * math.sqrt(2 * math.pi))
        log_height.append(height.clamp(min=1e-300).log())
        density.append(own / height.clamp(min=1e-300))
    below = torch.stack(log_height).sum(0).exp()
    truth = (torch.stack(density) * below).sum(-1) * (t[1] - t[0])
    assert abs(float(truth.sum()) - 1) < 1e-4
    assert distance(probs, truth) < 5e-4
    assert float(error) < 1e-3


@pytest.mark.parametrize(("deviation", "spread"), [(5.0, 0.0), (8.0, 5.0), (10.0, 0.0), (10.0, 3.0), (15.0, 1.0)])
@pytest.mark.parametrize("wide", [1, 2])
def test_a_few_very_wide_logits_among_narrow_ones(wide: int, deviation: float, spread: float) -> None:
    """A grid for the wide logits, draws for the others; with twenty nodes the entropy was off by up to 0.5 nats."""
    mean = spread * dense.randn(200, seed=wide)
    grid = torch.cartesian_prod(*[torch.linspace(-6, 6, 121, dtype=torch.float64)] * wide).reshape(-1, wide)
    weights = (-grid.square().sum(-1) / 2).softmax(0)
    probs, entropy, draws = torch.zeros(200).double(), 0.0, 0.1 * dense.randn(4, 200, seed=9)
    for step in torch.cat([draws, -draws]):
        f = (mean + step).repeat(len(grid), 1)
        f[:, :wide] = mean[:wide] + deviation * grid
        logs = f.log_softmax(-1)
        probs = probs + weights @ logs.exp() / 8
        entropy -= float(weights @ (logs.exp() * logs).sum(-1)) / 8
    matrix = 0.01 * torch.eye(200).double()
    matrix[:wide, :wide] = deviation**2 * torch.eye(wide)
    matrix = matrix - matrix.mean(-1, keepdim=True)
    matrix = (matrix - matrix.mean(-2, keepdim=True)).float()
    found = expected_softmax(mean.float()[None], DenseSpread(matrix[None]), None)
    assert distance(found.probs[0], probs) < 3e-3
    assert abs(float(found.entropy) - entropy) < 3e-3


def test_without_variance_it_is_the_softmax() -> None:
    mean = 3 * dense.randn(200, seed=1)
    probs, entropy, _ = found_by(mean, torch.zeros(200, 200).double())
    assert distance(probs, mean.softmax(-1)) < 1e-5
    assert abs(float(entropy - torch.special.entr(mean.softmax(-1)).sum())) < 1e-3


@pytest.mark.parametrize("common", [0.05, 0.2])
def test_four_correlated_classes_by_quadrature(common: float) -> None:
    """Few classes are the hardest for an expansion in correlations: what is stated holds, with an exact truth."""
    mean, factor = torch.tensor([0.5, 0.0, -0.3, 0.2]).double(), dense.randn(4, 4, seed=6)
    matrix = torch.diag(torch.tensor([1.0, 0.5, 0.8, 0.3]).double()) + common * factor @ factor.mT
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(24))
    grid, mass = torch.cartesian_prod(*[nodes] * 4), torch.cartesian_prod(*[weights] * 4).prod(-1)
    logs = (mean + grid @ torch.linalg.cholesky(matrix).mT).log_softmax(-1)
    truth = (logs.exp() * mass[:, None]).sum(0) / mass.sum()
    expected = -((logs.exp() * logs).sum(-1) * mass).sum() / mass.sum()
    probs, entropy, error = found_by(mean, matrix)
    assert distance(probs, truth) < float(error) < 0.03
    assert abs(float(entropy - expected)) < 0.03


def test_what_all_logits_share_does_not_matter() -> None:
    mean = 1.5 * dense.randn(100, seed=2)
    one, other = (found_by(mean, covariance(kind, 100)) for kind in ("independent", "shifted"))
    torch.testing.assert_close(one[0], other[0], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(one[1], other[1], rtol=1e-3, atol=0)


def test_strong_correlations_are_said_to_be_too_much() -> None:
    """Eight directions carry all of the covariance: points take over, and give what brute force gives."""
    factors = 1.5 * dense.randn(100, 8, seed=5)
    mean, matrix = dense.randn(100, seed=2), factors @ factors.mT
    assert float(found_by(mean, matrix)[2]) > 0.02
    matrix = matrix - matrix.mean(-1, keepdim=True)
    matrix = matrix - matrix.mean(-2, keepdim=True)
    probs = expected_softmax(mean[None], DenseSpread(matrix[None]), None).probs[0]
    truth, _, noise = monte_carlo(mean, matrix, 100_000)
    assert distance(probs, truth) < 0.01 + noise


def test_an_item_does_not_depend_on_its_batch() -> None:
    """Items of one batch that take different ways: narrow, medium, wide, with one class ahead, correlated."""
    left = torch.linalg.qr(dense.randn(90, 90, seed=1)).Q.float()
    spread = torch.tensor([0.1, 0.7, 3.0, 20.0, 0.7]).reshape(5, 1) * (1 + dense.randn(5, 90, seed=2).abs().float())
    spread[-1, :9] *= 20
    mean = dense.randn(5, 90, seed=3).float()
    mean[1, 0] += 20
    whole = expected_softmax(mean, SharedSpread(left, spread), None)
    for k in range(5):
        alone = expected_softmax(mean[k : k + 1], SharedSpread(left, spread[k : k + 1]), None)
        torch.testing.assert_close(alone.probs[0], whole.probs[k], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(alone.entropy[0], whole.entropy[k], rtol=1e-4, atol=1e-6)


def test_gradients() -> None:
    mean, matrix = dense.randn(70, seed=2), covariance("factors", 70)
    direction, weights, step = dense.randn(70, seed=3), dense.randn(70, seed=4), 1e-4
    moved = lambda h: found_by(mean + h * direction, matrix)[0] @ weights  # noqa: E731
    at = mean.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(found_by(at, matrix)[0] @ weights, at)
    assert math.isclose(float(moved(step) - moved(-step)) / (2 * step), float(gradient @ direction), rel_tol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("prior", [0.05, 5.0])
def test_a_head_of_many_classes_exports(prior: float, tmp_path: Path) -> None:
    """The traced form gives what `predict` gives, for wide and narrow posteriors."""
    net = dense.build(lambda: nn.Linear(6, 80)).float()
    x, y = torch.randn(60, 6, generator=dense.seeded(1)), torch.randint(80, (60,), generator=dense.seeded(2))
    la = lapwing.fit(net, [(x, y)], "classification", structure="kron", select="last_layer", prior=prior)
    la.export(tmp_path / "model.pt2", x[:2])
    written, p = torch.export.load(tmp_path / "model.pt2").module()(x[:7]), la.predict(x[:7])
    torch.testing.assert_close(written["probs"], p.probs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(written["epistemic"], p.epistemic, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_head_of_many_classes_is_the_same_in_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    net = dense.build(lambda: nn.Linear(6, 80)).float()
    x, y = torch.randn(60, 6, generator=dense.seeded(1)), torch.randint(80, (60,), generator=dense.seeded(2))
    la = lapwing.fit(net, [(x, y)], "classification", structure="kron", select="last_layer", prior=0.05)
    la.export(tmp_path / "model.onnx", x[:2])
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    values = session.run(["probs", "epistemic"], {session.get_inputs()[0].name: x[:7].numpy()})
    p = la.predict(x[:7])
    torch.testing.assert_close(torch.tensor(values[0]), p.probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(values[1]), p.epistemic, rtol=0, atol=1e-4)
