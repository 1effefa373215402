"""SWAG: a Gaussian through the iterates of stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.baselines.mixing import Weighted
from lapwing.baselines.training import Task
from lapwing.errors import BadData, require_generator, require_whole
from lapwing.likelihoods import Likelihood
from lapwing.model.inputs import Inputs
from lapwing.model.module import outside_inference
from lapwing.predictive import Prediction


@dataclass(frozen=True, eq=False)
class SWAG:
    """N(θ̄, ½ Σ_diag + D Dᵀ / (2(K−1))): moments of SGD iterates (Maddox et al. 2019, Algorithm 1).

    θ̄ (`mean`) and Σ_diag (`variance`, second moment minus squared mean) run over all iterates; the columns of D
    (`deviations`, (K, P) here) are the last K iterates minus the running mean at their time. `SWAG.fit` continues the
    training of a network with a constant rate and takes one iterate per epoch. Batch norm keeps the statistics of the
    trained network, where the paper estimates them anew for every draw. The user's module is not written to.

    Example:
        >>> swag = SWAG.fit(model, train_loader, "classification", epochs=20, rate=0.01)
        >>> swag.predict(x).probs
    """

    network: Weighted
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
        prior: Any = 1.0,
        samples: int = 30,
        batch_size: int = 128,
        n_data: float | None = None,
        generator: torch.Generator | None = None,
        split: Callable[[Any], tuple] | None = None,
    ) -> SWAG:
        """Run SGD on −log p(D, θ)/n from the weights of a trained network, and keep one iterate per epoch.

        `data` and `split` are as in `lapwing.fit`; a pair (X, y) is shuffled in batches of `batch_size`. `prior` is a
        precision, `rank` the number K of deviations, `samples` the number of networks that predict.
        """
        require_whole("rank", rank)
        require_whole("epochs", epochs)
        if epochs < 2:
            raise BadData(f"SWAG needs at least two iterates, one per epoch; got epochs={epochs}")
        task = Task.of(model, data, likelihood, "SWAG", prior, batch_size, n_data, generator, split)
        theta = task.params.flat.clone().requires_grad_()
        optimizer = torch.optim.SGD([theta], rate, momentum=momentum)
        moments = Moments.empty(theta.detach())

        def after(_: int) -> None:
            nonlocal moments
            moments = moments.joined(theta.detach(), rank)

        task.descend(optimizer, epochs, lambda batch: task.loss(batch, theta), decay=False, after=after)
        network = Weighted.of(task.module, task.params, task.likelihood, task.convention)
        return cls(network, moments.mean.to(theta), moments.variance.to(theta), moments.deviations.to(theta), samples)

    @property
    def module(self) -> nn.Module:
        """The network whose weights are averaged."""
        return self.network.module

    @property
    def likelihood(self) -> Likelihood:
        """What the outputs of the network mean."""
        return self.network.likelihood

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n weight vectors, (n, P); the same at every call without a generator."""
        require_generator(generator, self.mean.device)
        generator = torch.Generator(self.mean.device).manual_seed(0) if generator is None else generator
        rank, mean = len(self.deviations), self.mean
        free = torch.randn(n, len(mean), generator=generator, dtype=mean.dtype, device=mean.device)
        bound = torch.randn(n, rank, generator=generator, dtype=mean.dtype, device=mean.device)
        spread = (0.5 * self.variance).sqrt() * free
        return self.mean + spread + bound @ self.deviations / (2 * max(rank - 1, 1)) ** 0.5

    @outside_inference
    def predict(
        self,
        x: Inputs,
        *,
        samples: int | None = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Return the mixture of networks at drawn weights."""
        count = self.samples if samples is None else samples
        require_whole("samples", count)
        return self.network.predict(self.sample(count, generator), x, differentiable=differentiable)


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
