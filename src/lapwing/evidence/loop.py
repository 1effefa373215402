"""The loop of `lapwing.train`: optimizer steps, the evidence in between, the best weights and checkpoints."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm.auto import tqdm

from lapwing.errors import BadData, CorruptFile, UnsupportedOperation
from lapwing.evidence.online import Online, Progress
from lapwing.model import Batch, Batches, batch_size, take
from lapwing.posterior import Prior
from lapwing.storage import load_tree, save_tree

FILE = "train.pt"


@dataclass(frozen=True, eq=False)
class Shuffled:
    """A pair (X, y) of tensors in random batches; the order depends on the seed and the number of the pass only."""

    data: tuple[Any, Tensor]
    size: int
    seed: int
    epoch: int = 0

    def __iter__(self) -> Iterator[Any]:
        x, y = self.data
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        for rows in torch.randperm(len(y), generator=generator, device=generator.device).split(self.size):
            part = rows.to(y.device)
            yield take(x, part, len(y)), y[part]

    def __len__(self) -> int:
        return -(-len(self.data[1]) // self.size)


@dataclass(frozen=True, eq=False)
class Schedule:
    """How long to train, how often to use the evidence, and which weights to keep.

    `every` and `burnin` count optimizer steps; by default once per epoch, and a tenth of the training. `patience`
    counts steps of the evidence without a better score; `keep` is "evidence", "validation" or "last".
    """

    epochs: int
    every: int | None = None
    burnin: int | None = None
    patience: int | None = None
    keep: str = "evidence"
    per_step: bool = False  # whether the learning-rate scheduler moves every step, not every epoch

    def __post_init__(self) -> None:
        for name in ("epochs", "every", "patience"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value > 0):
                raise BadData(f"{name} is a positive whole number, got {value!r}")
        if self.burnin is not None and self.burnin < 0:
            raise BadData(f"burnin counts optimizer steps, at least 0; got {self.burnin}")
        if self.keep not in ("evidence", "validation", "last"):
            raise UnsupportedOperation(f"keep is 'evidence', 'validation' or 'last', got {self.keep!r}")


@dataclass(frozen=True, eq=False)
class Training:
    """One training run. `run()` leaves the module at the weights that it keeps."""

    module: nn.Module
    data: Any
    online: Online
    optimizer: Optimizer
    scheduler: Any
    schedule: Schedule
    val: Any = None
    folder: Path | None = None
    progress: bool | None = None

    def run(self) -> tuple[Online, tuple[Moment, ...], bool]:
        """Train. Return what was learned at the weights that are kept, the history, and whether it stopped early."""
        state = State(self.online)
        if self._checkpoint is not None and self._checkpoint.path.exists():
            self._checkpoint.read(state)
        modes = [(m, m.training) for m in self.module.modules()]
        try:
            self._train(state)
        finally:
            for m, mode in modes:
                m.training = mode
        return self._kept(state), tuple(state.history), state.stopped

    def _train(self, state: State) -> None:
        hide = None if self.progress is None else not self.progress
        bar = tqdm(total=self.schedule.epochs, initial=state.epoch, desc="train", disable=hide, leave=False)
        with bar, torch.inference_mode(False), torch.enable_grad():
            while state.epoch < self.schedule.epochs and not state.stopped:
                self._epoch(state)
                bar.update()
                bar.set_postfix(self._shown(state))
                if self._checkpoint is not None:
                    self._checkpoint.write(state)

    def _epoch(self, state: State) -> None:
        began = time.perf_counter()
        source = replace(self.data, epoch=state.epoch) if isinstance(self.data, Shuffled) else self.data
        batches = Batches(source, self.module, next(self.module.parameters()).device, self.online.split)
        first, length = state.step, batches.length
        for batch in batches:
            self.module.train()
            loss = self._descend(state, batch)
            state.step += 1
            state.loss, state.count = state.loss + loss, state.count + 1
            if self.scheduler is not None and self.schedule.per_step:
                self.scheduler.step()
            if self._due(state, length):
                self._evidence(state, began)
                if state.stopped:
                    break
        if length is None and self._due(state, state.step - first):
            self._evidence(state, began)
        if self.scheduler is not None and not self.schedule.per_step:
            plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([loss] if plateau else []))
        state.epoch += 1

    def _descend(self, state: State, batch: Batch) -> float:
        """Take one step of the optimizer; it gets a closure, so that line searches work too."""
        losses: list[float] = []

        def closure() -> float:
            self.optimizer.zero_grad(set_to_none=True)
            loss = state.online.loss(self.module, batch.inputs, batch.targets, batch.weights)
            loss.backward()
            losses.append(loss.item())
            return losses[-1]

        self.optimizer.step(closure)
        loss = losses[0]
        if not math.isfinite(loss):
            raise BadData(
                f"the loss is {loss} at step {state.step}, epoch {state.epoch}: lower the learning rate, or check the "
                "data"
            )
        return loss

    def _due(self, state: State, length: int | None) -> bool:
        plan = self.schedule
        if not self.online.learning and plan.keep == "last" and self.val is None:
            return False  # the prior is fixed and no score is needed
        burnin = plan.burnin
        if burnin is None:
            burnin = 0 if length is None else plan.epochs * length // 10
        every = plan.every or length
        return every is not None and state.step > burnin and state.step % every == 0

    def _evidence(self, state: State, began: float) -> None:
        data = self.data.data if isinstance(self.data, Shuffled) else self.data
        if isinstance(self.data, Shuffled) and self.online.structure == "batch":
            data = replace(self.data, epoch=-1 - state.step)
        state.online = state.online.step(self.module, data)
        belief = state.online.belief
        precision = torch.ones(1) if belief.precision is None else belief.precision
        low, high = precision.aminmax()
        noise = float(belief.likelihood.dispersion) ** 0.5
        found = Moment(
            state.step,
            state.epoch,
            state.loss / max(state.count, 1),
            belief.evidence,
            belief.effective,
            (low.item(), high.item()),
            noise,
            self._validation(state.online),
            time.perf_counter() - began,
        )
        state.history.append(found)
        state.loss, state.count = 0.0, 0
        score = {"evidence": found.evidence, "validation": -found.nll, "last": math.inf}[self.schedule.keep]
        if score > state.best or self.schedule.keep == "last":
            state.best, state.stale, state.belief = score, 0, belief
            state.weights = copy.deepcopy(self.module.state_dict())
        else:
            state.stale += 1
            state.stopped = self.schedule.patience is not None and state.stale >= self.schedule.patience

    def _validation(self, online: Online) -> float:
        """Return the mean −log p of the validation data, with the network in eval mode."""
        if self.val is None:
            return math.nan
        total, count = 0.0, 0.0
        self.module.eval()
        with torch.no_grad():
            for batch in Batches(self.val, self.module, next(self.module.parameters()).device, online.split):
                share = batch_size(batch.inputs)
                total += online.misfit(self.module, batch.inputs, batch.targets, batch.weights).item() * share
                count += share
        return total / count

    def _kept(self, state: State) -> Online:
        if self.schedule.keep != "last" and state.weights:
            self.module.load_state_dict(state.weights)
            assert state.belief is not None
            return replace(state.online, belief=state.belief, _terms={})
        return state.online

    def _shown(self, state: State) -> dict[str, str]:
        if not state.history:
            return {}
        last = state.history[-1]
        return {"loss": f"{last.loss:.4g}", "log evidence": f"{last.evidence:.6g}"}

    @property
    def _checkpoint(self) -> Checkpoint | None:
        if self.folder is None:
            return None
        online = self.online
        identity = {
            "parameters": [[name, list(p.shape)] for name, p in self.module.named_parameters()],
            "n_data": float(online.n_data),
            "prior": online.prior if isinstance(online.prior, str) else "fixed",
            "structure": str(getattr(online.structure, "name", online.structure)),
        }
        loader = getattr(self.data, "generator", None)
        sampler = getattr(getattr(self.data, "sampler", None), "generator", None)
        found = {id(g): g for g in (loader, sampler, online.generator) if isinstance(g, torch.Generator)}
        generators = tuple(found.values())
        return Checkpoint(self.folder / FILE, self.module, self.optimizer, self.scheduler, generators, identity)


def count_data(data: Any, module: nn.Module, split: Callable[[Any], tuple] | None) -> float:
    """Count the samples in one pass over the batches."""
    if isinstance(data, Shuffled):
        return float(len(data.data[1]))
    batches = Batches(data, module, torch.device("cpu"), split)
    batches.require_reiterable("training")
    total = 0.0
    for batch in batches:
        total += batch_size(batch.inputs) if batch.weights is None else float(batch.weights.double().sum())
    return total


@dataclass(frozen=True, eq=False)
class Moment:
    """One entry of the history: where training was, the mean loss since the last entry, evidence, noise and NLL."""

    step: int
    epoch: int
    loss: float
    evidence: float
    effective: float
    precision: tuple[float, float]  # smallest and largest
    noise: float
    nll: float  # of the validation data, NaN without any
    seconds: float


@dataclass(eq=False)
class State:
    """Everything that changes during training; a checkpoint holds all of it."""

    online: Online
    epoch: int = 0
    step: int = 0
    history: list[Moment] = field(default_factory=list)
    best: float = -math.inf
    stale: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)  # the state of the module at the best score
    belief: Progress | None = None
    stopped: bool = False
    loss: float = 0.0
    count: int = 0


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A training that can go on exactly: one file, written atomically.

    A training resumes from it only if it has the same `identity`.
    """

    path: Path
    module: nn.Module
    optimizer: Optimizer
    scheduler: Any
    generators: tuple[torch.Generator, ...]
    identity: dict[str, Any]

    def write(self, state: State) -> None:
        content = {
            "identity": self.identity,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "belief": _stored(state.online.belief),
            "best": {
                "score": state.best,
                "weights": state.weights,
                "belief": None if state.belief is None else _stored(state.belief),
            },
            "history": [_fields(moment) for moment in state.history],
            "counts": [state.epoch, state.step, state.stale, int(state.stopped), state.loss, state.count],
            "random": [torch.get_rng_state(), *(g.get_state() for g in self.generators)],
        }
        save_tree(self.path, content)

    def read(self, state: State) -> None:
        """Restore module, optimizer, scheduler, generators and state from the file."""
        content = self._content()
        try:
            self._apply(content, state)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise CorruptFile(f"{self.path} does not fit together ({error}): delete it to start over") from error

    def _apply(self, content: dict[str, Any], state: State) -> None:
        for name, value in content["module"].items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise ValueError(f"{name!r} is not finite")
        self.module.load_state_dict(content["module"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(content["scheduler"])
        state.online = replace(state.online, belief=_restored(content["belief"], state.online), _terms={})
        best = content["best"]
        state.best, state.weights = best["score"], best["weights"]
        state.belief = None if best["belief"] is None else _restored(best["belief"], state.online)
        state.history = [Moment(**{**m, "precision": tuple(m["precision"])}) for m in content["history"]]
        state.epoch, state.step, state.stale, stopped, state.loss, state.count = content["counts"]
        state.stopped = bool(stopped)
        torch.set_rng_state(content["random"][0])
        for generator, saved in zip(self.generators, content["random"][1:], strict=True):
            generator.set_state(saved)

    def _content(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = load_tree(self.path)
        except CorruptFile as error:
            raise CorruptFile(f"{self.path} is not a complete checkpoint ({error}): delete it to start over") from error
        if not isinstance(content, dict) or not isinstance(content.get("identity"), dict):
            raise CorruptFile(f"{self.path} is not a checkpoint of a training: delete it to start over")
        changed = [key for key, value in self.identity.items() if content["identity"].get(key) != value]
        if changed:
            raise BadData(
                f"{self.path} belongs to another training (other {', '.join(changed)}): choose another folder"
            )
        return content


def _fields(moment: Moment) -> dict[str, Any]:
    return {**vars(moment), "precision": list(moment.precision)}


def _stored(belief: Progress) -> dict[str, Any]:
    tensors, spec = belief.prior.spec()
    return {
        "tensors": tensors,
        "spec": spec,
        "dispersion": float(belief.likelihood.dispersion),
        "precision": belief.precision,
        "moments": belief.moments,
        "numbers": [belief.evidence, belief.effective, belief.steps],
    }


def _restored(stored: dict[str, Any], online: Online) -> Progress:
    family = online.likelihood
    if family.dispersion_name:
        family = family.with_dispersion(stored["dispersion"])
    evidence, effective, steps = stored["numbers"]
    prior = Prior.from_spec(stored["tensors"], stored["spec"])
    return Progress(prior, family, stored["precision"], evidence, effective, steps, stored["moments"])
