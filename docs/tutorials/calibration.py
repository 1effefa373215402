# %% [markdown]
# # A calibrated classifier that abstains
#
# A trained network gives probabilities, but of the answers to which it gives 99 %, often fewer than 99 % are right. This tutorial fits a
# posterior to a small classifier of handwritten digits, tunes it on held-out data, and lets it abstain where it is uncertain.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
order = torch.randperm(len(x))
train, val, test = order[:300], order[300:700], order[700:]

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for _ in range(300):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[train]), y[train]).backward()
    optimizer.step()

# %% [markdown]
# ## Fit and tune
# `fit` reads the training data once or twice. `tune` chooses the prior precision and two temperatures on held-out data. Neither changes
# the network.

# %%
la = lapwing.fit(model, (x[train], y[train]), "classification", structure="kron")
la = la.tune((x[val], y[val]))
print(la.summary())

# %% [markdown]
# ## Compare with the network and with temperature scaling
# `evaluate` takes anything that predicts. Here it compares the network, the network with one temperature (the usual remedy), and the
# posterior.

# %%
scaled = lapwing.TemperatureScaled.fit(model, (x[val], y[val]))
methods = {"network": model, "temperature scaling": scaled, "Laplace": la}
report = lapwing.evaluate(methods, (x[test], y[test]))
print(report.table())

# %% [markdown]
# ## See whether confidence can be trusted
# A reliability diagram shows the share of correct answers against the confidence. For a calibrated classifier the bars end on the diagonal.

# %%
curves = {}
for name, probs in {"network": model(x[test]).softmax(-1).detach(), "Laplace": la.predict(x[test]).probs}.items():
    confidence, label = probs.max(-1)
    curves[name] = (confidence, (label == y[test]).float())
lapwing.plots.reliability(curves)

# %% [markdown]
# ## Abstain on uncertain images
# Suppose that you want an error rate of at most one percent, and can pass difficult images on to a person. Sorting the images by
# uncertainty shows how many of them the classifier can answer.

# %%
p = la.predict(x[test])
wrong = (p.label != y[test]).float()[p.entropy.argsort()]
risk = wrong.cumsum(0) / torch.arange(1, len(wrong) + 1)
answered = int((risk <= 0.01).nonzero().max()) + 1
print(f"all answered: {wrong.mean():.1%} wrong")
print(f"the {answered / len(wrong):.0%} most certain: {risk[answered - 1]:.1%} wrong")
