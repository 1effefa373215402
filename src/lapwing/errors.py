"""The errors that Lapwing raises, and functions that word messages.

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
    """Base of all errors raised by Lapwing.

    Examples:
        >>> try:
        ...     lapwing.fit(model, train_loader, "classify")
        ... except lapwing.LapwingError as error:
        ...     print(error)
        likelihood='classify': use one of ...
    """


class UnsupportedModel(LapwingError):
    """The network cannot be given a posterior as it stands (for example: samples mix inside a batch).

    Examples:
        >>> class Centered(nn.Module):  # the output for one sample depends on the others
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(4, 3)
        ...     def forward(self, x):
        ...         return self.layer(x - x.mean(0))
        >>> lapwing.fit(Centered(), train_loader, "classification")
        Traceback (most recent call last):
        lapwing.errors.UnsupportedModel: the outputs of a sample depend on the other samples of its batch: ...
    """


class UnsupportedOperation(LapwingError):
    """The chosen structure, factor or method does not offer this operation.

    Examples:
        >>> la.predictor("probs")  # this posterior is over all layers, not the last one
        Traceback (most recent call last):
        lapwing.errors.UnsupportedOperation: a predictor needs a posterior over one linear layer (select=...
    """


class BadData(LapwingError, ValueError):
    """Inputs or targets are empty, not finite, or do not fit the likelihood.

    Examples:
        >>> lapwing.fit(model, (x, y + 5), "classification")
        Traceback (most recent call last):
        lapwing.errors.BadData: batch 0: target 5 at index (0,) is outside the 3 classes 0…2 (or ignore_index=-100).
    """


class NotPositiveDefinite(LapwingError, ArithmeticError):
    """A precision has an eigenvalue that is not above zero.

    Examples:
        >>> lapwing.fit(model, train_loader, "classification", structure="full", factor="hessian", prior=1e-6)
        Traceback (most recent call last):
        lapwing.errors.NotPositiveDefinite: the posterior precision is not positive definite: ...
    """


class IncompatiblePrior(LapwingError, ValueError):
    """The prior cannot be added to this structure without leaving it.

    Examples:
        >>> per_weight = torch.rand(131) + 0.5
        >>> lapwing.fit(model, train_loader, "classification", structure="kron", prior=per_weight)
        Traceback (most recent call last):
        lapwing.errors.IncompatiblePrior: block 0 ('0.weight, 0.bias'): a Kronecker posterior has no eigenbasis for ...
    """


class NotReiterable(LapwingError, TypeError):
    """Several passes over the data are needed and the data can be read only once.

    Examples:
        >>> lapwing.fit(model, iter(train_loader), "classification", structure="ekfac")
        Traceback (most recent call last):
        lapwing.errors.NotReiterable: structure='ekfac' reads the data more than once, but the data is a one-shot ...
    """


class TooLarge(LapwingError, MemoryError):
    """The result would not fit into the memory budget.

    Examples:
        >>> lapwing.fit(model, train_loader, "classification", structure="full", memory=1000)
        Traceback (most recent call last):
        lapwing.errors.TooLarge: structure='full' for 131 weights needs 0.412 MB; the budget is 0.001 MB. ...
    """


class CorruptFile(LapwingError, OSError):
    """A file is damaged or is not a Lapwing file.

    Examples:
        >>> import pathlib
        >>> size = pathlib.Path("model.lapwing").write_bytes(b"not a posterior")
        >>> lapwing.load("model.lapwing", model)
        Traceback (most recent call last):
        lapwing.errors.CorruptFile: 'model.lapwing' is damaged or not a Lapwing file; fit again, or restore a copy ...
    """


class CannotWrite(LapwingError, OSError):
    """A file could not be written: the disk is full, or the folder is read-only. An older file is unchanged.

    Examples:
        >>> import pathlib
        >>> pathlib.Path("folder").touch()
        >>> la.save("folder/model.lapwing")  # "folder" is a file
        Traceback (most recent call last):
        lapwing.errors.CannotWrite: 'folder/model.lapwing' could not be written ...
    """


class VersionMismatch(LapwingError):
    """A file was written by a newer format than this version reads.

    Examples:
        >>> try:
        ...     la = lapwing.load("model.lapwing", model)  # doctest: +SKIP
        ... except lapwing.VersionMismatch:
        ...     print("install a newer lapwing-torch to read this file")
    """


class NotConverged(LapwingError, ArithmeticError):
    """An iterative method stopped before it reached its tolerance.

    Examples:
        >>> structure = lapwing.MatrixFree(rank=1, iterations=1, tolerance=1e-4)
        >>> la = lapwing.fit(model, train_loader, "classification", structure=structure)
        >>> la.posterior.precision.solve(la.posterior.mean)
        Traceback (most recent call last):
        lapwing.errors.NotConverged: conjugate gradients left 1 of 1 columns above the relative residual 0.0001 ...
    """


_NOT_THE_USER = (f"{Path(__file__).parent}{os.sep}", contextlib.__file__, f"{Path(torch.__file__).parent}{os.sep}")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user that led here, past this package, its wrappers and context managers."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def refuse_export(what: str) -> None:
    """Raise while `torch.export` is tracing: an exported file cannot take decisions item by item."""
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


def require_whole(name: str, value: object) -> None:
    """Refuse anything but a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadData(f"{name} must be a whole number of at least 1, got {value!r}")


def positive(name: str, value: Any) -> float:
    """Return a finite number above 0, which a tensor or an array may hold, as a float; refuse anything else."""
    number = isinstance(value, Real) or getattr(value, "shape", None) == ()
    if isinstance(value, bool) or not number or not 0 < float(value) < math.inf:
        raise BadData(f"{name} must be positive and finite, got {value!r}")
    return float(value)


def positives(name: str, values: Any) -> tuple[float, ...]:
    """Return one or several finite numbers above 0, from a list, a tensor or an array; refuse anything else."""
    try:
        found = tuple(values)
    except TypeError:
        found = ()
    if isinstance(values, str) or not found:
        raise BadData(f"{name} must be a list of at least one positive number, got {values!r}")
    return tuple(positive(f"each of {name}", value) for value in found)


def require_generator(generator: Any, device: Any) -> None:
    """Refuse a random generator on another device than the network."""
    if generator is not None and generator.device != device:
        raise BadData(
            f"the generator is on {str(generator.device)!r} and the network on {str(device)!r}; pass "
            f"generator=torch.Generator({str(device)!r})"
        )
