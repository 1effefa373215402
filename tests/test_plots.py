"""Plots: what they draw is what the metrics say; pyplot and the user's settings are left alone."""

import subprocess
import sys

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import lapwing
from lapwing import metrics, plots
from lapwing.errors import BadData
from lapwing.evidence import Setting, Tuning
from lapwing.evidence.evidence import Candidate, Comparison
from lapwing.likelihoods import Categorical
from lapwing.posterior import Prior, Tempered


def scores(shift: float = 0.0, n: int = 200) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(0)) + shift


def test_reliability_draws_the_table_and_writes_the_error() -> None:
    confidence, correct = scores(), scores() > 0.4
    figure = plots.reliability({"A": (confidence, correct), "B": (confidence, ~correct)}, bins=10)
    table = metrics.reliability(confidence, correct, 10)
    axes = figure.axes[0]
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == pytest.approx(table.accuracy.tolist())
    assert axes.texts[0].get_text() == f"ECE {table.gap:.3f}"
    assert [a.get_title(loc="left") for a in figure.axes[::2]] == ["A", "B"]


def test_histograms_hold_every_item_and_name_the_auroc() -> None:
    inside, outside = scores(), scores(0.3)
    figure = plots.entropies({"A": inside}, {"A": {"other": outside}})
    drawn = [patch.get_data().values.sum() for patch in figure.axes[0].patches]
    assert drawn == pytest.approx([1.0] * len(drawn))
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["test", f"other (AUROC {metrics.auroc(inside, outside):.3f})"]


def test_ecdf_ends_at_one() -> None:
    (line,) = plots.ecdf({"A": scores()}).axes[0].get_lines()
    x, y = line.get_data()
    assert y[-1] == pytest.approx(1.0)
    assert list(x) == sorted(scores().double().tolist())


def test_constant_scores_can_be_drawn() -> None:
    assert isinstance(plots.entropies({"A": torch.zeros(5)}, {"A": {"other": torch.zeros(3)}}), Figure)


@pytest.mark.parametrize("shape", [(9, 8, 8), (9, 1, 8, 8), (9, 3, 8, 8)])
def test_images_are_ordered_by_score(shape: tuple[int, ...]) -> None:
    figure = plots.uncertain_images(torch.rand(shape), torch.arange(9.0), [f"no {i}" for i in range(9)], count=4)
    assert [axes.get_title(loc="center") for axes in figure.axes] == ["no 8", "no 7", "no 6", "no 5"]


def test_bad_input() -> None:
    with pytest.raises(BadData, match=r"got \(2, 5, 8, 8\)"):
        plots.uncertain_images(torch.rand(2, 5, 8, 8), torch.rand(2))
    with pytest.raises(BadData, match="nothing to draw"):
        plots.reliability({})


def test_settings_are_put_back_and_pyplot_stays_out() -> None:
    before = dict(matplotlib.rcParams)
    plots.coverage([0.5, 0.9], {"A": [0.4, 0.8]})
    assert dict(matplotlib.rcParams) == before
    code = (
        "import sys, torch; from lapwing import plots\n"
        "plots.ecdf({'A': torch.rand(5)}).savefig('/dev/null', format='png'); print('matplotlib.pyplot' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_a_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'lapwing-torch\[report\]'"):
        plots.ecdf({"A": scores()})


def test_the_surface_holds_every_setting_with_a_posterior() -> None:
    precisions, temperatures = (0.1, 10.0), (1.0, 100.0)
    settings = [Setting(torch.tensor([tau]), T) for tau in precisions for T in temperatures]
    settings.append(Setting(torch.empty(0), deterministic=True))
    scores = torch.tensor([0.5, 0.3, 0.4, 0.2, 0.35], dtype=torch.float64)
    tuning = Tuning("validation", tuple(settings), scores, 3, Prior(10.0), Tempered(100.0), Categorical(),
                    baselines={"MAP": 0.35})  # fmt: skip
    figure = plots.surface(tuning)
    dots = figure.axes[0].collections[0]
    drawn = {(round(float(x), 3), float(y)): float(c) for (x, y), c in zip(dots.get_offsets(), dots.get_array())}
    assert drawn == pytest.approx({(0.1, 1.0): 0.3, (0.1, 100.0): 0.1, (10.0, 1.0): 0.2, (10.0, 100.0): 0.0})
    assert dots.get_clim() == pytest.approx((0.0, 0.3))
    assert figure.axes[1].get_ylabel() == "NLL per item above 0.2, in nats"
    (mark,) = figure.axes[0].get_lines()
    assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (pytest.approx(10.0), 100.0)
    alone = Tuning("validation", tuple(settings[-1:]), scores[-1:], 0, Prior(1.0), Tempered(1.0), Categorical())
    with pytest.raises(BadData, match="nothing to draw"):
        plots.surface(alone)


def test_a_surface_of_nearly_equal_settings_can_be_read() -> None:
    """Within 0.0003 nats, colors run over the whole map and the labels count in units of 10⁻⁴ nats."""
    settings = tuple(Setting(torch.tensor([tau])) for tau in (0.1, 1.0, 10.0))
    scores = torch.tensor([0.15534, 0.15504, 0.15519], dtype=torch.float64)
    tuning = Tuning("validation", settings, scores, 1, Prior(1.0), Tempered(1.0), Categorical())
    figure = plots.surface(tuning)
    dots = figure.axes[0].collections[0]
    assert sorted(dots.get_array().tolist()) == pytest.approx([0.0, 1.5, 3.0])
    assert dots.get_clim() == pytest.approx((0.0, 3.0))
    assert figure.axes[1].get_ylabel() == "NLL per item above 0.155, in 10$^{-4}$ nats"
    assert "all settings are within 0.0003 nats per item" in figure.axes[0].get_title(loc="left")


def test_risk_and_coverage_of_ties_and_of_a_rejection() -> None:
    uncertainty, wrong = torch.tensor([0.1, 0.5, 0.5, 0.9]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    (line,) = plots.risk_coverage({"A": (uncertainty, wrong)}).axes[0].get_lines()
    x, y = line.get_data()
    assert x.tolist() == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert y.tolist() == pytest.approx([0, 0.25, 1 / 3, 0.5])  # either of the two in the middle may come first
    curve = metrics.Rejection(torch.tensor([0.5, 1.0]), torch.tensor([0.1, 0.2]), torch.zeros(2), "entropy", False)
    (line,) = plots.risk_coverage({"A": curve}).axes[0].get_lines()
    assert line.get_ydata().tolist() == pytest.approx([0.1, 0.2])
    with pytest.raises(BadData, match="got 4 and 3"):
        plots.risk_coverage({"A": (uncertainty, wrong[:3])})
    with pytest.raises(BadData, match="NaN"):
        plots.risk_coverage({"A": (uncertainty, wrong * torch.nan)})


def test_the_curve_of_a_score_is_that_of_scikit_learn() -> None:
    roc_curve = pytest.importorskip("sklearn.metrics").roc_curve
    inside, outside = torch.randint(9, (60,)), torch.randint(3, 12, (40,))
    axes = plots.roc({"entropy": inside}, {"entropy": outside}).axes[0]
    x, y = axes.get_lines()[1].get_data()
    truth = torch.cat([torch.zeros(60), torch.ones(40)])
    flagged, found, _ = roc_curve(truth, torch.cat([inside, outside]), drop_intermediate=False)
    expected = set(zip(flagged.round(9).tolist(), found.round(9).tolist()))
    assert set(zip(x.round(9).tolist(), y.round(9).tolist())) == expected
    label = axes.get_legend().get_texts()[0].get_text()
    assert label == f"entropy  {metrics.auroc(inside, outside):.3f}"
    with pytest.raises(BadData, match="the same names"):
        plots.roc({"entropy": inside}, {"novelty": outside})
    alone = plots.roc(inside, outside).axes[0].get_lines()[1]
    assert alone.get_xdata().tolist() == x.tolist()
    with pytest.raises(BadData, match="for both"):
        plots.roc(inside, {"novelty": outside})


def test_a_band_holds_interval_and_doubt() -> None:
    x = torch.tensor([2.0, 0.0, 1.0])
    mean, lower, upper = x.square(), x.square() - 1, x.square() + 2
    axes = plots.band(x[:, None], (mean, lower, upper), data=(x, mean)).axes[0]
    assert axes.get_lines()[0].get_data()[1].tolist() == [0.0, 1.0, 4.0]  # by increasing x
    path = axes.collections[0].get_paths()[0].vertices
    assert (path[:, 1].min(), path[:, 1].max()) == (-1.0, 6.0)
    with pytest.raises(BadData, match="3 inputs and 2 predictions"):
        plots.band(x, (mean[:2], lower[:2], upper[:2]))


def test_parity_tells_hits_from_misses() -> None:
    truth = torch.tensor([0.0, 1.0, 2.0])
    bounds = (truth + 0.1, truth - torch.tensor([1.0, 1.0, -0.05]), truth + 1)
    axes = plots.parity({"A": bounds}, truth).axes[0]
    held, missed = (line for line in axes.get_lines() if line.get_marker() == "o")
    assert held.get_xdata().tolist() == [0.0, 1.0]
    assert missed.get_xdata().tolist() == [2.0]
    with pytest.raises(BadData, match="A: 2 predictions and 3 targets"):
        plots.parity({"A": tuple(part[:2] for part in bounds)}, truth)


def test_residuals_are_standardized() -> None:
    mean, spread = torch.zeros(1000), torch.full((1000,), 2.0)
    y = 2 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    patch = plots.residuals({"A": (mean, spread)}, y).axes[0].patches[0]
    values, edges, _ = patch.get_data()
    assert (values * (edges[1:] - edges[:-1])).sum() == pytest.approx(1.0)
    centers = (edges[1:] + edges[:-1]) / 2
    assert (values * centers**2).sum() * 0.25 == pytest.approx(1.0, abs=0.1)


def test_both_sides_of_a_separation_hold_every_item() -> None:
    up, down = plots.separation(scores(), scores(0.4), names=("in", "out")).axes[0].patches
    assert (up.get_data().values ** 2).sum() == pytest.approx(1.0)
    assert (down.get_data().values ** 2).sum() == pytest.approx(1.0)
    assert up.get_data().values.max() > 0 > down.get_data().values.min()


def test_intervals_of_scores_and_of_the_evidence() -> None:
    axes = plots.scores({"MAP": {"entropy": (0.9, 0.8, 0.95)}, "LA": {"novelty": (0.7, 0.6, 0.8)}}).axes[0]
    assert axes.get_lines()[0].get_xdata().tolist() == [0.8, 0.95]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["MAP: entropy", "LA: novelty"]
    best = Candidate("kron", 10, 3.0, -50.0, 0.5, 100, 1.0)
    other = Candidate("diag", 10, 3.0, -58.0, None, 100, 1.0, error=0.25)
    axes = plots.evidence(Comparison({"b": other, "a": best}, ())).axes[0]
    bars = [line.get_xdata() for line in axes.get_lines()]
    assert bars[0] == pytest.approx([-1.5, 1.5])  # one nat, and the shift
    assert bars[2] == pytest.approx([-9.5, -6.5])  # one nat, and two standard errors
    with pytest.raises(BadData, match="no moment"):
        plots.evidence(())


def test_the_evidence_of_a_training() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    trained = lapwing.train(nn.Linear(2, 1), (x, x[:, :1]), "regression", epochs=4, every=1, burnin=1, progress=False)
    (line,) = plots.evidence(trained).axes[0].get_lines()
    assert line.get_ydata().tolist() == [moment.evidence for moment in trained.history]


def test_a_band_of_a_prediction_also_shows_the_doubt_about_the_mean() -> None:
    x = torch.linspace(-1, 1, 9)[:, None]
    la = lapwing.fit(torch.nn.Linear(1, 1), (x, x.square()), lapwing.Gaussian(noise=0.3), structure="full")
    p = la.predict(x)
    axes = plots.band(x, p, level=0.9).axes[0]
    outer, inner = (c.get_paths()[0].vertices[:, 1].max() for c in axes.collections[:2])
    lower, upper = p.interval(0.9)
    reach = 1.6448536 * p.epistemic.sqrt()  # the 95 % quantile of the standard normal law
    assert (outer, inner) == pytest.approx((float(upper.max()), float((p.mean + reach).max())), rel=1e-5)
    assert bool((lower < p.mean - reach).all())


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(BadData, match="no model has a score"):
        plots.scores({"MAP": {}})
    with pytest.raises(BadData, match="the targets are empty"):
        plots.parity({"MAP": (torch.empty(0),) * 3}, torch.empty(0))
