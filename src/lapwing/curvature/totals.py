"""What a pass over the data adds up besides the curvature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lapwing.curvature.factor import Directions
from lapwing.curvature.shards import add_up, add_up_numbers
from lapwing.model import Plan


@dataclass(frozen=True, eq=False)
class Totals:
    """What a pass over the data adds up besides the curvature."""

    statistics: Tensor
    seen: float
    gradient: Tensor | None
    notes: tuple[str, ...] = ()


class Sums:
    """Running totals of a pass."""

    def __init__(self) -> None:
        self.statistics: Tensor | None = None
        self.gradient: Tensor | None = None
        self.seen = self.curvature = self.dropped = 0.0
        self.samples = self.directions = 0

    def add(self, statistics: Tensor, chosen: Directions) -> None:
        self.statistics = statistics if self.statistics is None else self.statistics + statistics
        self.curvature += chosen.total
        self.dropped += chosen.dropped
        self.samples += len(chosen.needed)
        self.directions += int(chosen.needed.sum())

    def join(self, other: Sums) -> None:
        """Those of another pass, without gradients."""
        assert other.statistics is not None
        self.statistics = other.statistics if self.statistics is None else self.statistics + other.statistics
        for name in ("seen", "curvature", "dropped", "samples", "directions"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def add_up(self, state: Mapping[str, Tensor], plan: Plan) -> None:
        """Add up these totals and the tensors of `state` over all processes."""
        assert self.statistics is not None
        add_up({**state, **{f"total {name}": t for name, t in vars(self).items() if isinstance(t, Tensor)}}, plan)
        numbers = {name: v for name, v in vars(self).items() if isinstance(v, int | float)}
        vars(self).update(add_up_numbers(numbers, self.statistics.device))

    def totals(self) -> Totals:
        assert self.statistics is not None
        notes: tuple[str, ...] = ()
        if self.dropped > 1e-6 * self.curvature:
            notes = (
                f"directions: {self.directions / max(self.samples, 1):.2g} a sample, "
                f"which leaves out {self.dropped / self.curvature:.2g} of the curvature in output space",
            )
        return Totals(self.statistics, self.seen, self.gradient, notes)
