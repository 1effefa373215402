"""Lightning is imported first through the door, which keeps the warnings of its import to itself."""

import warnings

import lapwing.lightning  # noqa: F401

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytorch_lightning  # noqa: F401
