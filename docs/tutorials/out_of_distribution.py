# %% [markdown]
# # Inputs of another kind
#
# A classifier answers even if an image shows none of its classes. This tutorial trains on the digits 0 to 7, and measures how
# well different scores tell the digits 8 and 9, and pure noise, from new images of the known digits.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
known, unknown = torch.nonzero(y < 8)[:, 0], torch.nonzero(y > 7)[:, 0]
known = known[torch.randperm(len(known))]
train, val, test = known[:600], known[600:900], known[900:]

model = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 8))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for _ in range(300):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[train]), y[train]).backward()
    optimizer.step()

la = lapwing.fit(model, (x[train], y[train]), "classification", structure="ekfac").tune((x[val], y[val]))

# %% [markdown]
# ## Compare three scores
# - `p.entropy`: how undecided the prediction is. A blurred 3 has a high entropy, too.
# - `p.epistemic`: the part of the entropy that comes from not knowing the weights.
# - `p.novelty`: how much a label at this input would teach about the weights. It does not depend on the tuned prior.
#
# The table has the AUROC of each score: 1 means that it separates the two kinds of images perfectly, 0.5 is chance.

# %%
outside = {"digits 8 and 9": x[unknown], "noise": torch.rand(300, 64)}
inside = la.predict(x[test])
network = lapwing.metrics.entropy(model(x[test]).softmax(-1).detach())
print(f"{'AUROC':16s} {'network entropy':>16s} {'entropy':>8s} {'epistemic':>10s} {'novelty':>8s}")
for name, images in outside.items():
    p = la.predict(images)
    plain = lapwing.metrics.entropy(model(images).softmax(-1).detach())
    pairs = [(network, plain), (inside.entropy, p.entropy), (inside.epistemic, p.epistemic), (inside.novelty, p.novelty)]
    values = [float(lapwing.metrics.auroc(a, b)) for a, b in pairs]
    print(f"{name:16s} {values[0]:16.3f} {values[1]:8.3f} {values[2]:10.3f} {values[3]:8.3f}")

# %% [markdown]
# At the same share of false alarms, a higher curve means that more of the digits 8 and 9 are found.

# %%
other = la.predict(outside["digits 8 and 9"])
scores = ("entropy", "epistemic", "novelty")
lapwing.plots.roc(
    {name: getattr(inside, name) for name in scores}, {name: getattr(other, name) for name in scores}, title="digits 8 and 9"
)

# %% [markdown]
# These are the digits 8 and 9 with the highest novelty.

# %%
lapwing.plots.uncertain_images(outside["digits 8 and 9"].reshape(-1, 8, 8), other.novelty, count=8)

# %% [markdown]
# No score is the best for every network: compare them on inputs that your own network may meet. `lapwing.evaluate(..., ood={...})` computes
# them all, together with accuracy and calibration.

# %%
report = lapwing.evaluate({"network": model, "Laplace": la}, (x[test], y[test]), ood=outside)
print(report.table())
