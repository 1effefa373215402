"""Log-determinants by stochastic Lanczos quadrature, deflated by a sketch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg.krylov.estimators import spheres
from lapwing.linalg.krylov.lanczos import lanczos
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
    the quadrature, which for the logarithm falls exponentially with `steps`.
    """
    found = lanczos(matvec, spheres(probes, like, generator), min(steps, like.shape[-1]), keep=False)
    nodes, weights = found.quadrature()
    each = (weights * nodes.clamp(min=1e-300).log()).sum(-1)
    error = each.std() / probes**0.5 if probes > 1 else torch.full_like(each[0], torch.inf)
    return Estimate(each.mean(), error, probes, probes * found.alphas.shape[-1])
