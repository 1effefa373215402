"""The command line as a user meets it: exit codes, one clear line, the demo from end to end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lapwing
from lapwing.cli import main as cli


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "LAPWING_DATA"}
    command = [sys.executable, "-m", "lapwing", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=kept | environment)


def test_wrong_input_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = run("demo", "--data", "mnist", "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip().startswith("lapwing: LAPWING_DATA is not set")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["demo", "--data", "imagenet"], ["bake"], ["demo", "--seed", "x"]])
def test_usage_errors_have_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: lapwing" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "below")]) == 1
    assert capsys.readouterr().err.startswith("lapwing: ")


def test_a_missing_extra_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    assert "pip install 'lapwing-torch[data]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    if arguments[0] == "demo":
        assert "example: lapwing demo" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"lapwing {lapwing.__version__}"


def rows(text: str) -> dict[str, list[float]]:
    """The numbers of a printed table by model."""
    names = ("MAP + temperature", "MAP", "Laplace")
    found = [re.match(rf"({'|'.join(map(re.escape, names))})  (.*\d)$", line) for line in text.splitlines()]
    return {row[1].strip(): [float(v) for v in re.findall(r"\d+\.\d+", row[2])] for row in found if row}


@pytest.mark.slow
def test_demo_prints_what_the_readme_says(tmp_path: Path) -> None:
    done = run("demo", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    printed = rows(done.stdout)
    promised = rows((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8"))
    assert list(printed) == list(promised) == ["MAP", "MAP + temperature", "Laplace"]
    for name, numbers in promised.items():
        for value, expected, tolerance in zip(printed[name], numbers, (0.5, 0.01, 0.01, 0.01), strict=True):
            assert value == pytest.approx(expected, abs=tolerance)
    # tuned on held-out data, the posterior does not do worse than the network
    assert printed["Laplace"][1] < printed["MAP"][1]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg ") == 3 + 1 + 3  # reliability of each model, risk, and the outside set
    assert page.count("data:image/png;base64,") == 3 * 16  # most uncertain and most wrong
    assert str(tmp_path / "out" / "report.html") in done.stdout
    assert "train" in done.stderr  # the progress bar


def test_it_runs_from_the_source_without_installed_metadata(tmp_path: Path) -> None:
    """`PYTHONPATH=src python -m lapwing`, in an interpreter that finds no metadata of the package."""
    source = Path(lapwing.__file__).parents[1]
    others = [place for place in sys.path if place and "site-packages" in place]
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "real = m.distribution\n"
        "def distribution(name):\n"
        "    if name == 'lapwing':\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.distribution = distribution\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(source), *others])}
    command = [sys.executable, "-m", "lapwing", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["lapwing", lapwing.__version__]
