"""Every error that Lapwing raises on purpose, and the words it has for people.

A message says what came, what is allowed and what to do. Warnings point at the user's own line, near misses get a
suggestion, and objects are described without their numbers.
"""

import contextlib
import difflib
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from numbers import Real
from pathlib import Path
from typing import Any

import torch


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


_NOT_THE_USER = (f"{Path(__file__).parent}{os.sep}", contextlib.__file__, f"{Path(torch.__file__).parent}{os.sep}")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user that led here, past this package, its wrappers and context managers."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def refuse_export(what: str) -> None:
    """Raise while `torch.export` is tracing, for what takes decisions item by item that no file can hold."""
    if torch.compiler.is_exporting():
        raise UnsupportedOperation(f"{what}: la.predict(x) and la.predictor(...) compute it")


def nearest(given: Any, known: Iterable[str]) -> str:
    """Return ". Did you mean 'kron'?" for the known name that is most like what was given, or nothing."""
    if not isinstance(given, str):
        return ""
    plain = {name.lower().replace("_", "").replace("-", ""): name for name in known}
    asked = given.lower().replace("_", "").replace("-", "").replace(" ", "")
    found = difflib.get_close_matches(asked, plain, n=1, cutoff=0.65)
    found = found or [name for name in plain if len(asked) > 2 and (name.startswith(asked) or asked.startswith(name))]
    return f". Did you mean {plain[found[0]]!r}?" if found else ""


def brief(value: Any) -> str:
    """Describe an object by its fields, without the numbers in its tensors and the layers of its modules."""
    names = [field.name for field in fields(value) if field.repr and not field.name.startswith("_")]
    return f"{type(value).__name__}({', '.join(f'{name}={_brief(getattr(value, name))}' for name in names)})"


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}" if value.numel() != 1 else f"{float(value):.6g}"
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    if isinstance(value, Mapping):
        return "{" + ", ".join(map(repr, value)) + "}"
    if isinstance(value, list | tuple) and (len(value) > 4 or any(isinstance(v, torch.Tensor) for v in value)):
        return f"{len(value)} of {type(value[0]).__name__}"
    text = repr(value)
    return text if len(text) < 200 and "tensor(" not in text and "\n" not in text else f"{type(value).__name__}(…)"


def require_whole(name: str, value: object, least: int = 1) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadData(f"{name} must be a whole number of at least {least}, got {value!r}")


def positive(name: str, value: Any) -> float:
    """Return a finite number above 0, which a tensor or an array may hold, as a float; refuse anything else."""
    number = isinstance(value, Real) or getattr(value, "shape", None) == ()
    if isinstance(value, bool) or not number or not 0 < float(value) < math.inf:
        raise BadData(f"{name} must be positive and finite, got {value!r}")
    return float(value)


def require_generator(generator: Any, device: Any) -> None:
    """Refuse a random generator of another device than that of the network."""
    if generator is not None and generator.device != device:
        raise BadData(
            f"the generator is on {str(generator.device)!r} and the network on {str(device)!r}; pass "
            f"generator=torch.Generator({str(device)!r})"
        )
