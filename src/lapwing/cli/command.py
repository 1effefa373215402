"""What a command is: a name, words for `--help` with an example, its options, and what it does with them."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Command:
    """One command of the command line.

    Example:
        >>> COMMAND = Command("greet", "say hello", "Say hello.", "lapwing greet", lambda parser: None, print)
    """

    name: str
    summary: str
    description: str
    example: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]

    def add(self, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Join the commands of a parser."""
        sub = commands.add_parser(
            self.name,
            help=self.summary,
            description=textwrap.fill(self.description, 100),
            epilog=f"example: {self.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,  # an example on one line can be copied
        )
        self.options(sub)
        sub.set_defaults(run=self.run)
