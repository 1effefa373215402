"""Attacks go along the gradient of the whole predictive distribution, checked against finite differences."""

from typing import Any

import pytest
import torch
from tests import dense
from torch import Tensor, nn

import lapwing
from lapwing import attacks
from lapwing.baselines import DeepEnsemble, MCDropout, TemperatureScaled
from lapwing.errors import BadData, UnsupportedOperation

STEP = 1e-5


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return dense.build(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4)))


def data() -> tuple[Tensor, Tensor]:
    x = dense.randn(40, 3, seed=4)
    return x, x.argmax(-1)


def predictors(net: nn.Module) -> dict[str, tuple[Any, dict[str, Any]]]:
    la = lapwing.fit(net, data(), "classification", structure="kron")
    last = lapwing.fit(net, data(), "classification", structure="full", select="last_layer")
    others = [net, dense.build(lambda: nn.Linear(3, 4), seed=9)]
    return {
        "linearized": (la, {}),
        "probit": (la, {"link": "probit"}),
        "sampled": (la, {"method": "sampled", "samples": 6}),
        "last layer": (last, {}),
        "ensemble of draws": (la.ensemble(5), {}),
        "dropout": (MCDropout(net, "classification", samples=5), {}),
        "deep ensemble": (DeepEnsemble(others, "classification"), {}),
        "temperature": (TemperatureScaled(net, 1.7, lapwing.Categorical()), {}),
        "mixture": (lapwing.Mixture([la, last]), {"link": "probit"}),
        "distilled": (la.distill(data()[0], epochs=0), {}),
    }


NAMES = (
    "linearized",
    "probit",
    "sampled",
    "last layer",
    "ensemble of draws",
    "dropout",
    "deep ensemble",
    "temperature",
    "mixture",
    "distilled",
)


def differences(predictor: Any, x: Tensor, target: Tensor, options: dict[str, Any]) -> Tensor:
    """∂ log p(target)/∂x by central differences, through ordinary predictions."""
    slope = torch.zeros_like(x)
    for k in range(x.shape[1]):
        move = torch.zeros_like(x)
        move[:, k] = STEP
        up, down = (predictor.predict(x + sign * move, **options).log_prob(target) for sign in (1, -1))
        slope[:, k] = (up - down) / (2 * STEP)
    return slope.detach()


@pytest.mark.parametrize("name", NAMES)
def test_both_attacks_follow_the_sign_of_the_numerical_gradient(net: nn.Module, name: str) -> None:
    predictor, options = predictors(net)[name]
    x = dense.randn(6, 3, seed=5)
    label = predictor.predict(x, **options).label
    slope = differences(predictor, x, label, options)
    clear = slope.abs() > 1e-6
    moved = attacks.fgsm(predictor, x, 0.1, **options)
    assert torch.allclose(moved[clear], (x - 0.1 * slope.sign())[clear])
    target = (label + 1) % 4
    uphill = differences(predictor, x, target, options)
    clear = uphill.abs() > 1e-6
    moved = attacks.targeted(predictor, x, target, 0.05, 1, **options)
    assert torch.allclose(moved[clear], (x + 0.05 * uphill.sign())[clear])
    before, after = (predictor.predict(z, **options).probs.gather(1, target[:, None]).mean() for z in (x, moved))
    assert after > before


def test_the_gradient_itself_agrees_with_differences(net: nn.Module) -> None:
    for name, (predictor, options) in predictors(net).items():
        x, target = dense.randn(4, 3, seed=6), torch.tensor([0, 1, 2, 3])
        slope = attacks._slope(predictor, x, target, options)
        expected = differences(predictor, x, target, options)
        assert torch.allclose(slope, expected, rtol=1e-4, atol=1e-7), name


def test_several_steps_come_from_one_run(net: nn.Module) -> None:
    ensemble, x = DeepEnsemble([net], "classification"), dense.randn(3, 3)
    sizes = [0.0, 0.1, 0.3]
    several = attacks.fgsm(ensemble, x, sizes)
    assert several.shape == (3, 3, 3)
    assert all(torch.equal(attacks.fgsm(ensemble, x, eta), moved) for eta, moved in zip(sizes, several))
    path = attacks.targeted(ensemble, x, 2, 0.05, range(4))
    assert torch.equal(path[0], x)
    assert torch.equal(attacks.targeted(ensemble, x, 2, 0.05, 3), path[3])
    assert torch.equal(attacks.targeted(ensemble, path[1], 2, 0.05, 2), path[3])
    assert attacks.fgsm(ensemble, x[:1], 0.1).shape == (1, 3)


def test_scale_and_bounds(net: nn.Module) -> None:
    ensemble, x = DeepEnsemble([net], "classification"), dense.randn(3, 3)
    scale = torch.tensor([0.0, 1.0, 2.0]).double()
    moved = attacks.fgsm(ensemble, x, 0.1, scale=scale) - x
    assert torch.allclose(moved.abs(), (0.1 * scale).expand(3, 3))
    inside = attacks.targeted(ensemble, x, 1, 0.5, 5, bounds=(-1.0, 1.0))
    assert inside.abs().max() <= 1.0


def test_a_binary_network_and_a_stranger_are_attacked() -> None:
    model = dense.build(lambda: nn.Linear(3, 1))
    x = dense.randn(5, 3)
    moved = attacks.fgsm(DeepEnsemble([model], "binary"), x, 0.1)
    sure = (2 * (model(x) > 0).double() - 1) * model.weight
    assert torch.allclose(moved, x - 0.1 * sure.sign())

    class Own:
        def predict(self, x: Tensor) -> lapwing.Prediction:
            return DeepEnsemble([model], "binary").predict(x, differentiable=True)

    assert torch.equal(attacks.fgsm(Own(), x, 0.1), moved)


def test_what_cannot_be_attacked_is_refused(net: nn.Module) -> None:
    x, ensemble = dense.randn(3, 3), DeepEnsemble([net], "classification")

    class Flat:
        def predict(self, x: Tensor) -> lapwing.Prediction:
            return ensemble.predict(x)

    with pytest.raises(UnsupportedOperation, match="no gradient"):
        attacks.fgsm(Flat(), x, 0.1)
    with pytest.raises(BadData, match="DeepEnsemble"):
        attacks.fgsm(net, x, 0.1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOperation, match="classes and labels"):
        attacks.fgsm(DeepEnsemble([net], lapwing.Gaussian(noise=1.0)), x, 0.1)
    with pytest.raises(BadData, match="real numbers"):
        attacks.fgsm(ensemble, torch.ones(2, 3).long(), 0.1)
    with pytest.raises(BadData, match="step sizes"):
        attacks.fgsm(ensemble, x, [])
    with pytest.raises(BadData, match="step sizes"):
        attacks.fgsm(ensemble, x, "a")  # type: ignore[arg-type]
    for steps in (-1, 2.5):
        with pytest.raises(BadData, match="numbers of steps"):
            attacks.targeted(ensemble, x, 0, 0.1, steps)  # type: ignore[arg-type]
    for attack in (attacks.fgsm, lambda *given: attacks.targeted(ensemble, x.numpy(), 0, 0.1, 1)):
        with pytest.raises(BadData, match=r"got ndarray: pass torch\.as_tensor"):
            attack(ensemble, x.numpy(), 0.1)  # type: ignore[arg-type]
    with pytest.raises(BadData, match=r"one per input, \(3,\); got shape \(2,\)"):
        attacks.targeted(ensemble, x, torch.tensor([0, 1]), 0.1, 1)


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    class Steep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x).abs().sqrt() + x  # the slope of a root at zero is infinite

    predictor = DeepEnsemble([nn.Sequential(Steep(), nn.Linear(3, 2))], "classification")
    with pytest.raises(UnsupportedOperation, match="missing or not finite"):
        attacks.fgsm(predictor, torch.zeros(2, 3), 0.1)
