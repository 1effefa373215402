"""Every error that Lapwing raises on purpose. A message says what came, what is allowed and what to do."""

import math
from numbers import Real
from typing import Any


class LapwingError(Exception):
    """Base of all errors raised by Lapwing."""


class UnsupportedModel(LapwingError):
    """The network cannot be given a posterior as it stands (for example: samples mix inside a batch)."""


class UnsupportedOperation(LapwingError):
    """The chosen structure, factor or method does not offer this operation."""


class BadData(LapwingError, ValueError):
    """Inputs or targets are empty, not finite, or do not fit the likelihood."""


def require_whole(name: str, value: object, least: int = 1) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadData(f"{name} must be a whole number of at least {least}, got {value!r}")


def positive(name: str, value: Any) -> float:
    """A finite number above 0 (a number, or a tensor or array that holds one) as a float; refuse anything else."""
    number = isinstance(value, Real) or getattr(value, "shape", None) == ()
    if isinstance(value, bool) or not number or not 0 < float(value) < math.inf:
        raise BadData(f"{name} must be positive and finite, got {value!r}")
    return float(value)


class NotPositiveDefinite(LapwingError, ArithmeticError):
    """A precision has an eigenvalue that is not above zero."""


class IncompatiblePrior(LapwingError, ValueError):
    """The prior cannot be added to this structure without leaving it."""


class NotReiterable(LapwingError, TypeError):
    """Several passes over the data are needed and the data can be read only once."""


class TooLarge(LapwingError, MemoryError):
    """The result would not fit into the memory budget."""


class CorruptFile(LapwingError, OSError):
    """A file is damaged or is not a Lapwing file."""


class CannotWrite(LapwingError, OSError):
    """A file could not be written: the disk is full, or the folder is not for writing. An older file is as it was."""


class VersionMismatch(LapwingError):
    """A file was written by a newer format than this version reads."""


class NotConverged(LapwingError, ArithmeticError):
    """An iterative method stopped before it reached its tolerance."""


def require_generator(generator: Any, device: Any) -> None:
    """Refuse a random generator of another device than that of the network."""
    if generator is not None and generator.device != device:
        raise BadData(
            f"the generator is on {str(generator.device)!r} and the network on {str(device)!r}; pass "
            f"generator=torch.Generator({str(device)!r})"
        )
