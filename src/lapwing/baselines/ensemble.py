"""Deep ensembles: networks trained independently, with equal weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from lapwing.baselines.mixing import known_likelihood, mixed
from lapwing.baselines.training import Task, TaskOptions
from lapwing.errors import BadData, require_whole
from lapwing.likelihoods import Likelihood
from lapwing.model.calls import Inputs, call, output_tensor, outside_inference
from lapwing.model.copies import borrowed
from lapwing.predictive import Prediction


@dataclass(frozen=True, eq=False)
class DeepEnsemble:
    """The average prediction of several trained networks (Lakshminarayanan et al. 2017).

    The networks may differ in architecture. One network alone predicts without uncertainty about its weights. The
    networks are read when they predict, not copied.

    Examples:
        >>> others = [nn.Linear(4, 3) for _ in range(2)]  # trained, in practice
        >>> ensemble = baselines.DeepEnsemble([model, *others], "classification")
        >>> ensemble.predict(x).probs.shape
        torch.Size([8, 3])
    """

    models: Sequence[nn.Module]
    likelihood: Likelihood

    def __init__(self, models: Sequence[nn.Module], likelihood: str | Likelihood) -> None:
        models = tuple(models)
        wrong = [type(model).__name__ for model in models if not isinstance(model, nn.Module)]
        if wrong or not models:
            raise BadData(f"an ensemble is made of one or more nn.Modules, got {wrong[0] if wrong else 'none'}")
        object.__setattr__(self, "models", models)
        object.__setattr__(self, "likelihood", known_likelihood(likelihood, "DeepEnsemble"))

    @classmethod
    def fit(
        cls,
        make: Callable[[], nn.Module],
        data: Any,
        likelihood: str | Likelihood,
        *,
        members: int = 5,
        epochs: int = 20,
        rate: float = 1e-3,
        **options: Unpack[TaskOptions],
    ) -> DeepEnsemble:
        """Train `members` networks that `make()` returns, by Adam on the log joint with a cosine schedule.

        The other options (prior, batch_size, n_data, generator, split) are those of `TaskOptions`.

        Examples:
            >>> make = lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
            >>> ensemble = baselines.DeepEnsemble.fit(make, train_loader, "classification", members=2, epochs=2)
        """
        require_whole("the number of members", members)
        tasks = (Task.of(make(), data, likelihood, "DeepEnsemble", **options) for _ in range(members))
        return cls([_trained(task, epochs, rate) for task in tasks], likelihood)

    @property
    def module(self) -> nn.Module:
        """The first of the networks, where the inputs of all belong."""
        return self.models[0]

    @outside_inference
    def predict(self, x: Inputs, *, differentiable: bool = False) -> Prediction:
        """Return the mixture of the members' predictions."""

        def run(inputs: Inputs) -> Iterable[Tensor]:
            for model in self.models:
                with borrowed(model) as own, torch.set_grad_enabled(differentiable):
                    yield output_tensor(call(own, inputs))

        return mixed(self.module, self.likelihood, x, run, differentiable=differentiable)


def _trained(task: Task, epochs: int, rate: float) -> nn.Module:
    """Train a network that was made for this ensemble, and write the weights into it."""
    theta = task.params.flat.clone().requires_grad_()
    task.descend(torch.optim.Adam([theta], rate), epochs, lambda batch: task.loss(batch, theta), decay=True)
    live = dict(task.module.named_parameters())
    with torch.no_grad():
        for name, value in task.params.unflatten(theta.detach()).items():
            live[name].copy_(value)
    return task.module.eval()
