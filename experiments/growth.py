"""Growth of time and memory of matrix-free posteriors with weights, data and rank, on a log–log picture.

    python -m experiments.growth [--seeds 3] [--out DIR]

An MLP 64-w-w-10 on digits (repeated with noise where more are asked for), not trained; CPU seconds and peak memory
above the resting process, each point in a process of its own; products and solves after a first product. One axis
varies at a time around width 128, 500 data and rank 32.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed
from experiments._results import Claim, Result, spread, verdict

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "003", "minutes": 4, "quick": 0.49, "page": "without_a_matrix.md", "picture": "../figures/growth.png"}

warnings.filterwarnings("ignore")
AXES = {
    "weights": [(w, 500, 32) for w in (32, 128, 256, 512)],
    "data": [(128, n, 32) for n in (125, 500, 1000, 2000)],
    "rank": [(128, 500, r) for r in (8, 32, 64, 128)],
}


COSTS = ("fit s", "product s", "solve s", "peak MB")


def measure(width: int, n: int, rank: int, seed: int, results: multiprocessing.Queue) -> None:
    """Put costs of one setting into the queue; seconds of products and solves are per column."""
    torch.manual_seed(seed)
    data = datasets.digits()
    rows = torch.arange(n) % len(data.inputs)
    x, y = data.inputs[rows] + 0.01 * torch.randn(n, *data.inputs.shape[1:]), data.targets[rows]
    model = networks.mlp([64, width, width, 10])
    rest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = [time.process_time()]
    structure = lapwing.MatrixFree(rank=rank, unconverged="warn")
    la = lapwing.fit(model, list(zip(x.split(250), y.split(250))), "classification", structure=structure, prior=1.0)
    fitted = time.process_time() - times[0]
    v = torch.randn(4, la.params.size, dtype=torch.float64)
    la.curvature.matrix.product.matvec(v)  # warm-up of forward mode
    times = [time.process_time()]
    la.curvature.matrix.product.matvec(v)
    times.append(time.process_time())
    found = la.posterior.precision.solution(v)
    times.append(time.process_time())
    product, solve = (b - a for a, b in pairwise(times))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rest) / 1e3
    costs = dict(zip(COSTS, (fitted, product / 4, solve / 4, peak)))
    results.put(
        {"width": width, "data": n, "rank": rank, "weights": la.params.size, **costs, "steps": found.iterations}
    )


Points = dict[str, list[dict[str, float]]]


def run(seed: int, given: Any) -> Points:
    """Costs of each setting, by the axis that varies."""
    context = multiprocessing.get_context("spawn")
    points: Points = {}
    for axis in given.axes:
        for setting in AXES[axis][: given.points]:
            results = context.Queue()
            process = context.Process(target=measure, args=(*setting, seed, results))
            process.start()
            found = results.get()
            process.join()
            points.setdefault(axis, []).append(found)
            print(f"{axis}: " + "  ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
    return points


def exponents(points: Points) -> dict[str, dict[str, float]]:
    """Slopes of the logarithm of each cost against that of the axis, from the first to the last point."""

    def slope(rows: list[dict[str, float]], axis: str, cost: str) -> float:
        (x, y), (u, v) = ((math.log(row[axis]), math.log(max(row[cost], 1e-6))) for row in (rows[0], rows[-1]))
        return (v - y) / (u - x)

    return {axis: {c: slope(rows, axis, c) for c in COSTS} for axis, rows in points.items() if len(rows) > 1}


def claims(grown: Mapping[str, Mapping[str, list[float]]], steps: list[float]) -> list[Claim]:
    """What the slides say, judged by rules that are stated."""
    mean = {axis: {cost: sum(v) / len(v) for cost, v in row.items()} for axis, row in grown.items()}
    linear = {axis: mean[axis]["product s"] for axis in ("weights", "data") if axis in mean}
    memory = {"weights": mean["weights"]["peak MB"]} if "weights" in mean else {}
    told = lambda values: ", ".join(f"{axis} {value:.2f}" for axis, value in values.items())  # noqa: E731
    return [
        Claim(
            "But Matrix-Vector Products are cheap",
            "the slide of that title",
            f"Time of a product grows with powers of {told(linear) or 'nothing (one point)'}; memory of a posterior "
            f"with {told(memory) or 'nothing (one point)'}.",
            verdict(all(value < 1.2 for value in linear.values()), all(value < 1.2 for value in memory.values())),
            "cheap means that time grows at most linearly with weights and with data, and memory with weights: powers "
            "below 1.2. A matrix would need the second power.",
        ),
        Claim(
            "We can use Iterative Solvers!",
            "the same slide",
            f"Steps of conjugate gradients to 1e-4, least and most of all settings: {min(steps):g} and {max(steps):g}.",
            verdict(max(steps) < 1000),
            "fewer than 1,000 steps everywhere, where a direct method needs as many as there are weights.",
        ),
    ]


def figure(runs: Sequence[Points]) -> Any:
    """Costs against weights, data and rank, with logarithmic axes: means over seeds, and a dot per seed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    canvas = Figure(figsize=(11, 3.8), layout="constrained")
    panels = canvas.subplots(1, len(runs[0]), sharey=True, squeeze=False)[0]
    for axis, plot in zip(runs[0], panels):
        at = [row[axis] for row in runs[0][axis]]
        for cost in COSTS:
            scale, label = (0.01, "peak memory, 100 MB") if cost == "peak MB" else (1.0, f"{cost[:-2]}, s")
            each = [[scale * row[cost] for row in run[axis]] for run in runs]
            (line,) = plot.loglog(at, [sum(values) / len(values) for values in zip(*each)], label=label)
            for values in each:
                plot.plot(at, values, ".", color=line.get_color(), ms=5)
        plot.set(xlabel=axis)
        plot.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel("cost")
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COSTS), frameon=False)
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("growth", run, given)
    grown = [exponents(each) for each in runs]
    powers = {a: {cost: [one[a][cost] for one in grown] for cost in COSTS} for a in grown[0]}
    rows = [
        {"varied": axis, **{key: value for key, value in first.items() if key not in (*COSTS, "steps")},
         **{key: spread([each[axis][k][key] for each in runs]) for key in (*COSTS, "steps")}}
        for axis, found in runs[0].items()
        for k, first in enumerate(found)
    ]  # fmt: skip
    steps = [row["steps"] for each in runs for found in each.values() for row in found]
    command = f"python -m experiments.growth --seeds {given.seeds}"
    result = (
        Result("growth", "Growth of matrix-free posteriors", ABOUT["paper"],
               f"{command} --axes {' '.join(given.axes)} --points {given.points}", list(seeds))
        .with_rows(rows)
        .with_claims(*claims(powers, steps))
        .with_sentence(
            "Powers with which costs grow: "
            + "; ".join(
                f"with {axis} " + ", ".join(f"{cost} {sum(v) / len(v):.2f}" for cost, v in row.items())
                for axis, row in powers.items()
            )
            + "."
        )
        .with_notes(
            "An MLP 64-w-w-10 on digits, not trained; the prior precision is 1. One of weights, data and rank varies "
            "at a time around width 128, 500 data and rank 32. Seconds are CPU seconds, of products and solves per "
            "column; memory is what the process needs at most above its rest. ± is the standard deviation over seeds; "
            "lines of the figure are means, dots are seeds.",
            "The rules were written after an earlier run without them was seen ([that page](without_a_matrix.md)).",
        )
    )  # fmt: skip
    result.with_data(points=runs, powers=powers).finish(given.out, lambda: figure(runs))


if __name__ == "__main__":
    parser = Experiment(__doc__, smoke={"axes": ["weights"], "points": 1}, quick={"points": 2}, seeds=3)
    parser.add_argument("--axes", nargs="+", choices=tuple(AXES), default=list(AXES))
    parser.add_argument("--points", type=int, default=4, help="points of each axis")
    main(parser.parse_args())
