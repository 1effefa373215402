"""The commands of `lapwing`, one per file; `lapwing.cli.main` lists them."""
