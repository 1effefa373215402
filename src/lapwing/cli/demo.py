"""`lapwing demo`: see what the library does, on real data."""

import argparse
from pathlib import Path

from lapwing.cli import scenarios
from lapwing.cli.command import Command


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        choices=sorted(scenarios.SCENARIOS),
        default="digits",
        help="digits: scikit-learn's 8×8 digits, 8 and 9 kept out (default); mnist, fashion: from LAPWING_DATA",
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the report (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the training and every draw (%(default)s)")


def _run(options: argparse.Namespace) -> None:
    scenarios.run(options.data, options.out, seed=options.seed)


COMMAND = Command(
    "demo",
    "train a small network, fit a posterior, print a table, write an HTML report",
    "Train a small network on real data, fit and tune a posterior, compare it with the network alone and with "
    "temperature scaling, and write an HTML report.",
    "lapwing demo --data digits --out demo-output",
    _options,
    _run,
)
