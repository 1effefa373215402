# %% [markdown]
# # Comparing models without held-out data
#
# The evidence says how probable the data are under a model with all its weights averaged out. It rewards fit and punishes flexibility
# that the data do not need, so it can choose an architecture from the training data alone.

# %%
import torch
from matplotlib.figure import Figure
from torch import nn

import lapwing

torch.manual_seed(0)
x = torch.rand(60, 1, dtype=torch.float64) * 4 - 2
y = torch.sin(2 * x) + 0.2 * torch.randn_like(x)
new = torch.rand(2000, 1, dtype=torch.float64) * 4 - 2
truth = torch.sin(2 * new) + 0.2 * torch.randn_like(new)


def network(width):
    torch.manual_seed(0)
    layers = [nn.Linear(1, 1)] if width == 0 else [nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)]
    return nn.Sequential(*layers).double()


fits, losses = {}, {}
for width in (0, 1, 2, 4, 8, 16, 32):
    model = network(width)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(1500):
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        ((model(x) - y).square().sum() / 0.08 + 0.05 * penalty).backward()
        optimizer.step()
    la = lapwing.fit(model, (x, y), "regression", structure="full", prior=0.1).tune(method="evidence")
    name = f"{width} units" if width else "a line"
    fits[name] = la
    losses[name] = -la.predict(new).log_prob(truth).mean().item()

# %%
comparison = lapwing.compare(fits)
print(comparison.table())

# %% [markdown]
# The picture shows how far the log evidence of each model is below that of the best one, with the error of the estimate.

# %%
lapwing.plots.evidence(comparison)

# %% [markdown]
# The evidence and the loss on new data agree about which networks are too simple. Beyond the width that suffices both change little: the
# data hardly determine the extra units, so these cost little.

# %%
for name, la in fits.items():
    evidence = float(la.log_evidence(at="linear-mode"))
    print(f"{name:9s} log evidence {evidence:8.2f}   loss on new data {losses[name]:6.3f}   effective weights {la.effective_parameters:5.1f}")

# %% [markdown]
# The picture shows predictions of three models with their 95 % intervals. The straight line treats as noise whatever it cannot follow.

# %%
grid = torch.linspace(-4, 4, 200, dtype=torch.float64)[:, None]
figure = Figure(figsize=(9, 2.8), layout="constrained")
for axes, name in zip(figure.subplots(1, 3, sharey=True), ("a line", "2 units", "16 units")):
    p = fits[name].predict(grid)
    low, high = p.interval(0.95)
    axes.fill_between(grid[:, 0], low[:, 0], high[:, 0], alpha=0.25, lw=0)
    axes.plot(grid[:, 0], p.mean[:, 0])
    axes.plot(x[:, 0], y[:, 0], ".", color="black", ms=4)
    axes.set_title(name, loc="left")
    axes.set_ylim(-3, 3)
figure
