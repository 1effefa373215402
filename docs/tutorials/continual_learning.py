# %% [markdown]
# # Continual learning: one task after another
#
# A network that learns one task after another forgets the first ones. If the posterior of the old tasks is the prior of the new one,
# weights that mattered for the old tasks stay where they are, and the others are free to change.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
order = torch.randperm(len(x))
train, test = order[:1200], order[1200:]
tasks = [torch.arange(64)] + [torch.randperm(64) for _ in range(3)]  # the same digits with shuffled pixels


def accuracies(model):
    with torch.no_grad():
        return [float((model(x[test][:, task]).argmax(-1) == y[test]).float().mean()) for task in tasks]


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def learn(model, task, penalty=lambda: 0.0):
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[train][:, task]), y[train], reduction="sum") + penalty()
        loss.backward()
        optimizer.step()


# %% [markdown]
# ## Without a posterior: the network forgets

# %%
model = network()
for task in tasks:
    learn(model, task)
print("plain training:", " ".join(f"{a:.1%}" for a in accuracies(model)))

# %% [markdown]
# ## With a diagonal posterior as the next prior
# `Prior.from_posterior` turns a posterior into the next prior. The training loss gets a penalty, the negative log-density of this prior.

# %%
def away(posterior, model):
    """Half the squared distance from the posterior's mean, measured by its precision."""
    step = torch.cat([p.flatten() for p in model.parameters()]) - posterior.mean
    return 0.5 * (step * posterior.precision.matvec(step)).sum()


model = network()
learn(model, tasks[0], lambda: 0.5 * sum(p.square().sum() for p in model.parameters()))
la = lapwing.fit(model, (x[train][:, tasks[0]], y[train]), "classification", structure="diag", prior=1.0)
for task in tasks[1:]:
    learn(model, task, lambda posterior=la.posterior: away(posterior, model))
    prior = lapwing.Prior.from_posterior(la.posterior)
    la = lapwing.fit(model, (x[train][:, task], y[train]), "classification", structure="diag", prior=prior)
print("with posteriors:", " ".join(f"{a:.1%}" for a in accuracies(model)))

# %% [markdown]
# ## With Kronecker factors, which protect more
# A diagonal posterior holds each weight by itself. Kronecker factors (`structure="kron"`, or `"ekfac"`) also hold directions in which
# weights act together, so they protect more of what was learned. Each new task adds the curvature of its data to the posterior of the old
# tasks. This sum is exact if the old posterior is a Kronecker product; otherwise it is the nearest Gaussian in the best basis at hand.
# `neglected` of each block says what share of the sum this basis leaves out.

# %%
model = network()
learn(model, tasks[0], lambda: 0.5 * sum(p.square().sum() for p in model.parameters()))
la = lapwing.fit(model, (x[train][:, tasks[0]], y[train]), "classification", structure="kron", prior=1.0)
for task in tasks[1:]:
    learn(model, task, lambda posterior=la.posterior: away(posterior, model))
    prior = lapwing.Prior.from_posterior(la.posterior)
    la = lapwing.fit(model, (x[train][:, task], y[train]), "classification", structure="kron", prior=prior)
print("with Kronecker posteriors:", " ".join(f"{a:.1%}" for a in accuracies(model)))
print("neglected per layer:", " ".join(f"{block.neglected:.2f}" for block in la.posterior.precision.blocks))
