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
    """Passes of r directions in all.

    Rows of norms are written into arrays for all of them, and with a digest so is all that is left: small tensors of
    one pass that stay between the large ones of the next would let memory grow. Without a digest, gradients of matrices
    stay as they came.
    """

    def __init__(self, at: Reading, r: int, digest: Digest | None = None) -> None:
        self.at, self.r, self.digest = at, r, digest
        self.digested = at.digested(digest).keys()
        self.taken = 0
        self.passes: list[Backward] = []
        self.rows: dict[int, list[Tensor]] = {}  # by record, (n, r, *shape) for each live tensor
        self.digests: dict[int, Tensor] = {}  # by record, (n, r, q, o) or (q, o, o)
        self.gradients: dict[int, Tensor] = {}  # by record, (r, *out.shape)

    @property
    def gone(self) -> Set[int]:
        """Records whose gradients are not kept."""
        return self.rows.keys() | self.digests.keys()

    def take(self, one: Backward, scale: Tensor | None = None) -> None:
        """What a pass brings, which is still to be multiplied with one number a sample, `scale` (n,)."""
        require_reaching(self.at, one)
        with torch.no_grad():
            for k in self.at.early:
                self._write_rows(k, one, scale)
            for k in self.digested:
                self._write_digest(k, one, scale)
            if self.digest is not None:
                for k in range(len(one.found)):
                    if k not in self.gone:
                        self._write_gradient(k, one, scale)
        if self.digest is None:
            self.passes.append(Backward(one.r, tuple(None if k in self.gone else g for k, g in enumerate(one.found))))
        self.taken += one.r

    def lazy(self, looped: dict[str, Tensor], scale: Tensor | None = None) -> LazyRows:
        """Rows of all passes; `scale` is that of the first."""
        if self.digest is None:
            found = gradients_of(self.at, self.passes, scale, self.gone)
        else:
            records = range(len(self.at.finished.records))
            found = Gradients(tuple((self.gradients[k],) if k in self.gradients else () for k in records))
        return LazyRows(self.at, found, looped, self.r, self.rows, self.digests)

    def _write_rows(self, k: int, one: Backward, scale: Tensor | None) -> None:
        at, (rule, call_) = self.at, self.at.early[k]
        record, out = at.finished.records[k], at.plan.steps[k].out
        assert out is not None
        found = small_rows(rule, call_, record, shaped(one, k, record.out), out, at.n)
        if k not in self.rows:
            self.rows[k] = [rows.new_empty(at.n, self.r, *rows.shape[2:]) for rows in found]
        for whole, rows in zip(self.rows[k], found, strict=True):
            self._place(whole, 1, rows if scale is None else _times(rows, scale))

    def _write_digest(self, k: int, one: Backward, scale: Tensor | None) -> None:
        at, (rule, call_) = self.at, self.at.matrix(k)
        record, out = at.finished.records[k], at.plan.steps[k].out
        assert self.digest is not None
        assert out is not None
        g = shaped(one, k, record.out)
        if self.digest.kind == "sums":
            summed = rule.left_sum(call_, g, out, at.n).to(at.params.dtype)
            if k not in self.digests:
                self.digests[k] = summed.new_empty(at.n, self.r, *summed.shape[2:])
            self._place(self.digests[k], 1, summed if scale is None else _times(summed, scale))
            return
        g = g if scale is None else g * out.spread(scale, record.out, at.n)
        found = rule.left_gram(call_, g.to(at.params.dtype), out, at.n)
        if k in self.digests:
            self.digests[k] += found
        else:
            self.digests[k] = found

    def _write_gradient(self, k: int, one: Backward, scale: Tensor | None) -> None:
        record, out = self.at.finished.records[k], self.at.plan.steps[k].out
        g = shaped(one, k, record.out)
        if k not in self.gradients:
            self.gradients[k] = g.new_empty(self.r, *record.out.shape)
        if scale is not None:
            assert out is not None  # there is none where a loop over samples takes the place of a pass
            g = g * out.spread(scale, record.out, self.at.n)
        self._place(self.gradients[k], 0, g)

    def _place(self, whole: Tensor, axis: int, part: Tensor) -> None:
        whole.narrow(axis, self.taken, part.shape[axis]).copy_(part)


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
    """Refuse a batch whose graph lost a record that the self-check saw (a plan that was not checked saw none)."""
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
