# %% [markdown]
# # Bayesian optimization with a network as surrogate
#
# Bayesian optimization looks for the best experiment with few trials. BoTorch chooses each next trial by a probabilistic model.
# `lapwing.botorch.LaplaceModel` makes a network that model: the linearized network with its posterior is a Gaussian process whose kernel
# the network has learned.

# %%
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from matplotlib.figure import Figure
from torch import nn

import lapwing
from lapwing.botorch import LaplaceModel

branin = Branin(negate=True).to(torch.float64)
low, high = branin.bounds
unit = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def measure(points):
    return branin(low + points * (high - low))[:, None]


def surrogate(x, y):
    """Train a small network on standardized targets, and give it a posterior."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    target = (y - y.mean()) / y.std()
    optimizer = torch.optim.Adam(network.parameters(), 1e-2, weight_decay=1e-4)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(x), target).backward()
        optimizer.step()
    la = lapwing.fit(network, (x, target), lapwing.Gaussian(noise=0.05), structure="full", select="last_layer", progress=False)
    return LaplaceModel(la), target.max()


# %% [markdown]
# The search starts with eight random experiments, then makes twenty that maximize the expected improvement. A random search is the
# comparison.

# %%
torch.manual_seed(1)
x = torch.rand(8, 2, dtype=torch.float64)
y = measure(x)
for _ in range(20):
    model, best = surrogate(x, y)
    point, _ = optimize_acqf(LogExpectedImprovement(model, best), unit, q=1, num_restarts=2, raw_samples=64)
    x, y = torch.cat([x, point]), torch.cat([y, measure(point)])

other = measure(torch.rand(28, 2, dtype=torch.float64))
print(f"best value after 28 experiments: network {y.max():.3f}, at random {other.max():.3f}, optimum {branin.optimal_value:.3f}")

# %%
figure = Figure(figsize=(6, 3.5), layout="constrained")
axes = figure.subplots()
for name, values in {"network": y, "at random": other}.items():
    axes.plot(branin.optimal_value - values[:, 0].cummax(0).values, label=name)
axes.set(xlabel="experiments", ylabel="distance to the optimum", yscale="log")
axes.legend()
figure
