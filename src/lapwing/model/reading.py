"""One forward pass under the tape, with what the plan says of its records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor, nn

from lapwing.model.batches import Inputs
from lapwing.model.params import Params
from lapwing.model.plan import Plan, bind
from lapwing.model.rules import Call, MatrixRule, RowsRule, Rule
from lapwing.model.tape import Pass

SMALLER = 4  # times, so that rows are made before they are asked for
Outputs = Callable[[Tensor], Tensor]  # raw outputs -> (n, *event, c)


@dataclass(frozen=True)
class Digest:
    """What is made of the gradients of some matrix blocks as soon as a pass brings them, so that they need not be kept:
    their sums over the positions of a sample, or the sum of their outer products."""

    kind: Literal["sums", "grams"]
    blocks: frozenset[int]


@dataclass(frozen=True, eq=False)
class Reading:
    """A network at a batch as its plan reads it: outputs f (n, *event, c) and the records with their rules."""

    module: nn.Module
    params: Params
    plan: Plan
    inputs: Inputs
    finished: Pass
    outputs: Outputs
    f: Tensor
    leaves: dict[str, Tensor]  # the selected parameters as the forward pass saw them
    create_graph: bool = False

    @property
    def n(self) -> int:
        return self.f.shape[0]

    @cached_property
    def bound(self) -> dict[int, tuple[Rule, Call]]:
        """Rule and arguments of every record that is read by its rule; what rules compute of the inputs is kept."""
        read = (k for k, step in enumerate(self.plan.steps) if step.method == "rule")
        found = {k: bind(self.finished.records[k]) for k in read}
        return {k: pair for k, pair in found.items() if pair is not None}

    def right(self, k: int, with_ones: bool) -> Tensor:
        """The inputs of a record that multiplies with a matrix, (n, 1, t, groups, in)."""
        (rule, call_), out = self.matrix(k), self.plan.steps[k].out
        assert out is not None
        return rule.right(call_, out, self.n, with_ones)

    @cached_property
    def early(self) -> dict[int, tuple[RowsRule, Call]]:
        """Records whose rows are much smaller than the gradients they are made of (norm layers of images, of tokens):
        they are made as soon as a pass brings those, which need not be kept."""
        if self.create_graph:
            return {}
        return {
            k: (rule, call_)
            for k, (rule, call_) in self.bound.items()
            if isinstance(rule, RowsRule) and SMALLER * self._row(k) * self.n <= self.finished.records[k].out.numel()
        }

    def digested(self, digest: Digest | None) -> dict[int, int]:
        """Records of which nothing but the digest is wanted, as all their weights are in its blocks, and where that is
        much smaller than gradients; with its size for one direction of all samples (grams of several are one sum)."""
        if digest is None or self.create_graph:
            return {}
        names: dict[int, set[str]] = {}
        for j in digest.blocks:
            for k, _ in self.plan.blocks[j].uses:
                names.setdefault(k, set()).update(self.plan.blocks[j].names)
        sizes = {k: self._digest_size(k, digest) for k, own in names.items() if self.plan.steps[k].names <= own}
        return {k: size for k, size in sizes.items() if SMALLER * size <= self.finished.records[k].out.numel()}

    def _digest_size(self, k: int, digest: Digest) -> int:
        rule, call_ = self.matrix(k)
        assert call_.weight is not None
        q, o, _ = rule.view(call_, call_.weight).shape
        return q * o * (self.n if digest.kind == "sums" else o)

    def matrix(self, k: int) -> tuple[MatrixRule, Call]:
        """Rule and arguments of a record that multiplies with a matrix."""
        rule, call_ = self.bound[k]
        assert isinstance(rule, MatrixRule)
        return rule, call_

    def _row(self, k: int) -> int:
        """Numbers of one row of all weights of a record."""
        record = self.finished.records[k]
        return sum(record.tensors[j].numel() for j in record.live)

    @property
    def width(self) -> int:
        """Numbers that one direction brings to all records, a sample."""
        return sum(record.out.numel() for record in self.finished.records) // max(self.n, 1)

    @property
    def kept(self) -> int:
        """Those of them that wait to be asked for, with the rows that others were turned into."""
        gone = sum(self.finished.records[k].out.numel() for k in self.early) // max(self.n, 1)
        return self.width - gone + sum(self._row(k) for k in self.early)

    def kept_with(self, digest: Digest) -> int:
        """The same where gradients are digested."""
        sizes = self.digested(digest)
        gone = sum(self.finished.records[k].out.numel() for k in sizes)
        return self.kept + (sum(sizes.values()) - gone) // max(self.n, 1)
