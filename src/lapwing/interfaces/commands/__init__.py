"""The commands of `lapwing`, one a file; `lapwing.interfaces.cli` lists them."""
