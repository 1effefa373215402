# %% [markdown]
# # Matrix-free: exact curvature that does not fit into memory
#
# The full Gauss–Newton matrix of a network with 200,000 weights has 40 billion entries. `structure="matrixfree"` never forms it: it only
# multiplies it with vectors, at the price of about two gradients per product, and computes solves, samples and the evidence from such
# products.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = slice(0, 300), slice(300, 310)


def trained(width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[train]), y[train]).backward()
        optimizer.step()
    return model


# %% [markdown]
# ## The same numbers as the dense matrix
# On a small network both structures are possible, and their results agree.

# %%
small = trained(8)
dense = lapwing.fit(small, (x[train], y[train]), "classification", structure="full", prior=10.0)
free = lapwing.fit(small, (x[train], y[train]), "classification", structure=lapwing.MatrixFree(rank=64), prior=10.0)
print(f"{dense.params.size} weights")
print(f"log evidence: dense {float(dense.log_evidence()):.2f}, matrix-free {float(free.log_evidence()):.2f}")
difference = (dense.predict(x[test]).function.covariance - free.predict(x[test]).function.covariance).abs().max()
print(f"largest difference of predictive covariances {float(difference):.1e}")

# %% [markdown]
# ## A network whose matrix does not fit

# %%
large = trained(2000)
la = lapwing.fit(large, (x[train], y[train]), "classification", structure=lapwing.MatrixFree(rank=128), prior=100.0)
print(f"{la.params.size:,} weights: the matrix would take {4 * la.params.size**2 / 1e9:.0f} GB")
p = la.predict(x[test], link="jvp")
print("entropies:", " ".join(f"{e:.3f}" for e in p.entropy[:5].tolist()))
