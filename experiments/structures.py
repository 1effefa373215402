"""How far structures are from the exact GGN of a pretrained ResNet-20: evidence and predictive variance by prior.

LAPWING_DATA=... python -m experiments.structures --data 256 --figure docs/figures/structures.png

Full and block-diagonal curvature are exact, by the kernels of the Jacobian rows of all 269,722 weights and of every
block; rows that together hold 1e-6 of the trace are left out. The matrix-free estimate is checked against them.
Needs LAPWING_DATA.
"""

from __future__ import annotations

import time
import warnings

import torch
from experiments._arguments import Experiment
from torch import Tensor

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.curvature import GGN, pose
from lapwing.curvature.onepass import pass_over
from lapwing.likelihoods import Categorical
from lapwing.linalg import Jacobian
from lapwing.model import Batches, Network, Params
from lapwing.predictive.linearized import Linearized

ABOUT = {"paper": "003", "minutes": None, "page": "matrixfree.md", "picture": "../figures/structures.png"}

warnings.filterwarnings("ignore")
PRIORS = (1.0, 10.0, 100.0, 1000.0)
NEGLIGIBLE = 1e-6


def rows_of(jacobian: Jacobian) -> list[Tensor]:
    """The rows of every block, (n·r, p)."""
    return [part.dense().flatten(0, 1).detach() for part in jacobian.rows]


def weighty(parts: list[Tensor]) -> list[Tensor]:
    squares = torch.stack([part.double().square().sum(-1) for part in parts]).sum(0)
    order = squares.argsort()
    keep = order[squares[order].cumsum(0) > NEGLIGIBLE * squares.sum()]
    return [part[keep] for part in parts]


def kernel(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for x, y in zip(a.split(8192, 1), b.split(8192, 1)):
        total += x @ y.T
    return total


def exact(k: Tensor, cross: Tensor, own: Tensor) -> tuple[list[float], list[Tensor]]:
    """log|H| − log|Π| and variances under every prior, from K = ΦΦᵀ, C = JΦᵀ and diag JJᵀ."""
    values, vectors = torch.linalg.eigh((k + k.T) / 2)
    values, inside = values.clamp(min=0), (cross @ vectors).square()
    ratios = [float((values / tau).log1p().sum()) for tau in PRIORS]
    return ratios, [(own - inside @ (1 / (values + tau))) / tau for tau in PRIORS]


def main() -> None:
    parser = Experiment(__doc__, smoke={"data": 3, "test": 2, "rank": 8})
    parser.add_argument("--data", type=int, default=256)
    parser.add_argument("--test", type=int, default=24)
    parser.add_argument("--rank", type=int, default=256, help="of the matrix-free sketch")
    parser.add_argument("--figure")
    arguments = parser.parse_args()
    train, test = datasets.images("cifar10", "train")[: arguments.data], datasets.images("cifar10", "test")
    x, y = networks.standardize(train.inputs), train.targets
    held_out = networks.standardize(test.inputs[: arguments.test])
    model = networks.pretrained_resnet(20)
    data = list(zip(x.split(32), y.split(32)))
    results: dict[str, tuple[list[float], list[Tensor]]] = {}

    begin = time.process_time()
    names = tuple(n for n, _ in model.named_parameters())
    network = Network(model, Params.of(model, names), Categorical().outputs)
    problem = pose(network, Batches(data, model, torch.device("cpu")), Categorical(), GGN())
    kept: list[list[Tensor]] = []
    squares = []

    def update(jacobian: Jacobian, fresh: Tensor | None) -> None:
        parts = weighty(rows_of(jacobian))
        kept.append(parts)
        squares.append(torch.cat([part.double().square().sum(0) for part in parts]))

    pass_over(problem, update)
    blocks = [torch.cat(parts) for parts in zip(*kept)]
    at = Linearized(network, problem.plan, None, None, 2**30)  # type: ignore[arg-type]
    tests = [torch.cat(parts) for parts in zip(*(rows_of(rows) for _, rows in at.jacobians(held_out)))]
    size = sum(block.shape[1] for block in blocks)
    print(f"{len(blocks[0]):,} rows of {size:,} weights, {time.process_time() - begin:.0f} s CPU", flush=True)

    whole: list[Tensor] = []
    for phi, jac in zip(blocks, tests):
        parts = [kernel(phi, phi), kernel(jac, phi), jac.double().square().sum(-1)]
        ratio, variance = exact(*parts)
        if not whole:
            whole, results["block"] = parts, (ratio, variance)
        else:
            whole = [a + b for a, b in zip(whole, parts)]
            before = results["block"]
            results["block"] = (
                [a + b for a, b in zip(before[0], ratio)], [a + b for a, b in zip(before[1], variance)]
            )  # fmt: skip
    results["exact"] = exact(*whole)
    diagonal = torch.stack(squares).sum(0)
    flat = torch.cat(tests, 1).double().square()
    results["diag"] = (
        [float((diagonal / tau).log1p().sum()) for tau in PRIORS], [flat @ (1 / (diagonal + tau)) for tau in PRIORS]
    )  # fmt: skip
    print(f"exact, block and diag: {time.process_time() - begin:.0f} s CPU", flush=True)
    del blocks, tests, flat
    kept.clear()

    for name, structure in (
        ("kron expand", lapwing.Kron("expand")), ("kron reduce", lapwing.Kron("reduce")), ("ekfac", lapwing.EKFAC()),
    ):  # fmt: skip
        la = lapwing.fit(model, data, "classification", structure=structure)
        each = [la.replace(prior=tau) for tau in PRIORS]
        ratio = [float(it.posterior.precision.logdet()) - it.params.size * torch.tensor(t).double().log().item()
                 for it, t in zip(each, PRIORS)]  # fmt: skip
        results[name] = ratio, [it.predict(held_out).function.variance.double().flatten() for it in each]
        print(f"{name}: {time.process_time() - begin:.0f} s CPU", flush=True)

    print(f"\nlog|H| − log|Π| and, below, mean predictive variance over exact (and the median ratio); prior {PRIORS}")
    truth = results["exact"]
    for name, (ratio, variance) in results.items():
        print(f"{name:<12}" + "".join(f"{value:14.1f}" for value in ratio))
        shares = [(float(v.mean() / w.mean()), float((v / w).median())) for v, w in zip(variance, truth[1])]
        print(" " * 12 + "".join(f"{mean:8.3f} {median:5.2f}" for mean, median in shares))

    structure = lapwing.MatrixFree(rank=arguments.rank, probes=4, steps=5)
    la = lapwing.fit(model, data, "classification", structure=structure, prior=10.0)
    found = la.posterior.precision.ratio_estimate()
    print(f"matrix-free at prior 10: {float(found.value):.2f} ± {float(found.error):.2g}, exact {truth[0][1]:.2f}")
    if arguments.figure:
        draw(results, arguments.figure)


def draw(results: dict, path: str) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    truth = results["exact"]
    for name, (ratio, variance) in results.items():
        style = {"color": "black", "lw": 2} if name == "exact" else {"marker": "o", "ms": 3}
        left.loglog(PRIORS, ratio, label=name, **style)
        right.loglog(PRIORS, [float(v.mean() / w.mean()) for v, w in zip(variance, truth[1])], label=name, **style)
    left.set(xlabel="prior precision", ylabel="log|H| − log|Π|, nats")
    right.set(xlabel="prior precision", ylabel="predictive variance / exact")
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
