"""The last layer alone: f = f̂ + R diag(s) z for every input, with one R for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.linalg import PSD, Diagonal
from lapwing.model import Linearization, Network, Plan, PlanChanged
from lapwing.model.inputs import Inputs
from lapwing.model.linearization import pull


def shared_root(network: Network, plan: Plan, precision: PSD, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """R (C, C) and s (B, C) with covariance R diag(s²) Rᵀ of f at every input, where only its last layer is uncertain.

    That is where the outputs are those of one weight matrix, W a, and its precision has eigenvectors that are products.
    No covariance of the outputs is formed. None for other networks, selections and structures.
    """
    if len(plan.blocks) != 1 or plan.looped or network.params.index is not None:
        return None
    block = plan.blocks[0]
    if block.kind != "matrix" or len(block.uses) != 1 or block.uses[0][1]:
        return None
    try:
        with network.borrow(), torch.enable_grad():
            at = network.linearize(plan, inputs)
    except PlanChanged:
        return None
    uses = at.plan.blocks[0].uses if at.plan.blocks else ()  # of a plan made for these inputs, where it is another
    if len(uses) != 1 or not _last(at, uses[0][0]):
        return None
    a = at.recorded.right(uses[0][0], block.bias)[:, 0].detach()
    if a.shape[1:3] != (1, 1):
        return None
    if precision.is_diagonal:
        precision = Diagonal(block.places.take(precision.diagonal()))
    return precision.output_root(a[:, 0, 0])


def _last(at: Linearization, k: int) -> bool:
    """Whether outputs (B, C) are those of a record as they are, by their values and by what they back-propagate."""
    record = at.recorded.records[k]
    if at.f.ndim != 2 or record.out.shape != at.f.shape or not torch.equal(record.out, at.f):
        return False
    v = torch.randn(at.f.shape, generator=torch.Generator().manual_seed(0)).to(at.f)
    (g,) = pull(at.f, [record.edge], v)
    return g is not None and torch.equal(g.to(v), v)
