"""The user's module as Lapwing runs it: a private copy in eval mode, called with nested inputs; and what it returns."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, wraps
from itertools import islice
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import BaseTorchFunctionMode

from lapwing.errors import BadData, LapwingError, UnsupportedModel
from lapwing.model.copies import PrivateCopy
from lapwing.model.inputs import Inputs, batch_size, map_tensors, require_dense, take, tensors_in

P = ParamSpec("P")
T = TypeVar("T")
AUTOCAST_KINDS = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu")
LINGERING = 2**27  # bytes in dropped copies with reference cycles, after which the garbage collector is called

_SOURCES: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
_DROPPED: deque[tuple[weakref.ref[nn.Module], int]] = deque(maxlen=64)  # large copies that may still be in memory
_IN_USE = threading.local()
_WRITES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # whether its first call wrote to the inputs


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile` and (distributed) data parallel wrappers."""
    while True:
        compiled = module._modules.get("_orig_mod")  # not by getattr, which wrappers may forward to the module inside
        if compiled is not None:
            module = compiled
        elif isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        else:
            return module


@cache
def _autocast_kinds() -> tuple[str, ...]:
    """Return the kinds of devices that this version of PyTorch knows an autocast for."""
    known = []
    for kind in AUTOCAST_KINDS:
        try:
            torch.is_autocast_enabled(kind)
        except RuntimeError:
            continue
        known.append(kind)
    return tuple(known)


_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether autocast is on for some device, where PyTorch tells it in one call."""


def outside_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function as if the caller had not switched on `torch.autocast`.

    Curvature that is summed in half precision is not positive definite, and a network that computed in another type
    when it was fitted is another network. Autocast inside a network's own forward is part of the network and stays.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _any_autocast():
            return function(*args, **kwargs)
        own = torch._C._get_privateuse1_backend_name()
        on = [kind for kind in (*_autocast_kinds(), own) if torch.is_autocast_enabled(kind)]
        if not on:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for kind in on:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return called


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
    """Return a tensor that autograd can record: a copy, if it was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


@contextmanager
def borrowed(module: nn.Module, selected: Iterable[str] = ()) -> Iterator[nn.Module]:
    """Lend a private copy of the module in eval mode, with gradients for the selected parameters only.

    The user's module itself is neither run nor written to: other threads may call it meanwhile. Letting only the
    selected parameters require grad keeps the backward pass out of frozen parts of the network.
    """
    with private(module, selected) as own, without_fast_path(own), torch.inference_mode(False), torch.enable_grad():
        yield own


@contextmanager
def without_fast_path(module: nn.Module) -> Iterator[None]:
    """Keep encoders from their fast path, which is taken only without a graph and zeroes padded positions.

    With it, outputs and derivatives would belong to two different networks. Encoders do not take it while any
    `TorchFunctionMode` is active.
    """
    fast = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
    with BaseTorchFunctionMode() if any(isinstance(m, fast) for m in module.modules()) else nullcontext():
        yield


@contextmanager
def private(module: nn.Module, selected: Iterable[str] = ()) -> Iterator[nn.Module]:
    """Lend a private copy of a module in eval mode, in which the selected parameters alone require gradients.

    A thread that asks again for the copy it is using gets the same one.
    """
    key = (id(module), frozenset(selected))
    mine: dict = _IN_USE.__dict__.setdefault("copies", {})
    if key in mine:
        yield mine[key].root
        return
    _collect()
    maker = PrivateCopy(module, key[1])
    try:
        mine[key] = maker
        _SOURCES[maker.root] = module
        yield maker.root
    finally:
        mine.pop(key, None)
        maker.put_back()
        maker.release()
        if maker.size > LINGERING // 64:
            _DROPPED.append((weakref.ref(maker.root), maker.size))


def _collect() -> None:
    """Free copies with reference cycles before they fill the memory: Python counts objects, not bytes."""
    if _DROPPED and sum(size for root, size in list(_DROPPED) if root() is not None) > LINGERING:
        gc.collect()
        _DROPPED.clear()


def in_use(module: nn.Module, selected: Iterable[str] = ()) -> nn.Module:
    """Return the private copy that this thread is using."""
    return _IN_USE.copies[id(module), frozenset(selected)].root


def put_back(module: nn.Module) -> None:
    """Undo what a call of a private copy has written to it, so that the next call begins like the first.

    Otherwise a module that keeps a tensor computed from its weights would use it at other weights too.
    """
    for maker in _IN_USE.__dict__.get("copies", {}).values():
        if maker.root is module:
            maker.put_back()


def source_of(module: nn.Module) -> nn.Module:
    """Return the user's module behind a private copy, or the module itself."""
    return _SOURCES.get(module, module)


def call(module: nn.Module, inputs: Inputs, weights: Mapping[str, Tensor] | None = None) -> Any:
    """Return model(x), model(*x) for a tuple or list, or model(**x) for a mapping; at other weights if they are given.

    A module that writes to its inputs gets copies. Its first call shows whether it does.
    """
    source = source_of(module)
    writes = _WRITES.get(source)
    own = inputs if writes is False else map_tensors(Tensor.clone, inputs)
    before = [_version(t) for t in tensors_in(own)]
    try:
        out = _called(module, own, weights)
    finally:
        put_back(module)
    changed = before != [_version(t) for t in tensors_in(own)]
    if changed and writes is False:
        _WRITES[source] = True
        raise UnsupportedModel(
            "the network wrote to its inputs, which it had not done in earlier calls, so that your data have changed. "
            "Let its forward pass work on a copy (x = x.clone()), load the data again and start over."
        )
    if writes is None:
        _WRITES[source] = changed
    return out


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _called(module: nn.Module, inputs: Inputs, weights: Mapping[str, Tensor] | None) -> Any:
    args, kwargs = arguments(inputs)
    if weights is None:
        return module(*args, **kwargs)
    return functional_call(module, dict(weights), args, kwargs)


def arguments(inputs: Inputs) -> tuple[tuple, dict[str, Any]]:
    """Return the positional and named arguments that inputs stand for."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


@contextmanager
def explained(inputs: Inputs) -> Iterator[None]:
    """Say in the error which inputs came, if a network fails on them."""
    try:
        yield
    except (LapwingError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError) as error:
        came = " and ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors_in(inputs))
        whole = any(not (t.is_floating_point() or t.is_complex()) for t in tensors_in(inputs))
        hint = " Integers stay integers: pass x.float() to a network of real numbers." if whole else ""
        raise BadData(
            f"the network does not take inputs of shape {came} ({type(error).__name__}: {error}). "
            f"The first dimension counts the items: a single item is x[None].{hint}"
        ) from error


def evaluated(module: nn.Module, inputs: Inputs, **more: Any) -> Any:
    """Return the module's output for copies of the inputs, on its device, in eval mode and without gradients."""
    device = next((p.device for p in module.parameters()), None)
    args, kwargs, more = map_tensors(lambda t: t.to(device or t.device, copy=True), (*arguments(inputs), more))
    with borrowed(module) as own, torch.no_grad():
        return own(*args, **kwargs, **more)


def placed(
    module: nn.Module, inputs: Inputs, device: torch.device, cast: bool | None = None
) -> tuple[Inputs, bool | None]:
    """Move inputs to a device, and cast them to the module's floating dtype if it refuses theirs.

    `cast` says whether it refuses them, None if that is not known yet; it is returned as far as it is known now.
    """
    inputs = map_tensors(lambda t: ordinary(require_dense(t)).to(device), inputs)
    came = {t.dtype for t in tensors_in(inputs) if t.is_floating_point()}
    if came <= {p.dtype for p in islice(module.parameters(), 1)}:  # the usual case, checked quickly
        return inputs, cast
    own = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(own) != 1 or came <= own:
        return inputs, cast
    if cast is None and batch_size(inputs):
        cast = _refuses(module, take(inputs, slice(0, 1), batch_size(inputs)))
    (dtype,) = own
    return map_tensors(lambda t: t.to(dtype) if cast and t.is_floating_point() else t, inputs), cast


def _refuses(module: nn.Module, inputs: Inputs) -> bool:
    try:
        evaluated(module, inputs)
    except Exception:
        return True
    return False


def output_tensor(output: object) -> Tensor:
    """Find the outputs in what a module returned: a tensor, its `.logits`, `["logits"]`, or the first of a tuple."""
    if isinstance(output, Tensor):
        return output
    from_attribute = getattr(output, "logits", None)
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


def left_out(output: object) -> tuple[Tensor, ...]:
    """Return the tensors beside the outputs in a tuple or list that have their shape, and that are not used."""
    if not isinstance(output, (tuple, list)) or hasattr(output, "logits") or not output:
        return ()
    first, *others = output
    if not isinstance(first, Tensor):
        return ()
    return tuple(each for each in others if isinstance(each, Tensor) and each.shape == first.shape)


class _Here:
    """A pattern that matches messages of the thread that made it."""

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
