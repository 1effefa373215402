"""Every experiment explains itself without running, and has the options that all share."""

import re
import subprocess
import sys

import pytest

from lapwing.cli.repository import experiments

SCRIPTS = experiments()
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
    assert all(option in helps[name] for option in ("--smoke", "--quick", "--seeds N", "--out DIR", "--cache DIR"))
    assert helps[name].count("\n") < 60
