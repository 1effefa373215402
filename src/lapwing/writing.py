"""Files that take the place of others at once, and leave nothing behind when a disk is full or a process is killed."""

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

LOCK = "lock"  # its writer holds it locked for as long as it lives
BEGINNING = 1.0  # seconds within which a writer has locked its folder
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
FORGOTTEN = 3600.0  # seconds after which a folder that no lock tells about is taken for left behind


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` at the end: others see the old file or the new one.

    Where writing fails, the old file stays as it is and `CannotWrite` says why. What writers that were killed have left
    behind for the same path is removed.

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
    """Put a complete file in the place of another, with its permissions, once the disk has it."""
    os.chmod(part, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


@contextmanager
def _told(path: Path, numbers: tuple[int, ...] = ()) -> Iterator[None]:
    """`CannotWrite` in place of an error of the system; where `numbers` are given, of these only."""
    try:
        yield
    except SafetensorError as error:
        raise CannotWrite(_words(path, error)) from error
    except OSError as error:
        if numbers and error.errno not in numbers:
            raise
        raise CannotWrite(_words(path, error)) from error


def _words(path: Path, error: Exception) -> str:
    left = "the file that was there is as it was" if path.is_file() else "there is no such file"
    return f"{str(path)!r} could not be written ({error}); {left}"


def require_writable(folder: Path) -> None:
    """Make a folder and refuse one in which no file can be made, before the work whose result it should hold."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"written")
            file.flush()
    except OSError as error:
        raise CannotWrite(f"no file can be written into the folder {str(folder)!r} ({error})") from error


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove what writers of the files of this name, or pattern, have left behind when they were killed."""
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
