"""The whole benchmark: `python -m benchmarks [--quick] [--out DIR]`, also `lapwing bench` and `make bench`."""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from tqdm.auto import tqdm

import lapwing
from benchmarks import environment, picture, plan, report
from benchmarks.cell import Cell, Outcome, Place, run
from benchmarks.imports import import_times
from benchmarks.workloads import WORKLOADS
from lapwing.errors import LapwingError


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    began, load = time.time(), os.getloadavg()[0]
    peers = None if options.ours_only else options.peers or environment.peers()
    place = Place(options.python, peers, limit=options.limit or (60.0 if options.quick else 600.0))
    processes = options.processes or (1 if options.quick else 2)
    cells = [replace(cell, threads=t, repeats=processes) for t in options.threads for cell in chosen(options)]
    points = [] if options.no_growth or options.workload else list(plan.growth(options.quick))
    kept = Kept(options.out / "cells.jsonl", options.resume or options.known)
    if options.known:
        cells = [cell for cell in cells if cell in kept.known]
        points = [point for point in points if point[-1] in kept.known]
    prepare([*cells, *(cell for _, _, cell in points)])
    jobs = options.jobs or (min(2, os.cpu_count() or 1) if options.quick and set(options.threads) == {1} else 1)
    measured = [*progress(cells, kept, place, "cells", jobs)]
    outcomes = progress([cell for _, _, cell in points], kept, place, "growth", jobs)
    grown = [(axis, size, outcome) for (axis, size, _), outcome in zip(points, outcomes, strict=True)]
    record = {
        "place": conditions(began, load, peers),
        "imports": imports(options.python, peers),
        "cells": [report.stored(outcome) for outcome in measured],
        "growth": [{"axis": a, "size": s, "outcome": report.stored(outcome)} for a, s, outcome in grown],
    }
    write(record, options.out)
    return 0


def write(record: dict[str, Any], out: Path) -> None:
    """Table, JSON and picture."""
    (out / "bench.json").write_text(json.dumps(record, indent=1))
    text = report.document(record)
    (out / "bench.md").write_text(text)
    grown = report.growth_of(record)
    if grown:
        picture.draw(grown, out / "growth.png", "Growth of time and memory, one thread")
    print(text)
    print(f"Written: {out}/bench.md, bench.json" + (", growth.png" if grown else ""))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    top.add_argument("--quick", action="store_true", help="small data and few cells: ten minutes on two cores")
    top.add_argument("--out", type=Path, default=Path("bench-output"), help="folder (%(default)s)")
    top.add_argument("--threads", type=int, nargs="+", default=[1], help="1: CPU time, more: wall time (%(default)s)")
    top.add_argument(
        "--jobs", type=int, help="cells at a time (quick with one thread: 2 where there are 2 cores; else 1)"
    )
    top.add_argument("--processes", type=int, help="of each side, taking turns (1 quick, 2 otherwise)")
    top.add_argument("--workload", help="only these, with commas")
    top.add_argument("--operation", help="only operations that begin so")
    top.add_argument("--no-growth", action="store_true")
    top.add_argument("--ours-only", action="store_true", help="without the peers")
    top.add_argument("--resume", action="store_true", help="keep cells that OUT/cells.jsonl already has")
    top.add_argument("--known", action="store_true", help="measure nothing: report the cells that an earlier run left")
    top.add_argument("--limit", type=float, help="CPU seconds a process may take (60 quick, 600 otherwise)")
    top.add_argument("--python", default=sys.executable, help="interpreter for Lapwing")
    top.add_argument("--peers", help="interpreter that has the peers (default: .venv-peers, made if need be)")
    return top


def chosen(options: argparse.Namespace) -> list[Cell]:
    """The cells of the plan that were asked for."""
    cells = (replace(cell, inner=2) for cell in plan.quick()) if options.quick else plan.whole()
    names = set(options.workload.split(",")) if options.workload else None
    if names and not names <= set(WORKLOADS):
        raise SystemExit(f"there is no workload {', '.join(sorted(names - set(WORKLOADS)))}: {', '.join(WORKLOADS)}")
    begin = options.operation or ""
    return [c for c in cells if (names is None or c.workload in names) and c.operation.startswith(begin)]


def prepare(cells: Iterable[Cell]) -> None:
    """Train and cache what is needed before anything is measured."""
    for name in dict.fromkeys(cell.workload for cell in cells):
        WORKLOADS[name](1, 1)


class Kept:
    """Cells measured so far, one a line of a file, so that an interrupted run goes on where it stopped."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path, self.lock = path, Lock()
        if not resume:
            path.unlink(missing_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = {outcome.cell: outcome for outcome in map(report.restored, map(json.loads, lines))}

    def get(self, cell: Cell, place: Place) -> Outcome:
        if cell not in self.known:
            outcome = run(cell, place)
            with self.lock, self.path.open("a") as lines:
                self.known[cell] = outcome
                lines.write(json.dumps(report.stored(outcome)) + "\n")
        return self.known[cell]


def progress(cells: Sequence[Cell], kept: Kept, place: Place, label: str, jobs: int) -> Iterable[Outcome]:
    """The outcomes of the cells in their order, measured so many at a time."""
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(cells), desc=label, unit="cell", leave=False) as bar:

        def measure(cell: Cell) -> Outcome:
            bar.set_postfix_str(f"{cell.workload} {cell.operation}", refresh=True)
            outcome = kept.get(cell, place)
            bar.update()
            return outcome

        yield from pool.map(measure, cells)


def imports(python: str, peers: str | None) -> dict[str, float]:
    pythons = {"torch": python, "lapwing": python}
    return import_times(pythons | ({"laplace": peers} if peers else {}))


def conditions(began: float, load: float, peers: str | None) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    names = ["laplace-torch", "curvlinops-for-pytorch"]
    versions = environment.installed(Path(peers), names) if peers else []
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, cwd=Path(lapwing.__file__).parent, capture_output=True, text=True)
    return {
        "date": time.strftime("%Y-%m-%d", time.localtime(began)),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": [load, os.getloadavg()[0]],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "laplace-torch": versions[0] if versions else "absent",
        "curvlinops": versions[1] if versions else "absent",
        "commit": commit.stdout.strip() or "no repository",
        "command": command(sys.argv[1:]),
        "minutes": (time.time() - began) / 60,
        "cpu_minutes": sum(os.times()[:4]) / 60,
    }


def command(arguments: Sequence[str]) -> str:
    """How to do it again, without the paths of this machine."""
    paths = {k for k, word in enumerate(arguments) if word in ("--out", "--python", "--peers")}
    kept = [word for k, word in enumerate(arguments) if k not in paths and k - 1 not in paths]
    return shlex.join(["python", "-m", "benchmarks", *kept])


def processor() -> str:
    """The processor's name where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LapwingError as error:
        print(f"benchmarks: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
