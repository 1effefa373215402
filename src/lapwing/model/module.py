"""The user's module as Lapwing runs it: a private copy in eval mode; and the outputs in what it returns."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from lapwing.errors import UnsupportedModel
from lapwing.model.autocast import outside_autocast
from lapwing.model.kernels import without_fast_path
from lapwing.model.skeleton import private

P = ParamSpec("P")
T = TypeVar("T")


def unwrap(module: nn.Module) -> nn.Module:
    """The module behind `torch.compile` and (distributed) data parallel wrappers."""
    while True:
        compiled = module._modules.get("_orig_mod")  # not by getattr, which wrappers may hand on to what they wrap
        if compiled is not None:
            module = compiled
        elif isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        else:
            return module


def outside_inference(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function as if the caller had not switched to `torch.inference_mode()` or `torch.autocast`.

    Its results may need gradients, and its sums the precision of the weights.
    """
    function = outside_autocast(function)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return called


def ordinary(tensor: Tensor) -> Tensor:
    """A tensor that autograd can record: a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


@contextmanager
def borrowed(module: nn.Module, selected: Iterable[str] = ()) -> Iterator[nn.Module]:
    """Lend a private copy of the module in eval mode, with gradients for the selected parameters only.

    The user's module itself is neither run nor written to: other threads may call it meanwhile. Letting only the
    selected parameters require grad keeps the backward pass out of frozen parts of the network.
    """
    with private(module, selected) as own, without_fast_path(own), torch.inference_mode(False), torch.enable_grad():
        yield own


class _Here:
    """Matches messages of the thread that made it."""

    def __init__(self, start: str) -> None:
        self.start, self.thread = start, threading.get_ident()

    def match(self, message: str) -> bool:
        return threading.get_ident() == self.thread and message.startswith(self.start)


@contextmanager
def warnings_here(action: Literal["ignore", "error"], category: type[Warning], start: str = "") -> Iterator[None]:
    """Ignore, or raise, warnings of this thread that begin with `start`.

    `warnings.catch_warnings` does so for all threads, and two threads that use it at the same time can leave the
    filters of one of them behind for good.
    """
    filters: Any = warnings.filters
    entry = (action, _Here(start), category, None, 0)
    filters.insert(0, entry)
    warnings._filters_mutated()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        now: Any = warnings.filters
        for own in (filters, now):  # the user may have replaced the list meanwhile
            if entry in own:
                own.remove(entry)
        warnings._filters_mutated()  # type: ignore[attr-defined]


def left_out(output: object) -> tuple[Tensor, ...]:
    """Tensors of the shape of the outputs that a tuple or list holds beside them, and that `output_tensor` leaves."""
    if not isinstance(output, (tuple, list)) or hasattr(output, "logits") or not output:
        return ()
    first, *others = output
    if not isinstance(first, Tensor):
        return ()
    return tuple(each for each in others if isinstance(each, Tensor) and each.shape == first.shape)


def output_tensor(output: object) -> Tensor:
    """The tensor of outputs in what a module returned: itself, `.logits`, `["logits"]`, or the first of a tuple."""
    from_attribute = getattr(output, "logits", None)
    if isinstance(output, Tensor):
        return output
    if isinstance(from_attribute, Tensor):
        return from_attribute
    if isinstance(output, dict) and isinstance(output.get("logits"), Tensor):
        return output["logits"]
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise UnsupportedModel(
        f"the model returned {type(output).__name__}; Lapwing needs a tensor, an object with `.logits`, or a tuple "
        "whose first entry is a tensor. Wrap the model in a module that returns its outputs."
    )
