"""The front door: fitting and loading, storage, data sets, the command line."""

__version__ = "0.1.0.dev0"
