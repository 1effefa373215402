"""Log-determinants by stochastic Lanczos quadrature, deflated by a sketch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.linalg.krylov.estimators import spheres
from lapwing.linalg.krylov.lanczos import Tridiagonal, lanczos
from lapwing.linalg.krylov.nystrom import Sketch
from lapwing.linalg.krylov.results import Estimate, Matvec


@dataclass(frozen=True, eq=False)
class Density:
    """Eigenvalues of a sketch and, for each of b probes, the quadrature of the rest: tr f(A) for any f with f(0) = 0.

    `nodes`, `weights` (b, m) come from probes outside the sketch. One density serves every f: all scales and constant
    priors of a curvature.
    """

    values: Tensor  # (k,)
    nodes: Tensor
    weights: Tensor
    products: int

    def trace(self, f: Callable[[Tensor], Tensor]) -> Estimate:
        """Σ f(λ) over the sketch plus the mean over probes; differentiable in what f closes over."""
        each = (self.weights * f(self.nodes.clamp(min=0))).sum(-1)
        n = len(each)
        error = each.detach().std() / n**0.5 if n > 1 else torch.full_like(each.detach()[0], torch.inf)
        return Estimate(f(self.values).sum() + each.mean(), error, n, self.products)


def deflated_density(
    matvec: Matvec, sketch: Sketch, like: Tensor, *, probes: int = 8, steps: int = 20,
    generator: torch.Generator | None = None,
) -> Density:  # fmt: skip
    """Project the sketch out of A and run Lanczos' method from random probes in the complement.

    Plain quadrature spends its variance on a few large eigenvalues; without them it is small. Exact eigenvectors in
    the sketch give no bias; approximate ones one of second order in ‖(I − UᵀU) A Uᵀ‖.
    """
    basis = sketch.basis

    def project(v: Tensor) -> Tensor:
        for _ in range(2):
            v = v - (v.to(basis.dtype) @ basis.T @ basis).to(v.dtype)
        return v

    start = project(spheres(probes, like, generator))
    free = like.shape[-1] - sketch.rank
    start = start * (free**0.5 / start.double().norm(dim=-1, keepdim=True).clamp(min=1e-300)).to(start)
    steps = max(1, min(steps, free))
    if free <= 0:
        none = torch.zeros(probes, 1, dtype=torch.float64, device=like.device)
        return Density(sketch.values, none, none, 0)
    found = lanczos(lambda v: project(matvec(project(v))), start, steps, keep=False)
    nodes, weights = found.quadrature()
    return Density(sketch.values, nodes, weights, probes * steps)


def slq_logdet(
    matvec: Matvec, like: Tensor, *, probes: int = 8, steps: int = 20, generator: torch.Generator | None = None
) -> Estimate:
    """log |A| = E zᵀ log(A) z for a positive definite A, by Lanczos quadrature (Ubaru, Chen, Saad 2017).

    For a preconditioned A, close to the identity, few steps and probes suffice whatever the sketch: no bias but that of
    the quadrature, which for the logarithm falls exponentially with `steps`. The error holds both: the spread of the
    probes, and what the last steps' changes, continued as a geometric series, say is left.
    """
    found = lanczos(matvec, spheres(probes, like, generator), min(steps, like.shape[-1]), keep=False)
    each = _logs(found, found.alphas.shape[-1])
    spread = each.std() / probes**0.5 if probes > 1 else torch.full_like(each[0], torch.inf)
    error = (spread.square() + _truncation(found).square()).sqrt()
    return Estimate(each.mean(), error, probes, probes * found.alphas.shape[-1])


def _logs(found: Tridiagonal, steps: int) -> Tensor:
    """zᵀ log(A) z of every probe by the first steps, (b,)."""
    part = replace(found, alphas=found.alphas[:, :steps], betas=found.betas[:, : max(0, steps - 1)])
    nodes, weights = part.quadrature()
    return (weights * nodes.clamp(min=1e-300).log()).sum(-1)


def _truncation(found: Tridiagonal) -> Tensor:
    """What is left of the series of changes d_m = v_m − v_{m−1}, continued geometrically: d·r/(1 − r), at least d."""
    steps = found.alphas.shape[-1]
    if not bool((found.coupling > 0).any()):  # the Krylov spaces are exhausted: exact
        return found.alphas.new_zeros(())
    if steps == 1:
        return _logs(found, 1).mean().abs()
    values = [_logs(found, k).mean() for k in range(max(1, steps - 2), steps + 1)]
    last = (values[-1] - values[-2]).abs()
    if len(values) < 3:
        return last
    ratio = (last / (values[-2] - values[-3]).abs().clamp(min=1e-300)).clamp(max=0.95)
    return last * (ratio / (1 - ratio)).clamp(min=1.0)
