"""Plots: what they draw is what the metrics say; pyplot and the user's settings are left alone."""

import subprocess
import sys

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure

from lapwing import metrics, plots
from lapwing.errors import BadData
from lapwing.evidence import Setting, Tuning
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
