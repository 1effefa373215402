"""Compile and register the test device "elsewhere": tensors that PyTorch treats like a GPU's, in ordinary memory.

`elsewhere.cpp` says what the device checks. It is compiled once per version of PyTorch and kept in a cache folder. A
process that uses it must call `device()` before its first backward pass, because PyTorch counts devices only then.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

NAME = "elsewhere"
SOURCE = Path(__file__).with_name("elsewhere.cpp")
ROOT = Path(torch.__file__).parent
FLAGS = (
    "-std=c++20", "-O0", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    f"-I{ROOT / 'include'}", f"-I{ROOT / 'include/torch/csrc/api/include'}",
)  # fmt: skip
LIBRARIES = (f"-L{ROOT / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{ROOT / 'lib'}")


class NoDevice(Exception):
    """The test device cannot be built here; the text says why."""


@cache
def device() -> torch.device:
    """Register the test device in this process and return it."""
    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Runtime(NAME))
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device(NAME, 0)


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Fill a dict with the number of copies and waits between host and device at the end of the block.

    Keys are "upload", "download" and the names of operations for which the host waits, such as "aten::nonzero".
    """
    found: dict[str, int] = {}
    torch.ops.elsewhere.reset()
    yield found
    found.update(torch.ops.elsewhere.counts())


def library() -> Path:
    """Return the compiled device, compiling it where the cache does not hold it. Raises `NoDevice`."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise NoDevice("the test device needs a C++ compiler (g++), and none was found")
    key = hashlib.sha256("\n".join([SOURCE.read_text(), torch.__version__, compiler, *FLAGS]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"lapwing-tests-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"elsewhere-{key}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes want the same
        if not target.exists():
            _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    built = target.with_suffix(".part")
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(built), *LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoDevice(f"the test device does not compile against PyTorch {torch.__version__}:\n{done.stderr[-2000:]}")
    built.replace(target)


class _Runtime(ModuleType):
    """What PyTorch looks up as `torch.elsewhere`."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device(where: object) -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        torch.ops.elsewhere.seed(seed)

    @staticmethod
    def get_rng_state(where: object = None) -> torch.Tensor:
        return torch.ops.elsewhere.state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, where: object = None) -> None:
        torch.ops.elsewhere.set_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
