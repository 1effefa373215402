"""The command line: one file per command; `lapwing.cli.main` lists them."""
