"""Objects of the user's own Python code, by name: `path/to/file.py:name` or `package.module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lapwing.errors import BadData


def read_object(text: str) -> Any:
    """The object that `file.py:name` or `module:name` names. The current folder and the file's own are importable.

    Example:
        >>> read_object("net.py:model")
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise BadData(f"{text!r} names no object: write path/to/file.py:name or package.module:name")
    _let_import(Path.cwd())
    module = _file_module(Path(place)) if place.endswith(".py") else _named_module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise BadData(f"{place} has no {name!r}; it has {_names(module)}")
        found = getattr(found, part)
    return found


def made(value: Any, text: str) -> Any:
    """What a callable without required arguments returns; any other value as it is."""
    if not callable(value):
        return value
    required = [
        p.name for p in _parameters(value) if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if required:
        raise BadData(
            f"{text} needs arguments ({', '.join(required)}): name an object, or a function that can be called without"
        )
    return guarded(value, f"calling {text}")


def guarded(call: Callable[[], Any], what: str, file: str = "") -> Any:
    """The result of the user's code; what it raises becomes one line, with the line number in `file`."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f", line {lines[-1]}" if lines else ""
        words = f"{type(error).__name__}: {error}".rstrip(": ")
        raise BadData(f"{what} failed{where}: {words}") from error


def _parameters(value: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):  # written in C, without a signature
        return []


def _let_import(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _file_module(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"{path.stem}@{path.parent}"  # no clash with an installed module
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise BadData(f"there is no Python file {str(path)!r}")
    _let_import(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        guarded(lambda: spec.loader.exec_module(module), f"importing {path.name}", str(path))  # type: ignore[union-attr]
    except BadData:
        del sys.modules[name]
        raise
    return module


def _named_module(name: str) -> ModuleType:
    found: ModuleType = guarded(lambda: importlib.import_module(name), f"importing {name}")
    return found


def _names(module: ModuleType, limit: int = 12) -> str:
    own = [name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType)]
    return ", ".join(own[:limit]) + (", …" if len(own) > limit else "") if own else "no names"
