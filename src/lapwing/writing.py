"""Atomic writing: a file replaces another at once, and nothing is left behind by a full disk or a killed process."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from lapwing.errors import CannotWrite

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"  # the writing process holds a lock on it as long as it lives
BEGINNING = 1.0  # seconds within which a writing process locks its folder
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
FORGOTTEN = 3600.0  # seconds after which a folder without a lock counts as left behind


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
    """Raise `CannotWrite` in place of errors of the operating system, or of those with these `numbers`."""
    try:
        yield
    except SafetensorError as error:
        raise CannotWrite(_words(path, error)) from error
    except OSError as error:
        if numbers and error.errno not in numbers:
            raise
        raise CannotWrite(_words(path, error)) from error


def _words(path: Path, error: Exception) -> str:
    kept = "; the older file of that name is unchanged" if path.is_file() else ""
    advice = "Free some space, or choose a folder that you may write to"
    return f"{str(path)!r} could not be written ({error}){kept}. {advice}."


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
