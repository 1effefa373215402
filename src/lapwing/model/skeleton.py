"""A private copy of the user's module that shares its weights: the only thing that Lapwing ever runs or writes to.

Passes need eval mode, gradients for the selected parameters alone, other weights, and a module whose forward pass may
write attributes and buffers. None of that may be seen by the user's module, which other threads may be calling at the
same time. So every pass runs on a copy of the tree of modules: parameters are aliases that share storage with the
user's, buffers and plain tensors are copies, and everything in which a module, a tensor or a bound method can hide
(lists, dicts, partial functions, closures, plain objects) is followed.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

ATOMIC = frozenset(
    (type(None), bool, int, float, complex, str, bytes, type, range, torch.dtype, torch.device, torch.Size)
)
SHARED = (types.BuiltinFunctionType, types.ModuleType, torch.Generator)
DEPTH = 8  # how far into plain objects a module or a tensor is looked for

_WRITTEN: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_SLOTS: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()
_SOURCES: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
_IN_USE = threading.local()


def source_of(module: nn.Module) -> nn.Module:
    """Return the user's module behind a private copy, or the module itself."""
    return _SOURCES.get(module, module)


def written_by_forward(module: nn.Module) -> set[str]:
    """Return the plain attributes that a forward pass of this submodule was seen to write (caches, counters)."""
    return _WRITTEN.get(module, set())


@contextmanager
def private(module: nn.Module, selected: Iterable[str] = ()) -> Iterator[nn.Module]:
    """Lend a private copy of a module in eval mode, in which the selected parameters alone require gradients.

    A thread that asks again for the copy it is using gets the same one.
    """
    key = (id(module), frozenset(selected))
    mine: dict = _IN_USE.__dict__.setdefault("copies", {})
    if key in mine:
        yield mine[key]
        return
    maker = _Copier(module, key[1])
    mine[key] = maker.root
    _SOURCES[maker.root] = module
    try:
        yield maker.root
    finally:
        del mine[key]
        maker.note_written()


def in_use(module: nn.Module, selected: Iterable[str] = ()) -> nn.Module:
    """Return the private copy that this thread is using."""
    return _IN_USE.copies[id(module), frozenset(selected)]


class _Copier:
    """One walk over a tree of modules, which copies what a forward pass may write to."""

    def __init__(self, module: nn.Module, selected: frozenset[str]) -> None:
        self.memo: dict[int, Any] = {}
        self.alive: list[Any] = []  # keeps the keys of the memo from being used again
        self.attributes: list[tuple[nn.Module, nn.Module, dict[str, Any]]] = []
        for name, p in module.named_parameters():
            self._remember(p, _alias(p, name in selected))
        self.tree = {*self.memo, *map(id, module.modules())}  # what belongs to the module, by a global name too
        self.root: nn.Module = self.of(module)
        for part in self.root.modules():
            part.training = False

    def note_written(self) -> None:
        """Write down which attributes the passes over the copy have set."""
        for source, own, before in self.attributes:
            now = vars(own)
            changed = {k for k, v in now.items() if k not in before or before[k] is not v} - {"training"}
            if changed:
                _WRITTEN.setdefault(source, set()).update(changed)

    def _remember(self, source: Any, own: Any) -> Any:
        self.memo[id(source)] = own
        self.alive.append(source)
        return own

    def of(self, x: Any) -> Any:
        """Return the private counterpart of a value."""
        kind = type(x)
        if kind in ATOMIC:
            return x
        if id(x) in self.memo:
            return self.memo[id(x)]
        if isinstance(x, Tensor):
            return self._remember(x, _tensor(x))
        if isinstance(x, nn.Module):
            return self._module(x)
        if isinstance(x, SHARED) or isinstance(x, type):
            return x
        if kind in COPIED:
            return COPIED[kind](self, x)
        if isinstance(x, tuple):  # a named tuple
            return self._remember(x, tuple.__new__(kind, [self.of(v) for v in x]))
        return self._object(x) if self._holds(x, DEPTH, set()) else x

    def _module(self, source: nn.Module) -> nn.Module:
        if isinstance(source, torch.jit.ScriptModule):
            return self._scripted(source)
        own = self._remember(source, object.__new__(type(source)))
        values = own.__dict__
        for k, v in dict(vars(source)).items():
            kind = type(v)
            if kind in ATOMIC:
                values[k] = v
            elif kind in EMPTY and not v:  # most of what a module has: tables of hooks
                values[k] = kind()
            else:
                values[k] = self.of(v)
        _copy_slots(source, own, self.of)
        if isinstance(getattr(source, "_orig_mod", None), nn.Module):  # torch.compile: run what was compiled, eagerly
            own.__dict__["forward"] = own._orig_mod.__call__
        if getattr(source, "max_norm", None) is not None:  # an embedding that renormalizes its own weights
            frozen = {k: p for k, p in own._parameters.items() if p is not None and not p.requires_grad}
            own._parameters.update({k: nn.Parameter(p.clone(), requires_grad=False) for k, p in frozen.items()})
        self.attributes.append((source, own, dict(vars(own))))
        return own

    def _scripted(self, source: nn.Module) -> nn.Module:
        """Copy a scripted module whole: it lives in C++, where weights cannot be shared by name."""
        aliases = {name: self.memo.get(id(p)) for name, p in source.named_parameters()}
        own = self._remember(source, copy.deepcopy(source))
        for name, p in own.named_parameters():
            p.requires_grad_(getattr(aliases[name], "requires_grad", False))
        for part in own.modules():
            part.training = False
        return own

    def _sequence(self, x: Any) -> Any:
        own = self._remember(x, type(x)())
        own.extend(self.of(v) for v in list(x))
        return own

    def _deque(self, x: deque) -> deque:
        own = self._remember(x, deque(maxlen=x.maxlen))
        own.extend(self.of(v) for v in list(x))
        return own

    def _tuple(self, x: tuple) -> tuple:
        own = tuple(self.of(v) for v in x)
        return x if all(a is b for a, b in zip(own, x)) else self._remember(x, own)

    def _set(self, x: Any) -> Any:
        return self._remember(x, type(x)(self.of(v) for v in list(x)))

    def _mapping(self, x: dict) -> dict:
        own = self._remember(x, defaultdict(x.default_factory) if isinstance(x, defaultdict) else type(x)())
        own.update((k, v if type(v) in ATOMIC else self.of(v)) for k, v in list(x.items()))
        return own

    def _method(self, x: types.MethodType) -> Any:
        owner = self.of(x.__self__)
        return x if owner is x.__self__ else types.MethodType(x.__func__, owner)

    def _partial(self, x: functools.partial) -> Any:
        return self._remember(x, functools.partial(self.of(x.func), *self.of(x.args), **self.of(x.keywords)))

    def _reference(self, x: weakref.ref) -> Any:
        there = x()
        own = None if there is None else self.of(there)
        return x if own is there else weakref.ref(own)

    def _function(self, x: types.FunctionType) -> Any:
        """Copy a function that reaches a module or a tensor by its closure, its defaults or a global name."""
        if not self._holds(x, DEPTH, set()):
            return x
        cells = x.__closure__ or ()
        fresh = tuple(types.CellType() for _ in cells)
        named = {name: x.__globals__.get(name) for name in _names(x.__code__)}
        named = {name: value for name, value in named.items() if id(value) in self.tree}
        scope = dict(x.__globals__) if named else x.__globals__
        own = self._remember(x, types.FunctionType(x.__code__, scope, x.__name__, None, fresh))
        for cell, new in zip(cells, fresh):
            try:
                new.cell_contents = self.of(cell.cell_contents)
            except ValueError:  # a cell without a value
                continue
        if named:
            scope.update({name: self.of(value) for name, value in named.items()})
        own.__defaults__, own.__kwdefaults__ = self.of(x.__defaults__), self.of(x.__kwdefaults__)
        own.__dict__.update({k: self.of(v) for k, v in vars(x).items()})
        own.__qualname__, own.__doc__, own.__module__ = x.__qualname__, x.__doc__, x.__module__
        return own

    def _object(self, x: Any) -> Any:
        """Copy a plain object that holds modules or tensors."""
        try:
            own = object.__new__(type(x))
        except TypeError:  # made in C
            return x
        self._remember(x, own)
        if hasattr(x, "__dict__"):
            own.__dict__.update({k: self.of(v) for k, v in dict(vars(x)).items()})
        _copy_slots(x, own, self.of)
        return own

    def _holds(self, x: Any, depth: int, seen: set[int]) -> bool:
        """Whether a value reaches a module, a tensor or something that has a private copy."""
        kind = type(x)
        if kind in ATOMIC or isinstance(x, SHARED) or isinstance(x, type):
            return False
        if id(x) in self.memo or isinstance(x, (nn.Module, Tensor)):
            return True
        if depth == 0 or id(x) in seen:
            return False
        seen.add(id(x))
        return any(self._holds(v, depth - 1, seen) for v in _inside(x, self.tree))


EMPTY = frozenset((dict, OrderedDict, list, set))
COPIED: dict[type, Callable[[Any, Any], Any]] = {
    list: _Copier._sequence,
    tuple: _Copier._tuple,
    set: _Copier._set,
    deque: _Copier._deque,
    dict: _Copier._mapping,
    OrderedDict: _Copier._mapping,
    defaultdict: _Copier._mapping,
    types.MethodType: _Copier._method,
    functools.partial: _Copier._partial,
    weakref.ref: _Copier._reference,
    types.FunctionType: _Copier._function,
}


def _inside(x: Any, tree: set[int]) -> Iterator[Any]:
    """Yield what a value refers to, as far as a forward pass may follow it."""
    if isinstance(x, dict):
        yield from list(x.values())
    elif isinstance(x, (list, tuple, set, frozenset, deque)):
        yield from list(x)
    elif isinstance(x, types.MethodType):
        yield x.__self__
    elif isinstance(x, functools.partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, weakref.ref):
        yield x()
    elif isinstance(x, types.FunctionType):
        for cell in x.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue
        yield from (x.__defaults__, x.__kwdefaults__, vars(x))
        # by a global name, only what belongs to the module: other modules of a script are none of its parts
        named = (x.__globals__.get(name) for name in _names(x.__code__))
        yield from (value for value in named if id(value) in tree)
    else:
        yield from list(getattr(x, "__dict__", {}).values())
        yield from (getattr(x, name) for name in _slots(type(x)) if hasattr(x, name))


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that a function and the functions inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _slots(kind: type) -> tuple[str, ...]:
    if kind not in _SLOTS:
        _SLOTS[kind] = _find_slots(kind)
    return _SLOTS[kind]


def _find_slots(kind: type) -> tuple[str, ...]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        found.extend((slots,) if isinstance(slots, str) else tuple(slots))
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _copy_slots(source: Any, own: Any, of: Callable[[Any], Any]) -> None:
    for name in _slots(type(source)):
        if hasattr(source, name):
            object.__setattr__(own, name, of(getattr(source, name)))


def _alias(p: Tensor, wanted: bool) -> Tensor:
    """Return a leaf that shares storage with a parameter; hooks and gradients of the parameter stay with it."""
    if type(p) is not nn.Parameter and not wanted:
        return p if not p.requires_grad else p.detach()
    floating = p.is_floating_point() or p.is_complex()
    return nn.Parameter(p.detach(), requires_grad=wanted and floating)


def _tensor(x: Tensor) -> Tensor:
    """Return a copy of a buffer or a plain tensor, which a forward pass may overwrite; a parameter's is an alias."""
    if isinstance(x, nn.Parameter):  # of a module that is not registered
        return _alias(x, False)
    own = x.detach().clone() if x.layout == torch.strided else x.detach()
    if type(own) is not type(x) and type(x).__torch_function__ is torch._C._disabled_torch_function_impl:
        own = x.detach()
    return own
