"""One measurement in a process of its own: `python -m benchmarks.measure lenet fit-kron --by ours`.

Prints one line of JSON. The first run of the operation comes before anything large, for its peak memory, and is not
timed; then the operation and the gradient epoch alternate.
"""

import argparse
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.operations import Operation, operation
from benchmarks.results import Measurement, dump, middle
from benchmarks.workloads import WORKLOADS, Task
from lapwing.evaluation.meter import measure as metered

SOURCES = {
    "ours": "benchmarks.ours",
    "laplace-torch": "benchmarks.laplace_torch",
    "curvlinops": "benchmarks.curvlinops",
}
CPU = torch.device("cpu")
BRIEF = 0.1  # seconds; what takes less is repeated within one timing
LONG = 5.0  # seconds; what takes longer is timed once
ENDLESS = 15.0  # seconds; of what takes longer, the first run is the only one


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    task = WORKLOADS[options.workload](options.n, options.m)
    done = measure(task, operation(options.operation), options)
    print(dump(done))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.measure", description=__doc__)
    top.add_argument("workload", choices=WORKLOADS)
    top.add_argument("operation")
    top.add_argument("--by", choices=SOURCES, default="ours")
    top.add_argument("--n", type=int, default=512, help="data to fit (%(default)s)")
    top.add_argument("--m", type=int, default=16, help="inputs to predict (%(default)s)")
    top.add_argument("--repeats", type=int, default=3, help="timings, alternating with the gradient (%(default)s)")
    top.add_argument("--threads", type=int, default=1)
    top.add_argument("--result", type=Path, help="file for the result, to compare")
    top.add_argument("--profile", type=Path, help="file for a table of where the time goes")
    return top


def measure(task: Task, op: Operation, options: argparse.Namespace) -> Measurement:
    """Peak memory of the first run, then medians of alternating times."""
    asked = {"by": options.by, "workload": options.workload, "operation": op.name}
    asked |= {"n": options.m if op.of_new else options.n, "threads": options.threads}
    gradient = task.gradient_of_new if op.of_new else task.gradient
    try:
        run, read = import_module(SOURCES[options.by]).prepare(task, op)
        _warm(task)
        (result, first), cost = metered(lambda: timed(run), CPU)
        if options.result and (tensor := read(result)) is not None:
            save_file({"result": tensor.detach().contiguous()}, options.result)
        del result
        gradient_peak = metered(gradient, CPU)[1].peak_bytes
        works = {"seconds": run, "gradient": gradient, "forward": task.forward_of_new}
        if op.action == "predict":
            works["covariances"] = task.covariances()
        times = alternate(works, options.repeats, {"seconds": first})
        if options.profile:
            profile(run, options.profile)
    except (Exception, SystemExit) as error:
        return Measurement(**asked, error=reason(error))
    clock = "cpu" if options.threads == 1 else "wall"
    return Measurement(
        **asked,
        clock=clock,
        **{name: middle(values[clock]) for name, values in times.items()},
        peak=cost.peak_bytes,
        gradient_peak=gradient_peak,
        more={"times": times, "parameters": sum(p.numel() for p in task.parameters)},
    )


def _warm(task: Task) -> None:
    """Load what torch loads at its first convolution or product, with two samples, and all data: pages of a file count
    where they are first read."""
    for t in (task.new, *(t for batch in task.batches for t in batch)):
        t.sum()
    x, _ = task.batches[0]
    torch.autograd.grad(task.rows(x[:2]).sum(), task.parameters)


Times = dict[str, list[float]]  # "cpu" and "wall" seconds


def alternate(works: dict[str, Callable[[], Any]], repeats: int, first: dict[str, Times]) -> dict[str, Times]:
    """Seconds of each piece of work, in turns. The first run warms up and is not counted. Brief work is repeated within
    a turn, long work has one turn, and endless work none: there the first run counts."""
    first = first | {name: timed(work)[1] for name, work in works.items() if name not in first}
    turns = {name: how_often(first[name]["cpu"][0], repeats) for name in works}
    times: dict[str, Times] = {name: {"cpu": [], "wall": []} if turns[name] else first[name] for name in works}
    for turn in range(repeats):
        for name, work in works.items():
            if turn < turns[name]:
                _, taken = timed(work, repetitions(first[name]["cpu"][0]))
                times[name] = {clock: times[name][clock] + taken[clock] for clock in taken}
    return times


def how_often(seconds: float, repeats: int) -> int:
    """The turns of work whose first run took so long."""
    if seconds > ENDLESS:
        return 0
    return 1 if seconds > LONG else repeats


def timed(work: Callable[[], Any], count: int = 1) -> tuple[Any, Times]:
    """The result, and the mean seconds of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        result = work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return result, {"cpu": [cpu / count], "wall": [wall / count]}


def repetitions(seconds: float) -> int:
    """How often to repeat work that takes so long, for a timing that is not noise."""
    return 1 if seconds >= BRIEF else min(100, 1 + int(BRIEF / max(seconds, 1e-5)))


def profile(run: Callable[[], Any], path: Path) -> None:
    """A table of torch's operations by their own CPU time, and Python's functions by theirs."""
    import cProfile
    import io
    import pstats

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        run()
    python = cProfile.Profile()
    python.runcall(run)
    text = io.StringIO()
    pstats.Stats(python, stream=text).sort_stats("tottime").print_stats(40)
    table = recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60)
    path.write_text(f"{table}\n{text.getvalue()}")


def reason(error: BaseException) -> str:
    """The error in a line."""
    if isinstance(error, AssertionError) and not str(error):
        return f"AssertionError in {traceback.extract_tb(error.__traceback__)[-1].name}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


if __name__ == "__main__":
    main()
