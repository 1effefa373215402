"""Find the mode of the linearized model by Jacobian products, for networks that are not at a mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import NotConverged, brief
from lapwing.likelihoods import Likelihood
from lapwing.linalg import PSD
from lapwing.linalg.solvers import conjugate_gradients
from lapwing.model import Batches, Network
from lapwing.model.batches import Batch
from lapwing.model.products import Products
from lapwing.posterior import Belief

NEWTON, BACKTRACKS = 50, 20


@dataclass(frozen=True, eq=False)
class LinearMode:
    """θ̄ (P,) = argmax T·log p(D | f̂ + J(θ − θ̂)) − ½(θ − μ₀)ᵀΠ(θ − μ₀), the log joint there, and the work it took."""

    __repr__ = brief

    weights: Tensor
    log_joint: Tensor
    newton: int
    products: int


@dataclass(frozen=True, eq=False)
class LinearModel:
    """The model f̂ + J δ on the data, with a likelihood that counts `scale` times and a Gaussian prior around μ₀."""

    products: Products
    likelihood: Likelihood
    scale: float  # T times the size of the data set, over what is read
    offset: Tensor  # θ̂ − μ₀ (P,)
    prior: PSD

    def _outputs(self, delta: Tensor) -> Iterator[tuple[Batch, Tensor, Tensor, Tensor]]:
        """Yield (batch, targets, f̂, J δ) for rows δ (s, P)."""
        for batch, f, moved in self.products.jacobian(delta, "linear mode"):
            yield batch, self.likelihood.targets(f, batch.targets), f, moved

    def log_joint(self, delta: Tensor) -> Tensor:
        """Return the log joint for each row of δ (s, P), (s,) float64."""
        total = torch.zeros(len(delta), dtype=torch.float64, device=delta.device)
        for batch, y, f, moved in self._outputs(delta):
            each = torch.stack([self.likelihood.log_prob(f + row, y).double() for row in moved])
            total += _weighted(each, batch).reshape(len(delta), -1).sum(1)
        away = self.offset + delta.double()
        return self.scale * total - 0.5 * (away * self.prior.matvec(away)).sum(-1)

    def gradient(self, delta: Tensor) -> Tensor:
        """Return the gradient of the log joint at δ (P,)."""

        def pull(batch: Batch, f: Tensor) -> Tensor:
            moved = self.products.jvp(batch.inputs, delta[None])[1][0]
            y = self.likelihood.targets(f, batch.targets)
            return _weighted(self.likelihood.score(f + moved, y)[None], batch)

        slope = self.scale * self.products.transposed(pull, 1, "linear mode")[0]
        return slope - self.prior.matvec(self.offset + delta.double()).double()

    def curvature(self, delta: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function v (s, P) -> (T·JᵀΛ(f̂ + Jδ)J + Π) v."""
        phi = self.likelihood.common_factor.detach()

        def middle(batch: Batch, f: Tensor, u: Tensor) -> Tensor:
            moved = self.products.jvp(batch.inputs, delta[None])[1][0]
            root = self.likelihood.factor(f + moved, self.likelihood.targets(f, batch.targets))
            inner = torch.einsum("...cr,s...c->s...r", root, u.to(root))
            return _weighted(torch.einsum("...cr,s...r->s...c", root, inner) / phi.to(root), batch)

        return lambda v: self.scale * self.products.ggn(v, middle, "linear mode") + self.prior.matvec(v).double()


def linear_mode(
    network: Network, belief: Belief, batches: Batches, *, tolerance: float = 1e-3, progress: bool | None = None
) -> LinearMode:
    """Find the mode of the linearized model by Newton's method with conjugate gradients.

    The posterior precision at hand is the preconditioner. Ends when the quadratic model promises less than `tolerance`
    nats. A step of Newton reads the data once for the gradient, once per conjugate gradient, and once or more for its
    length.
    """
    batches.require_reiterable("the mode of the linearized model")
    model = LinearModel(
        Products(network, batches, progress),
        belief.likelihood,
        float(belief.temperature.T) * belief.curvature.n_data / belief.curvature.seen,
        belief.offset,
        belief.prior_in_use[1].scale(belief.temperature.prior_scale),
    )
    precision = belief.posterior.precision
    delta = torch.zeros_like(model.offset)
    value = model.log_joint(delta[None])[0]
    used = 0
    for step in range(NEWTON):
        gradient = model.gradient(delta)
        solution = conjugate_gradients(
            model.curvature(delta),
            gradient[None],
            precondition=lambda v: precision.solve(v).double(),
            tolerance=1e-5,
            iterations=500,
            unconverged="accept",
        )
        used += solution.products
        move = solution.x[0]
        if 0.5 * (gradient * move).sum() <= tolerance:
            return LinearMode(belief.weights.double() + delta, value, step, used)
        delta, value = _advanced(model, delta, move, value)
    raise NotConverged(
        f"the mode of the linearized model was not reached in {NEWTON} steps of Newton's method: "
        f"{float(0.5 * (gradient * move).sum()):.3g} nats are left. Use at='map', or a larger prior precision"
    )


def _advanced(model: LinearModel, delta: Tensor, move: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    length = 1.0
    for _ in range(BACKTRACKS):
        there = delta + length * move
        new = model.log_joint(there[None])[0]
        if torch.isfinite(new) and new >= value:
            return there, new
        length /= 2
    raise NotConverged("no step towards the mode of the linearized model raises the log joint; use float64 or at='map'")


def _weighted(values: Tensor, batch: Batch) -> Tensor:
    """Multiply values (s, n, …) by the weights (n,) of the samples."""
    if batch.weights is None:
        return values
    return values * batch.weights.to(values).reshape(1, -1, *(1,) * (values.ndim - 2))
