"""Run the checks on the test device, each file of `inside/` in a process of its own.

A process of its own, because PyTorch counts devices once, at the first backward pass, and because no other test should
see one more device. By hand: `python -m pytest tests/devices/inside/check_structures.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices.elsewhere import NoDevice, library

INSIDE = Path(__file__).with_name("inside")
ROOT = INSIDE.parents[2]


def run(file: str, marks: str) -> None:
    """Run one file of checks; their output is the message of a failure."""
    try:
        library()
    except NoDevice as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marks]
    done = subprocess.run([*command, str(INSIDE / file)], cwd=ROOT, capture_output=True, text=True, check=False)
    nothing = pytest.ExitCode.NO_TESTS_COLLECTED  # a file whose checks are all long
    assert done.returncode in (0, nothing), done.stdout[-6000:] + done.stderr[-2000:]


FILES = sorted(path.name for path in INSIDE.glob("check_*.py"))
LONG = sorted(path.name for path in INSIDE.glob("check_*.py") if "mark.slow" in path.read_text())


@pytest.mark.parametrize("file", FILES)
def test_quick_checks_on_another_device(file: str) -> None:
    run(file, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("file", LONG)
def test_long_checks_on_another_device(file: str) -> None:
    run(file, "slow")
