"""The command line: `lapwing …` or `python -m lapwing …`.

Exit codes: 0 fine, 1 the input is wrong (one clear line, no traceback), 2 usage.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from lapwing.errors import LapwingError
from lapwing.interfaces import bench, demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A usage error leaves through SystemExit(2), as argparse does."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except (LapwingError, ImportError, OSError) as error:
        print(f"lapwing: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lapwing: interrupted", file=sys.stderr)
        return 130
    return 0


def run() -> None:
    """The entry point of the `lapwing` script."""
    sys.exit(main())


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="lapwing",
        description="A posterior over the weights of any trained PyTorch network, by the Laplace approximation.",
    )
    top.add_argument("--version", action="version", version=f"lapwing {version('lapwing')}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_bench(commands)
    return top


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    sub = commands.add_parser(
        "demo",
        help="train a small network, fit a posterior, print a table, write an HTML report",
        description="Train a small network on real data, fit and tune a posterior, compare it with the network alone "
        "and with temperature scaling, and write an HTML report.",
        epilog="example: lapwing demo --data digits --out demo-output",
    )
    sub.add_argument(
        "--data",
        choices=sorted(demo.SCENARIOS),
        default="digits",
        help="digits: scikit-learn's 8×8 digits, 8 and 9 kept out (default); mnist, fashion: from LAPWING_DATA",
    )
    sub.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the report (%(default)s)")
    sub.add_argument("--seed", type=int, default=0, help="of the split, the training and every draw (%(default)s)")
    sub.set_defaults(run=lambda options: demo.run(options.data, options.out, seed=options.seed))


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    sub = commands.add_parser(
        "bench",
        help="measure time and memory beside laplace-torch and curvlinops",
        description="Measure fits, predictions and evidence in gradient epochs beside the peers, and write a table, a "
        "JSON file and a picture of growth. Needs the repository and the folder named by LAPWING_DATA.",
        epilog="example: lapwing bench --quick --out bench-output",
    )
    sub.add_argument("--quick", action="store_true", help="small data, few cells: ten minutes on two cores")
    sub.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for the results (%(default)s)")
    sub.add_argument("--threads", type=int, nargs="+", default=[1], help="1 (default): CPU time, more: wall time")
    sub.add_argument("--workload", help="only these networks, with commas: lenet,resnet20")
    sub.add_argument("--operation", help="only operations that begin so: fit-kron")
    sub.add_argument("--ours-only", action="store_true", help="without the peers")
    sub.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    sub.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> None:
    names = ("quick", "threads", "workload", "operation", "ours_only", "resume")
    bench.run(options.out, **{name: getattr(options, name) for name in names})
