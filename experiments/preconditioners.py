"""Iterations of block CG to 1e-4 for each preconditioner, on trained networks, and how structures' evidence compares.

python -m experiments.preconditioners            # digits: an MLP and a small conv net (or one: mlp, cnn)
python -m experiments.preconditioners spectrum   # why Kronecker factors do not help: a small MLP, by dense algebra
LAPWING_DATA=... python -m experiments.preconditioners resnet20   # pretrained, 64 images; llama: 64 × 16 tokens
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from experiments._arguments import Experiment
from torch import Tensor, nn

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from experiments import matrixfree
from lapwing.curvature.matrixfree import MatrixFree
from lapwing.linalg import Diagonal
from lapwing.linalg.operator import Operator
from lapwing.linalg.solvers import Preconditioner, conjugate_gradients, nystrom

ABOUT = {"paper": "003", "minutes": None, "page": "matrixfree.md"}

warnings.filterwarnings("ignore")
PRIORS = {"resnet20": 1.0, "llama": 1000.0}  # for the pretrained networks


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
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
) -> dict[str, Callable[[], Callable | None]]:
    """Name → a function that makes M⁻¹."""
    op, size = la.posterior.precision, la.params.size

    def jacobi() -> Callable:
        diagonal = op.diagonal().clamp(min=tau)  # where outputs are many it is an estimate, which can be negative
        return lambda v: v / diagonal

    def kronecker(name: str) -> Callable:
        return (fit(name).curvature.matrix + Diagonal(torch.full((size,), tau))).solve

    def by_products(rank: int) -> Callable:
        like, generator = torch.empty(0, size), torch.Generator().manual_seed(5)
        sketch = nystrom(lambda v: op.product.matvec(v).to(v.dtype), like, rank, generator)
        return Preconditioner(sketch, torch.tensor(tau, dtype=torch.float64)).solve

    def by_rows(rank: int) -> Callable:
        return fit(MatrixFree(rank=rank, probes=1, steps=1), tau).posterior.precision.preconditioner.solve

    made: dict[str, Callable] = {"none": lambda: None, "jacobi": jacobi}
    made |= {name: lambda name=name: kronecker(name) for name in ("kron", "ekfac")}
    for rank in ranks:
        made[f"nystrom {rank}"] = lambda rank=rank: by_products(rank)
        made[f"rows {rank}"] = lambda rank=rank: by_rows(rank)
    return made


def pretrained(name: str, tau: float, iterations: int, only: str) -> None:
    """ResNet-20 or the Llama: two columns, up to `iterations`; what is not reached is printed as the residual."""
    model, data, likelihood = matrixfree.resnet(20, 64) if name == "resnet20" else matrixfree.llama(64, 16)
    factors = {} if name == "resnet20" else {"kron": "mc", "ekfac": "mc"}
    fit = lambda structure, tau=tau: lapwing.fit(  # noqa: E731
        model, data, likelihood, structure=structure, prior=tau, factor=factors.get(structure, "ggn")
    )
    la = fit(MatrixFree(sketch="none", probes=1, steps=1))
    b = torch.randn(2, la.params.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    print(f"{name}, {la.params.size:,} weights, {la.n_data:g} data, prior {tau:g}", flush=True)
    ways = preconditioners(la, fit, tau, (32, 128))
    compare(la.posterior.precision, b, {k: way for k, way in ways.items() if only in k}, iterations)


def compare(op: Operator, b: Tensor, ways: dict[str, Callable], iterations: int) -> None:
    for label, make in ways.items():
        begin = time.process_time()
        solve = make()
        made = time.process_time() - begin
        wide = None if solve is None else (lambda v, solve=solve: solve(v).double())
        found = conjugate_gradients(
            op._apply, b, precondition=wide, tolerance=1e-4, iterations=iterations, unconverged="accept"
        )
        spent = time.process_time() - begin - made
        print(f"  {label:<12} {found.iterations:4d} iterations {spent:7.1f} s CPU, made in {made:6.1f} s, "
              f"residual {float(found.residuals.max()):.1e}", flush=True)  # fmt: skip


def spectrum(epochs: int, tau: float = 1.0) -> None:
    """Eigenvalues of M⁻¹A with Kronecker factors as they are, and with the prior put back in the null space of G."""
    data = datasets.digits()
    x, y = data.inputs[:100], data.targets[:100]
    torch.manual_seed(0)
    model = train(networks.mlp([64, 16, 16, 10]), x, y, epochs).double()
    fit = lambda structure: lapwing.fit(  # noqa: E731
        model, (x.double(), y), "classification", structure=structure, prior=tau
    )
    eye = torch.eye(fit("full").params.size, dtype=torch.float64)
    g = fit("full").curvature.matrix.matvec(eye)
    values, vectors = torch.linalg.eigh((g + g.T) / 2)
    inside, null = vectors[:, values > 1e-10 * values.max()], vectors[:, values <= 1e-10 * values.max()]
    print(f"{len(eye):,} weights, 100 data, prior {tau:g}: G has rank {inside.shape[1]}")
    b = torch.randn(4, len(eye), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrices = {"none": tau * eye, "jacobi": torch.diag(g.diagonal()) + tau * eye}
    matrices |= {name: fit(name).curvature.matrix.matvec(eye) + tau * eye for name in ("kron", "ekfac", "blockdiag")}
    for name, m in matrices.items():
        mended = inside @ (inside.T @ m @ inside) @ inside.T + tau * null @ null.T
        for label, each in ((name, m), (f"{name}, prior in null space", mended)):
            root = torch.linalg.cholesky((each + each.T) / 2)
            half = torch.linalg.solve_triangular(root, g + tau * eye, upper=False)
            found = torch.linalg.eigvalsh(torch.linalg.solve_triangular(root, half.T, upper=False))
            apart = int(((found / found.median()).log().abs() > 0.1).sum())
            outer = torch.linalg.eigvalsh(null.T @ each @ null) / tau
            inverse = torch.linalg.inv(each)
            steps = conjugate_gradients(
                lambda v: v @ (g + tau * eye), b, precondition=lambda v, m=inverse: v @ m, tolerance=1e-4
            ).iterations
            print(f"  {label:<28} M⁻¹A {float(found[0]):6.2g} … {float(found[-1]):6.2g}, {apart:4d} eigenvalues 10 % "
                  f"from the median; M/τ in the null space to {float(outer[-1]):.2g}; {steps} iterations")  # fmt: skip


def main() -> None:
    parser = Experiment(__doc__, smoke={"what": "mlp", "data": 50, "epochs": 1, "iterations": 5})
    parser.add_argument("what", nargs="?", choices=["mlp", "cnn", "spectrum", *PRIORS], help="all of digits without")
    parser.add_argument("prior", nargs="?", type=float, help="precision for resnet20 (1) and llama (1000)")
    parser.add_argument("only", nargs="?", default="", help="a part of a preconditioner's name, for these two")
    parser.add_argument("--data", type=int, default=500, help="digits")
    parser.add_argument("--epochs", type=int, default=40, help="of training on digits")
    parser.add_argument("--iterations", type=int, default=400, help="of block CG on digits, at most")
    given = parser.parse_args()
    if given.what in PRIORS:
        return pretrained(given.what, given.prior or PRIORS[given.what], 60, given.only)
    if given.what == "spectrum":
        return spectrum(given.epochs)
    data = datasets.digits()
    x, y = data.inputs[: given.data], data.targets[: given.data]
    torch.manual_seed(0)
    chosen = {"mlp 64-64-64-10": networks.mlp([64, 64, 64, 10]), "small cnn": networks.small_cnn()}
    for name, model in chosen.items():
        if given.what and given.what not in name:
            continue
        train(model, x, y, given.epochs)
        fit = lambda structure, tau=1.0, model=model: lapwing.fit(  # noqa: E731
            model, (x, y), "classification", structure=structure, prior=tau
        )
        for tau in (1.0, 0.01):
            la = fit(MatrixFree(rank=1, probes=1, steps=1), tau)
            op = la.posterior.precision
            b = torch.randn(4, la.params.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            print(f"{name}, {la.params.size:,} weights, {given.data} data, prior {tau:g}", flush=True)
            compare(op, b, preconditioners(la, fit, tau), given.iterations)
        print("  evidence and mean predictive variance of structures, prior 1")
        for structure in ("diag", "kron", "ekfac", MatrixFree(rank=500, predictive="sketch", probes=4)):
            la = fit(structure)
            spread = float(la.predict(data.inputs[500:600]).function.variance.mean())
            print(f"  {la.curvature.structure.name:<12} {float(la.log_evidence()):12.2f} {spread:10.4g}", flush=True)


if __name__ == "__main__":
    main()
