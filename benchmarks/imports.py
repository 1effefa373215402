"""What importing costs: `import lapwing` and `import laplace` beside `import torch`."""

import subprocess
from collections.abc import Mapping

from benchmarks.cell import ROOT, environment
from benchmarks.results import middle

TIMED = "import time; began = time.process_time(); import {name}; print(time.process_time() - began)"


def import_times(pythons: Mapping[str, str], repeats: int = 5) -> dict[str, float]:
    """CPU seconds of importing each module with the interpreter given for it, in turns; medians.

    A first round, not counted, writes the bytecode that pip writes for an installed package.
    """
    kept = {name: value for name, value in environment(1).items() if name != "PYTHONDONTWRITEBYTECODE"}
    times: dict[str, list[float]] = {name: [] for name in pythons}
    for _ in range(1 + repeats):
        for name, python in pythons.items():
            command = [python, "-W", "ignore", "-c", TIMED.format(name=name)]
            done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=True)
            times[name].append(float(done.stdout.split()[-1]))
    return {name: middle(values[1:]) for name, values in times.items()}
