"""`python -m lapwing` is the command line."""

from lapwing.cli.main import run

run()
