"""laplace-torch's own test suite against `lapwing.compat.laplace_torch.install()`.

The suite is not part of this repository. Fetch aleximmer/Laplace, and set LAPLACE_TORCH_TESTS to its folder `tests`.
docs/coming-from-laplace-torch.md lists what does not pass, and why.
"""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.compat.suite_scope import IN_SCOPE, KNOWN, OUT_OF_SCOPE

PATH = os.environ.get("LAPLACE_TORCH_TESTS")
HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PATH, reason="LAPLACE_TORCH_TESTS does not name the folder of laplace-torch's tests"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """{test: "passed", "failed" or "skipped"} of all files in scope."""
    assert PATH is not None
    folder, report = Path(PATH).resolve(), tmp_path_factory.mktemp("suite") / "report.xml"
    source = HERE.parent.parent / "src"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (source, HERE, folder.parent)))}
    options = ["-q", "-p", "suite_plugin", "-c", os.devnull, "--rootdir", str(folder.parent), "-W", "ignore"]
    options += ["-n", "2"] if importlib.util.find_spec("xdist") else []
    files = [str(folder / name) for name in IN_SCOPE]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *files]
    subprocess.run(command, cwd=report.parent, env=environment, capture_output=True, check=False)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        state = {child.tag for child in case} & {"failure", "error", "skipped"}
        file = str(case.get("classname")).rpartition(".")[2]
        found[f"{file}.py::{case.get('name')}"] = (
            "failed" if state & {"failure", "error"} else "skipped" if state else "passed"
        )
    return found


def test_every_file_is_in_scope_or_not() -> None:
    assert PATH is not None
    assert {path.name for path in Path(PATH).glob("test_*.py")} <= IN_SCOPE.keys() | OUT_OF_SCOPE.keys()


def test_nine_in_ten_pass(results: dict[str, str]) -> None:
    run = [state for state in results.values() if state != "skipped"]
    passed = run.count("passed")
    print(f"{passed} of {len(run)} tests in scope pass, {len(results) - len(run)} are skipped")
    assert len(run) > 700
    assert passed >= 0.9 * len(run)


def test_the_others_are_known(results: dict[str, str]) -> None:
    failed = {name for name, state in results.items() if state == "failed"}
    unknown = [name for name in failed if not any(name.startswith(start) for start in KNOWN)]
    assert not unknown, unknown
