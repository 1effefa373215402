"""What baselines that train share: data in shuffled batches, and the log joint of a network at given weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from lapwing.baselines.mixing import known_likelihood
from lapwing.errors import BadData, IncompatiblePrior, NotConverged, nearest, positive, require_generator, require_whole
from lapwing.evaluation.scoring import device_of
from lapwing.evidence.loop import Shuffled, count_data
from lapwing.likelihoods import Likelihood
from lapwing.model import Batches, Params, select_names, unwrap
from lapwing.model.batches import Batch, Convention, require_one_process
from lapwing.model.calls import as_tensors, call, explained, output_tensor
from lapwing.model.copies import borrowed, in_use
from lapwing.posterior import resolve_prior


class TaskOptions(TypedDict, total=False):
    """What the `fit` of every baseline that trains takes, besides its own options.

    - `prior`: a precision, or anything else that `lapwing.fit` takes as a prior with one precision per weight; 1.0
    - `batch_size`: of a pair (X, y), which is shuffled; 128
    - `n_data`: the size of the data set, if `data` is only a part of it or repeats it
    - `generator`: of all random numbers; a fixed seed by default
    - `split`: a function batch -> (inputs, targets[, weights]), as in `lapwing.fit`
    """

    prior: Any
    batch_size: int
    n_data: float | None
    generator: torch.Generator | None
    split: Callable[[Any], tuple] | None


@dataclass(frozen=True, eq=False)
class Task:
    """A network, its trainable parameters, labeled data and a Gaussian prior with one precision per weight.

    The module runs in eval mode on a private copy and is never written to: batch norm keeps its statistics, and dropout
    is off. `n_data` is the size of the data set that the batches stand for.
    """

    module: nn.Module
    params: Params
    likelihood: Likelihood
    batches: Batches
    n_data: float
    center: Tensor  # the prior mean (P,)
    precision: Tensor  # the prior precision (P,)
    generator: torch.Generator

    @classmethod
    def of(
        cls,
        model: nn.Module,
        data: Any,
        likelihood: str | Likelihood,
        method: str,
        **options: Unpack[TaskOptions],
    ) -> Task:
        """Read what users pass to `fit`; `method` is for messages."""
        require_one_process(method)
        unknown = options.keys() - TaskOptions.__annotations__.keys()
        if unknown:
            name, known = min(unknown), sorted(TaskOptions.__annotations__)
            raise TypeError(f"{method}.fit() has no option {name!r}; all baselines have {known}{nearest(name, known)}")
        batch_size, n_data = options.get("batch_size", 128), options.get("n_data")
        generator, split = options.get("generator"), options.get("split")
        require_whole("batch_size", batch_size)
        module = unwrap(model)
        family = known_likelihood(likelihood, method)
        params = Params.of(module, select_names(module, "all"))
        device = device_of(module)
        require_generator(generator, device)
        generator = torch.Generator(device).manual_seed(0) if generator is None else generator
        data = as_tensors(data) if isinstance(data, tuple) else data
        pair = isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor)
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        source = Shuffled(data, batch_size, seed) if pair else data
        batches = Batches(source, module, device, split)
        batches.require_reiterable(method)
        size = count_data(source, module, split) if n_data is None else positive("n_data", n_data)
        if not size > 0:
            raise BadData("the data hold no samples")
        center, matrix = resolve_prior(options.get("prior", 1.0)).resolve(
            params.names, params.sizes, params.dtype, device
        )
        if not matrix.is_diagonal:
            raise IncompatiblePrior(f"{method} needs a prior with one precision per weight, not a matrix")
        precision = matrix.diagonal().to(params.dtype)
        return cls(module, params, family, batches, size, center, precision, generator)

    @property
    def convention(self) -> Convention:
        """How the batches were read."""
        return self.batches.convention

    def each(self, epochs: int) -> Iterator[tuple[int, Batch]]:
        """Yield the number of the epoch and a batch, in another order every epoch where the data are a pair (X, y)."""
        batches, source = self.batches, self.batches.data
        for epoch in range(epochs):
            if isinstance(source, Shuffled):
                batches = replace(batches, data=replace(source, epoch=epoch))
            for batch in batches:
                yield epoch, batch

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make one private copy of the module for all passes inside."""
        with borrowed(self.module):
            yield

    def outputs(self, batch: Batch, values: dict[str, Tensor]) -> Tensor:
        """Return the outputs of a batch at weights by name, one row per sample; inside `running`."""
        with explained(batch.inputs):
            return self.likelihood.outputs(output_tensor(call(in_use(self.module), batch.inputs, values)))

    def nll(self, batch: Batch, values: dict[str, Tensor], *, targets: Tensor | None = None) -> tuple[Tensor, float]:
        """Return Σ −log p(y | f) of a batch at weights by name, and how many data it stands for; inside `running`.

        `targets`, if given, are the targets of the batch after `likelihood.targets` has checked them.
        """
        f = self.outputs(batch, values)
        y = self.likelihood.targets(f.detach(), batch.targets) if targets is None else targets
        losses = -self.likelihood.log_prob(f, y).reshape(len(f), -1).sum(1)
        if batch.weights is None:
            return losses.sum(), float(len(f))
        return (losses * batch.weights.to(losses)).sum(), float(batch.weights.double().sum())

    def distance(self, theta: Tensor) -> Tensor:
        """Return ½(θ − μ₀)ᵀΠ(θ − μ₀)."""
        return 0.5 * ((theta - self.center).square() * self.precision).sum()

    def loss(self, batch: Batch, theta: Tensor) -> Tensor:
        """Return −log p(D, θ)/n estimated from one batch, up to a constant."""
        total, count = self.nll(batch, self.params.unflatten(theta))
        return total / max(count, 1e-12) + self.distance(theta) / self.n_data

    def descend(
        self,
        optimizer: torch.optim.Optimizer,
        epochs: int,
        loss: Callable[[Batch], Tensor],
        *,
        decay: bool,
        after: Callable[[int], None] | None = None,
    ) -> tuple[float, ...]:
        """Take a step per batch; `decay` lowers the rate to zero by a cosine, `after` is called after each epoch.

        Returns the mean loss of each epoch.
        """
        require_whole("epochs", epochs)
        length = self.batches.length
        steps = epochs * max(1, sum(1 for _ in self.batches) if length is None else length)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if decay else None
        sums: list[list[float]] = [[] for _ in range(epochs)]
        last = 0
        with self.running(), torch.enable_grad():
            for epoch, batch in self.each(epochs):
                if epoch != last and after is not None:
                    after(last)
                last = epoch
                optimizer.zero_grad()
                value = loss(batch)
                if not bool(value.isfinite()):
                    raise NotConverged(f"the loss is {value.item()} in epoch {epoch + 1}: use a smaller rate=")
                value.backward()
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                sums[epoch].append(value.item())
        if after is not None:
            after(last)
        return tuple(sum(each) / len(each) for each in sums)
