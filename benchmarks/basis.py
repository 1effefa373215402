"""How good EKFAC's eigenbasis is by how little is left out of it: `python -m benchmarks.basis lenet --n 2048`.

Moments always drop nothing. *held* is the squared norm of the curvature on the diagonal of the basis, relative to that
of the whole basis: what is not held is the error of EKFAC in the Frobenius norm. *log-determinant*, at prior precision
1, is above that of the block-diagonal curvature by what EKFAC does not hold: the lower the better.
"""

import argparse

import torch

import lapwing
from benchmarks.workloads import WORKLOADS
from lapwing import EKFAC, GGN, MCFisher
from lapwing.linalg import BlockDiagonal, EigenKronecker

BASES = {"all": GGN(tolerance=0.0), "all but 1e-3": GGN(tolerance=1e-3), "all but 1e-2": GGN(tolerance=1e-2),
         "Monte Carlo": MCFisher()}  # fmt: skip


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.basis", description=__doc__)
    top.add_argument("workload", nargs="+", choices=WORKLOADS)
    top.add_argument("--n", type=int, default=512)
    options = top.parse_args()
    print("| network | N | basis from | held | log-determinant | more than with all |\n|---|---|---|---|---|---|")
    for name in options.workload:
        task, whole = WORKLOADS[name](options.n, 1), (0.0, 0.0)
        for words, basis in BASES.items():
            la = lapwing.fit(
                task.model, task.batches, "classification", structure=EKFAC(basis), factor=GGN(tolerance=0.0),
                prior=1.0, select=task.select, progress=False, generator=torch.Generator().manual_seed(0),
            )  # fmt: skip
            found = held(la), float(la.posterior.precision.logdet())
            whole = found if words == "all" else whole
            print(
                f"| {name} | {options.n:,} | {words} | {found[0] / whole[0]:.5f} | {found[1]:,.2f} "
                f"| {found[1] - whole[1]:+.3f} |",
                flush=True,
            )


def held(la: lapwing.Laplace) -> float:
    """Σ E² over all Kronecker blocks."""
    matrix = la.curvature.matrix
    assert isinstance(matrix, BlockDiagonal)
    return sum(float(b.values.double().square().sum()) for b in matrix.blocks if isinstance(b, EigenKronecker))


if __name__ == "__main__":
    main()
