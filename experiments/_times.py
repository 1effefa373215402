"""How long the experiments take, one after the other: wall time, CPU time, and whether that is within the limits.

    python -m experiments._times --size smoke                       # every script, at most 10 s each
    python -m experiments._times --size quick toy_cubic --write     # into its ABOUT, in minutes
    python -m experiments._times --size full lowrank kfra -- --out docs/results --cache CACHE

One thread, so that the CPU time is what the run would take on an idle core, which the limits are for; on a machine that
others use, the wall time is longer. `--write` puts the CPU time, in minutes, into `ABOUT["quick"]` (quick) or
`ABOUT["minutes"]` (full) of each script that finished. Arguments after `--` go to the scripts. A folder of `--cache`
that holds parts of an earlier run makes the time too short.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lapwing.cli.repository import experiments, repository

LIMITS = {"smoke": 10.0, "quick": 120.0, "full": 3600.0}  # seconds
PATIENCE = 3.0  # limits after which a run is stopped
FIELDS = {"quick": "quick", "full": "minutes"}  # of ABOUT


@dataclass(frozen=True)
class Timing:
    """Seconds of one run by the clock and of the CPU, its peak memory in MB, and its exit code."""

    wall: float
    cpu: float
    peak: float
    code: int


def timed(name: str, size: str, arguments: list[str], log: Path | None) -> Timing:
    """Run one script in a process of its own, with one thread; its output goes to `log`, a folder, or nowhere.

    It is stopped where it takes several times what it may.
    """
    command = [sys.executable, "-m", f"experiments.{name}", *([] if size == "full" else [f"--{size}"]), *arguments]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if log is not None:
        log.mkdir(parents=True, exist_ok=True)
    with open(os.devnull if log is None else log / f"{name}-{size}.log", "w", encoding="utf-8") as file:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=repository(), env={**os.environ, **threads}, stdout=file, stderr=subprocess.STDOUT
        )
        end = threading.Timer(PATIENCE * LIMITS[size], process.kill)
        end.start()
        _, status, used = os.wait4(process.pid, 0)
        end.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - begin
    return Timing(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, process.returncode)


def write(path: Path, field: str, seconds: float) -> None:
    """Put a time, in minutes with two digits, into the dict `ABOUT` of a script."""
    text = path.read_text(encoding="utf-8")
    path.write_text(with_time(text, field, float(f"{max(seconds / 60, 0.1):.2g}")), encoding="utf-8")


def with_time(source: str, field: str, minutes: float) -> str:
    """Return the source of a script whose `ABOUT` has these minutes; `quick` is added after `minutes` if need be."""
    about = next(
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ABOUT"
    )
    assert isinstance(about, ast.Dict)
    values = {key.value: value for key, value in zip(about.keys, about.values) if isinstance(key, ast.Constant)}
    lines = source.splitlines(keepends=True)
    node = values.get(field, values["minutes"])
    line = lines[node.lineno - 1].encode()  # columns of ast count bytes
    head, tail = line[: node.col_offset], line[node.end_col_offset :]
    told = f"{minutes:g}" if field in values else f'{ast.unparse(node)}, "{field}": {minutes:g}'
    lines[node.lineno - 1] = (head + told.encode() + tail).decode()
    return "".join(lines)


def main(given: argparse.Namespace, arguments: list[str]) -> int:
    known, late = experiments(), []
    for name in given.names or known:
        found = timed(name, given.size, arguments, given.log)
        inside = found.code == 0 and found.cpu <= LIMITS[given.size]
        late += [] if inside else [name]
        told = "within the limit" if inside else f"exit code {found.code}" if found.code else "TOO LONG"
        print(
            f"{name:22s} {given.size:5s} {found.wall:7.1f} s {found.cpu:7.1f} s CPU {found.peak:6.0f} MB  {told}",
            flush=True,
        )
        if given.write and not found.code and given.size in FIELDS:
            write(known[name], FIELDS[given.size], found.cpu)
    print(f"limit {LIMITS[given.size]:g} s; not within it: {', '.join(late) or 'none'}")
    return len(late)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts; all without")
    parser.add_argument("--size", choices=tuple(LIMITS), default="smoke")
    parser.add_argument("--write", action="store_true", help="into ABOUT of each script")
    parser.add_argument("--log", type=Path, metavar="DIR", help="keep what the scripts print here")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    sys.exit(bool(main(parser.parse_args(words[:cut]), words[cut + 1 :])))
