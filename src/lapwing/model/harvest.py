"""What backward passes leave behind at a batch: gradients, or what is made of them as they arrive."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.model.gradients import Gradients
from lapwing.model.lazyrows import LazyRows, small_rows
from lapwing.model.plan import PlanChanged
from lapwing.model.reading import Digest, Reading


@dataclass(frozen=True, eq=False)
class Backward:
    """What one backward pass of r directions brings to each record."""

    r: int
    found: tuple[Tensor | None, ...]


class Harvest:
    """Passes of r directions in all. Rows and digests are written into arrays for all of them, made at the first pass:
    small ones made at each would lie between the large ones that come and go, and memory would grow."""

    def __init__(self, at: Reading, r: int, digest: Digest | None = None) -> None:
        self.at, self.r, self.digest = at, r, digest
        self.taken = 0
        self.passes: list[Backward] = []
        self.rows: dict[int, list[Tensor]] = {}  # by record, (n, r, *shape) for each live tensor
        self.digests: dict[int, Tensor] = {}  # by record, (n, r, q, o) or (q, o, o)

    def take(self, one: Backward, scale: Tensor | None = None) -> None:
        """Of what it brings, rows and digests are made, which `scale` (n,) multiplies; the rest is kept."""
        require_reaching(self.at, one)
        with torch.no_grad():
            for k in self.at.early:
                self._write_rows(k, one, scale)
            for k in self.at.digested(self.digest):
                self._write_digest(k, one, scale)
        gone = self.rows.keys() | self.digests.keys()
        self.passes.append(Backward(one.r, tuple(None if k in gone else g for k, g in enumerate(one.found))))
        self.taken += one.r

    def lazy(self, looped: dict[str, Tensor], scale: Tensor | None = None) -> LazyRows:
        """Rows of all passes; `scale` is that of the first."""
        gone = self.rows.keys() | self.digests.keys()
        return LazyRows(
            self.at, gradients_of(self.at, self.passes, scale, gone), looped, self.r, self.rows, self.digests
        )

    def _write_rows(self, k: int, one: Backward, scale: Tensor | None) -> None:
        at, (rule, call_) = self.at, self.at.early[k]
        record, out = at.finished.records[k], at.plan.steps[k].out
        assert out is not None
        found = small_rows(rule, call_, record, shaped(one, k, record.out), out, at.n)
        if k not in self.rows:
            self.rows[k] = [rows.new_empty(at.n, self.r, *rows.shape[2:]) for rows in found]
        for whole, rows in zip(self.rows[k], found, strict=True):
            whole[:, self.taken : self.taken + one.r] = rows if scale is None else _times(rows, scale)

    def _write_digest(self, k: int, one: Backward, scale: Tensor | None) -> None:
        at, (rule, call_) = self.at, self.at.matrix(k)
        record, out = at.finished.records[k], at.plan.steps[k].out
        assert self.digest is not None
        assert out is not None
        g = shaped(one, k, record.out)
        if self.digest.kind == "sums":
            summed = rule.left_sum(call_, g, out, at.n)
            if k not in self.digests:
                self.digests[k] = summed.new_empty(at.n, self.r, *summed.shape[2:])
            self.digests[k][:, self.taken : self.taken + one.r] = summed if scale is None else _times(summed, scale)
            return
        g = g if scale is None else g * out.spread(scale, record.out, at.n)
        found = rule.left_gram(call_, g.to(at.params.dtype), out, at.n)
        if k not in self.digests:
            self.digests[k] = found
        else:
            self.digests[k] += found


def gradients_of(
    at: Reading, passes: list[Backward], scale: Tensor | None = None, gone: Set[int] = frozenset()
) -> Gradients:
    """What they found at every record that is not gone, the first of them to be multiplied with one number a sample."""
    records = at.finished.records
    found = tuple(
        () if k in gone else tuple(shaped(one, k, record.out) for one in passes) for k, record in enumerate(records)
    )
    if scale is None:
        return Gradients(found)
    layouts = [None if k in gone else step.out for k, step in enumerate(at.plan.steps)]
    scales = (
        None if samples is None else samples.spread(scale, record.out, at.n)
        for record, samples in zip(records, layouts, strict=True)
    )
    return Gradients(found, tuple(scales))


def require_reaching(at: Reading, one: Backward) -> None:
    """Refuse a batch whose graph lost a record that the self-check saw."""
    for g, reaches in zip(one.found, at.plan.reaching, strict=False):
        if g is None and reaches:
            raise PlanChanged


def shaped(one: Backward, k: int, out: Tensor) -> Tensor:
    """(r, *out.shape) of a pass at record k; zeros where it does not reach it."""
    g = one.found[k]
    return out.new_zeros(()).expand(one.r, *out.shape) if g is None else g.reshape(one.r, *out.shape)


def _times(rows: Tensor, scale: Tensor) -> Tensor:
    """Rows (n, ...) times one number a sample."""
    return rows * scale.to(rows).reshape(-1, *(1,) * (rows.ndim - 1))
