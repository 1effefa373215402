# %% [markdown]
# # Training with the evidence
#
# Weight decay is usually found by trying values on held-out data. The evidence can find it during training, one value per layer, from the
# training data alone.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
order = torch.randperm(len(x))
train, test = order[:400], order[400:]
loader = [(x[part], y[part]) for part in train.split(100)]


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


# %% [markdown]
# The same network, once without a prior and once with `lapwing.train`, which moves the prior precisions towards the maximum of the
# evidence after a burn-in.

# %%
plain = network()
optimizer = torch.optim.Adam(plain.parameters(), 1e-2)
for _ in range(60):
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(images), labels).backward()
        optimizer.step()

model = network()
trained = lapwing.train(
    model, loader, "classification", epochs=60, prior="layerwise",
    optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2), progress=False,
)
print(trained.laplace.prior)

# %%
report = lapwing.evaluate({"no prior": plain, "evidence": model, "its posterior": trained.laplace}, (x[test], y[test]))
print(report.table())
