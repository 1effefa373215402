"""Mean-field variational inference: the fully factorized Gaussian closest to the posterior in KL divergence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lapwing.baselines.mixing import WeightDistribution, Weighted
from lapwing.baselines.training import Task, TaskOptions
from lapwing.errors import positive, require_whole
from lapwing.likelihoods import Likelihood
from lapwing.model.batches import Batch
from lapwing.model.calls import tensors_in


@dataclass(frozen=True, eq=False)
class MeanField(WeightDistribution):
    """q(θ) = N(μ, diag(σ²)), trained on the variational bound Σ E_q[log p(y|θ)] − KL(q ‖ prior).

    The bound is estimated by reparametrization (Kingma and Welling 2014; Blundell et al. 2015). A linear layer whose
    inputs are one row per sample draws its outputs instead of its weights, which has the same expectation and less
    noise (local reparametrization, Kingma et al. 2015); other weights are drawn once per batch. `deviation` is σ (P,),
    `history` the mean of −bound/n in each epoch. The user's module is not written to.

    Examples:
        >>> field = baselines.MeanField.fit(model, train_loader, "classification", epochs=2)
        >>> field.predict(x).entropy.shape
        torch.Size([8])
    """

    mean: Tensor
    deviation: Tensor
    samples: int = 100
    history: tuple[float, ...] = field(default=(), repr=False)

    @classmethod
    def fit(
        cls,
        model: nn.Module,
        data: Any,
        likelihood: str | Likelihood,
        *,
        epochs: int = 50,
        rate: float = 1e-3,
        start: float = 1e-2,
        draws: int = 1,
        samples: int = 100,
        **options: Unpack[TaskOptions],
    ) -> MeanField:
        """Maximize the bound by Adam with a cosine schedule, from the weights of the model and σ = `start`.

        `data` are as in `lapwing.fit`, `draws` are weight draws per step, `samples` is the number of networks that
        predict, and the other options (prior, batch_size, n_data, generator, split) are those of `TaskOptions`.
        """
        require_whole("draws", draws)
        task = Task.of(model, data, likelihood, "MeanField", **options)
        mean = task.params.flat.clone().requires_grad_()
        log_deviation = torch.full_like(mean, math.log(positive("start", start))).requires_grad_()
        bound = Bound(task, draws, _rows(task))
        optimizer = torch.optim.Adam([mean, log_deviation], rate)
        history = task.descend(optimizer, epochs, lambda batch: bound(batch, mean, log_deviation.exp()), decay=True)
        network = Weighted.of(task.module, task.params, task.likelihood, task.convention)
        return cls(network, mean.detach(), log_deviation.detach().exp(), samples, history)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n weight vectors, (n, P); the same at every call without a generator."""
        return self.mean + self.deviation * self._noise(n, self.mean, generator)(len(self.mean))


@dataclass(frozen=True, eq=False)
class Bound:
    """−bound/n of one batch, with gradients to μ and σ. `rows` names the parameters whose layers draw their outputs."""

    task: Task
    draws: int
    rows: frozenset[str]

    def __call__(self, batch: Batch, mean: Tensor, deviation: Tensor) -> Tensor:
        total = sum((self._expected(batch, mean, deviation) for _ in range(self.draws)), start=mean.new_zeros(()))
        return total / self.draws + self.divergence(mean, deviation) / self.task.n_data

    def divergence(self, mean: Tensor, deviation: Tensor) -> Tensor:
        """Return KL(q ‖ prior), 0-d."""
        ratio = deviation.square() * self.task.precision
        return 0.5 * (ratio - 1 - ratio.log()).sum() + self.task.distance(mean)

    def _expected(self, batch: Batch, mean: Tensor, deviation: Tensor) -> Tensor:
        """Estimate E_q[−log p]/n by one draw."""
        params, generator = self.task.params, self.task.generator
        try:
            values, deviations = params.unflatten(mean), params.unflatten(deviation)
            pairs = {id(values[name]): deviations[name].square() for name in self.rows}
            for name in params.names:
                if name not in self.rows:
                    like = values[name]
                    noise = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
                    values[name] = like + deviations[name] * noise
            with OutputDraws(pairs, generator) if pairs else nullcontext():
                total, count = self.task.nll(batch, values)
        except OtherUse:  # this batch uses a weight in another way than the first one did
            return replace(self, rows=frozenset())._expected(batch, mean, deviation)
        return total / max(count, 1e-12)


class OtherUse(Exception):
    """A weight whose layer draws its outputs was used in another way."""


class OutputDraws(TorchFunctionMode):
    """Lets linear layers draw their outputs: N(W̄a + b̄, σ_W²a² + σ_b²) per unit and sample.

    `variances` maps the identity of a mean tensor to its variance. Any use of such a tensor but one linear layer with
    one row per sample raises `OtherUse`: reading its mean there would leave out its noise.
    """

    def __init__(self, variances: Mapping[int, Tensor], generator: torch.Generator) -> None:
        super().__init__()
        self.variances, self.generator = variances, generator
        self.used: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        known = [id(t) for t in tensors_in((args, kwargs)) if id(t) in self.variances]
        found = func(*args, **kwargs)
        if not known or not _has_tensors(found):  # a shape or a dtype reads no value
            return found
        layer = linear_arguments(func, args, kwargs)
        if layer is None or self.used.intersection(known):
            raise OtherUse
        self.used.update(known)
        a, weight, bias = layer
        spread = F.linear(a.square(), self._variance(weight), None if bias is None else self._variance(bias))
        noise = torch.randn(found.shape, generator=self.generator, dtype=found.dtype, device=found.device)
        return found + noise * spread.clamp(min=torch.finfo(spread.dtype).tiny).sqrt()

    def _variance(self, tensor: Tensor) -> Tensor:
        known = self.variances.get(id(tensor))
        return torch.zeros_like(tensor) if known is None else known


class Uses(TorchFunctionMode):
    """Records by name how tensors are used: whether by one linear layer with one row per sample, and how often."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.count: dict[str, int] = {}
        self.other: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        known = [self.names[id(t)] for t in tensors_in((args, kwargs)) if id(t) in self.names]
        found = func(*args, **kwargs)
        if known and _has_tensors(found):
            for name in known:
                self.count[name] = self.count.get(name, 0) + 1
            if linear_arguments(func, args, kwargs) is None:
                self.other.update(known)
        return found

    @property
    def rows(self) -> frozenset[str]:
        """Names that one linear layer uses once, and nothing else."""
        return frozenset(name for name, count in self.count.items() if count == 1 and name not in self.other)


def _has_tensors(found: Any) -> bool:
    return any(True for _ in tensors_in(found))


def linear_arguments(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return input, weight and bias of a call of a linear layer with one row per sample; None for other calls."""
    if func is not F.linear:
        return None
    named = {**dict(zip(("input", "weight", "bias"), args)), **kwargs}
    a = named["input"]
    return (a, named["weight"], named.get("bias")) if a.ndim == 2 else None


def _rows(task: Task) -> frozenset[str]:
    """Find the parameters whose layers may draw their outputs, from the first batch."""
    values = task.params.unflatten(task.params.flat)
    uses = Uses({id(value): name for name, value in values.items()})
    with task.running(), torch.no_grad():
        batch = next(iter(task.batches))
        with uses:
            task.nll(batch, values)
    return uses.rows
