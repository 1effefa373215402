"""Which inputs hold one entry per sample, which are shared by all samples, and whether samples stay apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from lapwing.errors import UnsupportedModel
from lapwing.model.agreement import Types, close, tolerance
from lapwing.model.batches import Inputs, Path, batch_size, lists_values, map_named, named_tensors, share, take

FEW = 4  # samples that are run without the others of their batch

APART = (
    "A posterior needs independent samples: use running statistics in normalization layers, and the first dimension "
    "for the batch. Where a batch is one graph (or one set) whose nodes depend on each other, make it one sample: give "
    "inputs and targets a first dimension of 1, (x[None], edges[None]) and y[None], and let a wrapper run one graph "
    "after the other: `def forward(self, x, edges): return torch.stack([net(*graph) for graph in zip(x, edges)])`."
)
NOT_DETERMINISTIC = (
    "the network gives other outputs for the same samples when they are run again. A posterior needs a deterministic "
    "network: switch off noise and sampling inside it."
)

Run = Callable[[Inputs], Tensor]
"""Outputs f (n, *event, c) of a network, without gradients."""


@dataclass(eq=False)
class Roles:
    """What a network was seen to make of its inputs.

    A tensor whose first dimension differs from the number of samples is shared by all of them. One whose first
    dimension equals it may be either: a few samples are run without the others, and their outputs tell.
    """

    shared: set[tuple[Path, int]] = field(default_factory=set)  # with their lengths
    own: set[Path] = field(default_factory=set)
    largest: int = FEW  # samples of the largest batch whose outputs were compared

    def settle(self, inputs: Inputs, run: Run) -> None:
        """Mark the tensors that all samples share, so that they are not cut like samples."""
        n = batch_size(inputs)
        found = {path: t for path, t in named_tensors(inputs) if t.ndim}
        whole = {path for path, t in found.items() if len(t) != n}
        self.shared |= {(path, len(found[path])) for path in whole}
        self.own -= whole
        equal = [path for path, t in found.items() if (path, len(t)) not in self.shared]
        doubtful = [path for path in equal[1:] if path not in self.own]
        if doubtful:
            self._find_out(inputs, run, doubtful)
        for path, t in found.items():
            if (path, len(t)) in self.shared:
                share(t)

    def _find_out(self, inputs: Inputs, run: Run, doubtful: list[Path]) -> None:
        """Run a few samples with every doubtful tensor cut, with one of them whole, with all of them whole."""
        n = batch_size(inputs)
        try:
            whole = run(inputs)
        except (RuntimeError, ValueError, IndexError):
            return  # whoever runs the batch says what is wrong
        if len(whole) != n or lists_values(inputs, n) or not bool(whole.isfinite().all()):
            return
        rows, came = _spread(n, min(FEW, n - 1) or 2), "other values"  # one sample: the same twice
        for kept in chain([()], ((path,) for path in doubtful), [tuple(doubtful)]):
            few = self._cut(inputs, rows, {*kept})
            try:
                if _same(whole[rows.to(whole.device)], few, run):
                    self.shared |= {(path, n) for path in kept}
                    self.own |= {*doubtful} - {*kept}
                    self.largest = max(self.largest, n)
                    return
            except (RuntimeError, ValueError, IndexError) as error:
                came = f"an error ({type(error).__name__}: {error})"
        names = ", ".join(repr(".".join(map(str, path))) for path in doubtful)
        raise UnsupportedModel(
            f"the outputs of a sample depend on the other samples of its batch: without the others, {len(rows)} of a "
            f"batch of {n} give {came}, whether the inputs {names}, which have {n} entries too, are cut into samples "
            f"or shared by all. {APART}"
        )

    def _cut(self, inputs: Inputs, rows: Tensor, kept: set[Path]) -> Inputs:
        """Some samples, with the tensors that are shared, or are taken to be, as they are."""
        n = batch_size(inputs)

        def cut(path: Path, t: Tensor) -> Tensor:
            whole = not t.ndim or len(t) != n or (path, n) in self.shared or path in kept
            return t if whole else t[rows.to(t.device)]

        return map_named(cut, inputs)

    def require_apart(self, inputs: Inputs, f: Tensor, run: Run) -> None:
        """Refuse outputs f of a batch, larger than those seen before, that are not those of a few samples alone."""
        n = batch_size(inputs)
        if n <= self.largest or len(f) != n or lists_values(inputs, n) or not bool(f.isfinite().all()):
            return  # lists of plain values are not cut: a few samples cannot be run without the others
        rows = _spread(n, FEW).to(f.device)
        try:
            same = _same(f.detach()[rows], take(inputs, rows, n), run)
        except (RuntimeError, ValueError, IndexError) as error:
            raise refusal(n, FEW, error) from error
        if not same:
            raise UnsupportedModel(
                f"the outputs of a sample depend on the other samples of its batch: in a batch of {n} they are not "
                f"those that the same sample has in a batch of {FEW}. {APART}"
            )
        self.largest = n


def refusal(n: int, few: int, error: Exception) -> UnsupportedModel:
    """What to raise where a batch runs, and a few of its samples do not."""
    return UnsupportedModel(
        f"the network runs a batch of {n} samples but not {few} of them without the others "
        f"({type(error).__name__}: {error}). {APART}"
    )


def _same(f: Tensor, few: Inputs, run: Run) -> bool:
    """Whether a few samples alone have outputs f, by the precision that the network computes in."""
    alone = run(few)
    if close(f, alone, tolerance([f.dtype])):
        return True
    with Types() as inside:
        again = run(few)
    rtol = tolerance(inside.seen)
    if not close(again, alone, rtol):
        raise UnsupportedModel(NOT_DETERMINISTIC)
    return close(f, alone, rtol)


def _spread(n: int, count: int) -> Tensor:
    """Rows over the whole batch, the last among them: those that come last lose where places are few."""
    return torch.linspace(n - 1, 0, count).round().long().flip(0)
