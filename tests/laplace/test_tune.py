"""`la.tune(val_data)` at the front door: the default rule, the others, and what the result predicts."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.errors import NotConverged, UnsupportedOperation
from lapwing.evidence import Trials

GRID = {"prior": [1e-3, 0.1, 10.0, 1e3], "temperature": [1.0, 100.0]}


def overconfident(n: int, seed: int = 0) -> tuple[lapwing.Laplace, tuple[Tensor, Tensor]]:
    """A network whose logits are four times too large for the targets, and n held-out data."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        net[2].weight.mul_(4)
    draw = lambda x: torch.distributions.Categorical(logits=net(x).detach() / 4).sample()  # noqa: E731
    x, held = (torch.randn(k, 4, dtype=torch.float64, generator=generator) for k in (200, n))
    return lapwing.fit(net, (x, draw(x)), "classification", structure="ekfac"), (held, draw(held))


@pytest.mark.parametrize("rule", ["widest", "lowest"])
def test_the_score_is_what_the_tuned_posterior_predicts(rule: str) -> None:
    la, (x, y) = overconfident(300)
    tuned = la.tune((x, y), rule=rule, grid=GRID)
    assert tuned.tuning is not None
    assert tuned.tuning.score == pytest.approx(-tuned.predict(x).log_prob(y).mean().item(), abs=2e-3)
    assert tuned.logit_temperature > 1.5
    assert tuned.tuning.score <= tuned.tuning.baselines["temperature scaling"] + 0.002
    assert "logits divided by" in tuned.summary()


def test_the_widest_setting_is_not_narrower_and_hardly_worse() -> None:
    la, held = overconfident(300)
    wide, low = (la.tune(held, rule=rule, grid=GRID) for rule in ("widest", "lowest"))
    assert wide.tuning.setting.narrow <= low.tuning.setting.narrow
    assert low.tuning.score <= wide.tuning.score <= low.tuning.score + 0.002
    x, y = overconfident(1000, seed=1)[1]
    assert -wide.predict(x).log_prob(y).mean() < -low.predict(x).log_prob(y).mean() + 0.01


def test_few_data_keep_the_network() -> None:
    la, held = overconfident(300)
    calm = la.replace(logit_temperature=4.0)  # calibrated: nothing left to gain
    few = (held[0][:20], held[1][:20])
    tuned = calm.tune(few)
    assert 2.0 < tuned.logit_temperature < 8.0  # held near what is in force
    far = torch.randn(50, 4, dtype=torch.float64)
    plain = (la.module(far) / tuned.logit_temperature).softmax(-1).detach()
    torch.testing.assert_close(tuned.predict(far).probs, plain, rtol=0, atol=0.02)
    assert any("nothing is measurably better" in message for message in tuned.tuning.messages)


def test_a_rule_of_ones_own(tmp_path: Path) -> None:
    la, held = overconfident(40)

    def first(trials: Trials) -> int:
        assert trials.losses.shape == (len(trials.settings), 40)
        return 0

    grid = {"prior": [0.5, 5.0], "temperature": [2.0], "logit_temperature": [1.5]}
    tuned = la.tune(held, grid=grid, learn=("prior", "temperature", "logit_temperature"), rule=first)
    assert (tuned.tuning.setting.precision.item(), tuned.temperature.T) == (0.5, 2.0)
    tuned.save(tmp_path / "a.lapwing")
    back = lapwing.load(tmp_path / "a.lapwing", la.module)
    assert back.logit_temperature == tuned.logit_temperature
    with pytest.raises(UnsupportedOperation, match="'lowest', 'widest' or a function"):
        la.tune(held, rule="best")


def test_the_evidence_of_an_interpolating_network_comes_with_a_caution() -> None:
    la, _ = overconfident(10)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    few = lapwing.fit(la.module, (x, y), "classification", structure="diag")
    with pytest.warns(UserWarning, match="interpolates"):
        tuned = few.tune(method="evidence")
    assert "note: with more weights than data" in tuned.summary()
    assert not any("interpolates" in message for message in la.tune(method="evidence").tuning.messages)
    start, end = tuned.tuning.settings
    assert start.precision.item() == 1.0
    assert tuned.tuning.scores[1] <= tuned.tuning.scores[0]
    assert tuned.tuning.iterations > 0
    assert end.precision.item() == pytest.approx(
        tuned.prior.resolve(few.params.names, few.params.sizes)[1].diagonal()[0].item()
    )


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_a_tiny_matrix_free_posterior_is_tuned_as_the_full_one(likelihood: str) -> None:
    """In float32 no iteration converges for the smallest shifts of the grid: small matrices are formed instead."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(20, 3)
    y = torch.randint(2, (20,)) if likelihood == "classification" else torch.randn(20, 2)
    free, full = (lapwing.fit(net, (x, y), likelihood, structure=s).tune((x, y)) for s in ("matrixfree", "full"))
    assert len(free.tuning.settings) == len(full.tuning.settings)
    torch.testing.assert_close(free.tuning.scores, full.tuning.scores, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_free_posterior_leaves_out_settings_that_it_cannot_solve(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Products are rounded to ε times the largest eigenvalue: no solve converges far below."""
    monkeypatch.setattr("lapwing.linalg.operator.FORMED", 0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)
    x, y = 3 * torch.randn(100, 3, dtype=dtype), torch.randint(3, (100,))
    val = 3 * torch.randn(6, 3, dtype=dtype), torch.randint(3, (6,))
    free, full = (lapwing.fit(net, (x, y), "classification", structure=s) for s in ("matrixfree", "full"))
    grid = {"prior": (1e-6, 0.1, 100.0), "temperature": (1.0, 1e4)}
    learn = ("prior", "temperature")
    tuned, every = (la.tune(val, learn=learn, grid=grid).tuning for la in (free, full))
    exact = {(each.narrow, each.temperature): score for each, score in zip(every.settings, every.scores)}
    tried = [k for k, each in enumerate(tuned.settings) if not each.deterministic]
    assert 0 < len(tried) < 6
    for k in tried:
        there = (tuned.settings[k].narrow, tuned.settings[k].temperature)
        assert tuned.scores[k].item() == pytest.approx(exact[there].item(), abs=1e-3)
        chosen = free.replace(prior=there[0], temperature=there[1]).predict(val[0])  # what is tried can be used
        assert -chosen.log_prob(val[1]).mean().item() == pytest.approx(tuned.scores[k].item(), abs=1e-2)
    assert any(f"{6 - len(tried)} settings of the grid were left out" in text for text in tuned.messages)
    with pytest.raises(NotConverged, match="larger priors"):
        free.tune(val, learn=("prior",), grid={"prior": (1e-12,)})
    with pytest.raises(NotConverged, match="narrower grid"):
        free.replace(prior=1e-12).temperature_curve(val, temperatures=(1.0, 10.0))


def test_a_large_matrix_free_posterior_in_float32_is_tuned_on_the_usual_grid() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 90), nn.Tanh(), nn.Linear(90, 2))
    x = torch.randn(60, 20)
    y = (x[:, 0] > 0).long()
    la = lapwing.fit(net, (x, y), "classification", structure="matrixfree")
    assert la.params.size > 2048
    tuning = la.tune((x[:4], y[:4]), learn=("prior", "temperature")).tuning
    assert len(tuning.settings) > 20
    assert bool(tuning.scores.isfinite().all())


def test_a_choice_of_no_posterior_is_still_one_after_loading(tmp_path):
    """Without a posterior there is no evidence to print: that of a prior of 1e12 would only alarm."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 3), torch.arange(60) % 2
    model = torch.nn.Linear(3, 2)
    la = lapwing.fit(model, (x, y), "classification", progress=False).tune((x[:10], y[:10]))
    assert la.tuning.deterministic
    la.save(tmp_path / "model.lapwing")
    again = lapwing.load(tmp_path / "model.lapwing", model)
    assert "deterministic" in again.summary()
    assert "log evidence" not in la.summary()
    assert "log evidence" not in again.summary()


def test_methods_without_their_data_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    la = lapwing.fit(model, (torch.randn(8, 2), torch.arange(8) % 2), "classification", structure="full")
    with pytest.raises(lapwing.BadData, match="needs held-out data"):
        la.tune(method="validation")
    la.save(tmp_path / "model.lapwing")
    with pytest.raises(lapwing.BadData, match="needs the training data"):
        lapwing.load(tmp_path / "model.lapwing", model).tune(method="loo")
    with pytest.raises(lapwing.BadData):
        la.tune([])


def test_leave_one_out_reads_the_data_of_the_fit_again() -> None:
    torch.manual_seed(0)
    data = torch.randn(30, 2), torch.randn(30, 1)
    la = lapwing.fit(nn.Linear(2, 1), data, "regression", structure="full", progress=False)
    alone, given = la.tune(method="loo").tuning, la.tune(data, method="loo").tuning
    assert str(alone.setting) == str(given.setting)
    assert alone.score == given.score


@pytest.mark.parametrize("seed", range(3))
def test_a_tiny_matrix_free_posterior_serves_every_setting_that_tuning_may_choose(seed: int) -> None:
    """Priors below the rounding of products, where iterations do not converge, beside the full GGN in float64."""
    torch.manual_seed(seed)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(60, 4)
    y = (x.sum(1) > 0).long()
    la = lapwing.fit(model, (x[:40], y[:40]), "classification", structure="matrixfree")
    exact = lapwing.fit(copy.deepcopy(model).double(), (x[:40].double(), y[:40]), "classification", structure="full")
    for prior, far in ((1.0, 1e-5), (1e-3, 2e-3), (1e-5, 0.1)):
        found, true = (each.replace(prior=prior) for each in (la, exact))
        covariance = true.predict(x.double()).function.covariance
        error = (found.predict(x).function.covariance.double() - covariance).abs().max() / covariance.abs().max()
        assert error < far
        assert float(found.log_evidence()) == pytest.approx(float(true.log_evidence()), rel=far / 10)
        assert float(found.effective_parameters) == pytest.approx(float(true.effective_parameters), rel=far)
    for chosen in (la.tune((x[40:], y[40:])), la.replace(prior=1e-9)):
        p = chosen.predict(x)
        assert p.epistemic.isfinite().all()
        assert p.novelty.isfinite().all()
        assert chosen.predict(x, method="sampled", samples=5).probs.isfinite().all()
        assert bool((chosen.posterior.variance > 0).all())
