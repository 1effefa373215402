"""The command line: `lapwing …` or `python -m lapwing …`.

Exit codes: 0 fine, 1 the input is wrong (one clear line, no traceback), 2 usage.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from lapwing.errors import LapwingError
from lapwing.interfaces import demo


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
