"""SWAG: a Gaussian through the iterates of stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from lapwing.baselines.mixing import WeightDistribution, Weighted
from lapwing.baselines.training import Task, TaskOptions
from lapwing.errors import BadData, require_whole
from lapwing.likelihoods import Likelihood


@dataclass(frozen=True, eq=False)
class SWAG(WeightDistribution):
    """N(θ̄, ½ Σ_diag + D Dᵀ / (2(K−1))): moments of SGD iterates (Maddox et al. 2019, Algorithm 1).

    θ̄ (`mean`) and Σ_diag (`variance`, second moment minus squared mean) run over all iterates; the columns of D
    (`deviations`, (K, P) here) are the last K iterates minus the running mean at their time. `SWAG.fit` continues the
    training of a network with a constant rate and takes one iterate per epoch. Batch norm keeps the statistics of the
    trained network, where the paper estimates them anew for every draw. The user's module is not written to.

    Examples:
        >>> swag = baselines.SWAG.fit(model, train_loader, "classification", epochs=3, rate=0.01)
        >>> swag.predict(x).probs.shape
        torch.Size([8, 3])
    """

    mean: Tensor
    variance: Tensor
    deviations: Tensor
    samples: int = 30

    @classmethod
    def fit(
        cls,
        model: nn.Module,
        data: Any,
        likelihood: str | Likelihood,
        *,
        epochs: int = 20,
        rate: float = 1e-2,
        momentum: float = 0.9,
        rank: int = 20,
        samples: int = 30,
        **options: Unpack[TaskOptions],
    ) -> SWAG:
        """Run SGD on −log p(D, θ)/n from the weights of a trained network, and keep one iterate per epoch.

        `data` are as in `lapwing.fit`, `rank` is the number K of deviations, `samples` the number of networks that
        predict, and the other options (prior, batch_size, n_data, generator, split) are those of `TaskOptions`.
        """
        require_whole("rank", rank)
        require_whole("epochs", epochs)
        if epochs < 2:
            raise BadData(f"SWAG needs at least two iterates, one per epoch; got epochs={epochs}")
        task = Task.of(model, data, likelihood, "SWAG", **options)
        theta = task.params.flat.clone().requires_grad_()
        optimizer = torch.optim.SGD([theta], rate, momentum=momentum)
        moments = Moments.empty(theta.detach())

        def after(_: int) -> None:
            nonlocal moments
            moments = moments.joined(theta.detach(), rank)

        task.descend(optimizer, epochs, lambda batch: task.loss(batch, theta), decay=False, after=after)
        network = Weighted.of(task.module, task.params, task.likelihood, task.convention)
        return cls(network, moments.mean.to(theta), moments.variance.to(theta), moments.deviations.to(theta), samples)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n weight vectors, (n, P); the same at every call without a generator."""
        noise, rank = self._noise(n, self.mean, generator), len(self.deviations)
        spread = (0.5 * self.variance).sqrt() * noise(len(self.mean))
        return self.mean + spread + noise(rank) @ self.deviations / (2 * max(rank - 1, 1)) ** 0.5


@dataclass(frozen=True, eq=False)
class Moments:
    """Running moments of iterates in float64: their number, mean and mean square (P,), the last deviations (k, P)."""

    count: int
    mean: Tensor
    square: Tensor
    deviations: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Moments:
        """Start without iterates."""
        zero = torch.zeros_like(like, dtype=torch.float64)
        return cls(0, zero, zero, zero.new_zeros(0, len(like)))

    def joined(self, theta: Tensor, rank: int) -> Moments:
        """Add an iterate and keep the last `rank` deviations."""
        n, theta = self.count, theta.double()
        mean = (n * self.mean + theta) / (n + 1)
        square = (n * self.square + theta.square()) / (n + 1)
        deviations = torch.cat([self.deviations, (theta - mean)[None]])[-rank:]
        return Moments(n + 1, mean, square, deviations)

    @property
    def variance(self) -> Tensor:
        """The mean square minus the squared mean, at least zero."""
        return (self.square - self.mean.square()).clamp(min=0)
