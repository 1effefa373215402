# %% [markdown]
# # Training with the evidence
#
# Weight decay is usually found by trying values on held-out data. The evidence can find it during training from the training data alone:
# one value per layer, and the noise. This tutorial does so for a regression on 442 patients, of whom a third is kept for the test.

# %%
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import lapwing

torch.manual_seed(0)
data = load_diabetes()
x, y = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target, dtype=torch.float32)[:, None]
order = torch.randperm(len(x))
train, test = order[:300], order[300:]
x = (x - x[train].mean(0)) / x[train].std(0)
y = (y - y[train].mean()) / y[train].std()


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))


# %% [markdown]
# The same network is trained twice: once without a prior, and once with `lapwing.train`, which moves prior precisions and noise towards the
# maximum of the evidence after a burn-in.

# %%
plain = network()
optimizer = torch.optim.Adam(plain.parameters(), 1e-2)
for _ in range(600):
    optimizer.zero_grad()
    nn.functional.mse_loss(plain(x[train]), y[train]).backward()
    optimizer.step()

model = network()
trained = lapwing.train(
    model, [(x[train], y[train])], "regression", epochs=600, every=20, structure="full", prior="layerwise",
    optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2), progress=False,
)
print(trained.laplace.prior)

# %%
for name, network in {"no prior": plain, "evidence": model}.items():
    error = (network(x[test]) - y[test]).square().mean().sqrt().item()
    print(f"{name}: root mean squared error {error:.3f} on the test patients")

# %% [markdown]
# `trained.laplace` is the posterior. Its intervals should contain the stated share of patients that it has not seen.

# %%
p = trained.laplace.predict(x[test])
low, high = p.interval(0.9)
inside = ((low <= y[test]) & (y[test] <= high)).float().mean()
print(f"90 % intervals contain {inside:.0%} of the test patients; mean log-likelihood {p.log_prob(y[test]).mean().item():.3f}")

# %% [markdown]
# Each test patient's prediction with its 95 % interval, against what was measured:

# %%
lapwing.plots.parity({"trained with the evidence": p}, y[test])
