"""Measure what a computation costs: seconds and peak memory."""

import ctypes
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

if sys.platform != "win32":
    import resource

Result = TypeVar("Result")


@dataclass(frozen=True)
class Cost:
    """Wall-clock seconds, and the peak of memory in bytes above what was in use at the start (None where unknown)."""

    seconds: float
    peak_bytes: int | None


def measure(function: Callable[[], Result], device: torch.device) -> tuple[Result, Cost]:
    """Call the function once and say what it cost.

    On CUDA the peak is the allocator's. On the CPU it is the resident set: exact to a page on Linux, where the kernel's
    high-water mark can be reset; elsewhere only growth beyond the highest peak of the process so far is seen.

    Examples:
        >>> from lapwing.evaluation.meter import measure
        >>> square, cost = measure(lambda: x @ x.mT, x.device)
    """
    before = _start(device)
    began = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    known = device.type == "cuda" or sys.platform != "win32"
    return result, Cost(seconds, max(0, _peak(device) - before) if known else None)


def _start(device: torch.device) -> int:
    """Forget earlier peaks and return the bytes in use now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)  # memory that malloc keeps goes back to the system, so that using it again counts
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5 resets the high-water mark (man 5 proc)
        except OSError:
            return _peak(device)  # a container may forbid it: then only growth beyond the old peak is seen
    return _peak(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    if sys.platform == "win32":
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
