"""How far structures are from the exact GGN of a pretrained ResNet-20: evidence and predictive variance by prior.

    python -m experiments.structures --data 256 [--out DIR]

Full and block-diagonal curvature are exact, by the kernels of the Jacobian rows of all 269,722 weights and of every
block; rows that together hold 1e-6 of the trace are left out. The matrix-free estimate is checked against them. The
seed draws the images.
Needs LAPWING_DATA.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._results import Claim, Scores, answered
from experiments._study import study, told
from torch import Tensor, nn

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing.curvature import GGN, pose
from lapwing.curvature.onepass import pass_over
from lapwing.likelihoods import Categorical
from lapwing.linalg import Jacobian
from lapwing.model import Batches, Network, Params
from lapwing.predictive.predictive import Linearized

ABOUT = {
    "paper": "003",
    "minutes": 1.3,
    "quick": 0.3,
    "page": "without_a_matrix.md",
    "picture": "../figures/structures.png",
}

warnings.filterwarnings("ignore")
PRIORS = (1.0, 10.0, 100.0, 1000.0)
NEGLIGIBLE = 1e-6
RATIO, VARIANCE = KEYS = "log-det ratio, prior ", "variance, prior "
FREE = "matrix-free"


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


def by_kernels(model: nn.Module, data: list, held_out: Tensor) -> dict[str, tuple[list[float], list[Tensor]]]:
    """log|H| − log|Π| and predictive variances under every prior: exact, block-diagonal and diagonal."""
    network = Network(model, Params.of(model, tuple(n for n, _ in model.named_parameters())), Categorical().outputs)
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
    each = [
        [kernel(phi, phi), kernel(jac, phi), jac.double().square().sum(-1)] for phi, jac in zip(blocks, tests)
    ]  # the kernels of a block, and those of all weights, which are their sums
    found = [exact(*parts) for parts in each]
    diagonal, flat = torch.stack(squares).sum(0), torch.cat(tests, 1).double().square()
    return {
        "exact": exact(*(sum(parts[1:], start=parts[0]) for parts in zip(*each))),
        "block": ([sum(values) for values in zip(*(ratio for ratio, _ in found))],
                  [torch.stack(values).sum(0) for values in zip(*(variance for _, variance in found))]),
        "diag": ([float((diagonal / tau).log1p().sum()) for tau in PRIORS],
                 [flat @ (1 / (diagonal + tau)) for tau in PRIORS]),
    }  # fmt: skip


def run(seed: int, given: argparse.Namespace) -> Scores:
    generator = torch.Generator().manual_seed(seed)
    train = datasets.images("cifar10", "train").split(given.data, generator=generator)[0]
    test = datasets.images("cifar10", "test").split(given.test, generator=generator)[0]
    x, held_out = networks.standardize(train.inputs), networks.standardize(test.inputs)
    model, data = networks.pretrained_resnet(20), list(zip(x.split(32), train.targets.split(32)))
    results = by_kernels(model, data, held_out)
    for name, structure in (
        ("kron expand", lapwing.Kron("expand")), ("kron reduce", lapwing.Kron("reduce")), ("ekfac", lapwing.EKFAC()),
    ):  # fmt: skip
        la = lapwing.fit(model, data, "classification", structure=structure)
        each = [la.replace(prior=tau) for tau in PRIORS]
        ratio = [float(it.posterior.precision.logdet()) - it.params.size * torch.tensor(t).double().log().item()
                 for it, t in zip(each, PRIORS)]  # fmt: skip
        results[name] = ratio, [it.predict(held_out).function.variance.double().flatten() for it in each]
    truth, rows = results["exact"], {}
    for name, (ratio, variance) in results.items():
        rows[name] = {f"{RATIO}{tau:g}": value for tau, value in zip(PRIORS, ratio)} | {
            f"{VARIANCE}{tau:g}": float(v.mean() / w.mean()) for tau, v, w in zip(PRIORS, variance, truth[1])
        }
    structure = lapwing.MatrixFree(rank=given.rank, probes=4, steps=5)
    estimate = lapwing.fit(model, data, "classification", structure=structure, prior=PRIORS[1])
    rows[FREE] = {f"{RATIO}{PRIORS[1]:g}": float(estimate.posterior.precision.ratio_estimate().value)}
    return rows


def judge(mean: Scores) -> list[Claim]:
    ratio, variance = ({name: cells.get(f"{key}{PRIORS[1]:g}") for name, cells in mean.items()} for key in KEYS)
    off = abs(ratio[FREE] / ratio["exact"] - 1)
    spread = {name: value for name, value in variance.items() if value is not None and name != "exact"}
    order = {name: abs(math.log(value)) for name, value in spread.items()}
    return [
        answered(
            "Does the matrix-free estimate of the log determinant agree with the exact one?",
            f"At prior 10 the matrix-free estimate of log|H| − log|Π| is {ratio[FREE]:.1f}, the exact value "
            f"{ratio['exact']:.1f}.",
            "the two differ by less than 1 %.",
            off < 0.01,
        ),
        answered(
            "Are Kronecker factors closer to the exact predictive variance than the diagonal?",
            f"Mean predictive variance over the exact one, prior 10: {told(spread)}.",
            "three parts: for `kron expand`, `kron reduce` and `ekfac`, the logarithm of that ratio is nearer to zero "
            "than for `diag`.",
            *(order[name] < order["diag"] for name in ("kron expand", "kron reduce", "ekfac")),
        ),
    ]


def figure(each: Mapping[str, Mapping[str, list[float]]]) -> Any:
    """Log determinants and predictive variances against the prior, means over seeds."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, key, label in zip(canvas.subplots(1, 2), KEYS, ("log|H| − log|Π|, nats", "predictive variance / exact")):
        for name, cells in each.items():
            style = {"color": "black", "lw": 2} if name == "exact" else {"marker": "o", "ms": 3}
            found = {tau: cells[f"{key}{tau:g}"] for tau in PRIORS if f"{key}{tau:g}" in cells}
            if found:
                axes.semilogx(list(found), [sum(v) / len(v) for v in found.values()], label=name, **style)
        axes.set(xlabel="prior precision", ylabel=label, yscale="log" if key == RATIO else "linear")
        axes.legend(frameon=False, fontsize=8)
    return canvas


if __name__ == "__main__":
    parser = Experiment(
        __doc__, smoke={"data": 2, "test": 1, "rank": 4}, quick={"data": 16, "test": 4, "rank": 32}, seeds=3
    )
    parser.add_argument("--data", type=int, default=64)
    parser.add_argument("--test", type=int, default=8)
    parser.add_argument("--rank", type=int, default=256, help="of the matrix-free sketch")
    study("structures", ABOUT, "Structures beside the exact GGN", run, judge, parser.parse_args(), figure=figure)
