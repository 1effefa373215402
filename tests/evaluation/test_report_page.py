"""docs/report.md: its code runs from top to bottom and draws every picture that the page shows."""

import re
from pathlib import Path

import pytest
from tests.evaluation import draw

from lapwing import plots

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.mark.slow
def test_the_code_runs_and_draws_every_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, names = tmp_path, draw.run()
    for _, name in draw.PICTURES:
        assert (folder / name).stat().st_size > 3000
    for page, report in (("report.html", names["report"]), ("regression.html", names["scored"])):
        text = (folder / page).read_text(encoding="utf-8")
        assert report.findings()[0].split(" (")[0] in text
    assert "seven" in (folder / "report.html").read_text(encoding="utf-8")


def test_every_picture_is_stored_and_described() -> None:
    assert len(draw.PICTURES) >= 13
    for words, name in draw.PICTURES:
        assert words.strip()
        assert (FIGURES / name).stat().st_size > 3000


def test_each_plot_is_shown_and_has_an_example() -> None:
    for name in plots.__all__:
        function = getattr(plots, name)
        assert "Examples:" in function.__doc__
        assert f"plots.{name}(" in function.__doc__
        if name not in ("entropies", "scores"):  # one is older, the other belongs to a report
            assert re.search(rf"plots\.{name}\(", draw.PAGE), name
