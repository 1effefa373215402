"""Files: one format for all that is stored, the list of classes that can be stored in it, and checks of what it holds.

A file is safetensors with a JSON header and a checksum of both; there is no pickle. Posteriors, checkpoints of a
training and interrupted fits are such files. An object is stored as its tensors and a description in JSON (`pack`), by
the fields of its class, which registers itself where it is defined (`register`). Every file is written atomically
(`replacing`): nothing is left behind by a full disk or a killed process.
Anyone may have changed a file: `flaw_of_values` and similar functions say in words what is wrong with its numbers.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lapwing.errors import BadData, CannotWrite, CorruptFile, UnsupportedOperation, VersionMismatch

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 3  # 1: an index of all entries in place of runs; 2: options of a structure in a dict of their own
KEY = "lapwing"
PLAIN = (str, int, float, bool, type(None))
MISFITS = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)
LOCK = "lock"  # the writing process holds a lock on it as long as it lives
BEGINNING = 1.0  # seconds within which a writing process locks its folder
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
FORGOTTEN = 3600.0  # seconds after which a folder without a lock counts as left behind

C = TypeVar("C", bound=type)
T = TypeVar("T")
Kind = Callable[..., T]  # a class, which may be abstract

_classes: dict[str, list[type]] = {}
_names: dict[type, str] = {}


@overload
def register(cls: C) -> C: ...
@overload
def register(*, name: str | None) -> Callable[[C], C]: ...
def register(cls: Any = None, *, name: str | None = None) -> Any:
    """Let objects of a class be saved and loaded, and let it be found by name: `fit(structure="tridiagonal")`.

    A decorator for matrices, structures, factors and likelihoods. A file names the class as it is called in Python;
    the module that defines it must have been imported before a file is read. `name` is what the front door calls it,
    by default the name of the class in lower case.

        @lapwing.register
        @dataclass(frozen=True, eq=False)
        class Tridiagonal(PSD): ...

    The fields of a dataclass are stored and given to the class again. Fields with `metadata={"cache": True}` are not
    stored; fields with `metadata={"later": True}` may be missing in files that are older than the field. Any other
    class is restored with the attributes it had. Fields are tensors, numbers, strings, tuples of these, and objects of
    registered classes.

    Examples:
        >>> from dataclasses import dataclass
        >>> @lapwing.register
        ... @dataclass(frozen=True, eq=False)
        ... class Tenth(lapwing.MCFisher):  # now fit(factor="tenth") finds it, and files may hold it
        ...     samples: int = 10
        >>> la = lapwing.fit(model, train_loader, "classification", factor="tenth")
    """
    if cls is None:
        return partial(register, name=name)
    name = name or cls.__name__.lower()
    for other, taken in [*_names.items()]:
        if cls.__name__ == other.__name__ or name == taken:
            _require_free(cls, other)
    _classes.setdefault(cls.__name__, []).append(cls)
    _names[cls] = name
    return cls


def _require_free(cls: type, other: type) -> None:
    """Refuse a user's class with the name of one of Lapwing's own classes of the same kind."""
    ours = [base.__module__.startswith("lapwing.") for base in (other, cls)]
    alike = any(base.__module__.startswith("lapwing.") for base in set(cls.__mro__) & set(other.__mro__))
    if alike and ours == [True, False]:
        raise ValueError(
            f"Lapwing has a {other.__name__} of its own, called {_names[other]!r}: give your class another name"
        )


def is_registered(cls: type) -> bool:
    """Whether objects of this very class can be stored in files."""
    return cls in _names


def name_of(cls: type) -> str:
    """Return the name of a class in `fit`; the class's own name in lower case where it is not registered."""
    return _names.get(cls, cls.__name__.lower())


def named(kind: Kind[T]) -> dict[str, type[T]]:
    """Return the registered classes of a kind by their names in `fit`; of two with one name, the later."""
    return {name: cls for cls, name in _names.items() if issubclass(cls, cast(Any, kind))}


def _class(name: Any, kind: Any) -> Any:
    """Find the latest class of this name and kind."""
    if isinstance(name, type) and issubclass(name, kind):
        return name  # of a description that has not been in a file
    for cls in reversed(_classes.get(name, []) if isinstance(name, str) else []):
        if issubclass(cls, kind):
            return cls
    known = ", ".join(sorted({cls.__name__ for cls in _names if issubclass(cls, kind)}))
    raise CorruptFile(
        f"the file names {name!r}, which is no registered {kind.__name__} (these are {known}). Save it again, or, if "
        "it is your own, import the module that defines it before you load the file."
    )


def pack(value: Any) -> tuple[dict[str, Tensor], Any]:
    """Return tensors by name and a JSON-able description of an object, for `unpack`. Graphs are dropped."""
    tensors: dict[str, Tensor] = {}
    return tensors, describe(value, tensors, "", _registered_name)


def _registered_name(cls: type) -> str:
    if not is_registered(cls):
        raise UnsupportedOperation(
            f"a {cls.__name__} cannot be stored, since load could not find its class. Put @lapwing.register above the "
            "class, which must be a dataclass or keep all it needs in attributes."
        )
    return cls.__name__


def describe(value: Any, tensors: dict[str, Tensor], key: str, name: Callable[[type], Any]) -> Any:
    """Return JSON in which a tensor is {"tensor": key} and an object {"type": name, field: ...}.

    A class may have its own way: a method `describe(tensors, key)`, and `restore(description, tensors)` to read it.
    """
    if isinstance(value, Tensor):
        tensors[key] = value.detach()
        return {"tensor": key}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple | list):
        return [describe(item, tensors, f"{key}.{k}", name) for k, item in enumerate(value)]
    if hasattr(value, "describe"):
        return value.describe(tensors, key)
    stem = f"{key}." if key else ""
    own = {field: describe(item, tensors, stem + field, name) for field, item in stored_fields(value).items()}
    return {"type": name(type(value)), **own}


def stored_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass without caches and defaults of None, or all attributes of another object."""
    if not is_dataclass(value):
        return dict(vars(value)) if hasattr(value, "__dict__") else {}
    found = [(item, getattr(value, item.name)) for item in _stored(value)]
    return {item.name: own for item, own in found if own is not None or item.default is not None}


def _stored(cls: Any) -> list[Field]:
    return [item for item in fields(cls) if item.init and not item.metadata.get("cache")]


def unpack(tensors: Mapping[str, Tensor], description: Any, kind: Kind[T]) -> T:
    """Make the object that `pack` described; `CorruptFile` where the description does not fit together."""
    if not isinstance(description, Mapping):
        raise CorruptFile(f"a stored {cast(Any, kind).__name__} is described by {description!r}. Save it again.")
    cls = _class(description.get("type"), kind)
    try:
        if hasattr(cls, "restore"):
            return cls.restore(description, tensors)
        options = description["options"] if [*description] == ["type", "options"] else description  # format 2
        given = {name: _unpacked(tensors, options[name], kind) for name in options if name != "type"}
        return _made(cls, given)
    except CorruptFile:
        raise
    except MISFITS as error:
        raise CorruptFile(f"the stored {cls.__name__} does not fit together ({error}). Save it again.") from error


def _made(cls: Any, given: dict[str, Any]) -> Any:
    if not is_dataclass(cls):
        made = cls.__new__(cls)
        vars(made).update(given)
        return made
    lacking = [item.name for item in _stored(cls) if item.default is not None and not item.metadata.get("later")]
    if missing := [name for name in lacking if name not in given]:
        raise KeyError(f"it lacks {', '.join(missing)}")
    return cls(**given)  # type: ignore[operator]


def _unpacked(tensors: Mapping[str, Tensor], value: Any, kind: Any) -> Any:
    if isinstance(value, Mapping) and "tensor" in value:
        return tensor_of(tensors, value)
    if isinstance(value, Mapping):
        inner = value.get("type")
        own = isinstance(inner, type) or any(issubclass(cls, kind) for cls in _classes.get(str(inner), []))
        return unpack(tensors, value, kind if own and not isinstance(inner, type) else object)
    return tuple(_unpacked(tensors, item, kind) for item in value) if isinstance(value, list) else value


def tensor_of(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> Tensor:
    """Return the tensor that a description names."""
    if description["tensor"] not in tensors:
        raise CorruptFile(f"the file lacks the tensor {description['tensor']!r}. Save it again.")
    return tensors[description["tensor"]]


def move(value: T, device: torch.device | str) -> T:
    """Copy an object to another device, without graph and caches; tensors that it shares stay shared."""
    tensors: dict[str, Tensor] = {}
    description = describe(value, tensors, "", lambda cls: cls)
    tensors, aliases = once(tensors)
    moved = {key: own.to(device) for key, own in tensors.items()}
    return unpack(moved | {name: moved[own] for name, own in aliases.items()}, description, type(value))


def nbytes(value: Any) -> int:
    """Return the bytes of an object's tensors, shared ones counted once."""
    tensors: dict[str, Tensor] = {}
    describe(value, tensors, "", lambda cls: cls)
    return sum(tensor.numel() * tensor.element_size() for tensor in once(tensors)[0].values())


def once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors that share no memory, and for each of the others the name of the one it shares memory with."""
    seen: dict[Any, str] = {}
    names = {k: seen.setdefault((v.data_ptr(), v.shape, v.stride(), v.dtype, v.device), k) for k, v in tensors.items()}
    return {k: v for k, v in tensors.items() if names[k] == k}, {k: own for k, own in names.items() if own != k}


def under(prefix: str, tensors: Mapping[str, Tensor], device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, under names without it."""
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return own if device is None else {name: value.to(device) for name, value in own.items()}


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under names with a prefix."""
    return {prefix + name: value for name, value in tensors.items()}


def write_file(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-able header, atomically. Tensors that share memory are written once."""
    tensors, aliases = once(tensors)
    flat = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    header = {"format": FORMAT, **header, "aliases": aliases}
    text = json.dumps(header | {"digest": _digest(flat, header)})
    with replacing(path) as part:
        save_file(flat, part, metadata={KEY: text})


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and header of a file; `CorruptFile` where a byte has changed or Lapwing did not write it."""
    if not path.is_file():
        raise CorruptFile(f"there is no file {str(path)!r}" if not path.exists() else f"{str(path)!r} is a folder")
    damaged = f"{path.name!r} is damaged or not a Lapwing file; fit again, or restore a copy"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "tree" in metadata:  # of a training or an interrupted fit, in format 2
                return _read_tree(file, metadata, damaged)
            if KEY not in metadata:
                raise CorruptFile(f"{path.name!r} is a safetensors file, but not one that Lapwing wrote")
            header = json.loads(metadata[KEY])
            _require_format(header, path, damaged)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            if header.get("digest") != _digest(tensors, header):
                raise CorruptFile(f"{damaged} (its checksum does not fit its content)")
            return tensors | {name: tensors[own] for name, own in header.get("aliases", {}).items()}, header
    except CorruptFile:
        raise
    except (SafetensorError, ValueError, OSError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"{damaged} ({error})") from error


def _require_format(header: Any, path: Path, damaged: str) -> None:
    number = header.get("format") if isinstance(header, dict) else None
    if type(number) is not int or number < 1:
        raise CorruptFile(damaged)
    if number > FORMAT:
        raise VersionMismatch(
            f"{path.name!r} has format {number}, this version of Lapwing reads up to {FORMAT}: update lapwing"
        )


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """Return the SHA-256 of header and tensors: safetensors itself does not notice a flipped byte."""
    digest = hashlib.sha256(json.dumps({k: v for k, v in header.items() if k != "digest"}, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name}|{tensors[name].dtype}|{tuple(tensors[name].shape)}|".encode())
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _read_tree(file: Any, metadata: Mapping[str, str], damaged: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {name: file.get_tensor(name) for name in file.keys()}
    if metadata.get("digest") != _tree_digest(tensors, metadata["tree"]):
        raise CorruptFile(f"{damaged} (its checksum does not fit its content)")
    return tensors, {"tree": json.loads(metadata["tree"])}


def _tree_digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors, key=int):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()


def save_tree(path: Path, tree: Any) -> None:
    """Write dicts, lists, tuples, numbers, strings, None and tensors (the state of an optimizer, say), atomically."""
    tensors: dict[str, Tensor] = {}
    write_file(path, tensors, {"tree": lean(tree, tensors)})


def load_tree(path: Path) -> Any:
    """Read what `save_tree` wrote; `CorruptFile` where a byte has changed."""
    tensors, header = read_file(path)
    try:
        return full(header["tree"], tensors)
    except (*MISFITS, RecursionError) as error:
        raise CorruptFile(f"{path} is damaged: its header holds no tree that was stored ({error})") from error


def lean(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the tree as JSON, with {kind: ...} for tensors, dicts, tuples and dtypes, which JSON does not have."""
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"dict": [[lean(key, tensors), lean(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [lean(value, tensors) for value in tree]}
    if isinstance(tree, list):
        return [lean(value, tensors) for value in tree]
    if isinstance(tree, torch.dtype):
        return {"dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, PLAIN):
        return tree
    raise BadData(
        f"a {type(tree).__name__} cannot be stored: only dicts, lists, tuples, numbers, strings, None and tensors can"
    )


def full(lean: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the tree that `lean` described."""
    if isinstance(lean, list):
        return [full(value, tensors) for value in lean]
    if not isinstance(lean, dict):
        return lean
    ((kind, content),) = lean.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return _dtype(content)
    if kind == "tuple":
        return tuple(full(value, tensors) for value in content)
    if kind != "dict":
        raise ValueError(f"unknown kind {kind!r}")
    return {full(key, tensors): full(value, tensors) for key, value in content}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def flaw_of_values(name: str, values: Any, *, signed: bool = False) -> str:
    """Say what is wrong with values that should be finite and, unless `signed`, not negative."""
    values = torch.as_tensor(values)
    if not values.is_floating_point():
        return f"{name} is of type {values.dtype}"
    bad = ~values.isfinite() if signed else ~(values.isfinite() & (values >= 0))
    return f"{name} holds {values[bad].reshape(-1)[0].item()}" if bool(bad.any()) else ""


def flaw_of_scalar(name: str, value: Any) -> str:
    """Say what is wrong with a value that should be one number that is not negative."""
    shape = tuple(torch.as_tensor(value).shape)
    return f"{name} has shape {shape}" if shape else flaw_of_values(name, value)


def flaw_of_symmetric(name: str, matrix: Tensor, *, signed: bool = False) -> str:
    """Say what is wrong with matrices (*b, n, n) that should be symmetric and, unless `signed`, semi-definite."""
    if found := flaw_of_values(name, matrix, signed=True):
        return found
    matrix = matrix if matrix.dtype.itemsize >= 4 else matrix.float()
    largest = matrix.abs().max() if matrix.numel() else matrix.new_zeros(())
    if not float(largest):
        return ""
    unit = matrix / largest
    rounding = torch.finfo(matrix.dtype).eps ** 0.5
    if bool(((unit - unit.mT).abs() > rounding).any()):
        return f"{name} is not symmetric"
    if signed:
        return ""
    slack = rounding * unit.diagonal(dim1=-2, dim2=-1).abs().sum(-1, keepdim=True) + 1e-30
    _, failed = torch.linalg.cholesky_ex(unit + torch.diag_embed(slack.expand(unit.shape[:-1])))
    return f"{name} has an eigenvalue below zero" if bool(failed.any()) else ""


def flaw_of_basis(name: str, rows: Tensor, values: Tensor | None = None) -> str:
    """Say what is wrong with rows (*b, k, n) that should be orthonormal; rows of small `values` (k,) count less."""
    if found := flaw_of_values(name, rows, signed=True):
        return found
    rows = rows if rows.dtype.itemsize >= 4 else rows.float()
    each = torch.ones(rows.shape[-2]) if values is None or not len(values) else values / values.max().clamp(min=1e-300)
    each = each.to(rows)
    rows = rows * each.sqrt()[:, None]
    off = rows @ rows.mT - torch.diag(each)
    return f"{name} is not orthonormal" if bool((off.abs() > torch.finfo(rows.dtype).eps ** 0.5).any()) else ""


def flaw_of_ranks(ranks: Any) -> str:
    """Say what is wrong with a pair of ranks, each of which should be None or a whole number from zero."""
    fine = len(ranks) == 2 and all(rank is None or (type(rank) is int and rank >= 0) for rank in ranks)
    return "" if fine else f"the ranks are {ranks}"


def first_flaw(*found: str) -> str:
    """Return the first message that is not empty."""
    return next(filter(None, found), "")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to, which replaces `path` at the end: other processes see the old file or the new one.

    Where writing fails, the old file stays as it is and `CannotWrite` says why. Leftovers of killed processes for the
    same path are removed.

        with replacing(path) as part:
            save_file(tensors, part)
    """
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, glob.escape(path.name))
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        with _told(path, FULL), open(folder / LOCK, "wb") as lock:
            _locked(lock)
            yield folder / path.name
        with _told(path):
            _finish(folder / path.name, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _finish(part: Path, path: Path) -> None:
    """Replace a file by a complete one with the same permissions, once that is on the disk."""
    os.chmod(part, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


@contextmanager
def _told(path: Path, numbers: tuple[int, ...] = ()) -> Iterator[None]:
    """Raise `CannotWrite` in place of errors of safetensors and the operating system; `numbers` limits the latter."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        if numbers and isinstance(error, OSError) and error.errno not in numbers:
            raise
        kept = "; the older file of that name is unchanged" if path.is_file() else ""
        raise CannotWrite(
            f"{str(path)!r} could not be written ({error}){kept}. Free some space, or choose a folder that you may "
            "write to."
        ) from error


def require_writable(folder: Path) -> None:
    """Make a folder, and refuse one in which no file can be made, before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"written")
            file.flush()
    except OSError as error:
        raise CannotWrite(f"no file can be written into the folder {str(folder)!r} ({error})") from error


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove what killed processes left behind while they wrote files of this name or pattern."""
    for found in folder.glob(f".{name}.*.tmp"):
        if _left_behind(found):
            shutil.rmtree(found, ignore_errors=True)


def _left_behind(folder: Path) -> bool:
    try:
        age = time.time() - folder.stat().st_mtime
        if fcntl is None or not (folder / LOCK).exists():
            return age > FORGOTTEN
        with open(folder / LOCK, "rb+") as lock:
            return age > BEGINNING and _locked(lock)
    except OSError:  # its writer has just removed it
        return False


def _locked(file: IO[bytes]) -> bool:
    """Take the lock of a file for as long as it is open; False where another process, or file, holds it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
