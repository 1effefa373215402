"""How batches are read: which entry holds the labels, what they mean to the network, and in which dtype inputs come.

Networks differ in what a label at a position means: causal language models predict the token at t + 1 from position t,
others the token at t, and their names do not show which. So the network is asked, by the loss that it returns itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lapwing.errors import BadData

LABEL_KEYS = ("labels", "label", "targets", "target", "y")
IGNORED = -100  # the label that Hugging Face's losses ignore
AGREES = 1e-4  # relative difference up to which a loss counts as a mean NLL
AGREES_HALF = 2e-2  # the same for a loss in half precision

Run = Callable[..., Any]
"""What the network returns for inputs and further named arguments, in eval mode and without gradients."""


@dataclass(frozen=True)
class Convention:
    """What the batches of a fit have shown, for everything that is read after the fit."""

    names: tuple[str, ...] = LABEL_KEYS  # the first of these that a mapping has holds its targets
    shifted: bool | None = None  # whether position t predicts the label at t + 1; None before the network was asked
    entry: str | None = None  # the argument in which the network needs the labels as inputs, "" if it does not
    cast: bool | None = None  # whether inputs of another floating dtype than the network's are cast

    def inputs_of(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries that are inputs."""
        target = self.target_in(mapping)
        if self.entry and target is None and not any(str(name).startswith("decoder_") for name in mapping):
            raise BadData(
                f"the network makes decoder inputs from {self.entry!r}, as in the fit, and the inputs have none: pass "
                "the labels too, or decoder_input_ids"
            )
        own = {name: value for name, value in mapping.items() if name != target}
        return {**own, self.entry: mapping[target]} if target is not None and self.entry else own

    def target_in(self, mapping: Mapping[str, Any]) -> str | None:
        """Return the name of the entry that holds the targets, if there is one."""
        return next((name for name in self.names if name in mapping), None)


@dataclass(frozen=True, eq=False)
class Answer:
    """How the network itself reads labels (n, t): its own loss, with the logits and labels to compare it with."""

    entry: str  # as in `Convention`
    loss: Tensor | None = None  # None where it returns none
    logits: Tensor | None = None
    labels: Tensor | None = None

    @property
    def shifted(self) -> bool:
        """Whether position t predicts the label at t + 1; raises if its loss fits neither reading, or both."""
        if self.loss is None or self.logits is None or self.labels is None:
            return False
        own = self.loss.detach().double()
        readings = {False: self.labels, True: shift(self.labels)}
        means = {moved: _mean_nll(self.logits, labels) for moved, labels in readings.items()}
        far = {moved: _distance(own, mean) for moved, mean in means.items()}
        nearest = min(far, key=lambda moved: far[moved])
        tolerance = AGREES_HALF if self.loss.dtype in (torch.float16, torch.bfloat16) else AGREES
        if far[nearest] <= tolerance and 10 * far[nearest] < far[not nearest]:
            return nearest
        reason = "neither" if far[nearest] > tolerance else "both"
        raise BadData(
            f"the loss that the network returns for {len(self.labels)} samples is {own:.6g}; the mean NLL of its "
            f"outputs is {means[False]:.6g} if position t predicts the label at t, and {means[True]:.6g} if it "
            f"predicts the label at t + 1: it is {reason} of these, so the meaning of the labels is not known. Pass "
            f"split=lambda batch: (inputs, targets) with the targets that each position predicts, {IGNORED} for none"
        )


def are_tokens(labels: Any) -> bool:
    """Whether labels are class indices per position (n, t), which may belong to the position before."""
    return isinstance(labels, Tensor) and labels.ndim == 2 and not (labels.is_floating_point() or labels.is_complex())


def shift(labels: Tensor) -> Tensor:
    """Move labels (n, t) to the position before, which predicts them; the last position predicts nothing."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


def entry_for(module: nn.Module, name: str) -> str | None:
    """Return the argument of the network's forward that takes labels: this name, or "labels"; None without either."""
    try:
        arguments = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a scripted module has no signature
        return None
    named = {a.name for a in arguments if a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY)}
    anything = name if any(a.kind is a.VAR_KEYWORD for a in arguments) else None
    return next((taken for taken in (name, "labels") if taken in named), anything)


def ask(run: Run, inputs: Any, entry: str, labels: Tensor) -> Answer:
    """Let the network compute its own loss of these labels, and see whether its outputs depend on them."""
    try:
        output = run(inputs, **{entry: labels})
    except TypeError:
        return Answer("")  # it does not take labels after all
    except Exception as error:
        alone = _outputs(run, inputs)
        if alone is None or alone.shape[:2] != labels.shape:
            return Answer("")  # labels of samples, not of positions; or it does not take the inputs either
        raise BadData(
            f"the network takes {entry!r}, but its loss fails for these labels ({type(error).__name__}: {error}), so "
            "their meaning is not known. Pass split=lambda batch: (inputs, targets) with the targets that each "
            "position predicts"
        ) from error
    loss, logits = _loss(output), _logits(output)
    if loss is None or logits is None:
        return Answer("")
    alone = _outputs(run, inputs)
    independent = alone is not None and alone.shape == logits.shape and torch.allclose(alone, logits, 1e-3, 1e-5)
    if logits.shape[:2] != labels.shape:
        return Answer("" if independent else entry)
    return Answer("" if independent else entry, loss, logits, labels)


def _outputs(run: Run, inputs: Any) -> Tensor | None:
    """Return the outputs without labels; None if the network needs labels."""
    try:
        return _logits(run(inputs))
    except Exception:
        return None


def _loss(output: Any) -> Tensor | None:
    """Find the loss in what a network returned: by its name, or as the only scalar in a tuple."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found if found.numel() == 1 else None
    if not isinstance(output, (tuple, list)):
        return None
    numbers = [part for part in output if isinstance(part, Tensor) and part.ndim == 0]
    return numbers[0] if len(numbers) == 1 else None


def _logits(output: Any) -> Tensor | None:
    """Find outputs (n, t, c) in what a network returned, with or without a loss beside them."""
    found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    parts = found if isinstance(found, (tuple, list)) else (found,)
    return next((part.detach() for part in parts if isinstance(part, Tensor) and part.ndim == 3), None)


def _mean_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of −log p over the labels that count; NaN if none does."""
    counts = (labels >= 0) & (labels < logits.shape[-1])
    return cross_entropy(logits.double().flatten(0, 1), labels.where(counts, IGNORED).flatten().long())


def _distance(own: Tensor, mean: Tensor) -> float:
    """Return how far a loss is from a mean NLL, relative to it. Without any label, a loss is NaN or 0."""
    if bool(mean.isnan()):
        return 0.0 if bool(own.isnan()) or float(own) == 0 else torch.inf
    return torch.inf if bool(own.isnan()) else float((own - mean).abs() / mean.abs().clamp(min=1e-6))
