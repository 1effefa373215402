"""A stochastic lower bound of the evidence from one batch.

log|H + Π| − log|Π| is subadditive in the data: for a batch b of a data set of N (Immer et al. 2023, Prop. 1)

    log|H + Π| − log|Π| ≤ E_b[(N/|b|)·log|I + Φ_b Π⁻¹ Φ_bᵀ|],    Φ_b the rows Sᵀ J/√φ of the batch,

so that (N/|b|)·(log p(b|θ) − ½ log|I + Φ_b Π⁻¹ Φ_bᵀ|) − ½‖θ − μ‖²_Π is below the evidence on average, and the closer
the larger the batch. It is differentiable in prior, noise and whatever the inputs were made from.
"""

import torch
from torch import Tensor

from lapwing.curvature import Factor
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Diagonal, Jacobian
from lapwing.model import Batch, Network, Plan


def bracket_bound(rows: Jacobian, precision: Tensor, scale: Tensor, ratio: float) -> Tensor:
    """(N/|b|)·log|I + c·Φ Π⁻¹ Φᵀ| for rows Φ (n, r, P), Π = diag(precision), c = `scale` = φ⁻ᵏ and ratio = N/|b|."""
    kernel = Diagonal(precision).joint(rows).double().flatten(2).flatten(0, 1)  # (n·r, n·r)
    eye = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
    kernel = 0.5 * (kernel + kernel.mT) * scale
    return ratio * 2 * torch.linalg.cholesky(eye + kernel).diagonal().log().sum()


def batch_bound(
    network: Network,
    plan: Plan,
    batch: Batch,
    likelihood: Likelihood,
    factor: Factor,
    *,
    center: Tensor,
    precision: Tensor,
    n_data: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The bound for one batch, a float64 scalar with gradients into `precision` (P,), `center` and the noise."""
    with network.borrow():
        at = network.linearize(plan, batch.inputs)
        f = at.f.detach()
        y = likelihood.targets(f, batch.targets)
        ratio = n_data / likelihood.count(f, y, batch.weights)
        directions = torch.stack(list(factor.directions(likelihood, f, y, generator)))
        if batch.weights is not None:
            directions = directions * batch.weights.to(f).sqrt().reshape(-1, *(1,) * (f.ndim - 1))
        rows = at.jacobian(directions)
        scale = likelihood.common_factor.double() ** -factor.dispersion_power
        bracket = bracket_bound(rows, precision, scale, ratio)
    fit = ratio * likelihood.log_likelihood(likelihood.statistics(f, y, batch.weights))
    offset = network.params.flat.double() - center.double()
    return fit - 0.5 * (precision.double() * offset.square()).sum() - 0.5 * bracket
