# %% [markdown]
# # Regression with intervals
#
# You have measurements and want error bars, but do not know how large the noise is. This tutorial learns the noise from the data, checks
# the intervals on new data, and then models noise that changes with the input.

# %%
import torch
from torch import nn

import lapwing

torch.manual_seed(0)
x = torch.cat([torch.rand(40, 1) * 2 - 3, torch.rand(40, 1) * 2 + 0.5])
y = torch.sin(1.5 * x) + 0.15 * torch.randn_like(x)


def train(model, loss, steps=1500):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
train(model, lambda: nn.functional.mse_loss(model(x), y))

# %% [markdown]
# ## Learn the noise
# `"regression"` estimates the noise from the residuals. `tune(method="evidence")` learns noise and prior precision together, from the
# training data alone.

# %%
la = lapwing.fit(model, (x, y), "regression", structure="full")
la = la.tune(method="evidence")
print(f"noise {float(la.likelihood.noise):.3f} (the data were made with 0.15), prior {la.prior}")

# %%
grid = torch.linspace(-5, 5, 300)[:, None]
p = la.predict(grid)
lapwing.plots.band(grid, p, data=(x, y))

# %% [markdown]
# The band widens between the two clouds of points and outside them, where the network has seen no data. `p.aleatoric` is the noise, and
# `p.epistemic` is the part that more data would remove; both are variances.

# %%
for at in (-2.0, -0.4, 1.5, 4.0):
    point = la.predict(torch.tensor([[at]]))
    print(f"x = {at:4.1f}: noise {point.aleatoric.sqrt().item():.2f}, network {point.epistemic.sqrt().item():.2f}")

# %% [markdown]
# ## Check the intervals on new data
# On new data from the same source, 95 % intervals should contain 95 % of the targets.

# %%
new = torch.cat([torch.rand(1000, 1) * 2 - 3, torch.rand(1000, 1) * 2 + 0.5])
targets = torch.sin(1.5 * new) + 0.15 * torch.randn_like(new)
p = la.predict(new)
for level in (0.5, 0.8, 0.95):
    low, high = p.interval(level)
    inside = ((low <= targets) & (targets <= high)).float().mean()
    print(f"{level:.0%} intervals contain {inside:.1%}")

# %% [markdown]
# ## Model noise that changes with the input
# With `HeteroscedasticGaussian` the network has two outputs per target. Here they are the mean and the logarithm of the variance; without
# `parametrization="mean"` they are natural parameters, which suit training by the evidence. The likelihood itself gives the loss:
# `likelihood.log_prob` returns one number per item.

# %%
x2 = torch.rand(300, 1) * 6 - 3
y2 = torch.sin(1.5 * x2) + (0.05 + 0.15 * (x2 + 3) / 2) * torch.randn_like(x2)
likelihood = lapwing.HeteroscedasticGaussian(parametrization="mean")
model2 = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
train(model2, lambda: -likelihood.log_prob(model2(x2), y2).mean(), steps=600)
la2 = lapwing.fit(model2, (x2, y2), likelihood, structure="full", prior=1.0)
grid2 = torch.linspace(-4, 4, 200)[:, None]
lapwing.plots.band(grid2, la2.predict(grid2), data=(x2, y2))

# %%
p = la2.predict(torch.tensor([[-2.5], [0.0], [2.5]]))
for at, noise in zip((-2.5, 0.0, 2.5), p.aleatoric.sqrt()[:, 0]):
    print(f"x = {at:4.1f}: noise {noise:.2f}, the truth is {0.05 + 0.15 * (at + 3) / 2:.2f}")
