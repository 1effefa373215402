"""Load the user's network with its weights, and other objects of the user's Python code, by name.

A name is `path/to/file.py:name` or `package.module:name`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lapwing.errors import BadData

WRAPPED = ("state_dict", "model_state_dict", "model")  # keys under which checkpoints keep the weights
PREFIXES = ("module.", "_orig_mod.", "model.")  # of data parallel, torch.compile and Lightning
SHOWN = 4


def read_model(text: str, weights: Path | None = None, device: str | None = None) -> nn.Module:
    """Return the module that `file.py:name` names, or that it returns when called, with the weights of a file."""
    found = read_object(text)
    model = found if isinstance(found, nn.Module) else made(found, text)
    if not isinstance(model, nn.Module):
        raise BadData(f"{text} is a {type(model).__name__}, not a torch.nn.Module or a function that returns one")
    if weights is not None:
        load_weights(model, read_weights(weights), weights.name)
    return model if device is None else guarded(lambda: model.to(torch.device(device)), f"moving the model to {device}")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors file, or of a state dict that torch.save wrote; nothing else is unpickled."""
    if not path.is_file():
        raise BadData(f"there is no file of weights {str(path)!r}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, by what the file is
        raise BadData(
            f"{path.name} is not a file of tensors only: write the model's state_dict() and nothing else, as .pt or "
            f".safetensors ({str(error).strip().partition(chr(10))[0][:120]})"
        ) from error
    for key in WRAPPED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()
    ):
        raise BadData(f"{path.name} contains no state dict, neither by itself nor under a key {', '.join(WRAPPED)}")
    return dict(found)


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Put weights into a model, or say which keys and shapes do not fit.

    Step counters of batch norms and second names of tied weights may be missing.
    """
    live = model.state_dict()
    given = _without_prefix(tensors, live)
    places = {live[key].data_ptr() for key in given if key in live}
    missing = [
        key
        for key, value in live.items()
        if key not in given and not key.endswith("num_batches_tracked") and value.data_ptr() not in places
    ]
    unexpected = [key for key in given if key not in live]
    if missing or unexpected:
        raise BadData(f"{name} does not belong to this model: it {_lacks(missing, unexpected)}")
    wrong = [
        f"{key} {_kind(value)} instead of {_kind(live[key])}"
        for key, value in given.items()
        if value.shape != live[key].shape or value.is_complex() != live[key].is_complex()
    ]
    if wrong:
        raise BadData(f"{name} does not belong to this model: it has {some(wrong)}")
    model.load_state_dict(dict(given), strict=False)


def _without_prefix(tensors: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Remove the prefix of a wrapper that all keys share and the model does not have."""
    for prefix in PREFIXES:
        if tensors and all(key.startswith(prefix) for key in tensors) and not any(k.startswith(prefix) for k in live):
            return {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


def _kind(tensor: Tensor) -> str:
    return f"{'complex ' if tensor.is_complex() else ''}{tuple(tensor.shape)}"


def _lacks(missing: list[str], unexpected: list[str]) -> str:
    parts = [f"lacks {some(missing)}"] if missing else []
    return " and ".join([*parts, *([f"has {some(unexpected)}, which the model lacks"] if unexpected else [])])


def some(items: Iterable[str]) -> str:
    """List the first few names, and say how many more there are."""
    found = list(items)
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def read_object(text: str) -> Any:
    """Return the object `file.py:name` or `module:name`; its code may import from its own and the current folder."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise BadData(f"{text!r} names no object: write path/to/file.py:name or package.module:name")
    _let_import(Path.cwd())
    module = (
        _file_module(Path(place))
        if place.endswith(".py")
        else guarded(lambda: importlib.import_module(place), f"importing {place}")
    )
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise BadData(f"{place} has no {name!r}; it has {_names(module)}")
        found = getattr(found, part)
    return found


def made(value: Any, text: str) -> Any:
    """Call a value that is callable without arguments and return the result; return other values as they are."""
    if not callable(value):
        return value
    required = [
        p.name for p in _parameters(value) if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if required:
        raise BadData(
            f"{text} needs arguments ({', '.join(required)}): name an object, or a function without required arguments"
        )
    return guarded(value, f"calling {text}")


def guarded(call: Callable[[], Any], what: str, file: str = "") -> Any:
    """Run the user's code; an error in it becomes one line, with the line number in `file`."""
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


def _names(module: ModuleType, limit: int = 12) -> str:
    own = [name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType)]
    return ", ".join(own[:limit]) + (", …" if len(own) > limit else "") if own else "no names"
