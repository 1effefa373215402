"""Run the tests that try to break things, and print by category how many were tried and survived.

python -m tests.reliability               # all: some ten minutes on two cores
python -m tests.reliability files kills   # some categories
python -m tests.reliability --list        # the files of each category; runs nothing

A category holds the folder of its name (tests/threads, tests/devices, …) and the files below, by patterns: a new test
file counts as soon as it lies or is named accordingly.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
CATEGORIES: dict[str, tuple[str, ...]] = {
    "architectures": ("zoo/test_*.py", "fuzz/test_*.py", "model/test_*.py", "**/test_huggingface.py"),
    "bad inputs": (
        "**/test_*input*.py", "**/test_*target*.py", "**/test_*label*.py", "**/test_misread*.py",
        "**/test_*cannot_be_used.py", "**/test_memory_limits.py", "**/test_module_*.py", "**/test_numeric_precision.py",
        "**/test_torch_modes.py", "**/test_changes.py", "**/test_arrays.py", "peers/test_silent_errors.py",
    ),
    "files": ("**/test_*file*.py", "**/test_storage*.py", "**/test_trees.py", "**/test_writing.py"),
    "kills": ("**/test_kill*.py", "**/test_resume*.py"),
    "threads": ("**/test_*thread*.py",),
    "processes": ("**/test_process*.py", "**/test_shard*.py"),
    "devices": ("**/test_*device*.py",),
}  # fmt: skip


def files_of(category: str) -> list[Path]:
    """The test files of a category, which no earlier one has taken but in the order of the last patterns."""
    patterns = (*CATEGORIES[category], f"{category.replace(' ', '_')}/**/test_*.py")
    return sorted({path for pattern in patterns for path in TESTS.glob(pattern)})


def owners() -> dict[Path, str]:
    """The category of every file; where several patterns fit, the last category has it."""
    return {path: category for category in CATEGORIES for path in files_of(category)}


def run(files: list[Path], report: Path) -> None:
    """Run the tests of the files in two processes, and write what became of them."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", f"--junitxml={report}"]
    subprocess.run([*command, *map(str, files)], cwd=TESTS.parent)


def counted(report: Path, owner: dict[str, str]) -> dict[str, Counter[str]]:
    """By category, how many tests passed, failed and were skipped."""
    found: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = case.get("classname", "")
        module = next((module for module in owner if name == module or name.startswith(f"{module}.")), None)
        if module is not None:
            found.setdefault(owner[module], Counter())[outcome] += 1
    return found


def table(found: dict[str, Counter[str]]) -> str:
    """A Markdown table; skipped tests were not tried."""
    lines = ["| category | tried | survived | skipped |", "|---|---:|---:|---:|"]
    for category in (c for c in CATEGORIES if c in found):
        count = found[category]
        tried = count["passed"] + count["failed"]
        lines.append(f"| {category} | {tried:,} | {count['passed']:,} | {count['skipped']:,} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("categories", nargs="*", metavar="CATEGORY", help=f"of {', '.join(CATEGORIES)} (default: all)")
    parser.add_argument("--list", action="store_true", help="print the files of each category and run nothing")
    given = parser.parse_args()
    wanted = given.categories or list(CATEGORIES)
    if unknown := set(wanted) - set(CATEGORIES):
        parser.error(f"there is no category {', '.join(sorted(unknown))}; there are {', '.join(CATEGORIES)}")
    chosen = {path: category for path, category in owners().items() if category in wanted}
    if given.list:
        for category in wanted:
            names = [str(path.relative_to(TESTS)) for path, own in chosen.items() if own == category]
            print(f"{category}: {', '.join(names)}")
        return 0
    modules = {".".join(path.relative_to(TESTS.parent).with_suffix("").parts): c for path, c in chosen.items()}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        run(list(chosen), report)
        found = counted(report, modules)
    print(table(found))
    return int(any(count["failed"] for count in found.values()))


if __name__ == "__main__":
    sys.exit(main())
