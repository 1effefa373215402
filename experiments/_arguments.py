"""The command line that all experiments share: help from the docstring, three sizes, seeds, and where results go."""

from __future__ import annotations

import argparse
import atexit
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Experiment(argparse.ArgumentParser):
    """The options of an experiment. With `--smoke`, those of `smoke` have other defaults: ten seconds at most.

    parser = Experiment(__doc__, smoke={"size": 100, "epochs": 1}, quick={"size": 500})
    parser.add_argument("--size", type=int, default=1000)
    given = parser.parse_args()

    A script also has a dict `ABOUT = {"paper": "001, Fig. 2", "minutes": 12, "quick": 1.5}`, which `lapwing reproduce
    --list` and the gallery of docs/results read (`About` in lapwing/cli/repository.py says what may be in it).

    A smoke run keeps nothing: its `--cache` is a folder that goes when it ends. `--quick` takes at most two minutes on
    two cores; `quick` has its defaults. Every experiment also takes `--seeds N` and `--out DIR`, where `_results.py`
    writes its page, figure and data. What was parsed has a `command`, which runs the same again.
    """

    def __init__(self, description: str | None, smoke: dict[str, Any], quick: dict[str, Any], seeds: int = 1) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.smoke, self.quick = smoke, quick
        self.add_argument("--smoke", action="store_true", help="tiny data and few steps, to see that it runs")
        self.add_argument("--quick", action="store_true", help="smaller, at most two minutes on two cores")
        self.add_argument("--seeds", type=int, default=seeds, metavar="N", help="repeat with N seeds")
        self.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of the seeds")
        self.add_argument("--out", type=Path, metavar="DIR", help="write page, figure and data to this folder")
        self.add_argument("--cache", type=Path, metavar="DIR", help="keep parts here, so that a run can go on")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        words = sys.argv[1:] if args is None else list(args)
        for word, defaults in {"--smoke": {"seeds": 1, **self.smoke}, "--quick": {"seeds": 1, **self.quick}}.items():
            if word in words:
                unknown = defaults.keys() - {action.dest for action in self._actions}
                assert not unknown, f"{word} speaks of {sorted(unknown)}, which are no options"
                self.set_defaults(**defaults)
        given = super().parse_args(words, namespace)
        given.command = self._command(given)
        if given.smoke:
            given.cache = Path(tempfile.mkdtemp(prefix="lapwing-smoke-"))
            atexit.register(shutil.rmtree, given.cache, ignore_errors=True)
        return given

    def _command(self, given: argparse.Namespace) -> str:
        """Return the command line that gives the same result, with every option that has a value."""
        words = ["python", "-m", f"experiments.{Path(self.prog).stem}"]
        for action in self._actions:
            value = getattr(given, action.dest, None)
            hidden = action.dest in ("help", "smoke", "quick", "out", "cache") or (action.dest == "first" and not value)
            if hidden or value is None or value is False or value == "":
                continue
            values = [str(each) for each in (value if isinstance(value, list | tuple) else [value])]
            words += action.option_strings[:1] + ([] if value is True else values)
        return shlex.join(words)
