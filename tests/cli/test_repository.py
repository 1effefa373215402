"""`lapwing reproduce` runs the experiments of the repository."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from lapwing.cli import main as cli
from lapwing.cli import repository
from lapwing.errors import BadData

ROOT = Path(__file__).parents[2]


def test_experiments_are_listed_with_their_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in (ROOT / "experiments").glob("[!_]*.py"))
    assert all(len(line.split()) > 4 for line in lines)


def test_the_list_says_where_an_experiment_is_from_and_how_long_it_takes(tmp_path: Path) -> None:
    script = tmp_path / "some.py"
    head = '"""Which is best?\n\nMore."""\n'
    script.write_text(head + 'ABOUT = {"paper": "001, Fig. 2", "minutes": 1.5}\n', encoding="utf-8")
    found = repository.about(script)
    assert (found.question, found.source, found.document, found.time) == (
        "Which is best?", "paper 001, Fig. 2", "001", "1.5 min",
    )  # fmt: skip
    script.write_text(head + 'ABOUT = {"paper": "", "minutes": None}\n', encoding="utf-8")
    assert (repository.about(script).source, repository.about(script).time) == ("our own", "not timed")
    for wrong in ("", 'ABOUT = {"paper": "001"}\n', 'ABOUT = {"paper": "001", "minutes": 1, "tim": 2}\n'):
        script.write_text(head + wrong, encoding="utf-8")
        with pytest.raises(BadData, match="ABOUT"):
            repository.about(script)


def test_an_experiment_gets_the_arguments_that_follow(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lapwing", "reproduce", "tolerance", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "usage: tolerance.py" in done.stdout


@pytest.mark.parametrize("words", [["gone"], []])
def test_an_unknown_experiment(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", *words]) == 1
    said = capsys.readouterr().err
    assert "architectures, " in said
    assert said.count("\n") == 1


def test_an_experiment_that_stops(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "tolerance", "--no-such-option"]) == 1
    assert "lapwing: tolerance stopped with exit code 2" in capfd.readouterr().err


def test_experiments_need_the_repository(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(repository, "repository", partial(repository.repository, Path("/")))
    assert cli.main(["reproduce", "--list"]) == 1
    assert "get Lapwing's repository" in capsys.readouterr().err
