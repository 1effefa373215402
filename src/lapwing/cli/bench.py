"""`lapwing bench`: time and memory beside the peers."""

import argparse
from pathlib import Path

from lapwing.cli import repository
from lapwing.cli.command import Command


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="small data, few cells: ten minutes on two cores")
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for the results (%(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="1 (default): CPU time, more: wall time")
    parser.add_argument("--workload", help="only these networks, with commas: lenet,resnet20")
    parser.add_argument("--operation", help="only operations that begin so: fit-kron")
    parser.add_argument("--ours-only", action="store_true", help="without the peers")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")


def _run(options: argparse.Namespace) -> None:
    names = ("quick", "threads", "workload", "operation", "ours_only", "resume")
    repository.run(options.out, **{name: getattr(options, name) for name in names})


COMMAND = Command(
    "bench",
    "measure time and memory beside laplace-torch and curvlinops",
    "Measure fits, predictions and evidence in gradient epochs beside the peers, and write a table, a JSON file and a "
    "picture of growth. Needs the repository and the folder named by LAPWING_DATA.",
    "lapwing bench --quick --out bench-output",
    _options,
    _run,
)
