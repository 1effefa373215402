"""One cell: an operation on a workload by Lapwing and by its peers, in processes of their own that take turns."""

import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.laplace_torch import bytes_asked
from benchmarks.operations import Operation, operation
from benchmarks.results import Measurement, merged, parse, ratio
from benchmarks.workloads import BATCH, SHAPES
from lapwing.errors import BadData

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Cell:
    """What to measure. `n` data to fit, `m` inputs to predict; `peer_n` where a peer must do with fewer data.

    `peers` may be empty. `repeats` are processes of each, `inner` timings in a process.
    """

    workload: str
    operation: str
    n: int
    m: int = 16
    peers: tuple[str, ...] = ("laplace-torch",)
    peer_n: int | None = None
    repeats: int = 1
    inner: int = 3
    threads: int = 1

    @property
    def op(self) -> Operation:
        return operation(self.operation)

    def size(self, by: str) -> tuple[int, int]:
        """(n, m) for one implementation."""
        return (self.n, self.m) if by == "ours" else (self.peer_n or self.n, self.m)


@dataclass(frozen=True)
class Place:
    """Where processes run: the two interpreters, the bytes a peer may ask for, the CPU seconds a process may take."""

    ours: str = sys.executable
    peers: str | None = None
    memory: int = 8 * 10**9
    limit: float = 600.0


@dataclass(frozen=True)
class Outcome:
    """A measured cell: ours, and each peer's with the largest relative difference of the results."""

    cell: Cell
    ours: Measurement
    peers: tuple[Measurement, ...] = ()
    differences: tuple[float | None, ...] = ()

    def speed(self, k: int) -> float | None:
        """How many times as many gradient epochs peer k takes."""
        return ratio(self.peers[k].epochs, self.ours.epochs)

    def thrift(self, k: int) -> float | None:
        """How many times as much memory peer k takes."""
        return ratio(self.peers[k].peak, self.ours.peak)


def run(cell: Cell, place: Place) -> Outcome:
    """Measure a cell: ours, peer, ours, peer, …; then compare results on the peer's sizes."""
    sides = ["ours", *(cell.peers if place.peers else ())]
    runs: dict[str, list[Measurement]] = {by: [] for by in sides}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(cell.repeats):
            for by in sides:
                if not (runs[by] and runs[by][-1].error):
                    runs[by].append(once(cell, by, place, result=Path(folder) / f"{by}.safetensors"))
        if any(cell.size(by) != cell.size("ours") and not runs[by][-1].error for by in sides[1:]):
            smaller = replace(cell, n=cell.size(sides[1])[0], inner=1)
            once(smaller, "ours", place, result=Path(folder) / "ours.safetensors")
        results = {by: read(Path(folder) / f"{by}.safetensors") for by in sides}
    differences = tuple(difference(results["ours"], results[by]) for by in sides[1:])
    return Outcome(cell, merged(runs["ours"]), tuple(merged(runs[by]) for by in sides[1:]), differences)


def once(cell: Cell, by: str, place: Place, *, result: Path, more: Sequence[str] = ()) -> Measurement:
    """One process, or the bytes it would ask for."""
    n, m = cell.size(by)
    asked: dict[str, Any] = {
        "by": by, "workload": cell.workload, "operation": cell.operation, "threads": cell.threads,
        "n": m if cell.op.of_new else n,
    }  # fmt: skip
    if by == "laplace-torch":
        needed = needs(cell)
        if needed > place.memory:
            return Measurement(**asked, bytes_asked=needed, error=f"would ask for {needed / 1e9:,.1f} GB; not run")
    python = place.ours if by == "ours" else place.peers
    command = [
        str(python), "-m", "benchmarks.measure", cell.workload, cell.operation, "--by", by, "--n", str(n),
        "--m", str(m), "--repeats", str(cell.inner), "--threads", str(cell.threads), "--result", str(result), *more,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment(cell.threads), capture_output=True, text=True,
        preexec_fn=lambda: limit_time(place.limit),
    )  # fmt: skip
    if done.returncode == -signal.SIGXCPU:
        return Measurement(**asked, error=f"stopped after {place.limit:.0f} s")
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        if by == "ours":
            raise BadData(f"measuring {cell.workload} {cell.operation} failed: {last}")
        return Measurement(**asked, error=last[:300])
    return parse(done.stdout)


def limit_time(seconds: float) -> None:
    """Let this process have so many seconds of CPU time; a busy machine does not count against it."""
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 5))


def needs(cell: Cell) -> int:
    """Bytes that laplace-torch would ask for."""
    shape = SHAPES[cell.workload]
    n, m = cell.size("laplace-torch")
    rows = min(n, BATCH) * shape.rows
    return bytes_asked(cell.op, shape, batch=rows, new=m * shape.rows, last_layer=shape.last_layer)


def environment(threads: int) -> dict[str, str]:
    """The caller's, with so many threads, and with this folder and the caller's lapwing first."""
    count = str(threads)
    return os.environ | {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "PYTHONWARNINGS": "ignore"}


def read(path: Path) -> Tensor | None:
    return load_file(path)["result"] if path.exists() else None


def difference(ours: Tensor | None, theirs: Tensor | None) -> float | None:
    """max |ours − theirs| / max |theirs|, where both are there and of one shape."""
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    scale = theirs.double().abs().max()
    return float((ours.double() - theirs.double()).abs().max() / scale.clamp(min=torch.finfo(torch.float64).tiny))
