"""How Lapwing calls a module: nested inputs in, a tensor of outputs out, whatever modes the caller has switched on.

Inputs are nested tuples, lists and mappings of tensors. A tensor whose first dimension is the number of samples usually
has one entry per sample; `share` marks those that all samples share by chance. Numbers that two calls give are compared
within the precision that a network really computes in (`close`, `tolerance`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from functools import cache, wraps
from itertools import islice
from numbers import Number
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.weak import WeakIdKeyDictionary

from lapwing.errors import BadData, LapwingError, UnsupportedModel
from lapwing.model.copies import borrowed, put_back, source_of

P = ParamSpec("P")
T = TypeVar("T")
Inputs = Any  # a tensor, a tuple of tensors (called as model(*x)) or a dict (called as model(**x))
Path = tuple[str | int, ...]
"""Where a tensor is in nested inputs: the keys and numbers that lead to it."""
PLAIN = (str, bytes, Number, type(None), Enum, slice, range, torch.dtype, torch.device)  # equal if their text is
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}  # others: 5e-2; relative to the largest entry
APART = (
    "A posterior needs independent samples: use running statistics in normalization layers, and the first dimension "
    "for the batch. Where a batch is one graph (or one set) whose nodes depend on each other, make it one sample: give "
    "inputs and targets a first dimension of 1, (x[None], edges[None]) and y[None], and let a wrapper run one graph "
    "after the other: `def forward(self, x, edges): return torch.stack([net(*graph) for graph in zip(x, edges)])`."
)
NOT_DETERMINISTIC = (
    "the network gives other outputs for the same samples when they are run again. A posterior needs a deterministic "
    "network: switch off noise and sampling inside it."
)
_SHARED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors that do not hold one entry per sample
AUTOCAST_KINDS = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu")
_WRITES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # whether its first call wrote to the inputs


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors_in(value)


def named_tensors(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield every tensor of `tensors_in` with its path."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, (*path, key))
    elif isinstance(tree, (tuple, list)):
        for number, value in enumerate(tree):
            yield from named_tensors(value, (*path, number))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to everything in nested tuples, lists and mappings that is none of these itself."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        values = [map_leaves(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return function(tree)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of nested tuples, lists and mappings."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def map_named(function: Callable[[Path, Tensor], Tensor], tree: Any) -> Any:
    """Apply a function of path and tensor to every tensor."""
    paths = (path for path, _ in named_tensors(tree))
    return map_tensors(lambda tensor: function(next(paths), tensor), tree)


def as_tensors(tree: Any) -> Any:
    """Turn every array and data frame in nested tuples, lists and mappings into a tensor of its dtype."""
    return map_leaves(lambda leaf: _tensor_of(leaf) if is_array(leaf) else leaf, tree)


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array, a pandas frame or series, or another object that NumPy reads as an array."""
    return hasattr(value, "__array__") and not isinstance(value, (Tensor, np.generic))


def _tensor_of(value: Any) -> Tensor:
    array = np.asarray(value)
    if array.dtype == object and all(isinstance(entry, Number | np.bool_) for entry in array.flat):
        array = array.astype(np.float64)  # a frame with columns of numbers and of truth values
    if array.dtype.byteorder not in "=|" and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy())
    except TypeError as error:
        raise BadData(
            f"a {type(value).__name__} of dtype {array.dtype} holds no plain numbers{_culprits(value)}. Turn its "
            "entries into numbers: names of classes by np.unique(y, return_inverse=True)[1], columns by pd.get_dummies"
        ) from error


def _culprits(value: Any) -> str:
    """Name the columns of a data frame that hold no numbers."""
    kinds: Any = getattr(value, "dtypes", None)
    if not hasattr(kinds, "items"):
        return ""
    names = [repr(name) for name, kind in kinds.items() if getattr(kind, "kind", "O") not in "biuf"]
    return f" (columns {', '.join(names[:5])}{' and others' if len(names) > 5 else ''})" if names else ""


def require_dense(tensor: Tensor) -> Tensor:
    """Refuse a sparse or nested tensor."""
    if tensor.is_nested:
        raise BadData("a tensor of the data is nested: pass padded tensors, or batches of equal length")
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise BadData(f"a tensor of the data, of shape {tuple(tensor.shape)}, is {kind}: pass tensor.to_dense()")
    return tensor


def key_of(tree: Any, tensor: Callable[[Tensor], Hashable]) -> tuple:
    """Return a key that nested inputs share if they have the same structure and the same plain values.

    The structure is the type of every container, and the names in a mapping in their order. `tensor` returns the part
    of a tensor that is compared. Raises `TypeError` for an object whose value cannot be compared.
    """
    if isinstance(tree, Tensor):
        return ("tensor", tensor(tree))
    if isinstance(tree, Mapping):
        return ("mapping", *((repr(key), key_of(value, tensor)) for key, value in tree.items()))
    if isinstance(tree, (tuple, list)):
        return (type(tree).__name__, *(key_of(value, tensor) for value in tree))
    if isinstance(tree, PLAIN):
        return (type(tree).__name__, repr(tree))
    raise TypeError(f"an object of type {type(tree).__name__}")


def batch_size(inputs: Inputs) -> int:
    """Return the number of samples: the first dimension of the first tensor that has one."""
    for tensor in tensors_in(inputs):
        if tensor.ndim:
            return tensor.shape[0]
    raise BadData(f"no tensor with a batch dimension in inputs of type {type(inputs).__name__}")


def share(tensor: Tensor) -> None:
    """Mark a tensor that all samples share, although its first dimension may equal their number."""
    _SHARED[tensor] = True


def per_sample(tensor: Tensor, size: int) -> bool:
    """Whether a tensor of a batch of `size` samples holds one entry per sample."""
    return tensor.ndim > 0 and tensor.shape[0] == size and tensor not in _SHARED


def take(inputs: Inputs, rows: Tensor | slice, size: int) -> Inputs:
    """Return the chosen samples of inputs; tensors that are not `per_sample` stay whole."""
    return map_tensors(lambda tensor: tensor[rows] if per_sample(tensor, size) else tensor, inputs)


def detached(inputs: Inputs) -> Inputs:
    """Return inputs without their graphs; shared tensors stay marked as shared."""

    def cut(tensor: Tensor) -> Tensor:
        own = tensor.detach()
        if tensor in _SHARED:
            share(own)
        return own

    return map_tensors(cut, inputs)


def weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply values (n, …) by one number per sample, (n,); None stands for ones."""
    return values if weights is None else values * weights.to(values).reshape(-1, *(1,) * (values.ndim - 1))


def concatenate(pieces: Sequence[Inputs]) -> Inputs:
    """Concatenate inputs with equal keys (`key_of`), every tensor along its first dimension."""
    streams = [iter(list(tensors_in(piece))) for piece in pieces]
    return map_tensors(lambda _: torch.cat([next(stream) for stream in streams]), pieces[0])


def lists_values(tree: Any, n: int) -> bool:
    """Whether a list or tuple with as many entries as there are samples holds no tensor."""
    if isinstance(tree, Mapping):
        return any(lists_values(value, n) for value in tree.values())
    if not isinstance(tree, (tuple, list)):
        return False
    own = len(tree) == n and not any(True for _ in tensors_in(tree))
    return own or any(lists_values(value, n) for value in tree)


class Types(TorchFunctionMode):
    """Remembers the floating-point types of the results of all operations of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(result, Tensor) and result.is_floating_point():
                self.seen.add(result.dtype)
        return out


def finite(t: Tensor) -> bool:
    """Whether all values are finite. A finite sum shows it in a quarter of the time."""
    return bool(t.detach().sum().isfinite()) or bool(t.detach().isfinite().all())


def tolerance(types: Iterable[torch.dtype]) -> float:
    """Return how far numbers of the least precise of some types may differ, relative to the largest entry."""
    narrowest = min(types, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float64)
    return TOLERANCES.get(narrowest, 5e-2)


def close(a: Tensor, b: Tensor, rtol: float) -> bool:
    """Whether two tensors are equal up to rtol of the largest entry; integers must be exactly equal."""
    if a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return bool(((a == b) | ((a - b).abs() <= rtol * scale)).all())


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


def _without_autocast() -> ExitStack:
    """Switch off autocast for every kind of device that has it on, until the stack is closed."""
    stack = ExitStack()
    for kind in (*_autocast_kinds(), torch._C._get_privateuse1_backend_name()):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


class _Default(threading.local):
    """The default device that the caller of this package has set, while the package makes its tensors on the host."""

    device: torch.device | None = None


_DEFAULT = _Default()


def _default_device() -> torch.device | None:
    """Return the default device that is set, by `torch.set_default_device` or by a block; None where it is the host."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = reversed(_get_current_function_mode_stack())
    device = next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
    return None if device is None or device.type == "cpu" else device


@contextmanager
def _on_the_host(device: torch.device) -> Iterator[None]:
    """Make new tensors on the host, as this package expects, although the caller's default device is another."""
    before, _DEFAULT.device = _DEFAULT.device, device
    try:
        with torch.device("cpu"):
            yield
    finally:
        _DEFAULT.device = before


def as_called() -> AbstractContextManager[Any]:
    """Return a block for code of the user, such as a network or a loader, in which their default device is set."""
    if torch.compiler.is_compiling() or _DEFAULT.device is None:
        return nullcontext()
    return torch.device(_DEFAULT.device)


def read_as_called(source: Iterable[T]) -> Iterator[T]:
    """Yield what an iterable of the user yields, each item made under their default device."""
    with as_called():
        items = iter(source)
    while True:
        with as_called():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def outside_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function as if the caller had switched on neither `torch.autocast` nor another default device.

    Curvature that is summed in half precision is not positive definite, and a network that computed in another type
    when it was fitted is another network. Autocast inside a network's own forward is part of the network and stays.
    A default device is for the network and the data (`as_called`); this package puts its tensors where those are.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        device = _default_device()
        if device is None and not _any_autocast():
            return function(*args, **kwargs)
        with _without_autocast() as stack:
            if device is not None:
                stack.enter_context(_on_the_host(device))
            return function(*args, **kwargs)

    return called


def outside_inference(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function as `outside_autocast` does, and as if the caller had not switched to `torch.inference_mode()`.

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
    with as_called():
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
    with borrowed(module) as own, torch.no_grad(), as_called():
        return own(*args, **kwargs, **more)


def placed(
    module: nn.Module, inputs: Inputs, device: torch.device, cast: bool | None = None
) -> tuple[Inputs, bool | None]:
    """Move inputs to a device, and cast them to the module's floating dtype if it refuses theirs.

    `cast` says whether it refuses them, or is None while that is unknown; it is returned with what was found out.
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


def promote(f: Tensor) -> Tensor:
    """Convert outputs in half precision to float32; return float32 and float64 as they are."""
    return f.float() if f.dtype in (torch.float16, torch.bfloat16) else f


def left_out(output: object) -> tuple[Tensor, ...]:
    """Return the unused tensors of a tuple or list that have the shape of the outputs."""
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
