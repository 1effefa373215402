"""Growth of time and memory of matrix-free posteriors with weights, data and rank, on a log–log picture.

python -m experiments.growth --figure docs/figures/growth.png

An MLP 64-w-w-10 on digits (repeated with noise where more are asked for), not trained; CPU seconds and peak memory
above the resting process, each point in a process of its own; products and solves after a first product. One axis
varies at a time around width 128, 500 data and rank 32.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
import warnings
from itertools import pairwise

import torch
from experiments._arguments import Experiment

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "003", "minutes": None, "page": "matrixfree.md", "picture": "../figures/growth.png"}

warnings.filterwarnings("ignore")
AXES = {
    "weights": [(w, 500, 32) for w in (32, 128, 256, 512)],
    "data": [(128, n, 32) for n in (125, 500, 1000, 2000)],
    "rank": [(128, 500, r) for r in (8, 32, 64, 128)],
}


def run(width: int, n: int, rank: int, results: multiprocessing.Queue) -> None:
    torch.manual_seed(0)
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
    results.put((la.params.size, fitted, product / 4, solve / 4, found.iterations, peak))


def main() -> None:
    parser = Experiment(__doc__, smoke={"axes": ["weights"], "points": 1})
    parser.add_argument("--axes", nargs="+", choices=tuple(AXES), default=tuple(AXES))
    parser.add_argument("--points", type=int, default=4, help="points of each axis")
    parser.add_argument("--figure")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    points: dict[str, list] = {}
    for axis in arguments.axes:
        print(f"{axis}: width data rank | weights | fit s, product s, solve s a column (iterations) | peak MB")
        for setting in AXES[axis][: arguments.points]:
            results = context.Queue()
            process = context.Process(target=run, args=(*setting, results))
            process.start()
            found = results.get()
            process.join()
            points.setdefault(axis, []).append((setting, found))
            size, fit, product, solve, iterations, peak = found
            print(
                f"  {setting} {size:>8,} {fit:8.2f} {product:8.3f} {solve:8.3f} ({iterations}) {peak:8.0f}", flush=True
            )
    if arguments.figure:
        draw(points, arguments.figure)


def draw(points: dict[str, list], path: str) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
    for (axis, found), plot in zip(points.items(), axes):
        x = [result[0] if axis == "weights" else setting[1 if axis == "data" else 2] for setting, result in found]
        for column, label in ((1, "fit, s"), (2, "product, s"), (3, "solve to 1e-4, s"), (5, "peak memory, 100 MB")):
            scale = 0.01 if column == 5 else 1.0
            plot.loglog(x, [scale * result[column] for _, result in found], marker="o", ms=3, label=label)
        plot.set(xlabel=axis)
        plot.xaxis.set_minor_formatter(NullFormatter())
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
