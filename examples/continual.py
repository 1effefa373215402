"""Continual learning: the posterior of the old tasks is the prior of the next one, so none is forgotten.

python examples/continual.py
"""

import torch
from torch import Tensor, nn

import lapwing


def task(seed: int) -> tuple[Tensor, Tensor]:
    """Draw inputs from three clusters in forty dimensions, with labels; each task has its own centers."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (200,), generator=generator)
    centers = 1.5 * torch.randn(3, 40, generator=generator)
    return centers[y] + torch.randn(200, 40, generator=generator), y


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    return (model(data[0]).argmax(1) == data[1]).double().mean().item()


tasks = [task(seed) for seed in range(4)]
for name in ("fine-tuning", "posterior → prior"):
    torch.manual_seed(0)
    model, prior = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 3)), lapwing.Prior(1.0)
    for data in tasks:
        trained = lapwing.train(
            model, data, "classification", epochs=20, batch_size=50, prior=prior, structure="diag", keep="last",
            optimizer=lambda p: torch.optim.Adam(p, 1e-2),
        )  # fmt: skip
        if name != "fine-tuning":
            prior = lapwing.Prior.from_posterior(trained.laplace.posterior)
    print(f"{name:18s} accuracy on the tasks, oldest first:", [f"{accuracy(model, data):.1%}" for data in tasks])
