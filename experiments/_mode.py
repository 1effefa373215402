"""Train a small network to the mode of its log joint, on all data at once: what a Laplace approximation expects."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapwing.likelihoods import Likelihood


def to_mode(
    model: nn.Module, x: Tensor, y: Tensor, likelihood: Likelihood, precision: float, steps: int, rate: float = 1e-2
) -> nn.Module:
    """Minimize −Σ log p(y | f(x)) + precision/2·‖θ‖² by `steps` of Adam, then a twentieth of as many of L-BFGS."""
    weights = list(model.parameters())

    def loss() -> Tensor:
        f = likelihood.outputs(model(x))
        penalty = torch.stack([w.square().sum() for w in weights]).sum()
        return precision / 2 * penalty - likelihood.log_prob(f, likelihood.targets(f, y)).sum()

    adam = torch.optim.Adam(weights, rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(steps, 1), rate / 100)
    for _ in range(steps):
        adam.zero_grad()
        loss().backward()
        adam.step()
        schedule.step()
    lbfgs = torch.optim.LBFGS(weights, max_iter=20, history_size=30, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        lbfgs.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(steps // 400):
        lbfgs.step(closure)
    return model.eval()
