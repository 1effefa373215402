"""Forward-mode products with the fastest kernels that have a forward-mode derivative."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lapwing.model.kernels import differentiable_kernels, elementary_attention
from lapwing.model.module import warnings_here
from lapwing.model.tangents import Tangents, Values

_LEVEL: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # into KERNELS: what a module was seen to need
_TURN = threading.RLock()  # PyTorch has one forward-mode level per process: threads take turns
if hasattr(os, "register_at_fork"):  # a forked process has not the thread that may be holding it
    os.register_at_fork(after_in_child=lambda: globals().update(_TURN=threading.RLock()))
NESTED = "Nested forward mode AD"


KERNELS: tuple[Callable[[], Any], ...] = (nullcontext, elementary_attention, differentiable_kernels)


def level(module: nn.Module) -> int:
    """The first of `KERNELS` not yet seen to lack a derivative for this module; len(KERNELS) if all do."""
    return _LEVEL.get(module, 0)


def lacks_derivative(error: Exception) -> bool:
    """Whether an error says that an operation has no derivative of this kind; not that another thread is using it."""
    text = str(error).lower()
    return any(word in text for word in ("forward", "jvp", "derivative", "double backward", "batching rule"))


def push_forward(
    module: nn.Module,
    run: Callable[[dict[str, Tensor]], Tensor],
    values: dict[str, Tensor],
    tangents: list[dict[str, Tensor]],
    known: Values | None = None,
) -> tuple[Tensor, Tensor] | None:
    """f and J v of every tangent, or None where an operation has no forward-mode derivative with any kernels.

    Values that are `known` from a pass over the same inputs, are not computed again.
    """
    for number in range(level(module), len(KERNELS)):
        try:
            with KERNELS[number](), torch.no_grad(), forward_mode():
                passes = [_dual_pass(run, values, tangent, known) for tangent in tangents]
                if _overwritten(passes):
                    passes = [_dual_pass(run, values, tangent, None) for tangent in tangents]
                f = passes[0][0] if passes else run(values)
            return f, torch.stack([moved for _, moved, _ in passes]) if passes else f.new_zeros(0, *f.shape)
        except (NotImplementedError, RuntimeError) as error:
            if NESTED in str(error):  # the user's own forward mode in another thread
                return None
            if not lacks_derivative(error):
                raise
            _LEVEL[module] = number + 1
    return None


def _dual_pass(
    run: Callable[[dict[str, Tensor]], Tensor],
    values: dict[str, Tensor],
    tangent: dict[str, Tensor],
    known: Values | None,
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Return f, J v, and entries of the known values that were used: as they are, and as they were."""
    with forward_ad.dual_level(), Tangents(known) as heavy:
        out = run({name: forward_ad.make_dual(value, tangent[name]) for name, value in values.items()})
        f, moved = forward_ad.unpack_dual(out)
        found = f.clone(), torch.zeros_like(f) if moved is None else moved.clone(), heavy.taken
    if known is None or heavy.number == len(known.kept):
        return found
    return _dual_pass(run, values, tangent, None)  # other calls than those of the pass that left the values


def _overwritten(passes: list[tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]]) -> bool:
    """Tell whether a network has written to values behind PyTorch's back (`.data`) that later passes have used."""
    taken = [pair for _, _, pairs in passes for pair in pairs]
    if not taken:
        return False
    now, before = (torch.cat(entries) for entries in zip(*taken))
    return not torch.equal(now, before)


@contextmanager
def forward_mode() -> Iterator[None]:
    """Take this thread's turn with forward mode.

    PyTorch scripts its forward-mode formulas at first use, and warns that scripting is deprecated.
    """
    with _TURN, warnings_here("ignore", DeprecationWarning):
        yield
