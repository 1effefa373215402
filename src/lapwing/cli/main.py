"""The command line: `lapwing …` or `python -m lapwing …`.

Exit codes: 0 success, 1 wrong input (one clear line, no traceback), 2 wrong usage. Results go to standard output;
progress, warnings and errors go to standard error. With --json, standard output holds one JSON object and nothing else.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from lapwing import __version__
from lapwing.cli import demo, doctor, fit, predict, repository
from lapwing.cli.command import plain
from lapwing.errors import LapwingError

COMMANDS = (
    doctor.COMMAND,
    fit.FIT,
    fit.TUNE,
    predict.PREDICT,
    predict.REPORT,
    demo.COMMAND,
    repository.REPRODUCE,
    repository.BENCH,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A usage error leaves through SystemExit(2), as argparse does."""
    options = parser().parse_args(arguments)
    try:
        with warnings_in_a_line(), redirect_stdout(sys.stderr) if options.json else nullcontext():
            answer = options.run(options)
        if options.json:
            print(json.dumps(plain(answer), ensure_ascii=False, allow_nan=False))
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (LapwingError, ImportError, OSError) as error:
        print(f"lapwing: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except Exception as error:  # the user's own code, or a defect of ours
        if os.environ.get("LAPWING_DEBUG"):
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"lapwing: {words} (LAPWING_DEBUG=1 shows where)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lapwing: interrupted", file=sys.stderr)
        return 130
    return 0


def run() -> None:
    """Run the command line and exit: the entry point of the `lapwing` script."""
    sys.exit(main())


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    top = argparse.ArgumentParser(
        prog="lapwing",
        description="Give a trained PyTorch network a posterior over its weights, by the Laplace approximation.",
        epilog="For a network of your own, run doctor, fit, tune, predict and report, in this order.",
    )
    top.add_argument("--version", action="version", version=f"lapwing {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return top


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Print each warning on one line, without its position in the code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"lapwing: warning: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
