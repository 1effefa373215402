"""Every error that Lapwing raises on purpose. A message says what came, what is allowed and what to do."""


class LapwingError(Exception):
    """Base of all errors raised by Lapwing."""


class UnsupportedModel(LapwingError):
    """The network cannot be given a posterior as it stands (for example: samples mix inside a batch)."""


class UnsupportedOperation(LapwingError):
    """The chosen structure, factor or method does not offer this operation."""


class BadData(LapwingError, ValueError):
    """Inputs or targets are empty, not finite, or do not fit the likelihood."""


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
