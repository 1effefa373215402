"""The gallery of docs/results: up to date, with every experiment in it, and rewritten when results come."""

import json
import re
from pathlib import Path

import pytest
from experiments._gallery import BEGIN, COVERED, END, SECTIONS, refresh
from experiments._results import Claim, Result

from lapwing.cli.repository import about, experiments, repository

RESULTS = repository() / "docs" / "results"


def test_the_gallery_is_up_to_date(tmp_path: Path) -> None:
    """`python -m experiments._gallery` writes it anew."""
    for path in RESULTS.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes() if path.suffix != ".png" else b"")
    assert refresh(tmp_path)
    assert (RESULTS / "index.md").read_text(encoding="utf-8") == (tmp_path / "index.md").read_text(encoding="utf-8")


def test_every_experiment_is_in_it_once() -> None:
    page = (RESULTS / "index.md").read_text(encoding="utf-8")
    for name in experiments():
        assert len(re.findall(rf"`lapwing reproduce {name}`", page)) == 1, name


def test_the_table_of_papers_names_scripts_and_misses_none_with_a_page() -> None:
    named = [name for _, _, names in COVERED for name in names]
    assert len(named) == len(set(named))
    assert all(about(experiments()[name]).document == document for document, _, names in COVERED for name in names)
    assert {path.stem for path in RESULTS.glob("*.json") if about(experiments()[path.stem]).document} <= set(named)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_page_says_what_its_data_say(path: Path) -> None:
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    assert page == Result.read(path).page(path.with_suffix(".png").exists())


@pytest.mark.parametrize("name", experiments())
def test_an_experiment_says_what_it_is(name: str) -> None:
    known = about(experiments()[name])
    assert known.question
    assert known.document in SECTIONS
    assert known.minutes is None or 0 < known.minutes <= 60
    assert known.quick is None or 0 < known.quick <= 2
    assert not known.picture or (RESULTS / known.picture).exists()
    made = RESULTS / f"{name}.json"
    assert not made.exists() or json.loads(made.read_text(encoding="utf-8"))["paper"] == known.paper


def test_results_bring_their_line_up_to_date(tmp_path: Path) -> None:
    claim = Claim("It is best.", "Fig. 1", "2 < 3.", "holds in part", "lower is better.")
    result = Result("toy_cubic", "A cubic", "001", "command").with_rows([{"a": 1}]).with_claims(claim)
    page = tmp_path / "index.md"
    page.write_text(f"# Top\n\n{BEGIN}\nyesterday's line\n{END}\n\nbelow\n", encoding="utf-8")
    result.with_sentence("Kron | diag are near.").finish(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Top\n\n<!--")
    assert text.endswith(f"{END}\n\nbelow\n")
    assert "yesterday's line" not in text
    assert "- **[A cubic](toy_cubic.md)**. Kron | diag are near. Claims (holds in part: 1). `lapwing" in text
    (tmp_path / "toy_cubic.png").write_bytes(b"")
    refresh(tmp_path)
    row = "| [![A cubic](toy_cubic.png)](toy_cubic.md) | **[A cubic](toy_cubic.md)**. Kron \\| diag are near. Claims"
    assert row in page.read_text(encoding="utf-8")


def test_a_folder_without_a_gallery_is_left_alone(tmp_path: Path) -> None:
    assert not refresh(tmp_path)
    page = tmp_path / "index.md"
    page.write_text("# Mine\n", encoding="utf-8")
    assert not refresh(tmp_path)
    assert page.read_text(encoding="utf-8") == "# Mine\n"
