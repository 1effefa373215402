"""`python -m lapwing` is the command line."""

from lapwing.interfaces.cli import run

run()
