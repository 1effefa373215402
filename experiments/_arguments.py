"""The command line that all experiments share: help from the docstring, and `--smoke`."""

from __future__ import annotations

import argparse
import atexit
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Experiment(argparse.ArgumentParser):
    """The options of an experiment. With `--smoke`, those of `smoke` have other defaults: a few seconds in all.

    parser = Experiment(__doc__, smoke={"size": 100, "epochs": 1})
    parser.add_argument("--size", type=int, default=1000)
    given = parser.parse_args()

    A smoke run keeps nothing: its `--cache`, where there is one, is a folder that goes when it ends.
    """

    def __init__(self, description: str | None, smoke: dict[str, Any]) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.smoke = smoke
        self.add_argument("--smoke", action="store_true", help="tiny data and few steps, to see that it runs")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        words = sys.argv[1:] if args is None else list(args)
        if "--smoke" in words:
            unknown = self.smoke.keys() - {action.dest for action in self._actions}
            assert not unknown, f"smoke speaks of {sorted(unknown)}, which are no options"
            self.set_defaults(**self.smoke)
        given = super().parse_args(words, namespace)
        if given.smoke and "cache" in given:
            given.cache = Path(tempfile.mkdtemp(prefix="lapwing-smoke-"))
            atexit.register(shutil.rmtree, given.cache, ignore_errors=True)
        return given
