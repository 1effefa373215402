"""Lines of settings: many that differ in a common factor of their precisions alone, interpolated between a few."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lapwing.evidence.tuning import Setting

PER_DECADE = 1.4  # settings of a line that are computed at first


def lines_of(settings: Sequence[Setting]) -> list[list[int]]:
    """Group the numbers of settings that differ in a common factor of their precisions alone, in its order."""
    found: dict[tuple, list[int]] = {}
    for k, each in enumerate(settings):
        shape = tuple((each.precision / each.precision[0]).tolist()) if len(each.precision) else ()
        key = (shape, each.temperature, each.dispersion, each.logit_temperature, each.deterministic)
        found.setdefault(key, []).append(k)
    return [sorted(line, key=lambda k: settings[k].narrow) for line in found.values()]


def enough(line: Sequence[Setting]) -> int:
    """Return from how many settings of a line the others are interpolated at first."""
    decades = 0.0 if len(line) < 2 else math.log10(line[-1].narrow / line[0].narrow)
    return math.ceil(PER_DECADE * decades) + 3


def chebyshev(u: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return Chebyshev's nodes between the ends of u, and the matrix that interpolates from them to u (barycentric)."""
    angle = torch.linspace(0, math.pi, count, dtype=torch.float64)
    low, high = u.min(), u.max()
    nodes = (low + high) / 2 - (high - low) / 2 * angle.cos()
    weights = torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0).double()
    weights[[0, -1]] /= 2
    gaps = u[:, None] - nodes
    exact = gaps == 0
    parts = weights / gaps.masked_fill(exact, 1.0)
    parts = torch.where(exact.any(1, keepdim=True), exact.double(), parts)
    return nodes, parts / parts.sum(1, keepdim=True)
