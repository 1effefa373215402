"""Data as users have them, read as batches of inputs, targets and weights.

The first batches show which entry holds the labels, what labels mean to the network, and which dtype inputs have. This
is remembered as a `Convention`. Networks differ in what a label at a position means: causal language models predict the
token at t + 1 from position t, others the token at t, and nothing in their names shows which. The loss that a network
returns itself does (`ask`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from lapwing.errors import BadData, NotReiterable, UnsupportedOperation
from lapwing.model.calls import (
    Inputs,
    as_called,
    as_tensors,
    batch_size,
    evaluated,
    is_array,
    placed,
    read_as_called,
    require_dense,
    take,
    tensors_in,
)

ASKED = 8  # samples with which a network is asked how it reads labels
ROWS = 256  # a pair (X, y) of whole tensors is read in batches of this many samples
LABEL_KEYS = ("labels", "label", "targets", "target", "y")
IGNORED = -100  # the label that Hugging Face's losses ignore
AGREES = 1e-4  # relative difference up to which a loss counts as a mean NLL
AGREES_HALF = 2e-2  # the same for a loss in half precision


class NoSamples(BadData):
    """Raised when no batch of the data holds a sample."""


def sharded() -> bool:
    """Whether several processes fit together, each with its own shard of the data (under `torchrun`)."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def require_one_process(what: str) -> None:
    """Refuse, on every process, work that reads data and does not add up over processes."""
    if sharded():
        raise UnsupportedOperation(
            f"{what} does not add up over processes: each would see only its own shard and find another result. "
            "Save the posterior (la.save) or the weights, and go on in one process, without torchrun"
        )


@dataclass(frozen=True)
class Convention:
    """How batches are read: found out during a fit, and used for all data that come after it."""

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
class Batch:
    """One batch: what the model is called with, what it should predict, and optional weights per sample."""

    inputs: Inputs
    targets: Any
    weights: Tensor | None
    number: int  # counted from the start of the data, for messages


def _alike(data: Any) -> bool:
    """Whether data is a list of two tensors of the same shape per sample: two batches of inputs rather than (X, y)."""
    if not (isinstance(data, list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        return False
    one, two = data
    return one.ndim > 1 and one.shape[1:] == two.shape[1:] and one.dtype == two.dtype


def _looks_like_tensors(data: Any) -> bool:
    """Whether data is one pair (X, y) of whole tensors rather than a sequence of batches."""
    if not (isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], Tensor)):
        return False
    if isinstance(data, list) and isinstance(data[0], (tuple, list)):
        return False
    sizes = {t.shape[0] if t.ndim else None for t in tensors_in(data[0])}
    return sizes == {data[1].shape[0] if data[1].ndim else None}


def _require_equal_lengths(data: Any) -> None:
    """Refuse a pair (X, y) of tensors with different numbers of samples."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) and part.ndim for part in data):
        x, y = data
        if x.shape[0] != y.shape[0]:
            raise BadData(f"X has {x.shape[0]} samples, y has {y.shape[0]}: pass as many targets as inputs")


def _rows_of(data: Any) -> Iterator[tuple[Inputs, Tensor]]:
    inputs, targets = data
    for start in range(0, targets.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        yield take(inputs, rows, targets.shape[0]), targets[rows]


def _repeats(inputs: Inputs, targets: Any) -> bool:
    """Whether the targets are the input tokens themselves, up to ignored ones."""
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return False
    same = (t for t in tensors_in(inputs) if t.shape == targets.shape and not t.is_floating_point())
    return any(bool(((t == targets) | (targets == -100)).all()) for t in same)


def as_it_is(raw: tuple) -> tuple:
    """Return a batch that is split already, as a `split` for `Batches`."""
    return raw


def parts_of(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield the batch in pieces of at most `size` samples."""
    total = batch_size(batch.inputs)
    if size >= total:
        yield batch
        return
    targets = torch.as_tensor(batch.targets)
    for start in range(0, total, size):
        rows = slice(start, start + size)
        weights = None if batch.weights is None else batch.weights[rows]
        yield Batch(take(batch.inputs, rows, total), targets[rows], weights, batch.number)


@dataclass(frozen=True, eq=False)
class Batches:
    """Any re-iterable of batches, read as `Batch` objects on one device."""

    data: Any
    module: nn.Module
    device: torch.device
    split: Callable[[Any], tuple] | None = None
    known: Convention = field(default_factory=Convention)  # from batches of the same kind that were read before
    _learned: dict[str, Convention] = field(default_factory=dict, repr=False)  # the convention, once batches were read

    def __post_init__(self) -> None:
        pair = isinstance(self.data, (tuple, list)) and len(self.data) == 2
        for tensor in tensors_in(self.data) if pair else ():
            require_dense(tensor)
        if is_array(self.data) or (pair and (isinstance(self.data, tuple) or all(map(is_array, self.data)))):
            object.__setattr__(self, "data", as_tensors(self.data))
        if isinstance(self.data, tuple) and pair and isinstance(self.data[0], (Tensor, Mapping)):
            object.__setattr__(self, "data", (self.data[0], _listed(self.data[1])))

    @property
    def convention(self) -> Convention:
        """How the batches are read, by what has been found out so far."""
        return self._learned.get("convention", self.known)

    def _learn(self, **found: Any) -> None:
        self._learned["convention"] = replace(self.convention, **found)

    @property
    def reiterable(self) -> bool:
        return _looks_like_tensors(self.data) or not (hasattr(self.data, "__next__") and iter(self.data) is self.data)

    @property
    def length(self) -> int | None:
        """The number of batches, or None if the data do not say."""
        if _looks_like_tensors(self.data):
            return -(-self.data[1].shape[0] // ROWS)
        try:
            return len(self.data)
        except TypeError:
            return None

    def require_reiterable(self, why: str) -> None:
        """Raise if the data can be read only once; `why` names what needs several passes."""
        if not self.reiterable:
            raise NotReiterable(
                f"{why} reads the data more than once, but the data is a one-shot {type(self.data).__name__}. "
                "Pass a DataLoader or a list of batches: list(data) makes one."
            )

    def raw(self) -> Iterator[Any]:
        """Yield the batches as the data provide them."""
        _require_equal_lengths(self.data)
        source: Iterable = _rows_of(self.data) if _looks_like_tensors(self.data) else self.data
        if isinstance(source, Tensor) or not hasattr(source, "__iter__"):
            hint = ". Wrap it: DataLoader(data, batch_size=256)" if isinstance(source, Dataset) else ""
            hint = ". Of a table, pass (table[features], table[target])" if isinstance(source, Tensor) else hint
            kind = "one tensor or table" if isinstance(source, Tensor) else f"a {type(source).__name__}"
            raise BadData(f"data is {kind}; expected a DataLoader, a list of batches or a pair (X, y){hint}")
        if isinstance(source, Mapping):
            raise BadData(f"data is one dict with keys {sorted(map(str, source))}; a list of batches is [batch]")
        yield from read_as_called(source)

    def unlabeled(self) -> Iterator[Inputs]:
        """Yield the inputs of every batch, without targets. A list of two tensors of the same kind is two batches."""
        if _alike(self.data):
            yield from read_as_called(self.data)
        else:
            yield from map(self.inputs_of, self.raw())

    def inputs_of(self, raw: Any) -> Inputs:
        """Return the inputs of a batch that may have no targets."""
        if self.split is None:
            raw = as_tensors(raw)
            if isinstance(raw, Mapping) and self.convention.target_in(raw) is None:
                return raw
            if isinstance(raw, (tuple, list)) and len(raw) == 1:
                return raw[0]
        if isinstance(raw, Tensor):
            return raw
        inputs, targets, _, labels = self._split(raw)
        if labels is not None and self.convention.entry is None:
            self._ask(self.placed(inputs), labels, targets)
        return self._with_labels(inputs, labels, targets)

    def __iter__(self) -> Iterator[Batch]:
        seen = 0
        for number, raw in enumerate(self.raw()):
            inputs, targets, weights, labels = self._split(raw)
            inputs = self.placed(inputs)
            if batch_size(inputs) == 0:
                continue
            if targets is None:
                raise BadData(f"batch {number} has no targets")
            seen += 1
            targets = _on(self.device, require_dense(targets) if isinstance(targets, Tensor) else targets)
            if labels is not None and are_tokens(targets):
                inputs, targets = self._aligned(inputs, labels, targets, number)
            yield Batch(inputs, targets, _on(self.device, weights), number)
        if seen == 0:
            raise NoSamples("the data holds no samples: pass at least one batch that is not empty")

    def placed(self, inputs: Inputs) -> Inputs:
        """Move inputs to the device, and cast them to the network's floating dtype if it refuses theirs."""
        inputs, cast = placed(self.module, inputs, self.device, self.convention.cast)
        if cast is not self.convention.cast:
            self._learn(cast=cast)
        return inputs

    def _split(self, raw: Any) -> tuple[Inputs, Any, Tensor | None, str | None]:
        """Return inputs, targets, weights, and the name of labels that the network may shift or need as inputs."""
        if self.split is not None:
            with as_called():
                parts = as_tensors(tuple(self.split(raw)))
            if len(parts) not in (2, 3):
                raise BadData(f"split(batch) returned {len(parts)} values; expected (inputs, targets[, weights])")
            self._learn_inputs(parts[0])
            return parts[0], parts[1], parts[2] if len(parts) == 3 else None, None
        raw = as_tensors(raw)
        if isinstance(raw, Mapping):
            return self._split_mapping(raw)
        if isinstance(raw, (tuple, list)) and len(raw) == 2:
            self._learn_inputs(raw[0])
            targets = _listed(raw[1])
            # (ids, ids): labels as the network's own loss takes them
            return raw[0], targets, None, "labels" if _repeats(raw[0], targets) else None
        raise BadData(
            f"a batch is a {type(raw).__name__}{f' of {len(raw)} entries' if isinstance(raw, (tuple, list)) else ''}; "
            "expected (x, y), ((x1, x2), y) or a dict with 'labels'. Pass split=lambda batch: (inputs, targets)."
        )

    def _split_mapping(self, raw: Mapping) -> tuple[Inputs, Any, None, str]:
        key = self.convention.target_in(raw)
        if key is None:
            raise BadData(
                f"a batch is a dict with keys {sorted(map(str, raw))} and none of {list(self.convention.names)}. "
                "Pass split=lambda batch: (inputs, targets)."
            )
        if self.convention.names != (key,):
            self._learn(names=(key,))
        return {name: value for name, value in raw.items() if name != key}, _listed(raw[key]), None, key

    def _learn_inputs(self, inputs: Inputs) -> None:
        """Remember that entries which are inputs do not hold targets."""
        names = self.convention.names
        if isinstance(inputs, Mapping) and any(name in inputs for name in names):
            self._learn(names=tuple(name for name in names if name not in inputs))

    def _aligned(self, inputs: Inputs, name: str, labels: Tensor, number: int) -> tuple[Inputs, Tensor]:
        """Return inputs, with labels where the network needs them, and labels at the positions that predict them."""
        if self.convention.shifted is None:
            try:
                answer = self._ask(inputs, name, labels)
                if answer is not None:
                    self._learn(shifted=answer.shifted)
            except BadData as error:
                raise BadData(f"batch {number}: {error}") from error
        return self._with_labels(inputs, name, labels), shift(labels) if self.convention.shifted else labels

    def _ask(self, inputs: Inputs, name: str, labels: Any) -> Answer | None:
        """Find out with a few samples how the network reads labels; None if all labels are ignored ones."""
        entry = entry_for(self.module, name) if are_tokens(labels) else None
        if entry is None:
            self._learn(entry="")
            return Answer("")
        counted = (labels != IGNORED).any(1)
        rows = (counted if counted.any() else ~counted).nonzero().flatten()[:ASKED]
        few = take(inputs, rows.to(self.device), len(labels))
        answer = ask(self.module, few, entry, labels[rows].long())
        self._learn(entry=answer.entry)
        return answer if answer.loss is None or counted.any() else None

    def _with_labels(self, inputs: Inputs, name: str | None, labels: Any) -> Inputs:
        if name is None or not self.convention.entry:
            return inputs
        if not isinstance(inputs, Mapping):
            raise BadData(
                f"the network makes inputs of its decoder from {self.convention.entry!r}: pass batches as dicts, with "
                "the labels in them"
            )
        return {**inputs, self.convention.entry: labels.long() if are_tokens(labels) else labels}


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _listed(targets: Any) -> Any:
    """Turn targets in (nested) lists of numbers into a tensor; return anything else as it is."""
    if not isinstance(targets, (list, tuple)):
        return targets
    try:
        return torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(
            f"targets are a {type(targets).__name__} that is no tensor of numbers ({error}). Write classes as 0, 1, …"
        ) from error


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


def ask(module: nn.Module, inputs: Any, entry: str, labels: Tensor) -> Answer:
    """Let the network compute its own loss of these labels, and see whether its outputs depend on them."""
    try:
        output = evaluated(module, inputs, **{entry: labels})
    except TypeError:
        return Answer("")  # it does not take labels after all
    except Exception as error:
        alone = _outputs(module, inputs)
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
    alone = _outputs(module, inputs)
    independent = alone is not None and alone.shape == logits.shape and torch.allclose(alone, logits, 1e-3, 1e-5)
    if logits.shape[:2] != labels.shape:
        return Answer("" if independent else entry)
    return Answer("" if independent else entry, loss, logits, labels)


def _outputs(module: nn.Module, inputs: Any) -> Tensor | None:
    """Return the outputs without labels; None if the network needs labels."""
    try:
        return _logits(evaluated(module, inputs))
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
