"""The quick benchmark at two revisions, in turns: `python -m benchmarks.revisions 0e08667`.

Every cell runs in a process of its own, at the revision and in this folder alternately, after one another. Prints, per
cell, the CPU time in gradient epochs of the same process and the peak memory above model and data, and the ratio of
this folder to the revision (below one is better). A cell that the revision does not know is left out by name. The
revision is checked out into a temporary folder; it has to have `benchmarks.measure`, as every revision since dfbcff5.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tqdm.auto import tqdm

from benchmarks.cell import ROOT, Cell, environment
from benchmarks.plan import quick
from benchmarks.results import Measurement, parse

SMALL = 4e6  # bytes; peaks below it are noise of the allocator, and only compared with it


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    cells = [cell for cell in dict.fromkeys(quick()) if cell.operation.startswith(options.operation)]
    cells = [cell for cell in cells if not options.workload or cell.workload in options.workload.split(",")]
    ratios: dict[str, list[float]] = {"time": [], "memory": []}
    print(f"{'cell':40} {'epochs before':>14} {'now':>8} {'ratio':>6} {'MB before':>10} {'now':>8} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        git("worktree", "add", "--detach", str(before), options.revision)
        try:
            for cell in tqdm(cells, desc="cells", unit="cell"):
                told, found = compared(cell, before, options.repeats)
                tqdm.write(told, file=sys.stdout)
                for name, value in found.items():
                    ratios[name].append(value)
        finally:
            git("worktree", "remove", "--force", str(before))
    for name, values in ratios.items():
        if values:
            print(f"{name}: median ratio {median(values):.2f}, from {min(values):.2f} to {max(values):.2f}")
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.revisions", description=__doc__)
    top.add_argument("revision", help="the commit to compare this folder with")
    top.add_argument("--repeats", type=int, default=3, help="processes of each, in turns (%(default)s)")
    top.add_argument("--workload", help="only these, with commas")
    top.add_argument("--operation", default="", help="only operations that begin so")
    return top


def git(*words: str) -> None:
    subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True)


def compared(cell: Cell, before: Path, repeats: int) -> tuple[str, dict[str, float]]:
    """One line of the table, and the two ratios where both sides were measured."""
    runs: dict[Path, list[Measurement]] = {before: [], ROOT: []}
    for turn in range(repeats):
        for place in (before, ROOT) if turn % 2 == 0 else (ROOT, before):
            done = once(cell, place)
            if done.epochs is None:
                return f"{cell.workload + ' ' + cell.operation:40} left out: {done.error} ({place.name})", {}
            runs[place].append(done)
    old, new = (median(run.epochs or 0.0 for run in runs[place]) for place in (before, ROOT))
    less, more = (median(run.peak or 0 for run in runs[place]) for place in (before, ROOT))
    found = {"time": new / old, "memory": max(more, SMALL) / max(less, SMALL)}
    line = f"{cell.workload + ' ' + cell.operation:40} {old:14.2f} {new:8.2f} {found['time']:6.2f}"
    return f"{line} {less / 1e6:10.1f} {more / 1e6:8.1f} {found['memory']:6.2f}", found


def once(cell: Cell, place: Path) -> Measurement:
    """Measure a cell in a process that imports package and benchmarks of `place`."""
    command = [
        sys.executable, "-m", "benchmarks.measure", cell.workload, cell.operation,
        "--n", str(cell.n), "--m", str(cell.m), "--repeats", str(cell.inner), "--threads", str(cell.threads),
    ]  # fmt: skip
    path = {"PYTHONPATH": f"{place / 'src'}:{place}"}
    done = subprocess.run(command, cwd=place, env=environment(1) | path, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return Measurement("ours", cell.workload, cell.operation, cell.n, 1, error=last[:200])
    return parse(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
