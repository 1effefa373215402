"""Evidence per structure as lower bounds: is a structured Hessian's evidence below that of the full one?

    python -m experiments.evidence_bounds [--seeds 3] [--out docs/results]

Document 002: "Structured Hessian approximations yield lower bounds to the Laplace marglik". A block of a matrix has a
log-determinant no smaller than its share of the whole (Fischer), and so has a diagonal (Hadamard): `blockdiag`, `diag`
and `ekfac` (the diagonal in another basis) are bounds by a theorem. A Kronecker product is not made of entries of the
matrix, and is no bound. The log evidence of each structure is computed at the same weights and the same curvature of
the data, for prior precisions from 10⁻² to 10⁴ and during training, on three problems that allow the full matrix: a
regression (1-20-20-1), two moons (2-16-16-2) and 8×8 digits (64-12-10).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed
from experiments._mode import to_mode
from experiments._results import Claim, Result, gathered, spread, verdict
from experiments.underfitting import NOISE, draw
from torch import Tensor, nn

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks

ABOUT = {"paper": "002, Structured Laplace Approximations", "minutes": 3, "quick": 0.4}

STRUCTURES = ("full", "blockdiag", "ekfac", "kron", "diag")
THEOREMS = ("blockdiag", "ekfac", "diag")
ROUNDING = 1e-6  # of a nat per nat, by which a bound may be exceeded


def problems(given: Any, seed: int) -> dict[str, tuple[Any, tuple[Tensor, Tensor], nn.Module]]:
    """Likelihood, data and a fresh network by problem."""
    generator = torch.Generator().manual_seed(seed)
    digits = datasets.digits().split(given.digits, generator=generator)[0]
    images = digits.inputs.double().flatten(1), digits.targets
    torch.manual_seed(seed)
    return {
        "sine": (lapwing.Gaussian(noise=NOISE), draw("sine", 80, generator), networks.mlp([1, 20, 20, 1]).double()),
        "moons": (lapwing.Categorical(), draw("moons", 200, generator), networks.mlp([2, 16, 16, 2]).double()),
        "digits": (lapwing.Categorical(), images, networks.mlp([64, 12, 10]).double()),
    }


def evidences(model: nn.Module, data: tuple[Tensor, Tensor], likelihood: Any, precisions: Tensor) -> dict[str, Tensor]:
    """The log evidence per structure, (number of precisions,): one fit each, every prior from it."""
    found = {}
    for structure in STRUCTURES:
        la = lapwing.fit(model, data, likelihood, structure=structure, progress=False)
        each = [la.replace(prior=float(tau)).log_evidence().item() for tau in precisions]
        found[structure] = torch.tensor(each, dtype=torch.float64)
    return found


def run(seed: int, given: Any) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Gaps to the evidence of the full matrix by problem and structure, and the curves of the figure."""
    precisions = torch.logspace(-2, 4, given.precisions, dtype=torch.float64)
    table: dict[str, dict[str, float]] = {}
    curves: dict[str, Any] = {}
    for name, (likelihood, data, model) in problems(given, seed).items():
        stages, trained = [], 0
        for stage in (0.02, 0.2, 1.0):  # of the training: far from the mode, on the way, at it
            steps = int(stage * given.steps) - trained
            to_mode(model, *data, likelihood, 1.0, steps)
            trained += steps
            stages.append(evidences(model, data, likelihood, precisions))
        curves[name] = {"precision": precisions, **stages[-1]}
        for structure in STRUCTURES[1:]:
            gaps = torch.stack([stage["full"] - stage[structure] for stage in stages])  # (3, number of precisions)
            size = torch.stack([stage["full"].abs() for stage in stages])
            own, best = stages[-1][structure], stages[-1]["full"]
            table[f"{name}, {structure}"] = {
                "bound in %": 100 * (gaps >= -ROUNDING * size).double().mean().item(),
                "smallest gap": gaps.min().item(),
                "gap at the mode, τ = 1": gaps[-1, (precisions - 1).abs().argmin()].item(),
                "best τ": precisions[own.argmax()].item(),
                "best τ by the full matrix": precisions[best.argmax()].item(),
                "full evidence lost by it": (best.max() - best[own.argmax()]).item(),
            }
    return table, curves


def claims(mean: Mapping[str, Mapping[str, float]], count: int) -> list[Claim]:
    share = {s: [row["bound in %"] for n, row in mean.items() if n.endswith(f", {s}")] for s in STRUCTURES[1:]}
    smallest = {s: min(row["smallest gap"] for n, row in mean.items() if n.endswith(f", {s}")) for s in STRUCTURES[1:]}
    average = {s: sum(values) / len(values) for s, values in share.items()}
    names = [n.partition(",")[0] for n in mean if n.endswith(", kron")]
    at = "gap at the mode, τ = 1"
    above = [n for n in names if mean[f"{n}, kron"][at] < mean[f"{n}, ekfac"][at]]
    bounds = Claim(
        "Structured Hessian approximations yield lower bounds to the Laplace marglik",
        "Structured Laplace Approximations",
        f"Below the evidence of the full GGN, in percent of {count} cases per structure (priors, stages of training, "
        "problems, seeds): " + ", ".join(f"{s} {value:.4g}" for s, value in average.items()) + ". Smallest gap, mean "
        "over seeds of the worst problem, in nats: "
        + ", ".join(f"{s} {v:.3g}" for s, v in smallest.items())
        + ". At the "
        f"mode, kron is above ekfac, which has the same eigenvectors, in {len(above)} of {len(names)} problems.",
        verdict(*(average[s] == 100 for s in STRUCTURES[1:])),
        "a bound has to hold in every case. For blockdiag, ekfac and diag it is a theorem; KFAC replaces a sum of "
        "Kronecker products by one product and has none.",
    )
    lost = {s: sum(r["full evidence lost by it"] for n, r in mean.items() if n.endswith(f", {s}")) for s in share}
    worst = {s: max(r["full evidence lost by it"] for n, r in mean.items() if n.endswith(f", {s}")) for s in share}
    use = Claim(
        "→ Theoretical justification for approximations",
        "the same slide",
        "Evidence of the full matrix that is lost by taking the prior a structure likes best, in nats, mean and worst "
        "problem: " + ", ".join(f"{s} {lost[s] / 3:.3g} and {worst[s]:.3g}" for s in share) + ".",
        verdict(*(worst[s] < 10 for s in share)),
        "a bound justifies choosing by it where the choice is as good as the full matrix's: within 10 nats.",
    )
    return [bounds, use]


def figure(curves: Mapping[str, Any]) -> Any:
    """The evidence against the prior precision at the mode, and how far it is below the full matrix's."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(12, 6.4))
    styles = {"full": ("black", "-"), "blockdiag": ("#2b6cb0", "-"), "ekfac": ("#2f855a", "-")}
    styles |= {"kron": ("#dd6b20", "--"), "diag": ("#718096", "-")}
    for k, (name, found) in enumerate(curves.items()):
        upper, lower = (canvas.add_subplot(2, 3, k + 1 + 3 * row) for row in range(2))
        values = {structure: torch.as_tensor(found[structure]) for structure in styles}
        for structure, (color, style) in styles.items():
            own = values[structure]
            upper.plot(found["precision"], own, color=color, ls=style, lw=1.6, label=structure)
            upper.plot(found["precision"][int(own.argmax())], own.max(), "o", color=color, ms=4)
            if structure != "full":
                lower.plot(found["precision"], values["full"] - own, color=color, ls=style, lw=1.6, label=structure)
        top, low = float(values["full"].max()), float(values["diag"].max())
        upper.set_ylim(top - 3 * (top - low), top + 0.3 * (top - low))
        upper.set_title(name, loc="left", fontsize=10)
        lower.set_yscale("log")
        lower.set_xlabel("prior precision")
        for axes in (upper, lower):
            axes.set_xscale("log")
        if k == 0:
            upper.set_ylabel("log evidence")
            lower.set_ylabel("gap to the full GGN, in nats")
            upper.legend(frameon=False, fontsize=8, loc="lower left")
    canvas.tight_layout()
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("evidence_bounds", run, given)
    each, mean = gathered([table for table, _ in runs])
    rows = [{"problem and structure": n, **{k: spread(v) for k, v in row.items()}} for n, row in each.items()]
    command = f"python -m experiments.evidence_bounds --seeds {given.seeds} --precisions {given.precisions}"
    found = claims(mean, 3 * 3 * given.precisions * given.seeds)
    kron = [row["bound in %"] for n, row in mean.items() if n.endswith(", kron")]
    result = (
        Result("evidence_bounds", "Evidence per structure", ABOUT["paper"], command, list(seeds))
        .with_rows(rows)
        .with_claims(*found)
        .with_sentence(
            "The evidence of `blockdiag`, `ekfac` and `diag` is below that of the full GGN, as theorems say; that of "
            f"`kron`, for which there is no theorem, was below it in {sum(kron) / len(kron):.4g} % of the cases."
        )
        .with_notes(
            "Gaps are the log evidence of the full GGN minus that of a structure, in nats; “best τ” maximizes the "
            "structure's own evidence on the grid of precisions; ± is the standard deviation over seeds.",
            "Three stages per training: after 2 %, 20 % and all of the steps.",
        )
    )
    curves = runs[0][1]
    result.with_data(scores=each, curves=curves).finish(given.out, lambda: figure(curves))


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"seeds": 1, "steps": 100, "precisions": 4, "digits": 60},
        quick={"seeds": 2, "steps": 1000},
    )
    parser.set_defaults(seeds=3)
    parser.add_argument("--precisions", type=int, default=13, help="prior precisions on a grid from 0.01 to 10,000")
    parser.add_argument("--digits", type=int, default=400, help="8×8 digits to train on")
    parser.add_argument("--steps", type=int, default=3000, help="of Adam, before L-BFGS")
    main(parser.parse_args())
