"""Checkpoints of a training: weights, optimizer, beliefs, history and random states, so that it resumes exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lapwing.errors import BadData, CorruptFile
from lapwing.evidence.online import Online, Progress
from lapwing.posterior import Prior
from lapwing.storage import load_tree, save_tree


@dataclass(frozen=True, eq=False)
class Moment:
    """One step of the evidence during training: when it was, the mean loss since the last one, and what it found."""

    step: int
    epoch: int
    loss: float
    evidence: float
    effective: float
    precision: tuple[float, float]  # smallest and largest
    noise: float
    nll: float  # of the validation data, where there are any
    seconds: float


@dataclass(eq=False)
class State:
    """Everything that changes during training, all of which a checkpoint holds."""

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
    """A file, written atomically, from which a training with the same `identity` resumes."""

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
        """Set module, optimizer, scheduler, generators and state to what was written."""
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
