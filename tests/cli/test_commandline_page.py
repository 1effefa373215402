"""docs/commandline.md: its files and commands run as they stand, and print what the page says."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from lapwing.cli import main as cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "commandline.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = r"\d+\.\d+"


def commands(text: str) -> list[list[str]]:
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("lapwing ")]


def scores(text: str) -> list[tuple[str, list[float]]]:
    """The rows of the tables of reports without their last two columns, seconds and memory."""
    rows = re.findall(r"^(MAP|Laplace)  (.*)  +[\d.]+  +\d+$", text, re.MULTILINE)
    return [(name, [float(value) for value in re.findall(NUMBER, cells)]) for name, cells in rows]


@pytest.mark.slow
def test_the_worked_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        Path(block.split()[1]).write_text(block)
    runpy.run_path("train.py")
    runpy.run_path("curve.py", run_name="__main__")
    for words in commands(PAGE):
        assert cli.main(words) == 0
    printed = capsys.readouterr().out
    promised, found = scores(PAGE), scores(printed)
    assert [name for name, _ in found] == [name for name, _ in promised] == 2 * ["MAP", "Laplace"]
    for (_, values), (_, stated) in zip(found, promised):
        assert len(values) == len(stated)
        assert values == pytest.approx(stated, abs=0.02)
    answers = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [answer["task"] for answer in answers] == ["numbers"]
    assert "noise 0.3" in printed
    tape = re.search(r"^tape.*?(?=^memory)", PAGE, re.MULTILINE | re.DOTALL)
    assert tape is not None
    assert tape[0] in printed


@pytest.mark.parametrize("words", commands(README), ids=lambda words: words[0])
def test_commands_of_the_readme_are_understood(words: list[str]) -> None:
    assert cli.parser().parse_args(words).run is not None


def test_there_are_such_commands() -> None:
    regression = ["fit", "predict", "report", "report"]
    assert [words[0] for words in commands(PAGE)] == ["doctor", "fit", "tune", "predict", "report", *regression]
    assert [words[0] for words in commands(README)] == ["doctor", "fit", "predict", "report"]
