"""Data in shards, one per process: every process ends with the same sums, or every process ends with an error.

Every exchange between processes is a call of `exchange` on all of them. A process that fails tells the others in its
next exchange, wherever they are by then, so that none of them waits for sums that never come.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed

from lapwing import errors
from lapwing.errors import BadData, LapwingError, UnsupportedOperation
from lapwing.model import Batch, Batches, Plan, PlanChanged, batch_size
from lapwing.model.batches import Convention, NoSamples, as_it_is
from lapwing.model.calls import map_tensors


def process_name() -> str:
    """Name this process among all, such as "0-of-2"."""
    return f"{distributed.get_rank()}-of-{distributed.get_world_size()}"


@contextmanager
def together() -> Iterator[None]:
    """Make all processes fail where one of them fails in this block."""
    try:
        yield
    except Exception as error:
        if not getattr(error, "shared", False):
            _tell(error)
            error.shared = True  # type: ignore[attr-defined]
        raise
    exchange(None)


def exchange(content: Any) -> list[Any]:
    """Return what every process brings, by rank; raise on all of them where one has failed."""
    found: list[Any] = [None] * distributed.get_world_size()
    try:
        distributed.all_gather_object(found, (None, content))
    except RuntimeError as error:
        raise _shared(LapwingError(f"another process has ended or does not answer ({error})")) from error
    for rank, (failure, _) in enumerate(found):
        if failure is not None:
            raise _shared(_received(rank, *failure))
    return [content for _, content in found]


def _tell(error: Exception) -> None:
    """Answer the next exchange of the other processes with an error."""
    found: list[Any] = [None] * distributed.get_world_size()
    try:
        distributed.all_gather_object(found, ((type(error).__name__, str(error)), None))
    except RuntimeError:
        pass  # the other processes are gone; the error itself is raised


def _received(rank: int, kind: str, message: str) -> Exception:
    """Return the error of another process, of the same class where the class is one of ours."""
    if kind == PlanChanged.__name__:
        return PlanChanged()
    known = getattr(errors, kind, None)
    if known is not None:
        return known(f"process {rank}: {message}")
    return LapwingError(f"process {rank} stopped with {kind}: {message}")


def _shared(error: Any) -> Exception:
    error.shared = True
    return error


def require_same(what: Mapping[str, str]) -> None:
    """Refuse, on every process, values that differ between processes; `what` maps their names to texts."""
    texts = {name: re.sub(r" at 0x[0-9a-f]+", "", text) for name, text in what.items()}  # default reprs
    found = exchange(texts)
    differ = [name for name in texts if len({each.get(name) for each in found}) > 1]
    if differ:
        raise _shared(
            BadData(
                f"the processes differ in {', '.join(differ)}: each passes its own shard of the data, but the same "
                "model with the same weights and the same options"
            )
        )


def shared_convention(convention: Convention) -> Convention:
    """Return one convention of reading batches for all processes: each part from the first process that knows it."""
    found, unknown = exchange(convention), Convention()
    for item in fields(Convention):
        told = [value for value in (getattr(each, item.name) for each in found) if value != getattr(unknown, item.name)]
        convention = replace(convention, **{item.name: (told or [getattr(unknown, item.name)])[0]})
    return convention


def filled(batches: Batches) -> Batches:
    """Return the batches of this process. An empty shard borrows a batch of another process, with zero weights."""
    iterator = iter(batches)
    try:
        first = next(iterator)
    except NoSamples:
        first = None
    empty = exchange(first is None)
    if all(empty):
        raise _shared(BadData("the data holds no samples on any process"))
    lender = empty.index(False)
    lent = exchange(_parts(first) if first and lender == distributed.get_rank() else None) if any(empty) else []
    if first is None:
        inputs, targets = lent[lender]
        return replace(batches, data=[(inputs, targets, torch.zeros(batch_size(inputs)))], split=as_it_is)
    if batches.reiterable:
        return batches
    again = ((batch.inputs, batch.targets, batch.weights) for batch in chain([first], iterator))
    return replace(batches, data=again, split=as_it_is)


def _parts(batch: Batch) -> tuple[Any, Any]:
    """Return inputs and targets as they are sent to other processes."""
    inputs, targets = map_tensors(lambda t: t.detach().cpu(), (batch.inputs, batch.targets))
    return inputs, targets


def add_up(tensors: Mapping[str, Tensor], plan: Plan | None = None) -> None:
    """Replace every tensor by its sum over the processes; `PlanChanged` where they run different operations."""
    own = plan and plan.signature, {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}
    if any(other != own for other in exchange(own)):
        if plan is None or plan.dynamic:
            raise _shared(UnsupportedOperation("the sums of the processes have different shapes and do not add up"))
        raise _shared(PlanChanged())
    for name in sorted(tensors):
        distributed.all_reduce(tensors[name])


def add_up_numbers(numbers: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Sum plain numbers over the processes."""
    names = sorted(numbers)
    total = torch.tensor([float(numbers[name]) for name in names], dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))
