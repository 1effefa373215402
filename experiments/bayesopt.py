"""Bayesian optimization with a network and its Laplace posterior, beside a Gaussian process and random search.

    python -m experiments.bayesopt [--functions branin hartmann ackley] [--steps 20] [--seeds 5] [--out DIR]

Maximizes test functions of BoTorch (Branin in 2 dimensions, Hartmann in 6, Ackley in 4 on [-5, 10], all negated). Every
method starts from the same 10 Sobol points of a seed and chooses one more per step by log expected improvement: "gp" is
BoTorch's SingleTaskGP with its defaults, fitted at every step; "last layer" and "all weights" are an MLP with two
hidden layers of tanh units, trained anew at every step to the mode under a unit Gaussian prior and a noise of 0.05 (in
standard deviations of the targets), with `lapwing.botorch.LaplaceModel`. The table has the simple regret (the
optimum minus the best value seen), that of random search with the same seed less it, and the CPU seconds per step.
Needs the extra botorch.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._results import Claim, Scores, answered
from experiments._study import study, told
from torch import Tensor, nn

import lapwing

ABOUT = {"paper": "", "minutes": 3, "quick": 0.2, "page": "../botorch.md"}

NOISE, START = 0.05, 10
METHODS = ("random", "gp", "last layer", "all weights")


def functions() -> dict:
    from botorch.test_functions import Ackley, Branin, Hartmann

    ackley = Ackley(4, negate=True, bounds=[(-5.0, 10.0)] * 4)
    return {"branin": Branin(negate=True), "hartmann": Hartmann(6, negate=True), "ackley": ackley}


def trained(x: Tensor, y: Tensor, width: int, epochs: int) -> nn.Module:
    """An MLP at the mode of its posterior under N(0, I) weights and the noise."""
    sizes = (x.shape[1], width, width)
    layers = [part for i, o in itertools.pairwise(sizes) for part in (nn.Linear(i, o), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(width, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        optimizer.zero_grad()
        energy = (model(x) - y).square().sum() / NOISE**2 + sum(p.square().sum() for p in model.parameters())
        (energy / (2 * len(x))).backward()
        optimizer.step()
        schedule.step()
    return model


def surrogate(method: str, x: Tensor, y: Tensor, epochs: int) -> Any:
    """A BoTorch model of standardized targets y at x in [-1, 1]."""
    if method == "gp":
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import SingleTaskGP
        from botorch.models.transforms import Normalize
        from gpytorch.mlls import ExactMarginalLogLikelihood

        gp = SingleTaskGP(x, y, outcome_transform=None, input_transform=Normalize(x.shape[1], bounds=cube(x.shape[1])))
        fit_gpytorch_mll(ExactMarginalLogLikelihood(gp.likelihood, gp))
        return gp
    from lapwing.botorch import LaplaceModel

    last = method == "last layer"
    model = trained(x, y, 64 if last else 32, epochs)
    options = {"select": "last_layer", "structure": "full"} if last else {"structure": "kron"}
    return LaplaceModel(lapwing.fit(model, (x, y), lapwing.Gaussian(noise=NOISE), progress=False, **options))


def cube(d: int) -> Tensor:
    """The bounds of [-1, 1]^d."""
    return torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand(2, d)


def regret(function: Any, method: str, steps: int, seed: int, epochs: int) -> float:
    """The optimum minus the best value after `steps` more evaluations."""
    from botorch.acquisition import LogExpectedImprovement
    from botorch.optim import optimize_acqf
    from botorch.utils.sampling import draw_sobol_samples

    middle, half = function.bounds.double().mean(0), (function.bounds[1] - function.bounds[0]).double() / 2
    bounds = cube(len(half))
    torch.manual_seed(seed)
    x = draw_sobol_samples(bounds, START, 1, seed=seed)[:, 0]
    values = function(middle + x * half).double()
    for _ in range(steps):
        if method == "random":
            new = 2 * torch.rand(1, len(half), dtype=torch.float64) - 1
        else:
            y = ((values - values.mean()) / values.std())[:, None]
            acquisition = LogExpectedImprovement(surrogate(method, x, y, epochs), best_f=y.max())
            new, _ = optimize_acqf(acquisition, bounds, 1, num_restarts=4, raw_samples=128, options={"maxiter": 50})
        x = torch.cat([x, new])
        values = torch.cat([values, function(middle + new * half).double()])
    return function.optimal_value - float(values.max())


def run(seed: int, given: argparse.Namespace) -> Scores:
    """Simple regret, gain over random search and CPU seconds per step, by function and method."""
    warnings.filterwarnings("ignore")  # of optimizers that stop early, and deprecations inside BoTorch
    rows = {}
    for name in given.functions:
        for method in ("random", *(m for m in given.methods if m != "random")):
            start = time.process_time()
            found = regret(functions()[name], method, given.steps, seed, given.epochs)
            spent = (time.process_time() - start) / given.steps
            by_chance = rows[f"{name}, random"]["regret"] if method != "random" else found
            rows[f"{name}, {method}"] = {
                "regret": found,
                "gain over random": by_chance - found,
                "CPU s per step": spent,
            }
    return rows


def judge(mean: Scores) -> list[Claim]:
    gains = {row: cells["gain over random"] for row, cells in mean.items() if row.split(", ")[1] in METHODS[2:]}
    return [
        answered(
            "Does a network with a Laplace posterior find better points than random search?",
            f"Mean simple regret of random search less that of the network: {told(gains)}.",
            "the mean simple regret is below that of random search from the same starts, function by function.",
            *(gain > 0 for gain in gains.values()),
        )
    ]


if __name__ == "__main__":
    parser = Experiment(
        __doc__, smoke={"functions": ["branin"], "steps": 2, "epochs": 20},
        quick={"functions": ["branin"], "steps": 8, "epochs": 200}, seeds=5,
    )  # fmt: skip
    names = ["branin", "hartmann", "ackley"]
    parser.add_argument("--functions", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME", help=", ".join(METHODS)
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=400, help="steps of training per network")
    study("bayesopt", ABOUT, "Bayesian optimization with networks", run, judge, parser.parse_args())
