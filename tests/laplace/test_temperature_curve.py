"""Curves against the temperature: one pass against a prediction for each temperature."""

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import metrics, plots
from lapwing.errors import BadData, IncompatiblePrior

TEMPERATURES = (0.1, 1.0, 30.0)


def problem(likelihood: str) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(30, 3, dtype=torch.float64)
    y = torch.randint(3, (30,)) if likelihood == "classification" else torch.randn(30, 3, dtype=torch.float64)
    return net, x, y, 4 * torch.randn(20, 3, dtype=torch.float64)


@pytest.mark.parametrize("tempers_prior", [False, True])
@pytest.mark.parametrize("structure", ["ekfac", "kron", "diag"])
def test_curve_is_what_predictions_say(structure: str, tempers_prior: bool) -> None:
    net, x, y, far = problem("classification")
    prior = {"0.*": 0.5, "2.*": 4.0}
    form = lapwing.Tempered(1.0, prior=tempers_prior)
    la = lapwing.fit(net, (x, y), "classification", structure=structure, prior=prior, temperature=form)
    la = la.replace(logit_temperature=1.3)
    curve = la.temperature_curve((x, y), ood={"far": far}, temperatures=TEMPERATURES)
    for k, T in enumerate(TEMPERATURES):
        at = la.replace(temperature=lapwing.Tempered(T, prior=tempers_prior))
        near, away = at.predict(x, samples=256), at.predict(far, samples=256)
        assert curve.nll[k].item() == pytest.approx(-near.log_prob(y).mean().item(), rel=1e-3)
        assert curve.accuracy is not None
        assert curve.accuracy[k].item() == pytest.approx((near.label == y).double().mean().item())
        assert curve.entropy[k].item() == pytest.approx(near.entropy.mean().item(), rel=1e-3)
        assert curve.outside["far"][k].item() == pytest.approx(away.entropy.mean().item(), rel=1e-3)
        area = metrics.auroc(near.entropy, away.entropy).item()
        assert curve.auroc["far"][k].item() == pytest.approx(area, abs=5e-3)
    assert len(str(curve).splitlines()) == 4
    assert "auroc far" in curve.table()


def test_factored_damping_is_tuned_as_it_predicts() -> None:
    net, x, y, far = problem("classification")
    la = lapwing.fit(net, (x, y), "classification", structure="kron").damping("factored")
    curve = la.temperature_curve((x, y), ood={"far": far}, temperatures=TEMPERATURES)
    for k, T in enumerate(TEMPERATURES):
        near = la.replace(temperature=T).predict(x, samples=256)
        assert curve.nll[k].item() == pytest.approx(-near.log_prob(y).mean().item(), rel=1e-3)
    tuned = la.tune((x, y), learn="prior", grid={"prior": [0.3, 3.0]}, rule="lowest")
    assert tuned.damped
    for setting, score in zip(tuned.tuning.settings[:2], tuned.tuning.scores[:2].tolist()):
        at = la.replace(prior=setting.precision.item()).predict(x, samples=256)
        assert score == pytest.approx(-at.log_prob(y).mean().item(), rel=1e-3)


def test_values_have_no_accuracy() -> None:
    net, x, y, far = problem("regression")
    la = lapwing.fit(net, (x, y), lapwing.Gaussian(1.0), structure="full")
    curve = la.temperature_curve((x, y), ood={"far": [far[:10], far[10:]]}, temperatures=TEMPERATURES)
    assert curve.accuracy is None
    for k, T in enumerate(TEMPERATURES):
        near = la.replace(temperature=T).predict(x)
        assert curve.nll[k].item() == pytest.approx(-near.log_prob(y).mean().item(), rel=1e-4)
        assert curve.entropy[k].item() == pytest.approx(near.entropy.mean().item(), rel=1e-4)
    assert curve.outside["far"][0] > curve.outside["far"][-1]


def test_the_picture_holds_the_curves() -> None:
    net, x, y, far = problem("classification")
    la = lapwing.fit(net, (x, y), "classification", structure="diag")
    curve = la.temperature_curve((x, y), ood={"far": far}, temperatures=TEMPERATURES)
    figure = plots.temperature(curve)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["NLL", "accuracy", "entropy", "AUROC of the entropy"]
    entropy, outside = figure.axes[2].get_lines()
    assert entropy.get_ydata().tolist() == pytest.approx(curve.entropy.tolist())
    assert outside.get_ydata().tolist() == pytest.approx(curve.outside["far"].tolist())


def test_refusals() -> None:
    net, x, y, _ = problem("classification")
    la = lapwing.fit(net, (x, y), "classification", structure="diag")
    with pytest.raises(BadData, match="positive"):
        la.temperature_curve((x, y), temperatures=(0.0, 1.0))
    each = la.replace(prior=torch.rand(la.params.size, dtype=torch.float64) + 0.1)
    with pytest.raises(IncompatiblePrior, match="constant per block"):
        each.temperature_curve((x, y))


def test_soft_labels_give_the_curve_of_their_classes() -> None:
    """Soft labels that are nearly certain score as the classes do; accuracy compares the likeliest class."""
    net, x, y, _ = problem("classification")
    soft = 0.997 * nn.functional.one_hot(y, 3).double() + 0.001
    la = lapwing.fit(net, (x, soft), "classification", structure="kron")
    curve = la.temperature_curve((x, soft), temperatures=TEMPERATURES)
    hard = la.temperature_curve((x, y), temperatures=TEMPERATURES)
    assert curve.accuracy is not None
    assert torch.equal(curve.accuracy, hard.accuracy)
    torch.testing.assert_close(curve.nll, hard.nll, rtol=2e-2, atol=0)
