"""Iterations of block CG to 1e-4 for each preconditioner, on trained networks, and how structures' evidence compares.

python experiments/preconditioners.py            # digits: an MLP and a small conv net (or one: mlp, cnn)
LAPWING_DATA=... python experiments/preconditioners.py resnet20   # pretrained, 16 images, and llama: 8 sequences
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable

import torch
from experiments import matrixfree
from torch import Tensor, nn

import lapwing
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.interfaces import datasets, networks
from lapwing.linalg import Diagonal
from lapwing.linalg.krylov import Preconditioner, conjugate_gradients, nystrom
from lapwing.linalg.operator import Operator

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


def preconditioners(
    la: lapwing.Laplace, fit: Callable[..., lapwing.Laplace], tau: float, ranks: tuple[int, ...] = (50, 200)
) -> dict[str, Callable]:
    op = la.posterior.precision
    diagonal = op.diagonal()
    size = la.params.size
    like = torch.empty(0, size)
    found: dict[str, Callable] = {"none": None, "jacobi": lambda v: v / diagonal}  # type: ignore[dict-item]
    for name in ("kron", "ekfac"):
        found[name] = (fit(name).curvature.matrix + Diagonal(torch.full((size,), tau))).solve
    for rank in ranks:
        sketch = nystrom(lambda v: op.product.matvec(v).to(v.dtype), like, rank, torch.Generator().manual_seed(5))
        found[f"nystrom {rank}"] = Preconditioner(sketch, torch.tensor(tau, dtype=torch.float64)).solve
        rows = fit(MatrixFree(rank=rank, probes=1, steps=1), tau)
        found[f"rows {rank}"] = rows.posterior.precision.preconditioner.solve
    return found


def pretrained(name: str, iterations: int = 80) -> None:
    """ResNet-20 or the Llama: two columns, up to `iterations`; what is not reached is printed as the residual."""
    model, data, likelihood = matrixfree.resnet(20, 16) if name == "resnet20" else matrixfree.llama(8)
    factors = {} if name == "resnet20" else {"kron": "mc", "ekfac": "mc"}
    fit = lambda structure, tau: lapwing.fit(  # noqa: E731
        model, data, likelihood, structure=structure, prior=tau, factor=factors.get(structure, "ggn")
    )
    for tau in (100.0,):
        la = fit(MatrixFree(rank=1, probes=1, steps=1), tau)
        b = torch.randn(2, la.params.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        print(f"{name}, {la.params.size:,} weights, {la.n_data:g} data, prior {tau:g}", flush=True)
        ways = preconditioners(la, lambda s, tau=tau: fit(s, tau), tau, (32, 128))
        compare(la.posterior.precision, b, ways, iterations)


def compare(op: Operator, b: Tensor, ways: dict[str, Callable], iterations: int) -> None:
    for label, solve in ways.items():
        begin = time.process_time()
        wide = None if solve is None else (lambda v, solve=solve: solve(v).double())
        found = conjugate_gradients(
            op._apply, b, precondition=wide, tolerance=1e-4, iterations=iterations, unconverged="accept"
        )
        print(f"  {label:<12} {found.iterations:4d} iterations {time.process_time() - begin:7.1f} s CPU "
              f"residual {float(found.residuals.max()):.1e}", flush=True)  # fmt: skip


def main() -> None:
    if sys.argv[1:] in (["resnet20"], ["llama"]):
        return pretrained(sys.argv[1])
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
            compare(op, b, preconditioners(la, fit, tau), 400)
        print("  evidence and mean predictive variance of structures, prior 1")
        for structure in ("diag", "kron", "ekfac", MatrixFree(rank=500, predictive="sketch", probes=4)):
            la = fit(structure)
            spread = float(la.predict(data.inputs[500:600]).function.variance.mean())
            print(f"  {la.curvature.structure.name:<12} {float(la.log_evidence()):12.2f} {spread:10.4g}", flush=True)


if __name__ == "__main__":
    main()
