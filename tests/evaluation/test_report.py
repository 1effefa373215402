"""The report against metrics computed directly from the networks' outputs."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import lapwing
from lapwing import metrics
from lapwing.baselines.temperature import TemperatureScaled
from lapwing.errors import BadData, NotReiterable
from lapwing.evaluation.evaluate import evaluate
from lapwing.evaluation.report import Report
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from lapwing.predictive import GaussianFunction, predict_targets


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def classes(n: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 5), torch.randint(3, (n,))


class Blurred:
    """Stands for a posterior: logits of a network with variance 1, a novelty, and its own likelihood."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.likelihood = model, Categorical()

    def predict(self, x: torch.Tensor):
        with torch.no_grad():
            f = self.model(x)
        novelty = x.flatten(1).square().sum(-1)
        function = GaussianFunction(f, torch.diag_embed(torch.ones_like(f)))
        return predict_targets(function, self.likelihood, novelty=novelty)


def test_classification_columns_equal_the_metrics() -> None:
    model, (x, y), other = nn.Linear(5, 3), classes(), 4 * torch.randn(40, 5)
    row = evaluate({"MAP": model}, (x, y), ood={"far": other}, likelihood="classification", bins=7).row("MAP")
    probs, strange = model(x).softmax(-1).detach(), model(other).softmax(-1).detach()
    assert row["accuracy"] == pytest.approx(metrics.accuracy(probs, y).item())
    assert row["nll"] == pytest.approx(functional.cross_entropy(model(x), y).item(), rel=1e-5)
    assert row["ece"] == pytest.approx(metrics.ece(probs, y, bins=7).item(), rel=1e-5)
    assert row["brier"] == pytest.approx(metrics.brier(probs, y).item(), rel=1e-5)
    inside, outside = metrics.entropy(probs), metrics.entropy(strange)
    assert row["entropy"] == pytest.approx(inside.mean().item(), rel=1e-5)
    assert row["auroc far"] == pytest.approx(metrics.auroc(inside, outside).item(), abs=1e-3)
    assert row["fpr95 far"] == pytest.approx(metrics.fpr95(inside, outside).item(), abs=0.03)
    assert row["seconds"] > 0


@pytest.mark.parametrize("size", [1, 7, 60])
def test_batching_does_not_matter(size: int) -> None:
    model, (x, y) = nn.Linear(5, 3), classes()
    batches = list(zip(x.split(size), y.split(size)))
    whole = evaluate({"MAP": model}, (x, y), likelihood="classification").row("MAP")
    parts = evaluate({"MAP": model}, batches, likelihood="classification").row("MAP")
    for name in ("accuracy", "nll", "ece", "brier", "entropy"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5)


def test_a_posterior_a_scaled_and_a_plain_network_side_by_side() -> None:
    model, (x, y) = nn.Linear(5, 3), classes(200)
    y = torch.where(torch.rand(200) < 0.6, model(x).argmax(-1), y)
    scaled = TemperatureScaled.fit(model, (x, y))
    report = evaluate({"MAP": model, "scaled": scaled, "posterior": Blurred(model)}, (x, y), ood={"far": 9 * x})
    rows = {name: report.row(name) for name in report.results}
    assert rows["scaled"]["nll"] <= rows["MAP"]["nll"] + 1e-7
    assert rows["scaled"]["accuracy"] == rows["MAP"]["accuracy"]
    assert rows["posterior"]["entropy"] > rows["MAP"]["entropy"]
    assert rows["posterior"]["auroc_novelty far"] == pytest.approx(
        metrics.auroc(x.square().sum(-1), 81 * x.square().sum(-1)).item(), abs=1e-6
    )
    assert "auroc_novelty far" not in rows["MAP"]
    lines = report.table().splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("MAP")
    assert "–" in lines[1]
    assert "AUROC far by novelty" in lines[0]


def test_table_chooses_columns_and_names_the_unknown() -> None:
    model, data = nn.Linear(5, 3), classes()
    report = evaluate({"MAP": model}, data, likelihood="classification")
    assert report.table("nll", "accuracy").splitlines()[0].split() == ["NLL", "accuracy"]
    assert str(report) == report.table()
    with pytest.raises(BadData, match="no column 'f1': choose from accuracy"):
        report.table("f1")


def test_regression_columns_equal_closed_forms() -> None:
    model = nn.Linear(5, 2)
    x, y = torch.randn(50, 5), torch.randn(50, 2)
    row = evaluate({"MAP": model}, (x, y), likelihood=Gaussian(0.7)).row("MAP")
    mean, noise = model(x).detach(), torch.full((50, 2), 0.7)
    assert row["nll"] == pytest.approx(2 * metrics.gaussian_nll(mean, noise, y).item(), rel=1e-5)
    assert row["rmse"] == pytest.approx(metrics.rmse(mean, y).item(), rel=1e-5)
    assert row["crps"] == pytest.approx(metrics.crps(mean, noise, y).item(), rel=1e-5)
    assert row["coverage95"] == metrics.coverage(mean - 1.959964 * noise, mean + 1.959964 * noise, y).item()
    assert row["stddev"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "draw"),
    [
        (Poisson(), 2, lambda n: torch.poisson(torch.ones(n, 2))),
        (HeteroscedasticGaussian(), 2, lambda n: torch.randn(n, 1)),
        (Gaussian(1.0), 1, lambda n: torch.randn(n)),
    ],
)
def test_other_numbers(likelihood, outputs: int, draw) -> None:
    model, x, y = nn.Linear(5, outputs), torch.randn(300, 5), draw(300)
    report = evaluate({"MAP": model}, (x, y), likelihood=likelihood, ood={"far": 9 * x})
    row = report.row("MAP")
    f = model(x).detach()
    expected = -likelihood.log_prob(f, likelihood.targets(f, y)).mean().item()
    assert row["nll"] == pytest.approx(expected, rel=1e-5)
    # CRPS from 256 draws against CRPS from many more
    draws = likelihood.conditional(f).sample((4000,))
    assert row["crps"] == pytest.approx(metrics.crps_samples(draws, y.reshape(draws.shape[1:])).item(), rel=0.03)
    assert 0 <= row["coverage95"] <= 1
    names = ["Predictions of MAP", "Coverage", "Sharpness", "Residuals of MAP", "Risk and coverage"]
    assert list(report.figures()) == [*names, "Scores on far", "ROC on far", "Separation of far"]


def test_calibrated_numbers_are_covered() -> None:
    model, x = nn.Linear(5, 1), torch.randn(4000, 5)
    y = model(x).detach() + 0.3 * torch.randn(4000, 1)
    report = evaluate({"MAP": model}, (x, y), likelihood=Gaussian(0.3))
    assert report.row("MAP")["coverage95"] == pytest.approx(0.95, abs=0.015)


def test_labels_count_each_label() -> None:
    model, x, y = nn.Linear(5, 2), torch.randn(40, 5), torch.randint(2, (40, 2))
    row = evaluate({"MAP": model}, (x, y), likelihood=Bernoulli()).row("MAP")
    p = model(x).sigmoid().detach()
    expected = functional.binary_cross_entropy(p, y.float(), reduction="sum").item() / 40
    assert row["nll"] == pytest.approx(expected, rel=1e-5)
    assert row["accuracy"] == pytest.approx(((p > 0.5) == y.bool()).float().mean().item())
    assert row["brier"] == pytest.approx(2 * (p - y).square().mean().item(), rel=1e-5)


def test_one_logit() -> None:
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
    x, y = torch.randn(40, 5), torch.randint(2, (40,))
    row = evaluate({"MAP": model}, (x, y), likelihood="binary").row("MAP")
    expected = functional.binary_cross_entropy_with_logits(model(x), y.float()).item()
    assert row["nll"] == pytest.approx(expected, rel=1e-5)


def test_ignored_targets_do_not_count() -> None:
    model = nn.Linear(4, 3)
    x, y = torch.randn(6, 7, 4), torch.randint(3, (6, 7))
    hidden = y.masked_fill(torch.rand(6, 7) < 0.4, -100)
    row = evaluate({"MAP": model}, (x, hidden), likelihood="classification").row("MAP")
    keep = hidden >= 0
    expected = functional.cross_entropy(model(x)[keep], y[keep]).item()
    assert row["nll"] == pytest.approx(expected, rel=1e-5)
    assert row["accuracy"] == pytest.approx(metrics.accuracy(model(x)[keep].softmax(-1), y[keep]).item())


@pytest.mark.parametrize("form", ["tensor", "pair", "batches", "batches without targets", "singletons"])
def test_outside_data_may_come_in_any_form(form: str) -> None:
    model, data, far = nn.Linear(5, 3), classes(), 4 * torch.randn(40, 5)
    forms = {
        "tensor": far,
        "pair": (far, torch.zeros(40)),
        "batches": [(far[:30], torch.zeros(30)), (far[30:], torch.zeros(10))],
        "batches without targets": [far[:30], far[30:], far[:0]],
        "singletons": [(far[:30],), (far[30:],)],
    }
    expected = evaluate({"MAP": model}, data, ood={"far": far}, likelihood="classification").row("MAP")
    row = evaluate({"MAP": model}, data, ood={"far": forms[form]}, likelihood="classification").row("MAP")
    assert row["auroc far"] == pytest.approx(expected["auroc far"], abs=1e-6)


def test_to_dict_is_json_and_complete() -> None:
    model, data = nn.Linear(5, 3), classes()
    report = evaluate({"MAP": model, "posterior": Blurred(model)}, data, ood={"far": torch.randn(30, 5)})
    back = json.loads(json.dumps(report.to_dict()))
    scores = ("", "_epistemic", "_novelty", "_energy", "_maxlogit")
    expected = {f"{metric}{score}" for score in scores for metric in ("auroc", "fpr95")}
    assert back["models"]["posterior"]["ood"]["far"].keys() == expected
    assert back["models"]["MAP"]["ood"]["far"].keys() == {c for c in expected if "nov" not in c and "epi" not in c}
    assert back["models"]["MAP"]["nll"] == report.row("MAP")["nll"]
    low, high = back["models"]["MAP"]["intervals"]["nll"]
    assert low < report.row("MAP")["nll"] < high
    assert back["models"]["posterior"]["differences"]["nll"] == list(report.difference("posterior", "nll"))
    assert "differences" not in back["models"]["MAP"] or not back["models"]["MAP"]["differences"]
    assert back["findings"] == list(report.findings())
    assert back["models"]["MAP"]["items"] == 60


def test_html_is_self_contained(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    x, y = torch.rand(50, 1, 8, 8), torch.randint(3, (50,))
    report = evaluate({"MAP": model, "<b>": Blurred(model)}, (x, y), ood={"noise & more": torch.rand(20, 1, 8, 8)})
    path = report.to_html(tmp_path / "new" / "report.html", heading="Title", notes=("A note.",))
    page = path.read_text(encoding="utf-8")
    names = ["Reliability of MAP", "Reliability of <b>", "Risk and coverage", "Scores on noise & more",
             "ROC on noise & more", "Separation of noise & more", "Most uncertain: test", "Most wrong: test",
             "Most uncertain: noise & more"]  # fmt: skip
    assert list(report.figures()) == names
    assert page.count("<svg ") == 6
    assert page.count("data:image/png;base64,") == 3 * 16
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert not re.search(r"url\((?!#)", page)
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "noise &amp; more" in page
    identifiers = re.findall(r'\bid="([^"]+)"', page)
    assert len(identifiers) == len(set(identifiers))


def test_the_gallery_holds_the_most_uncertain_pictures_whatever_the_batches() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    x, y = torch.rand(50, 1, 8, 8), torch.randint(3, (50,))
    report = evaluate({"MAP": model}, list(zip(x.split(9), y.split(9))), likelihood="classification")
    order = metrics.entropy(model(x).softmax(-1)).argsort(descending=True)[:16]
    shown = report.results["MAP"].examples["uncertain"]
    assert torch.equal(torch.stack([example.picture for example in shown]), x[order])
    probs = model(x[order[0]][None]).softmax(-1).detach()
    assert shown[0].caption == f"{int(y[order[0]])} → {int(probs.argmax())}\np {float(probs.max()):.2f}"
    losses = functional.cross_entropy(model(x), y, reduction="none")
    worst = report.results["MAP"].examples["wrong"]
    assert torch.equal(worst[0].picture, x[losses.argmax()])
    expected = losses.sort(descending=True).values[:16].tolist()
    assert [example.score for example in worst] == pytest.approx(expected, rel=1e-5)


def test_the_module_is_given_back_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate({"MAP": model}, classes(), likelihood="classification")
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bad_input() -> None:
    model, (x, y) = nn.Linear(5, 3), classes()
    with pytest.raises(BadData, match="at least one model"):
        evaluate({}, (x, y))
    with pytest.raises(BadData, match="pass likelihood="):
        evaluate({"MAP": model}, (x, y))
    with pytest.raises(BadData, match="a model is a str"):
        evaluate({"MAP": "model"}, (x, y), likelihood="classification")
    with pytest.raises(BadData, match="no samples"):
        evaluate({"MAP": model}, [], likelihood="classification")
    with pytest.raises(BadData, match="`ood` holds no items"):
        evaluate({"MAP": model}, (x, y), ood={"far": []}, likelihood="classification")
    with pytest.raises(NotReiterable, match="several models"):
        evaluate({"a": model, "b": model}, iter([(x, y)]), likelihood="classification")


def test_a_batch_of_one_is_no_special_case() -> None:
    report = evaluate({"MAP": nn.Linear(5, 3)}, classes(1), ood={"far": torch.randn(1, 5)}, likelihood="classification")
    assert isinstance(report, Report)
    assert all(math.isfinite(value) for value in report.row("MAP").values())


def test_batches_are_read_with_the_split_of_the_fit() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    batch = {"x": torch.randn(30, 3), "first": torch.zeros(30).long(), "second": torch.ones(30).long()}
    split = lambda b: (b["x"], b["second"])  # noqa: E731
    la = lapwing.fit(net, [batch], "classification", structure="full", split=split)
    report = lapwing.evaluate({"MAP": net, "Laplace": la}, [batch], ood={"far": 5 * batch["x"]})
    told = lapwing.evaluate({"MAP": net, "Laplace": la}, [batch], split=split)
    for name in ("MAP", "Laplace"):
        assert report.row(name)["nll"] == pytest.approx(told.row(name)["nll"])
    nll = -la.predict(batch["x"]).log_prob(batch["second"]).mean().item()
    assert report.row("Laplace")["nll"] == pytest.approx(nll)
