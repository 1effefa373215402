"""Data as users have them, read as batches of inputs, targets and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lapwing.errors import BadData, NotReiterable
from lapwing.model.convention import IGNORED, Answer, Convention, are_tokens, ask, entry_for, shift
from lapwing.model.inputs import Inputs, as_tensors, batch_size, is_array, require_dense, take, tensors_in
from lapwing.model.module import evaluated, placed

ASKED = 8  # samples with which a network is asked how it reads labels
ROWS = 256  # a pair (X, y) of whole tensors is read in batches of this many samples


class NoSamples(BadData):
    """Raised when no batch of the data holds a sample."""


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
        """How the batches are read, as far as the ones read so far have shown."""
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
            raise BadData(
                f"data is a {type(source).__name__}; expected a DataLoader, a list of batches or a pair (X, y){hint}"
            )
        if isinstance(source, Mapping):
            raise BadData(f"data is one dict with keys {sorted(map(str, source))}; a list of batches is [batch]")
        yield from source

    def unlabeled(self) -> Iterator[Inputs]:
        """Yield the inputs of every batch, without targets. A list of two tensors of the same kind is two batches."""
        if _alike(self.data):
            yield from self.data
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
        answer = ask(
            partial(evaluated, self.module), take(inputs, rows.to(self.device), len(labels)), entry, labels[rows].long()
        )
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
