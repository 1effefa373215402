"""Three ways to a low-rank curvature: one pass over rows, randomized Nyström, block Lanczos. Trace kept and CPU time.

    python -m experiments.lowrank [--ranks 20 100] [--seeds 3] [--out DIR]

A small convolutional network trained on digits. Every way returns eigenvalues of the GGN's low-rank part; the share of
the exact trace that they add up to is what it keeps.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from experiments._arguments import Experiment
from experiments._results import Claim, Scores, answered
from experiments._study import study, told
from experiments.preconditioners import train

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.linalg.krylov import largest_eigenpairs
from lapwing.linalg.solvers import nystrom

ABOUT = {"paper": "003", "minutes": 0.5, "quick": 0.1, "page": "without_a_matrix.md"}

warnings.filterwarnings("ignore")


ROWS = "rows, one pass"


def run(seed: int, given: argparse.Namespace) -> Scores:
    """Share of the trace and CPU seconds, by rank and way."""
    data = datasets.digits().split(given.data, generator=torch.Generator().manual_seed(seed))[0]
    x, y = data.inputs, data.targets
    torch.manual_seed(seed)
    model = train(networks.small_cnn(), x, y, given.epochs)
    la = lapwing.fit(model, (x, y), "classification", structure=MatrixFree(rank=1, probes=1, steps=1))
    product = la.curvature.matrix.product
    whole, like = float(product.diagonal().sum()), torch.empty(0, la.params.size)
    matvec = lambda v: product.matvec(v).to(v.dtype)  # noqa: E731
    rows = {}
    for rank in given.ranks:
        start = torch.randn(20, la.params.size, generator=torch.Generator().manual_seed(seed + 1))
        ways = {
            ROWS: lambda r=rank: (
                lapwing.fit(model, (x, y), "classification", structure=lapwing.LowRank(r)).curvature.matrix.values
            ),
            "Nyström": lambda r=rank: nystrom(matvec, like, r, torch.Generator().manual_seed(seed)).values,
            "block Lanczos": lambda r=rank, s=start: (
                largest_eigenpairs(matvec, s, r, tolerance=1e-3, steps=30, unconverged="accept").values
            ),
        }
        for name, way in ways.items():
            begin = time.process_time()
            kept = float(way().sum())
            rows[f"rank {rank}, {name}"] = {"trace kept": kept / whole, "CPU s": time.process_time() - begin}
    return rows


def judge(mean: Scores) -> list[Claim]:
    most = {row: max(c["trace kept"] for r, c in mean.items() if r.split(",")[0] == row.split(",")[0]) for row in mean}
    least = {row: min(c["CPU s"] for r, c in mean.items() if r.split(",")[0] == row.split(",")[0]) for row in mean}
    rows = {row: cells for row, cells in mean.items() if row.endswith(ROWS)}
    return [
        answered(
            "Does one pass over the rows keep as much as iterations do, for less time?",
            f"Share of the trace that is kept: {told({row: cells['trace kept'] for row, cells in mean.items()})}. CPU "
            f"seconds: {told({row: cells['CPU s'] for row, cells in mean.items()})}.",
            "at every rank, one pass over rows keeps at least 0.98 of what the best way keeps, and takes the least CPU "
            "time.",
            *(cells["trace kept"] >= 0.98 * most[row] for row, cells in rows.items()),
            *(cells["CPU s"] <= least[row] for row, cells in rows.items()),
        )
    ]


if __name__ == "__main__":
    parser = Experiment(
        __doc__, smoke={"data": 50, "epochs": 1, "ranks": [4]}, quick={"data": 300, "epochs": 20, "ranks": [20]},
        seeds=3,
    )  # fmt: skip
    parser.add_argument("--data", type=int, default=500, help="digits")
    parser.add_argument("--epochs", type=int, default=40, help="of training")
    parser.add_argument("--ranks", type=int, nargs="+", default=[20, 100])
    study("lowrank", ABOUT, "Ways to a low-rank curvature", run, judge, parser.parse_args())
