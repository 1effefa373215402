"""Iterations of block CG to 1e-4 for each preconditioner, on trained networks, and how structures' evidence compares.

python experiments/preconditioners.py            # digits: an MLP and a small conv net (or one: mlp, cnn)
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import lapwing
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.interfaces import datasets, networks
from lapwing.linalg import Diagonal
from lapwing.linalg.krylov import Preconditioner, conjugate_gradients, nystrom

warnings.filterwarnings("ignore")


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 40) -> nn.Module:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


def preconditioners(la: lapwing.Laplace, fit: Callable[[str], lapwing.Laplace], tau: float) -> dict[str, Callable]:
    op = la.posterior.precision
    diagonal = op.diagonal()
    size = la.params.size
    like = torch.empty(0, size)
    found: dict[str, Callable] = {"none": None, "jacobi": lambda v: v / diagonal}  # type: ignore[dict-item]
    for name in ("kron", "ekfac"):
        found[name] = (fit(name).curvature.matrix + Diagonal(torch.full((size,), tau))).solve
    for rank in (50, 200):
        sketch = nystrom(lambda v: op.product.matvec(v).to(v.dtype), like, rank, torch.Generator().manual_seed(5))
        found[f"nystrom {rank}"] = Preconditioner(sketch, torch.tensor(tau, dtype=torch.float64)).solve
        rows = lapwing.fit(la.module, la.curvature.matrix.product.problem.batches.data, "classification",
                           structure=MatrixFree(rank=rank, probes=1, steps=1), prior=tau)  # fmt: skip
        found[f"rows {rank}"] = rows.posterior.precision.preconditioner.solve
    return found


def main() -> None:
    data = datasets.digits()
    x, y = data.inputs[:500], data.targets[:500]
    chosen = {"mlp 64-64-64-10": networks.mlp([64, 64, 64, 10]), "small cnn": networks.small_cnn()}
    for name, model in chosen.items():
        if sys.argv[1:] and sys.argv[1] not in name:
            continue
        train(model, x, y)
        fit = lambda structure, tau=1.0, model=model: lapwing.fit(  # noqa: E731
            model, (x, y), "classification", structure=structure, prior=tau
        )
        for tau in (1.0, 0.01):
            la = fit(MatrixFree(rank=1, probes=1, steps=1), tau)
            op = la.posterior.precision
            b = torch.randn(4, la.params.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            print(f"{name}, {la.params.size:,} weights, 500 data, prior {tau:g}", flush=True)
            for label, solve in preconditioners(la, fit, tau).items():
                begin = time.perf_counter()
                wide = None if solve is None else (lambda v, solve=solve: solve(v).double())
                found = conjugate_gradients(
                    op._apply, b, precondition=wide, tolerance=1e-4, iterations=400, unconverged="accept"
                )
                print(f"  {label:<12} {found.iterations:4d} iterations {time.perf_counter() - begin:7.1f} s "
                      f"residual {float(found.residuals.max()):.1e}", flush=True)  # fmt: skip
        print("  evidence and mean predictive variance of structures, prior 1")
        for structure in ("diag", "kron", "ekfac", MatrixFree(rank=500, predictive="sketch", probes=4)):
            la = fit(structure)
            spread = float(la.predict(data.inputs[500:600]).function.variance.mean())
            print(f"  {la.curvature.structure.name:<12} {float(la.log_evidence()):12.2f} {spread:10.4g}", flush=True)


if __name__ == "__main__":
    main()
