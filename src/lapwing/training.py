"""`lapwing.train`: train weights, prior and noise together, and fit the posterior at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lapwing.curvature import Factor, Structure
from lapwing.curvature.resume import require_folder
from lapwing.errors import BadData, require_generator
from lapwing.evidence.loop import Moment, Schedule, Shuffled, Training, count_data
from lapwing.evidence.online import BATCH, Online, Subset
from lapwing.fitting import fit
from lapwing.laplace import Laplace
from lapwing.likelihoods import Likelihood
from lapwing.model import unwrap
from lapwing.model.batches import require_one_process

FIT = 2  # the fit at the end reads this many times the data of one step of the evidence


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network with its posterior (`.laplace`), the `.history` of the evidence, and whether it `.stopped`
    early. The module holds the best weights.

    Examples:
        >>> trained = lapwing.train(model, train_loader, "classification", epochs=2)
        >>> trained.laplace.predict(x).probs.shape
        torch.Size([8, 3])
    """

    laplace: Laplace
    online: Online
    history: tuple[Moment, ...]
    stopped: bool

    @property
    def module(self) -> nn.Module:
        """The network at the best weights.

        Examples:
            >>> lapwing.train(model, train_loader, "classification", epochs=2).module is model
            True
        """
        return self.laplace.module

    def table(self, rows: int = 20) -> str:
        """Return the history of the evidence as text, with about `rows` rows at most.

        Examples:
            >>> print(lapwing.train(model, train_loader, "classification", epochs=2).table())
        """
        heads = ("step", "epoch", "loss", "log evidence", "γ", "precision", "val NLL")
        lines = [" ".join(f"{h:>{w}}" for h, w in zip(heads, (8, 6, 10, 14, 9, 21, 8), strict=True))]
        thin = max(1, -(-len(self.history) // rows))
        shown = [m for k, m in enumerate(self.history) if k % thin == 0 or k == len(self.history) - 1]
        for m in shown:
            span = f"{m.precision[0]:.3g} … {m.precision[1]:.3g}"
            lines.append(
                f"{m.step:8d} {m.epoch:6d} {m.loss:10.4g} {m.evidence:14.6g} {m.effective:9.4g} {span:>21} {m.nll:8.4g}"
            )
        return "\n".join(lines)


def train(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    epochs: int,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    scheduler: Any = None,
    prior: Any = "layerwise",
    start: float = 1.0,
    learn: Any = None,
    structure: str | Structure = "kron",
    factor: str | Factor = "ggn",
    select: Any = "all",
    every: int | None = None,
    burnin: int | None = None,
    samples: int | None = 4096,
    reach: float = 1.0,
    n_data: float | None = None,
    batch_size: int = 128,
    val: Any = None,
    patience: int | None = None,
    keep: str = "evidence",
    schedule_by: str = "epoch",
    split: Callable[[Any], tuple] | None = None,
    generator: torch.Generator | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Trained:
    """Train a network on its log joint while the evidence chooses prior and noise, and fit the posterior at the end.

    After `burnin` steps (default: a tenth of the training) the evidence is estimated every `every` steps (default: once
    per epoch) on up to `samples` data, with the structure and factor of `fit` or structure="batch", the bound of one
    batch. The `prior` ("scalar", "layerwise", "unit", "input" or "parameterwise") and the noise of a Gaussian move
    towards its maximum; a number or a `Prior` stays fixed.

    - `optimizer`: an optimizer of the model's parameters, or a function that makes one (default: Adam with 1e-3),
      without weight decay. `scheduler`: likewise; it steps once per epoch, or every step with schedule_by="step".
    - `keep`: the weights to return: with the best "evidence", the best "validation" NLL (on `val`), or the "last".
    - `patience`: stop after so many estimates of the evidence without a better one.
    - `checkpoint`: a folder from which an interrupted training goes on exactly.
    - `batch_size`: a pair (X, y) is shuffled in batches of this size.
    - `samples`: the posterior at the end reads up to 2·`samples` data, which stand for all; None reads all data at
      every estimate and at the end.

    Examples:
        >>> trained = lapwing.train(model, train_loader, "classification", epochs=2, prior="layerwise")
        >>> trained.laplace.predict(x).probs.shape
        torch.Size([8, 3])
    """
    require_one_process("train")
    module = unwrap(model)
    require_generator(generator, next(module.parameters()).device)
    if schedule_by not in ("epoch", "step"):
        raise BadData(f"schedule_by is 'epoch' or 'step', got {schedule_by!r}")
    if keep == "validation" and val is None:
        raise BadData("keep='validation' needs validation data: val=val_loader")
    plan = Schedule(epochs, every, burnin, patience, keep, per_step=schedule_by == "step")
    pair = isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor)
    seed = 0 if generator is None else int(torch.randint(2**31, (), generator=generator, device=generator.device))
    source = Shuffled(data, batch_size, seed) if pair else data
    size = count_data(source, module, split) if n_data is None else float(n_data)
    online = Online(
        likelihood, size, prior, start, structure, factor, select, learn, reach,
        samples=samples, split=split, generator=generator,
    )  # fmt: skip
    stepper = _optimizer(module, optimizer)
    rate = scheduler(stepper) if callable(scheduler) else scheduler
    folder = None if checkpoint is None else Path(checkpoint)
    if folder is not None:
        require_folder(folder)
    training = Training(module, source, online, stepper, rate, plan, val, folder, progress)
    online, history, stopped = training.run()
    seen = Subset(data, None if samples is None else FIT * samples, None)
    last = "diag" if structure == BATCH else structure  # the bound of one batch has no matrix
    la = fit(
        module, seen, online.likelihood, structure=last, factor=factor, select=select,
        prior=online.belief.prior, n_data=size, split=split, generator=generator, progress=progress,
    )  # fmt: skip
    return Trained(replace(la, tuned=_told(online)), online, history, stopped)


def _told(online: Online) -> str:
    what = " and ".join(online.learning)
    return f"training with the evidence ({what}, {online.belief.steps} steps)" if what else ""


def _optimizer(module: nn.Module, optimizer: Any) -> Optimizer:
    if optimizer is None:
        optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], 1e-3)
    elif callable(optimizer):
        optimizer = optimizer([p for p in module.parameters() if p.requires_grad])
    if not isinstance(optimizer, Optimizer):
        raise BadData(f"optimizer is a torch optimizer or a function that makes one, got {type(optimizer).__name__}")
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        raise BadData("the optimizer has weight decay, but the prior is in the loss: set weight_decay=0")
    return optimizer
