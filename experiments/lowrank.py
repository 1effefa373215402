"""Three ways to a low-rank curvature: one pass over rows, randomized Nyström, block Lanczos. Trace kept and CPU time.

python -m experiments.lowrank
"""

from __future__ import annotations

import time
import warnings

import torch
from experiments._arguments import Experiment
from experiments.preconditioners import train

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.linalg.krylov import largest_eigenpairs
from lapwing.linalg.solvers import nystrom

ABOUT = {"paper": "003", "minutes": None, "page": "matrixfree.md"}

warnings.filterwarnings("ignore")


def main() -> None:
    parser = Experiment(__doc__, smoke={"data": 50, "epochs": 1, "ranks": [4]})
    parser.add_argument("--data", type=int, default=500, help="digits")
    parser.add_argument("--epochs", type=int, default=40, help="of training")
    parser.add_argument("--ranks", type=int, nargs="+", default=[20, 100])
    given = parser.parse_args()
    data = datasets.digits()
    x, y = data.inputs[: given.data], data.targets[: given.data]
    model = train(networks.small_cnn(), x, y, given.epochs)
    la = lapwing.fit(model, (x, y), "classification", structure=MatrixFree(rank=1, probes=1, steps=1))
    product = la.curvature.matrix.product
    whole = float(product.diagonal().sum())
    print(f"small cnn, {la.params.size:,} weights, {given.data} data, trace {whole:.4g}")
    like = torch.empty(0, la.params.size)
    for rank in given.ranks:
        start = torch.randn(20, la.params.size, generator=torch.Generator().manual_seed(1))
        ways = {
            "rows, one pass": lambda r=rank: (
                lapwing.fit(model, (x, y), "classification", structure=lapwing.LowRank(r)).curvature.matrix.values
            ),
            "nystrom": lambda r=rank: (
                nystrom(lambda v: product.matvec(v).to(v.dtype), like, r, torch.Generator().manual_seed(0)).values
            ),
            "block lanczos": lambda r=rank, s=start: (
                largest_eigenpairs(
                    lambda v: product.matvec(v).to(v.dtype), s, r, tolerance=1e-3, steps=30, unconverged="accept"
                ).values
            ),
        }
        for name, run in ways.items():
            begin = time.process_time()
            kept = float(run().sum())
            print(
                f"  rank {rank:<4} {name:<15} trace kept {kept / whole:.4%}  {time.process_time() - begin:6.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
