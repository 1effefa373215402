"""Batches as users have them, turned into (inputs, targets, weights), and inputs cut by sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lapwing.errors import BadData, NotReiterable, UnsupportedModel
from lapwing.model.module import is_causal_language_model, ordinary
from lapwing.model.skeleton import source_of

Inputs = Any  # a tensor, a tuple of tensors (called as model(*x)) or a dict (called as model(**x))

LABEL_KEYS = ("labels", "label", "targets", "target", "y")
ROWS = 256  # a pair (X, y) of whole tensors is read in batches of this many samples


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch: what the model is called with, what it should predict, and optional weights per sample."""

    inputs: Inputs
    targets: Any
    weights: Tensor | None
    number: int  # its place in the data, for messages


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors_in(value)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of nested tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def call(module: nn.Module, inputs: Inputs, weights: Mapping[str, Tensor] | None = None) -> Any:
    """model(x), model(*x) for a tuple or list, model(**x) for a mapping; at other weights where they are given.

    A module that writes to its inputs gets copies; whether it does is seen in its first call.
    """
    source = source_of(module)
    writes = _WRITES.get(source)
    own = inputs if writes is False else map_tensors(Tensor.clone, inputs)
    before = [_version(t) for t in tensors_in(own)]
    out = _called(module, own, weights)
    changed = before != [_version(t) for t in tensors_in(own)]
    if changed and writes is False:
        _WRITES[source] = True
        raise UnsupportedModel(
            "the network wrote to its inputs, which it had not done in earlier calls, so that your data have changed. "
            "Let its forward pass work on a copy (x = x.clone()), load the data again and start over."
        )
    if writes is None:
        _WRITES[source] = changed
    return out


_WRITES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # whether its first call wrote to the inputs


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _called(module: nn.Module, inputs: Inputs, weights: Mapping[str, Tensor] | None) -> Any:
    args: tuple = (inputs,)
    kwargs: dict = {}
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    elif isinstance(inputs, (tuple, list)):
        args = tuple(inputs)
    if weights is None:
        return module(*args, **kwargs)
    return functional_call(module, dict(weights), args, kwargs)


def batch_size(inputs: Inputs) -> int:
    """The number of samples: the first dimension of the first tensor that has one."""
    for tensor in tensors_in(inputs):
        if tensor.ndim:
            return tensor.shape[0]
    raise BadData(f"no tensor with a batch dimension in inputs of type {type(inputs).__name__}")


def take(inputs: Inputs, rows: Tensor | slice, size: int) -> Inputs:
    """The chosen samples of inputs; tensors whose first dimension is not the batch's are shared by all samples."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.ndim and tensor.shape[0] == size else tensor

    return map_tensors(cut, inputs)


def concatenate(pieces: Sequence[Inputs]) -> Inputs:
    """Inputs of the same build one after the other, every tensor along its first dimension."""
    streams = [iter(list(tensors_in(piece))) for piece in pieces]
    return map_tensors(lambda _: torch.cat([next(stream) for stream in streams]), pieces[0])


def _alike(data: Any) -> bool:
    """Whether data is a list of two tensors that differ in their rows alone: batches of inputs rather than (X, y)."""
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


def _require_tensors(data: Any) -> None:
    """Say what is wrong with a pair (X, y) that is not one of tensors of equal length."""
    if not (isinstance(data, tuple) and len(data) == 2):
        return
    x, y = data
    if type(y).__name__ in ("ndarray", "Series", "DataFrame") or type(x).__name__ in ("ndarray", "DataFrame"):
        raise BadData("data is a pair of arrays; pass tensors: (torch.as_tensor(X), torch.as_tensor(y))")
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim and y.ndim and x.shape[0] != y.shape[0]:
        raise BadData(f"X has {x.shape[0]} samples, y has {y.shape[0]}")


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
    """The batch in pieces of at most `size` samples."""
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

    @property
    def reiterable(self) -> bool:
        return _looks_like_tensors(self.data) or not (hasattr(self.data, "__next__") and iter(self.data) is self.data)

    @property
    def length(self) -> int | None:
        """Number of batches where the data can tell."""
        if _looks_like_tensors(self.data):
            return -(-self.data[1].shape[0] // ROWS)
        try:
            return len(self.data)
        except TypeError:
            return None

    def require_reiterable(self, why: str) -> None:
        """Raise where several passes are needed and the data allow only one."""
        if not self.reiterable:
            raise NotReiterable(
                f"{why} reads the data more than once, but the data is a one-shot {type(self.data).__name__}. "
                "Pass a DataLoader or a list of batches: list(data) makes one."
            )

    def raw(self) -> Iterator[Any]:
        """The batches as they come."""
        _require_tensors(self.data)
        source: Iterable = _rows_of(self.data) if _looks_like_tensors(self.data) else self.data
        if isinstance(source, Tensor) or not hasattr(source, "__iter__"):
            raise BadData(
                f"data is a {type(source).__name__}; expected a DataLoader, a list of batches or a pair (X, y)"
            )
        yield from source

    def unlabeled(self) -> Iterator[Inputs]:
        """The inputs of every batch; targets are left unread. Two tensors of a kind in a list are two batches."""
        if _alike(self.data):
            yield from self.data
        else:
            yield from map(self.inputs_of, self.raw())

    def inputs_of(self, raw: Any) -> Inputs:
        """The inputs of a batch that may come without targets."""
        if isinstance(raw, Tensor):
            return raw
        if isinstance(raw, Mapping) and not any(key in raw for key in LABEL_KEYS):
            return raw
        if isinstance(raw, (tuple, list)) and len(raw) == 1 and self.split is None:
            return raw[0]
        return self._split(raw)[0]

    def __iter__(self) -> Iterator[Batch]:
        seen = 0
        for number, raw in enumerate(self.raw()):
            inputs, targets, weights = self._split(raw)
            inputs = map_tensors(lambda t: ordinary(t).to(self.device), inputs)
            if batch_size(inputs) == 0:
                continue
            if targets is None:
                raise BadData(f"batch {number} has no targets")
            seen += 1
            targets = targets.to(self.device) if isinstance(targets, Tensor) else targets
            weights = weights.to(self.device) if isinstance(weights, Tensor) else weights
            yield Batch(inputs, targets, weights, number)
        if seen == 0:
            raise BadData("the data holds no samples: a fit needs at least one batch that is not empty")

    def _split(self, raw: Any) -> tuple[Inputs, Any, Tensor | None]:
        if self.split is not None:
            parts = tuple(self.split(raw))
            if len(parts) not in (2, 3):
                raise BadData(f"split(batch) returned {len(parts)} values; expected (inputs, targets[, weights])")
            return parts[0], parts[1], parts[2] if len(parts) == 3 else None
        if isinstance(raw, Mapping):
            return self._split_mapping(raw)
        if isinstance(raw, (tuple, list)) and len(raw) == 2:
            labels = _repeats(raw[0], raw[1])  # (ids, ids): labels as the model's own loss takes them
            return raw[0], self._shifted(raw[1]) if labels else raw[1], None
        raise BadData(
            f"a batch is a {type(raw).__name__}{f' of {len(raw)} entries' if isinstance(raw, (tuple, list)) else ''}; "
            "expected (x, y), ((x1, x2), y) or a dict with 'labels'. Pass split=lambda batch: (inputs, targets)."
        )

    def _shifted(self, targets: Any) -> Any:
        """A causal language model's position t predicts token t + 1, as its own loss has it; the last nothing."""
        tokens = isinstance(targets, Tensor) and targets.ndim == 2 and not targets.is_floating_point()
        if not (tokens and is_causal_language_model(self.module)):
            return targets
        return torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], -100)], dim=1)

    def _split_mapping(self, raw: Mapping) -> tuple[Inputs, Any, None]:
        for key in LABEL_KEYS:
            if key in raw:
                inputs = {name: value for name, value in raw.items() if name != key}
                return inputs, self._shifted(raw[key]), None
        raise BadData(
            f"a batch is a dict with keys {sorted(map(str, raw))} and none of {list(LABEL_KEYS)}. "
            "Pass split=lambda batch: (inputs, targets)."
        )
