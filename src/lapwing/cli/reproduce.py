"""`lapwing reproduce`: run an experiment, which is part of the repository, not of the package."""

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

from lapwing.cli.command import Command
from lapwing.cli.repository import repository
from lapwing.errors import BadData


def experiments() -> dict[str, Path]:
    """The scripts of experiments/ by name."""
    return {path.stem: path for path in sorted((repository() / "experiments").glob("[!_]*.py"))}


def headline(path: Path) -> str:
    """The first line of a script's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="print the names, each with its question")
    parser.add_argument("name", nargs="?", metavar="NAME", help="an experiment, as --list prints it")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="passed on; `NAME --help` says what there is"
    )


def _run(options: argparse.Namespace) -> None:
    known = experiments()
    if options.list:
        width = max(map(len, known))
        print("\n".join(f"{name:{width}}  {headline(path)}" for name, path in known.items()))
        return
    if options.name not in known:
        came = "no name came" if options.name is None else f"there is no experiment {options.name!r}"
        raise BadData(f"{came}; there are {', '.join(known)} (--list says more)")
    root = str(known[options.name].parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{options.name}", *options.arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    if done.returncode:
        raise BadData(f"{options.name} stopped with exit code {done.returncode}; its own message is above")


COMMAND = Command(
    "reproduce",
    "run one of the repository's experiments",
    "Run experiments/NAME.py of the repository that this package, or the current folder, belongs to; what follows NAME "
    "is passed on. Most need the folder named by LAPWING_DATA.",
    "lapwing reproduce uci_regression --help",
    _options,
    _run,
)
