"""The exact Hessian of the negative log-likelihood, by one second backward pass a weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.curvature.problem import Problem
from lapwing.curvature.structure import Estimate
from lapwing.curvature.totals import Totals
from lapwing.errors import TooLarge
from lapwing.linalg import PSD


def hessian_estimate(problem: Problem, wrap: Callable[[Tensor], PSD]) -> Estimate:
    """Σ_n φ·∇²_θ(−log p(y_n | f_n)), dense (P, P), handed to `wrap`."""
    params = problem.network.params
    needed = params.size**2 * torch.finfo(params.dtype).bits // 8
    if needed > problem.memory:
        raise TooLarge(
            f"the exact Hessian of {params.size:,} weights needs {needed / 1e9:.3g} GB. Use factor='ggn', or select "
            "fewer weights."
        )
    total = torch.zeros(params.size, params.size, dtype=params.dtype, device=params.device)
    statistics, seen = torch.zeros((), dtype=torch.float64), 0.0
    gradient = torch.zeros(params.size, dtype=torch.float64, device=params.device)
    with problem.network.borrow(differentiable=True):
        for batch in problem.read("fit (Hessian)"):
            f = problem.network.functional(None, batch.inputs)
            y = problem.prepare(batch, f)
            statistics = statistics + problem.likelihood.statistics(f.detach(), y, batch.weights)
            seen += problem.likelihood.count(f, y, batch.weights)
            logs = problem.likelihood.log_prob(f, y).reshape(f.shape[0], -1).sum(1)
            logs = logs if batch.weights is None else logs * batch.weights.to(logs)
            loss = -logs.sum() * problem.likelihood.dispersion.detach().to(logs)
            first, rows = _second(problem, loss)
            gradient -= first
            total += rows
    total = 0.5 * (total + total.mT)
    return Estimate(wrap(total), Totals(statistics, seen, gradient))


def _second(problem: Problem, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient (P,) and Hessian (P, P) of a loss."""
    params = problem.network.params
    leaves = list(problem.network.leaves().values())

    def flat(found: tuple) -> Tensor:
        whole = torch.cat(
            [torch.zeros_like(p).flatten() if g is None else g.reshape(-1) for g, p in zip(found, leaves, strict=True)]
        ).to(params.dtype)
        return whole if params.index is None else whole[params.index]

    slope = flat(torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True))
    rows = []
    for entry in slope:
        found = (
            torch.autograd.grad(entry, leaves, retain_graph=True, allow_unused=True)
            if entry.requires_grad
            else (None,) * len(leaves)
        )
        rows.append(flat(found).detach())
    return slope.detach().double(), torch.stack(rows)
