"""What importing costs: `import lapwing` and `import laplace` beside `import torch`."""

import subprocess
from collections.abc import Mapping

from benchmarks.cell import ROOT, environment
from benchmarks.results import middle

TIMED = """
import time
began = time.process_time()
import torch
alone = time.process_time() - began
import {name}
print(alone, time.process_time() - began)
"""


def import_times(pythons: Mapping[str, str], repeats: int = 5) -> dict[str, float]:
    """CPU seconds of importing each module with the interpreter given for it, in turns: the median of its ratio to
    `import torch` in the same process (which varies by a fifth from process to process) times the median of that.

    A first round, not counted, writes the bytecode that pip writes for an installed package.
    """
    kept = {name: value for name, value in environment(1).items() if name != "PYTHONDONTWRITEBYTECODE"}
    alone: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in pythons}
    for _ in range(1 + repeats):
        for name, python in pythons.items():
            command = [python, "-W", "ignore", "-c", TIMED.format(name=name)]
            done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=True)
            torch, whole = map(float, done.stdout.split()[-2:])
            alone.append(torch)
            ratios[name].append(whole / torch)
    usual = middle(alone[len(pythons) :])
    return {name: usual * middle(values[1:]) for name, values in ratios.items()}
