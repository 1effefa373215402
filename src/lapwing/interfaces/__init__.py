"""The front door: fitting and loading, storage, data sets, the command line."""
