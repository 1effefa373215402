"""Active learning: label the points about which the posterior knows least, instead of random ones.

python examples/active_learning.py
"""

import torch
from torch import nn

import lapwing

FIRST, ROUNDS, PER_ROUND = 6, 8, 3


def moons(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw two interleaved half circles with noise: inputs (n, 2) and labels (n,)."""
    angle = torch.rand(n, generator=generator) * torch.pi
    label = (torch.rand(n, generator=generator) > 0.9).long()  # the second moon is rare
    x = torch.stack([angle.cos(), angle.sin()], 1)
    x = torch.where(label[:, None] == 1, torch.tensor([1.0, 0.4]) - x, x)
    return x + 0.1 * torch.randn(n, 2, generator=generator), label


def trained(x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """Train a small network to the mode under a Gaussian prior of precision 0.1."""
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y, reduction="sum")
        (loss + 0.05 * sum(p.square().sum() for p in network.parameters())).backward()
        optimizer.step()
    return network


def accuracies(by_uncertainty: bool, seed: int) -> list[float]:
    """Return the balanced accuracy on test data after each round of labels."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    (pool, answers), (test, truth) = moons(400, generator), moons(2000, generator)
    chosen = torch.randperm(len(pool), generator=generator)[:FIRST].tolist()
    found = []
    for _ in range(ROUNDS):
        x, y = pool[chosen], answers[chosen]
        network = trained(x, y)
        right = network(test).argmax(1) == truth
        found.append(float(torch.stack([right[truth == k].float().mean() for k in (0, 1)]).mean()))
        scores = torch.rand(len(pool), generator=generator)
        if by_uncertainty:  # the mutual information of label and weights
            la = lapwing.fit(network, (x, y), "classification", structure="full", prior=0.1, progress=False)
            scores = la.predict(pool).epistemic.clone()
        scores[chosen] = -1.0
        chosen += scores.topk(PER_ROUND).indices.tolist()
    return found


labels = [FIRST + PER_ROUND * k for k in range(ROUNDS)]
print("labels     ", "  ".join(f"{n:5d}" for n in labels))
for name, by_uncertainty in (("random", False), ("epistemic", True)):
    mean = torch.tensor([accuracies(by_uncertainty, seed) for seed in range(3)]).mean(0)
    print(f"{name:11s}", "  ".join(f"{value:.3f}" for value in mean.tolist()))
