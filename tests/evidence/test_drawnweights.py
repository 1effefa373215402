"""Tuning and curves of the sampled predictive, against a loop over posteriors formed one by one."""

import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.errors import UnsupportedOperation
from lapwing.evidence.drawnweights import minimum
from tests import dense

GRID = {"prior": (0.3, 3.0, 30.0), "temperature": (1.0, 10.0)}


def blobs(n: int = 60, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = dense.randn(n, 4, seed=seed)
    return x, x[:, :3].argmax(-1)


def trained(outputs: int = 3, steps: int = 60, data: tuple[Tensor, Tensor] | None = None) -> nn.Module:
    net = dense.build(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)))
    x, y = data or blobs()
    loss = nn.functional.cross_entropy if not y.is_floating_point() else nn.functional.mse_loss
    optimizer = torch.optim.Adam(net.parameters(), 3e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return net


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return trained()


def brute_force(la: lapwing.Laplace, val: tuple[Tensor, Tensor], **changes: float) -> float:
    x, y = val
    return -la.replace(**changes).predict(x, method="sampled").log_prob(y).mean().item()


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "full", "lowrank"])
def test_every_setting_scores_as_its_own_prediction(net: nn.Module, structure: str) -> None:
    la = lapwing.fit(net, blobs(), "classification", structure=structure)
    val = blobs(40, seed=2)
    tuned = la.tune(val, predictive="sampled", grid=GRID, learn=("prior", "temperature"), rule="lowest")
    pairs = list(itertools.product(GRID["prior"], GRID["temperature"]))
    expected = [brute_force(la, val, prior=tau, temperature=T) for tau, T in pairs]
    assert tuned.tuning is not None
    assert tuned.tuning.scores[:6].tolist() == pytest.approx(expected, rel=1e-9)
    best = pairs[expected.index(min(expected))]
    assert (tuned.prior.precision, float(tuned.temperature.T)) == pytest.approx(best)
    assert tuned.tuning.method == "validation, sampled"


def test_factored_damping_is_tuned_as_it_predicts(net: nn.Module) -> None:
    la = lapwing.fit(net, blobs(), "classification", structure="kron").damping("factored")
    val = blobs(40, seed=2)
    tuned = la.tune(val, predictive="sampled", grid=GRID, learn=("prior", "temperature"))
    expected = [brute_force(la, val, prior=tau, temperature=T) for tau in GRID["prior"] for T in GRID["temperature"]]
    assert tuned.tuning is not None
    assert tuned.tuning.scores[:6].tolist() == pytest.approx(expected, rel=1e-9)
    assert tuned.damped


def test_the_logit_temperature_is_fitted_to_each_setting(net: nn.Module) -> None:
    la = lapwing.fit(net, blobs(), "classification", structure="diag")
    val = blobs(40, seed=2)
    grid = {"prior": (1.0, 10.0)}
    tuned = la.tune(val, predictive="sampled", grid=grid, learn=("prior", "logit_temperature"), rule="lowest")
    assert tuned.tuning is not None
    scaling = lapwing.TemperatureScaled.fit(net, val).temperature
    for setting, score in zip(tuned.tuning.settings[:2], tuned.tuning.scores[:2].tolist()):
        s, tau = setting.logit_temperature, setting.precision.item()
        assert score == pytest.approx(brute_force(la, val, prior=tau, logit_temperature=s), rel=1e-9)
        held = lambda s, tau=tau: (  # noqa: E731
            brute_force(la, val, prior=tau, logit_temperature=s) + 2 * math.log(s / scaling) ** 2 / 40
        )
        assert held(s) <= min(held(0.97 * s), held(1.03 * s)) + 1e-3


def test_without_a_grid_the_choice_is_no_worse_than_the_network_and_the_usual_points(net: nn.Module) -> None:
    la = lapwing.fit(net, blobs(), "classification", structure="diag")
    val = blobs(80, seed=2)
    tuned = la.tune(val, predictive="sampled", learn=("prior", "temperature"), rule="lowest")
    assert tuned.tuning is not None
    own = nn.functional.cross_entropy(net(val[0]), val[1]).item()
    assert tuned.tuning.score <= own + 1e-9
    assert tuned.tuning.score <= brute_force(la, val, prior=10.0) + 1e-9
    if not tuned.tuning.deterministic:
        p = tuned.predict(val[0], method="sampled")
        assert -p.log_prob(val[1]).mean().item() == pytest.approx(tuned.tuning.score, rel=1e-9)
    assert any("right labels" in said for said in tuned.tuning.messages)


def test_regression_learns_an_unknown_noise() -> None:
    x = dense.randn(50, 4, seed=1)
    y = x[:, :1].sin() + 0.3 * dense.randn(50, 1, seed=3)
    la = lapwing.fit(trained(1, 200, (x, y)), (x, y), "regression", structure="full")
    v = dense.randn(60, 4, seed=5)
    val = (v, v[:, :1].sin() + 0.3 * dense.randn(60, 1, seed=6))
    tuned = la.tune(val, predictive="sampled", rule="lowest")
    assert tuned.tuning is not None
    assert not tuned.tuning.deterministic
    assert tuned.tuning.score == pytest.approx(-tuned.predict(v, method="sampled").log_prob(val[1]).mean().item())
    assert tuned.tuning.score < min(tuned.tuning.baselines.values())
    assert 0.2 < float(tuned.likelihood.noise) < 0.9


def test_layerwise_priors_and_several_positions() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embed(x)))

    net = dense.build(Tokens)
    x = torch.randint(7, (30, 5), generator=torch.Generator().manual_seed(0))
    y = x % 3
    y[:, 0] = -100
    la = lapwing.fit(net, (x, y), "classification", structure="diag")
    grid = {"prior": (1.0, 10.0)}
    tuned = la.tune((x, y), predictive="sampled", prior="layerwise", grid=grid, learn=("prior",), rule="lowest")
    assert tuned.tuning is not None
    chosen = tuned.tuning.setting
    assert set(chosen.precision.tolist()) <= {1.0, 10.0}
    p = tuned.predict(x, method="sampled")
    assert -p.log_prob(y).sum().item() / (y >= 0).sum().item() == pytest.approx(tuned.tuning.score, rel=1e-9)


def test_a_choice_that_loses_the_labels_warns(net: nn.Module) -> None:
    la = lapwing.fit(net, blobs(), "classification", structure="diag")
    with pytest.warns(UserWarning, match="right labels on the held-out data"):
        la.tune(blobs(60, seed=2), predictive="sampled", grid={"prior": (1e-6,), "temperature": (1e-4,)})


def test_the_curve_scores_as_predictions_do(net: nn.Module) -> None:
    la = lapwing.fit(net, blobs(), "classification", structure="kron", prior=3.0)
    (x, y), far = blobs(40, seed=2), 4 * dense.randn(30, 4, seed=8)
    temperatures = (0.3, 1.0, 10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curve = la.temperature_curve((x, y), ood={"far": far}, temperatures=temperatures, predictive="sampled")
    for k, T in enumerate(temperatures):
        at = la.replace(temperature=T)
        p, q = at.predict(x, method="sampled"), at.predict(far, method="sampled")
        assert curve.nll[k].item() == pytest.approx(-p.log_prob(y).mean().item(), rel=1e-9)
        assert curve.entropy[k].item() == pytest.approx(p.entropy.mean().item(), rel=1e-9)
        assert curve.accuracy is not None
        assert curve.accuracy[k].item() == pytest.approx((p.label == y).double().mean().item())
        assert curve.outside["far"][k].item() == pytest.approx(q.entropy.mean().item(), rel=1e-9)
        pairs = (q.entropy[:, None] > p.entropy).double().mean().item()
        assert curve.auroc["far"][k].item() == pytest.approx(pairs, abs=1e-9)


def test_other_methods_and_names_are_refused(net: nn.Module) -> None:
    la = lapwing.fit(net, blobs(), "classification", structure="diag")
    with pytest.raises(UnsupportedOperation, match="tuned on held-out data"):
        la.tune(predictive="sampled")
    with pytest.raises(UnsupportedOperation, match="'linearized' or 'sampled'"):
        la.tune(blobs(), predictive="glm")
    with pytest.raises(UnsupportedOperation, match="'linearized' or 'sampled'"):
        la.temperature_curve(blobs(), predictive="glm")


def test_golden_sections_find_the_valley() -> None:
    assert minimum(lambda u: (u - 0.37) ** 2, -3, 3) == pytest.approx(0.37, abs=1e-4)
    assert minimum(lambda u: -u, -3, 3) == pytest.approx(3, abs=1e-3)
