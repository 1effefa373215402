"""Bayesian optimization: a small network with a Laplace posterior over its last layer finds the optimum of Branin.

python examples/bayesian_optimization.py    # needs the extra botorch
"""

# ruff: noqa: I001 (lapwing.botorch comes first: it keeps the warnings of BoTorch's import quiet)
import warnings

import torch
from torch import nn

import lapwing
from lapwing.botorch import LaplaceModel

from botorch.acquisition import LogExpectedImprovement
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin

NOISE = 0.05  # in standard deviations of the targets
BOUNDS = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
branin = Branin(negate=True)


def evaluate(x: torch.Tensor) -> torch.Tensor:
    """Return the values of the function at x in [-1, 1]²."""
    low, high = branin.bounds.double()
    return branin(low + (x + 1) / 2 * (high - low)).double()[:, None]


def surrogate(x: torch.Tensor, y: torch.Tensor) -> LaplaceModel:
    """Train a network to the mode of its posterior, and give its last layer a posterior."""
    network = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        misfit = (network(x) - y).square().sum() / NOISE**2
        ((misfit + sum(p.square().sum() for p in network.parameters())) / len(x)).backward()
        optimizer.step()
    likelihood = lapwing.Gaussian(noise=NOISE)
    la = lapwing.fit(network, (x, y), likelihood, select="last_layer", structure="full", prior=1.0, progress=False)
    return LaplaceModel(la)


torch.manual_seed(0)
warnings.filterwarnings("ignore", category=RuntimeWarning)  # of acquisition functions that are flat
x = 2 * torch.rand(8, 2, dtype=torch.float64) - 1
values = evaluate(x)
for step in range(16):
    y = (values - values.mean()) / values.std()
    acquisition = LogExpectedImprovement(surrogate(x, y), best_f=y.max())
    new, _ = optimize_acqf(acquisition, BOUNDS, q=1, num_restarts=3, raw_samples=64, options={"maxiter": 30})
    x, values = torch.cat([x, new]), torch.cat([values, evaluate(new)])
    if step % 4 == 3:
        print(f"after {len(x)} evaluations: {float(branin.optimal_value - values.max()):.3f} below the optimum")

random = evaluate(2 * torch.rand(200, len(x), 2, dtype=torch.float64).reshape(-1, 2) - 1).reshape(200, -1)
regret = branin.optimal_value - random.max(1).values
print(f"random search with as many: {float(regret.mean()):.3f} on average over 200 runs")
