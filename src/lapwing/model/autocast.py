"""Autocast around a call of this library: its own sums and products keep the precision of the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
KINDS = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu")


def outside_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function as if the caller had not switched on `torch.autocast`.

    Curvature that is summed in half precision is not positive definite, and a network that computed in another type
    when it was fitted is another network. Autocast inside a network's own forward is part of the network and stays.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        own = torch._C._get_privateuse1_backend_name()
        on = [kind for kind in (*KINDS, own) if torch.is_autocast_enabled(kind)]
        if not on:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for kind in on:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return called
