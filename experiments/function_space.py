"""The linearized network as a Gaussian process: weight space and function space give the same band (document 002).

    python -m experiments.function_space [--seeds 5] [--out docs/results]

A network 1-50-50-1 (2,701 weights) is trained to its mode on 60 points of a sine with a gap. Its linearization at the
mode is a Bayesian linear model in 2,701 features J(x), or a Gaussian process with kernel J(x) Π⁻¹ J(x′)ᵀ. Three ways to
the same band are compared: the full GGN in weight space (`structure="full"`), the posterior in function space
(`structure="functional"`), and the textbook equations of Gaussian process regression, written out in this script from
Jacobians of torch.func. Beside them stand two approximations that function space makes possible: a Gaussian process on
part of the data, and the Nyström form (ELLA), each against the size it is given. All in double precision.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed, tensors
from experiments._mode import to_mode
from experiments._results import Claim, Result, gathered, spread, verdict
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import lapwing
from experiments import _networks as networks

ABOUT = {"paper": "002, Linearized Model as a Gaussian Process", "minutes": 1, "quick": 0.4}

NOISE, PRIOR, SAME = 0.15, 1.0, 1e-6
EXACT = ("weight space, full", "function space, all data")
HAND = "equations of this script"


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """x uniform in [−3, −1] and [1, 3], y = sin 2x + noise."""
    generator = torch.Generator().manual_seed(seed)
    x = 1 + 2 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
    x = x * (1 - 2 * (torch.rand(n, 1, generator=generator) < 0.5).double())
    return x, (2 * x).sin() + NOISE * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def by_hand(model: nn.Module, x: Tensor, y: Tensor, grid: Tensor) -> tuple[Tensor, float]:
    """Variance of f at the grid, (m,), and log evidence, by Gaussian process regression with kernel J Π⁻¹ Jᵀ."""
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def output(w: Mapping[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, w, (one[None],))[0, 0]

    def features(inputs: Tensor) -> Tensor:
        parts = vmap(jacrev(output), (None, 0))(weights, inputs)
        return torch.cat([part.flatten(1) for part in parts.values()], 1)

    seen, new = features(x), features(grid)
    kernel = seen @ seen.T / PRIOR + NOISE**2 * torch.eye(len(x), dtype=x.dtype)
    cross = new @ seen.T / PRIOR
    root = torch.linalg.cholesky(kernel)
    variance = new.square().sum(1) / PRIOR - torch.linalg.solve_triangular(root, cross.T, upper=False).square().sum(0)
    # at the mode: log p(y | θ̂) + log p(θ̂) + log ∫ of the quadratic = −½ log|kernel|, with |H| = |Π| |kernel| / noise^2n
    with torch.no_grad():
        error = (y - model(x)).square().sum() / NOISE**2
    norm = PRIOR * torch.stack([w.square().sum() for w in weights.values()]).sum()
    log_det = 2 * root.diagonal().log().sum()
    evidence = -0.5 * (error + norm + log_det + len(x) * math.log(2 * math.pi))
    return variance, evidence.item()


def run(seed: int, given: Any) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Distances to the equations of this script by way of computing, and what the figure shows."""
    torch.manual_seed(seed)
    x, y = points(given.points, seed)
    model = networks.mlp([1, given.width, given.width, 1], nn.Tanh).double()
    likelihood = lapwing.Gaussian(noise=NOISE)
    to_mode(model, x, y, likelihood, PRIOR, given.steps)
    grid = torch.linspace(-5, 5, 201, dtype=torch.float64)[:, None]
    start = time.process_time()
    truth, evidence = by_hand(model, x, y, grid)
    taken = {HAND: time.process_time() - start}
    structures: dict[str, Any] = {
        EXACT[0]: lapwing.Full(),
        EXACT[1]: lapwing.Functional(),
    }
    for share in (2, 4, 8):
        structures[f"function space, 1/{share} of the data"] = lapwing.Functional(
            points=given.points // share, seed=seed
        )
    for rank in given.ranks:
        structures[f"Nyström, {rank} directions"] = lapwing.Nystrom(rank=rank, seed=seed)
    bands = {HAND: truth.sqrt()}
    evidences = {HAND: evidence}
    for name, structure in structures.items():
        start = time.process_time()
        la = lapwing.fit(model, (x, y), likelihood, structure=structure, prior=PRIOR, progress=False)
        bands[name] = la.predict(grid).function.variance[:, 0].sqrt()
        taken[name] = time.process_time() - start
        evidences[name] = la.log_evidence().item()
    inside = (grid[:, 0].abs() >= 1) & (grid[:, 0].abs() <= 3)
    table = {
        name: {
            "band off, worst": ((band / bands[HAND]) - 1).abs().max().item(),
            "band off, at the data": ((band / bands[HAND]) - 1)[inside].abs().mean().item(),
            "log evidence off": abs(evidences[name] - evidence),
            "log evidence": evidences[name],
            "CPU s": taken[name],
        }
        for name, band in bands.items()
    }
    with torch.no_grad():
        curves = {"x": grid[:, 0], "mean": model(grid)[:, 0], "data": (x[:, 0], y[:, 0]), "bands": bands}
    return table, curves


def claims(mean: Mapping[str, Mapping[str, float]], given: Any) -> list[Claim]:
    off = {name: (mean[name]["band off, worst"], mean[name]["log evidence off"]) for name in EXACT}
    same = Claim(
        "Linearized Model as a Gaussian Process",
        "the slide of that title",
        "Against the equations of Gaussian process regression, the bands are off by at most "
        + " and ".join(f"{a:.1e} of their size ({name})" for name, (a, _) in off.items())
        + ", the log evidence by "
        + " and ".join(f"{b:.1e}" for _, b in off.values())
        + " nats.",
        verdict(*(a < SAME and b < SAME * 1e3 for a, b in off.values())),
        f"the same means bands within {SAME:g} and evidences within {SAME * 1e3:g} nats.",
    )
    ranks = [mean[f"Nyström, {rank} directions"]["band off, at the data"] for rank in given.ranks]
    parts = [mean[f"function space, 1/{share} of the data"]["band off, at the data"] for share in (8, 4, 2)]
    falls = lambda values: all(b <= a * 1.001 for a, b in pairwise(values))  # noqa: E731
    told = lambda names, values: ", ".join(f"{n}: {100 * v:.2g} %" for n, v in zip(names, values))  # noqa: E731
    other = Claim(
        "→ Enables different posterior approximation techniques",
        "the same slide",
        f"At the data, the band is off by (Nyström, directions) {told(given.ranks, ranks)}; (share of the data) "
        f"{told(('1/8', '1/4', '1/2'), parts)}.",
        verdict(falls(ranks) and ranks[-1] < 0.05, falls(parts) and parts[-1] < 0.25),
        "Nyström forms and parts of the data must both come nearer as they grow; the largest Nyström form within "
        "5 %, half of the data within 25 %.",
    )
    return [same, other]


def figure(curves: Mapping[str, Any], given: Any) -> Any:
    """The common band; and, beside it, bands of the approximations."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(13, 4.2))
    x, mean, (px, py), bands = (curves[key] for key in ("x", "mean", "data", "bands"))
    left, right = canvas.subplots(1, 2)
    width = bands[EXACT[0]]
    left.fill_between(x, mean - 2 * width, mean + 2 * width, color="#2b6cb0", alpha=0.25, lw=0, label="weight space")
    for sign in (-1, 1):
        label = "function space" if sign > 0 else None
        other = "Gaussian process regression" if sign > 0 else None
        left.plot(x, mean + 2 * sign * bands[EXACT[1]], color="#dd6b20", lw=3, alpha=0.6, label=label)
        left.plot(x, mean + 2 * sign * bands[HAND], color="black", lw=1, ls="--", label=other)
    left.plot(x, mean, color="#2b6cb0", lw=1.5)
    left.plot(px, py, ".", color="black", ms=4)
    left.set_title("one band, three ways (mean ± 2 standard deviations)", loc="left", fontsize=9)
    left.legend(frameon=False, fontsize=8, loc="upper center")
    left.set_xlabel("x")
    for name, band in bands.items():
        if name.startswith("Nyström") or "1/" in name:
            right.plot(x, band, lw=1.2, ls="-" if name.startswith("Nyström") else ":", label=name)
    right.plot(x, width, color="black", lw=1.8, label="exact")
    right.set_yscale("log")
    right.set_xlabel("x")
    right.set_title("standard deviation of f by approximation", loc="left", fontsize=9)
    right.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    canvas.tight_layout()
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = each_seed("function_space", run, given)
    each, mean = gathered([table for table, _ in runs])
    rows = [{"way": n, **{key: spread(values) for key, values in row.items()}} for n, row in each.items()]
    command = (
        f"python -m experiments.function_space --seeds {given.seeds} --points {given.points} --width {given.width}"
    )
    result = Result(
        "function_space", "The linearized network as a Gaussian process", ABOUT["paper"], command, list(seeds)
    )
    found = claims(mean, given)
    worst = max(mean[name]["band off, worst"] for name in EXACT)
    result = (
        result.with_rows(rows)
        .with_claims(*found)
        .with_sentence(
            f"The posterior in weight space, the one in function space and Gaussian process regression with the kernel "
            f"J Π⁻¹ Jᵀ give one band, to {worst:.0e} of its size."
        )
        .with_notes(
            "“Band off” is the relative error of the standard deviation of f against Gaussian process regression "
            "written out in the script: the worst of 201 inputs between −5 and 5, and the mean over those at the data. "
            "± is the standard deviation over seeds, each with its own data and network.",
            "ELLA sets the variance outside its directions to zero; this library keeps the prior's there, so that its "
            "Nyström band is never below ELLA's.",
        )
    )
    curves = tensors(runs[0][1])
    result.with_data(scores=each, curves=curves).finish(given.out, lambda: figure(curves, given))


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"seeds": 1, "points": 24, "width": 8, "steps": 200, "ranks": [4, 16]},
        quick={"seeds": 2, "steps": 1000},
    )
    parser.set_defaults(seeds=5)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--width", type=int, default=50, help="of the two hidden layers")
    parser.add_argument("--steps", type=int, default=3000, help="of Adam, before L-BFGS")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64], help="directions of the Nyström form")
    main(parser.parse_args())
