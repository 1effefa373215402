"""Bayesian optimization with a network and its Laplace posterior, beside a Gaussian process and random search.

    python -m experiments.bayesopt [--functions branin hartmann ackley] [--steps 20] [--seeds 5]

Maximizes test functions of BoTorch (Branin in 2 dimensions, Hartmann in 6, Ackley in 4 on [-5, 10], all negated). Every
method starts from the same 10 Sobol points of a seed and chooses one more per step by log expected improvement: "gp" is
BoTorch's SingleTaskGP with its defaults, fitted at every step; "last layer" and "all weights" are an MLP with two
hidden layers of tanh units, trained anew at every step to the mode under a unit Gaussian prior and a noise of 0.05 (in
standard deviations of the targets), with `lapwing.botorch.LaplaceModel`. Prints the simple regret (the optimum minus
the best value seen) as mean, standard deviation and worst over seeds, on how many seeds a method ends below random
search, and the CPU seconds per step. Needs the extra botorch.
"""

from __future__ import annotations

import itertools
import time
import warnings
from typing import Any

import torch
from experiments._arguments import Experiment
from torch import Tensor, nn

import lapwing

ABOUT = {"paper": "", "minutes": None, "page": "../tutorials/bayesian_optimization.md"}

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


def main() -> None:
    parser = Experiment(__doc__, smoke={"functions": ["branin"], "steps": 2, "seeds": 2, "epochs": 20})
    names = ["branin", "hartmann", "ackley"]
    parser.add_argument("--functions", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=METHODS, metavar="NAME", help=", ".join(METHODS)
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=400, help="steps of training per network")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # of optimizers that stop early, and deprecations inside BoTorch
    print(f"{'function':10s} {'method':12s} {'mean':>8s} {'std':>8s} {'worst':>8s}  below random  CPU s per step")
    for name in options.functions:
        by_chance: list[float] = []
        for method in options.methods:
            start = time.process_time()
            found = [
                regret(functions()[name], method, options.steps, seed, options.epochs) for seed in range(options.seeds)
            ]
            seconds = (time.process_time() - start) / (options.seeds * options.steps)
            by_chance = found if method == "random" else by_chance
            below = sum(a < b for a, b in zip(found, by_chance))
            values = torch.tensor(found, dtype=torch.float64)
            spread = values.std(correction=0) if len(values) < 2 else values.std()
            won = "" if method == "random" or not by_chance else f"{below}/{len(found)}"
            figures = f"{values.mean():8.3f} {spread:8.3f} {values.max():8.3f}"
            print(f"{name:10s} {method:12s} {figures}  {won:>12s}  {seconds:.2f}", flush=True)


if __name__ == "__main__":
    main()
