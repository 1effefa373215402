"""Every experiment explains itself, and runs in a form of a few seconds: figures come out, and all are numbers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lapwing.cli import main as cli
from lapwing.cli.repository import experiments

SCRIPTS = experiments()
NEEDS_DATA = {name for name, path in SCRIPTS.items() if "Needs LAPWING_DATA" in path.read_text(encoding="utf-8")}
HELP = """
import importlib.util, runpy, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    sys.argv[:] = [name, "--help"]
    try:
        runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(f"== {name} {end.code}")
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What `--help` prints, by experiment: all in one process, whose imports take longest."""
    root = str(next(iter(SCRIPTS.values())).parents[1])
    done = subprocess.run([sys.executable, "-c", HELP, root, *SCRIPTS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pages = re.split(r"^== (\w+) 0\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(pages[1::2], pages[::2], strict=False))


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_printed_and_nothing_runs(name: str, helps: dict[str, str]) -> None:
    assert helps[name].startswith(f"usage: {name}")
    assert "--smoke" in helps[name]
    assert helps[name].count("\n") < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_experiment_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDS_DATA and not os.environ.get("LAPWING_DATA"):
        pytest.skip("LAPWING_DATA is not set")
    monkeypatch.chdir(tmp_path)
    text = SCRIPTS[name].read_text(encoding="utf-8")
    figure = [option for option in ("--figure", "--out") if f'add_argument("{option}")' in text]
    arguments = [word for option in figure for word in (option, str(tmp_path / "figure.png"))]
    assert cli.main(["reproduce", name, "--smoke", *arguments]) == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    assert len(re.findall(r"\d\.\d", said)) > 2, said
    assert not re.search(r"\b(nan|inf)\b", said, re.IGNORECASE), said
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == (["figure.png"] if figure else [])
    assert not figure or (tmp_path / "figure.png").stat().st_size > 1000
