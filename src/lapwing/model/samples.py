"""Where the samples of a batch sit inside a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AMBIGUOUS = "samples and positions cannot be told apart by their values"


@dataclass(frozen=True)
class Samples:
    """Axis that holds the samples; flattened with m others as (n, m), or as (m, n) when `minor`.

    Not `told`: m was 1 (sequences of length 1), which says nothing about the order for larger m.
    """

    axis: int
    minor: bool = False
    told: bool = True

    def first(self, x: Tensor, n: int, skip: int = 0) -> Tensor:
        """(skip dims, ..., n·m, ...) -> (n, skip dims, ..., m, ...): the sample axis in front, m where it was."""
        axis = self.axis + skip
        m = x.shape[axis] // n
        if not self.minor:
            return x.unflatten(axis, (n, m)).movedim(axis, 0)
        return x.unflatten(axis, (m, n)).movedim(axis + 1, 0)

    def spread(self, values: Tensor, x: Tensor, n: int) -> Tensor:
        """One number a sample, (n,), as a factor of a tensor that holds the samples so."""
        m = x.shape[self.axis] // n
        values = values.repeat(m) if self.minor else values.repeat_interleave(m)
        return values.reshape(-1, *(1,) * (x.ndim - 1 - self.axis)).to(x.dtype)

    def fits(self, shape: torch.Size, n: int) -> bool:
        return self.axis < len(shape) and (shape[self.axis] % n == 0 if self.told or n == 1 else shape[self.axis] == n)


def locate(whole: Tensor, single: Tensor, n: int, which: int, rtol: float) -> Samples | None:
    """The sample axis of a tensor, found by running the batch of n and sample `which` alone; None if there is none.

    The axis is the one whose size grew by n; where it is flattened together with others, values tell whether samples
    are the outer or the inner index. Raises LookupError when sizes fit but the values of the sample do not.
    """
    if whole.ndim != single.ndim:
        raise LookupError("its number of dimensions depends on the batch")
    changed = [d for d in range(whole.ndim) if whole.shape[d] != single.shape[d]]
    if not changed:
        return None
    if len(changed) > 1 or whole.shape[changed[0]] != n * single.shape[changed[0]]:
        raise LookupError(f"its shape goes from {tuple(single.shape)} for one sample to {tuple(whole.shape)} for {n}")
    axis = changed[0]
    one = single.shape[axis] == 1
    layouts = [Samples(axis, told=False)] if one else [Samples(axis), Samples(axis, minor=True)]
    fitting = [layout for layout in layouts if close(layout.first(whole, n)[which], single, rtol)]
    if not fitting:
        raise LookupError("its value for a sample depends on the other samples of the batch")
    if len(fitting) > 1:
        raise LookupError(AMBIGUOUS)
    return fitting[0]


def close(a: Tensor, b: Tensor, rtol: float) -> bool:
    """Equal up to rtol of the largest entry; exact for integers."""
    if a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return bool(((a == b) | ((a - b).abs() <= rtol * scale)).all())
