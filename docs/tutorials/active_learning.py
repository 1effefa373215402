# %% [markdown]
# # Active learning: ask for the labels that teach most
#
# Labels are expensive. Instead of labeling images at random, the network asks for the labels of the images with the highest `p.epistemic`,
# the mutual information between the label and the weights (BALD). This differs from the entropy: a blurred image has a high entropy, but
# its label teaches the network little.

# %%
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import lapwing

digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
shuffle = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
pool, test = shuffle[:1000], shuffle[1000:]


def trained(labeled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-4)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[labeled]), y[labeled]).backward()
        optimizer.step()
    return model


def at_random(model, labeled, rest, generator):
    return torch.rand(len(rest), generator=generator)


def by_epistemic(model, labeled, rest, generator):
    la = lapwing.fit(model, (x[labeled], y[labeled]), "classification", structure="kron", select="last_layer", prior=30.0, progress=False)
    return la.predict(x[rest]).epistemic


# %% [markdown]
# Both ways start with the same 20 labels and ask for ten more in each of twelve rounds. This is repeated three times with different first
# labels. Choosing by uncertainty pays only after a while: a network that has seen 20 images does not choose better than chance.

# %%
def curve(score, seed):
    generator = torch.Generator().manual_seed(seed)
    labeled = pool[torch.randperm(1000, generator=generator)[:20]]
    found = []
    for _ in range(13):
        model = trained(labeled)
        found.append(float((model(x[test]).argmax(-1) == y[test]).float().mean()))
        rest = pool[~torch.isin(pool, labeled)]
        labeled = torch.cat([labeled, rest[score(model, labeled, rest, generator).topk(10).indices]])
    return found


curves = {name: torch.tensor([curve(score, seed) for seed in range(3)])
          for name, score in {"at random": at_random, "epistemic": by_epistemic}.items()}
for name, values in curves.items():
    print(f"{name:10s} accuracy with 80 labels {values[:, 6].mean():.1%}, with 140 labels {values[:, -1].mean():.1%}")

# %%
figure = Figure(figsize=(6, 3.5), layout="constrained")
axes = figure.subplots()
labels = 20 + 10 * torch.arange(13)
for name, values in curves.items():
    axes.plot(labels, values.mean(0), label=name)
    axes.fill_between(labels, values.amin(0), values.amax(0), alpha=0.2)
axes.set(xlabel="labels", ylabel="test accuracy")
axes.legend()
figure
