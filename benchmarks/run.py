"""Measure single cells: `python -m benchmarks.run --workload resnet20 --operation fit-kron --repeats 3`.

`--ours-only` leaves the peers out; `--profile FILE` also writes where Lapwing's time goes. Several names may be given,
with commas.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cell import ROOT, Cell, Outcome, Place, once, run
from benchmarks.operations import operation
from benchmarks.results import Measurement
from benchmarks.workloads import WORKLOADS
from lapwing.errors import LapwingError


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    peers = None if options.ours_only else options.peers
    if peers is not None and not Path(peers).exists():
        print(f"{peers} is missing: `make bench` makes it, or pass --ours-only", file=sys.stderr)
        return 1
    place = Place(options.python, peers, limit=options.limit)
    for workload in options.workload.split(","):
        for name in options.operation.split(","):
            cell = cell_of(options, workload, name)
            WORKLOADS[workload](cell.n, cell.m)  # trains and caches, if need be, before anything is measured
            print(line(run(cell, place)), flush=True)
            if options.profile:
                with tempfile.TemporaryDirectory() as folder:
                    path = str(options.profile.resolve())
                    once(cell, "ours", place, result=Path(folder) / "result", more=("--profile", path))
    return 0


def cell_of(options: argparse.Namespace, workload: str, name: str) -> Cell:
    op = operation(name)
    peers = ("curvlinops",) if op.structure == "ekfac" else ("laplace-torch",)
    return Cell(
        workload, name, options.n, options.m, peers, options.peer_n,
        repeats=options.processes, inner=options.repeats, threads=options.threads,
    )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    top.add_argument("--workload", required=True, help=", ".join(WORKLOADS))
    top.add_argument("--operation", required=True, help="fit-kron, fit-diag-1e-3, predict-kron, sweep-diag, …")
    top.add_argument("--n", type=int, default=512, help="data to fit (%(default)s)")
    top.add_argument("--m", type=int, default=16, help="inputs to predict (%(default)s)")
    top.add_argument("--peer-n", type=int, help="data to fit for the peer (as ours)")
    top.add_argument("--repeats", type=int, default=3, help="timings in a process (%(default)s)")
    top.add_argument("--processes", type=int, default=1, help="processes of each side, taking turns (%(default)s)")
    top.add_argument("--threads", type=int, default=1, help="(%(default)s); CPU time with one, wall time with more")
    top.add_argument("--limit", type=float, default=300.0, help="CPU seconds a process may take (%(default)s)")
    top.add_argument("--python", default=sys.executable, help="interpreter for Lapwing")
    top.add_argument("--peers", default=str(ROOT / ".venv-peers/bin/python"), help="interpreter for the peers")
    top.add_argument("--ours-only", action="store_true")
    top.add_argument("--profile", type=Path, help="file for a profile of Lapwing's run")
    return top


def line(outcome: Outcome) -> str:
    """The cell in a few lines."""
    lines = [side(outcome.ours)]
    for k, peer in enumerate(outcome.peers):
        speed, apart = outcome.speed(k), outcome.differences[k]
        extra = "" if speed is None else f", {speed:.3g} × our epochs"
        extra += "" if apart is None else f", results differ by {apart:.1e}"
        lines.append(side(peer) + extra)
    return "\n".join(lines)


def side(m: Measurement) -> str:
    head = f"{m.workload:16} {m.operation:16} {m.by:14} n={m.n:<6}"
    if m.error:
        return f"{head} {m.error}"
    tail = f" {m.forwards:.3g} forwards," if operation(m.operation).of_new and m.forwards else ""
    return (
        f"{head} {m.epochs:8.4g} epochs,{tail} {m.seconds:.4g} s (gradient {m.gradient:.3g} s), "
        f"peak {(m.peak or 0) / 1e6:.0f} MB (gradient's {(m.gradient_peak or 0) / 1e6:.0f} MB)"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LapwingError, ValueError) as error:
        print(f"benchmarks: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
