"""Private copies of modules: Lapwing runs and writes to these, and never to the user's module.

Passes need eval mode, gradients for the selected parameters alone, other weights, and a module whose forward pass may
write attributes and buffers. The user's module, which other threads may be calling at the same time, must see none of
that. So every pass runs on a copy of the tree of modules. Its parameters are aliases that share storage with the
user's; its buffers and plain tensors are copies. Lists, dicts, partial functions, closures and plain objects are copied
too if a module, a tensor or a bound method is inside. A copy is lent to one thread for as long as it is needed
(`borrowed`).
"""

from __future__ import annotations

import copy
import enum
import functools
import gc
import operator
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import BaseTorchFunctionMode

ATOMIC = frozenset(
    (type(None), bool, int, float, complex, str, bytes, type, range, torch.dtype, torch.device, torch.Size)
)
SHARED = (
    types.ModuleType,
    torch.Generator,
    enum.Enum,
    torch.optim.Optimizer,  # from here on: what a module reaches by a reference to its trainer, and with it all data
    torch.utils.data.Dataset,
    torch.utils.data.DataLoader,
    torch.utils.data.dataloader._BaseDataLoaderIter,
)
TRAINERS = frozenset({"lightning", "pytorch_lightning", "lightning_fabric"})  # their modules refer to a Trainer
TABLES = frozenset(vars(nn.Module()))  # attributes of every module
DEPTH = 8  # levels of plain objects in which modules and tensors are looked for
_WRITTEN: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_SLOTS: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()
_TRAINERS: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
_RELEASED: dict[type, type] = {}
LINGERING = 2**27  # bytes in dropped copies with reference cycles, after which the garbage collector is called
_SOURCES: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
_DROPPED: deque[tuple[weakref.ref[nn.Module], int]] = deque(maxlen=64)  # large copies that may still be in memory
_IN_USE = threading.local()


def written_by_forward(module: nn.Module) -> set[str]:
    """Return the plain attributes that a forward pass of this submodule was seen to write (caches, counters)."""
    return _WRITTEN.get(module, set())


class PrivateCopy:
    """A private copy of a tree of modules: everything that a forward pass may write to is copied."""

    def __init__(self, module: nn.Module, selected: frozenset[str]) -> None:
        self.memo: dict[int, Any] = {}
        self.alive: list[Any] = []  # keeps ids in the memo from being reused
        self.unmoved: set[int] = set()  # ids of values from which nothing that is copied can be reached
        self.pairs: list[tuple[nn.Module, nn.Module]] = []
        self.finalized: list[Any] = []  # copies whose class has a `__del__`
        try:
            self.root = self._walk(module, selected)
        except BaseException:
            self.release()
            raise
        self.attributes = [(source, own, dict(vars(own))) for source, own in self.pairs]
        tensors = [t for t in self.memo.values() if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        self.size = sum(t.numel() * t.element_size() for t in tensors)
        self.tensors = [place for entry in self.attributes for place in _places(*entry)]

    def _walk(self, module: nn.Module, selected: frozenset[str]) -> nn.Module:
        parameters = list(module.named_parameters())
        for name, p in parameters:
            self._remember(p, _alias(p, name in selected))
        parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        # a hook may fill, by a global name or a closure, a list that the module reads: collections are part of the tree
        held = {id(v) for part in parts for v in _plain(part).values() if isinstance(v, HELD)}
        self.tree = {*self.memo, *map(id, module.modules()), *held}
        # all modules before their contents, so that deep nesting needs no deep recursion
        shells = [(part, self._shell(part)) for part in parts if type(part).__hash__ is nn.Module.__hash__]
        for _, p in parameters:
            self._carry(p, self.memo[id(p)])
        for part, own in shells:
            self._fill(part, own)
        root: nn.Module = self.of(module)
        for part in root.modules():
            part.training = False
        return root

    def put_back(self) -> None:
        """Undo the changes of a forward pass, and remember which attributes it has set."""
        for source, own, before in self.attributes:
            now = vars(own)
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            changed = {k for k, v in now.items() if k not in before or before[k] is not v} - {"training"}
            if changed:
                _WRITTEN.setdefault(source, set()).update(changed)
            now.clear()
            now.update(before)
        for place in self.tensors:
            place.put_back()

    def release(self) -> None:
        """Keep the finalizers of copies from closing resources that they share with the user's objects."""
        for own in self.finalized:
            object.__setattr__(own, "__class__", _released(type(own)))
        self.finalized.clear()

    def _remember(self, source: Any, own: Any) -> Any:
        self.memo[id(source)] = own
        self.alive.append(source)
        return own

    def _new(self, source: Any) -> Any:
        kind = type(source)
        own = self._remember(source, object.__new__(kind))
        if hasattr(kind, "__del__"):
            self.finalized.append(own)
        return own

    def of(self, x: Any) -> Any:
        """Return the private counterpart of a value."""
        kind = type(x)
        if kind in ATOMIC:
            return x
        if id(x) in self.memo:
            return self.memo[id(x)]
        if kind in weakref.ProxyTypes:
            return self._proxy(x)
        if isinstance(x, Tensor):
            return self._tensor(x)
        if isinstance(x, nn.Module):
            return self._module(x)
        if isinstance(x, SHARED) or isinstance(x, type) or _is_trainer(kind):
            return x
        if kind in COPIED:
            return COPIED[kind](self, x)
        if isinstance(x, tuple):
            return self._tuple(x)
        if isinstance(x, weakref.ref):
            return self._reference(x)
        if isinstance(x, COLLECTIONS):
            return self._collection(x)
        return self._object(x) if self._reaches(x) else x

    def _tensor(self, source: Tensor) -> Tensor:
        own = self._remember(source, _tensor(source))
        self._carry(source, own)
        return own

    def _carry(self, source: Tensor, own: Tensor) -> None:
        """Give the copy of a tensor the attributes that the user has set on it."""
        if own is not source and vars(source) and not hasattr(type(source), "__tensor_flatten__"):
            vars(own).update({k: self.of(v) for k, v in dict(vars(source)).items()})

    def _module(self, source: nn.Module) -> nn.Module:
        if isinstance(source, torch.jit.ScriptModule):
            return self._scripted(source)
        own = self._shell(source)
        self._fill(source, own)
        return own

    def _shell(self, source: nn.Module) -> nn.Module:
        own: nn.Module = self._new(source)
        self.pairs.append((source, own))
        return own

    def _fill(self, source: nn.Module, own: nn.Module) -> None:
        values = own.__dict__
        for k, v in dict(vars(source)).items():
            kind = type(v)
            if kind in ATOMIC:
                values[k] = v
            elif k in TABLES and not v:  # tables of hooks, most of them empty
                values[k] = kind()
            else:
                values[k] = self.of(v)
        _copy_slots(source, own, self.of)
        if values.get("_compiled_call_impl") is not None:  # module.compile(): run what was compiled, eagerly
            values["_compiled_call_impl"] = None
        inner = values.get("_modules", {}).get("_orig_mod")
        if isinstance(inner, nn.Module):  # torch.compile(module)
            values["forward"] = inner.__call__
        if getattr(source, "max_norm", None) is not None:  # an embedding that renormalizes its own weights
            frozen = {k: p for k, p in own._parameters.items() if p is not None and not p.requires_grad}
            own._parameters.update({k: nn.Parameter(p.clone(), requires_grad=False) for k, p in frozen.items()})

    def _scripted(self, source: nn.Module) -> nn.Module:
        """Copy a scripted module, which lives in C++, and give it the aliases of its parameters."""
        with torch.no_grad():  # otherwise its parameters would be clones with a graph that leads to the user's
            own = self._remember(source, copy.deepcopy(source))
        for theirs, part in zip(source.modules(), own.modules(), strict=True):
            for name, p in theirs._parameters.items():
                if p is not None:
                    part._c.setattr(name, self.of(p))
            part.training = False
        return own

    def _tuple(self, x: tuple) -> tuple:
        own = [self.of(v) for v in x]
        if all(map(operator.is_, own, x)):
            return x
        try:
            return self._remember(x, tuple.__new__(type(x), own))
        except TypeError:  # what torch.max, torch.linalg.eigh and others return
            return self._remember(x, type(x)(own))

    def _collection(self, x: Any) -> Any:
        """Copy a list, dict, set or deque, or an object of the user's own kind of these."""
        if type(x) is list and ATOMIC.issuperset(map(type, x)):  # of any length
            return self._remember(x, x.copy())
        if type(x) is dict and ATOMIC.issuperset(map(type, x)) and ATOMIC.issuperset(map(type, x.values())):
            return self._remember(x, x.copy())
        base: Any = next(kind for kind in COLLECTIONS if isinstance(x, kind))
        try:
            own = base.__new__(type(x), [self.of(v) for v in x]) if base is frozenset else base.__new__(type(x))
        except TypeError:  # made in C
            return x
        self._remember(x, own)
        if isinstance(x, dict):
            for k, v in list(x.items()):
                base.__setitem__(own, self.of(k), v if type(v) in ATOMIC else self.of(v))
        elif base is deque:
            deque.__init__(own, [self.of(v) for v in list(x)], x.maxlen)
        elif base is not frozenset:
            base.__init__(own, [self.of(v) for v in list(x)])
        if isinstance(x, defaultdict):
            own.default_factory = x.default_factory
        self._state(x, own)
        return own

    def _namespace(self, x: types.SimpleNamespace) -> types.SimpleNamespace:
        own = self._remember(x, types.SimpleNamespace())
        self._state(x, own)
        return own

    def _view(self, x: types.MappingProxyType) -> types.MappingProxyType:
        return self._remember(x, types.MappingProxyType(self.of(dict(x))))

    def _method(self, x: types.MethodType) -> Any:
        owner = self.of(x.__self__)
        return x if owner is x.__self__ else types.MethodType(x.__func__, owner)

    def _builtin(self, x: types.BuiltinMethodType) -> Any:
        """Return the method of the copy where a method written in C belongs to a value that is copied."""
        owner = self.of(x.__self__)
        return x if owner is x.__self__ else getattr(owner, x.__name__)

    def _partial(self, x: functools.partial) -> Any:
        return self._remember(x, functools.partial(self.of(x.func), *self.of(x.args), **self.of(x.keywords)))

    def _reference(self, x: weakref.ref) -> Any:
        there = x()
        own = None if there is None else self.of(there)
        if own is there:
            return x
        if isinstance(x, weakref.WeakMethod):
            return weakref.WeakMethod(own)
        if isinstance(x, weakref.KeyedRef):
            return weakref.KeyedRef(own, None, x.key)  # type: ignore[arg-type]
        return weakref.ref(own)

    def _proxy(self, x: Any) -> Any:
        try:
            there = x.__reduce_ex__.__self__  # of the object behind it
        except ReferenceError:
            return x
        own = self.of(there)
        return x if own is there else weakref.proxy(own)

    def _function(self, x: types.FunctionType) -> Any:
        """Copy a function that reaches a module or a tensor by its closure, its defaults or a global name."""
        if not self._reaches(x):
            return x
        eager = vars(x).get("_torchdynamo_orig_callable")
        if eager is not None:  # torch.compile(function): run what was compiled, eagerly
            return self.of(eager)
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
        own.__dict__.update({k: self.of(v) for k, v in dict(vars(x)).items()})
        own.__qualname__, own.__doc__, own.__module__ = x.__qualname__, x.__doc__, x.__module__
        return own

    def _object(self, x: Any) -> Any:
        """Copy a plain object that holds modules or tensors."""
        if hasattr(type(x), "__del__") and _slots(type(x)):  # its finalizer cannot be kept from running
            return x
        try:
            own = self._new(x)
        except TypeError:  # made in C
            return x
        self._state(x, own)
        return own

    def _state(self, x: Any, own: Any) -> None:
        if hasattr(x, "__dict__"):
            own.__dict__.update({k: self.of(v) for k, v in dict(vars(x)).items()})
        _copy_slots(x, own, self.of)

    def _reaches(self, x: Any) -> bool:
        """Whether a value leads to a module, a tensor or something that has a private copy."""
        if id(x) in self.unmoved:
            return False
        level, walked = [x], []
        seen: set[int] = set()
        for _ in range(DEPTH + 1):
            walked.append(level)  # so that no id is reused
            level = [inside for v in level if self._opens(v, seen) for inside in _inside(v, self.tree)]
            if any(map(self._moves, level)):
                return True
            if not level:
                break
        self.unmoved.add(id(x))
        self.alive.append(x)
        return False

    def _moves(self, x: Any) -> bool:
        copied = id(x) in self.memo or id(x) in self.tree
        return type(x) not in ATOMIC and (copied or isinstance(x, (nn.Module, Tensor)))

    def _opens(self, x: Any, seen: set[int]) -> bool:
        if type(x) in ATOMIC or isinstance(x, (*SHARED, type)) or id(x) in seen or id(x) in self.unmoved:
            return False
        if _is_trainer(type(x)):
            return False
        seen.add(id(x))
        return True


def _released(kind: type) -> type:
    """Return the class that a copy gets when it is dropped, if its own class has a finalizer.

    Python lets an object change to a class that adds attributes to the same base: `object`, or one without attributes
    such as `abc.ABC`.
    """
    if issubclass(kind, nn.Module):
        return nn.Module
    base = kind
    while base.__dictoffset__ or base.__weakrefoffset__:
        base = base.__base__  # type: ignore[assignment]
    if base not in _RELEASED:
        _RELEASED[base] = types.new_class("_Released", (base,))
    return _RELEASED[base]


def _is_trainer(kind: type) -> bool:
    """Whether a class is one of Lightning's trainers, which refer to all data, optimizers and loggers."""
    if kind not in _TRAINERS:
        named = (each for each in kind.__mro__ if each.__name__ in ("Trainer", "Fabric"))
        _TRAINERS[kind] = any(each.__module__.partition(".")[0] in TRAINERS for each in named)
    return _TRAINERS[kind]


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module beside those that every module has."""
    values = dict(vars(module))  # other threads may set attributes meanwhile
    return {name: values[name] for name in values.keys() - TABLES}


class _Place:
    """A buffer or plain tensor of a copy, stored under its name in one or two tables."""

    def __init__(self, tables: tuple[dict, ...], name: str, source: Tensor) -> None:
        self.tables, self.name, self.source = tables, name, source
        self.own: Tensor = tables[0][name]
        self.version = self.own._version

    def put_back(self) -> None:
        """Replace a tensor that was written to by a new copy; a graph may hold the old one."""
        if self.own._version != self.version:
            self.own = _tensor(self.source)
            self.version = self.own._version
        elif self.tables[0].get(self.name) is self.own:
            return
        for table in self.tables:
            table[self.name] = self.own


def _places(source: nn.Module, own: nn.Module, before: dict[str, Any]) -> Iterator[_Place]:
    for theirs, tables in ((source._buffers, (own._buffers,)), (_plain(source), (vars(own), before))):
        for name, x in list(theirs.items()):
            mine = tables[0].get(name)
            if isinstance(mine, Tensor) and mine is not x and not isinstance(mine, nn.Parameter):
                if not mine.is_inference():
                    yield _Place(tables, name, x)


HELD = (list, dict, set, deque)  # collections that a forward pass may fill
COLLECTIONS = (list, OrderedDict, defaultdict, dict, set, frozenset, deque)
COPIED: dict[type, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(COLLECTIONS, PrivateCopy._collection),
    tuple: PrivateCopy._tuple,
    types.MethodType: PrivateCopy._method,
    functools.partial: PrivateCopy._partial,
    weakref.ref: PrivateCopy._reference,
    types.SimpleNamespace: PrivateCopy._namespace,
    types.MappingProxyType: PrivateCopy._view,
    types.BuiltinMethodType: PrivateCopy._builtin,
    types.FunctionType: PrivateCopy._function,
}


def _inside(x: Any, tree: set[int]) -> Iterator[Any]:
    """Yield the objects that a forward pass can reach from a value in one step."""
    if isinstance(x, (dict, types.MappingProxyType)):
        yield from list(x)
        yield from list(x.values())
    elif isinstance(x, (list, tuple, set, frozenset, deque)):
        yield from list(x)
    elif isinstance(x, (types.MethodType, types.BuiltinMethodType)):
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
        # of global names only those of parts of the module: a script may have other modules
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
    """Return the names of the slots of a class and its bases."""
    if kind not in _SLOTS:
        found: list[str] = []
        for base in kind.__mro__:
            slots = base.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else tuple(slots)
            found.extend(_mangled(name, base) for name in names)
        _SLOTS[kind] = tuple(name for name in found if name not in ("__dict__", "__weakref__"))
    return _SLOTS[kind]


def _mangled(name: str, owner: type) -> str:
    private_name = name.startswith("__") and not name.endswith("__")
    return f"_{owner.__name__.lstrip('_')}{name}" if private_name else name


def _copy_slots(source: Any, own: Any, of: Callable[[Any], Any]) -> None:
    for name in _slots(type(source)):
        if hasattr(source, name):
            object.__setattr__(own, name, of(getattr(source, name)))


def _alias(p: Tensor, wanted: bool) -> Tensor:
    """Return a leaf that shares storage with a parameter, but not its hooks and gradients."""
    if isinstance(p, UninitializedParameter | UninitializedBuffer):
        return p
    wanted = wanted and (p.is_floating_point() or p.is_complex())
    if nn.Parameter in type(p).__mro__:  # also a class of the user's, whose methods a forward pass may call
        return torch.Tensor._make_subclass(type(p), p.detach(), wanted)
    if not wanted:
        return p.detach() if p.requires_grad else p
    return nn.Parameter(p.detach())


def _tensor(x: Tensor) -> Tensor:
    """Copy a buffer or a plain tensor, which a forward pass may overwrite; return an alias of a parameter.

    A computed tensor keeps its graph: `Network.plan` then notices a forward pass that reaches the user's parameters.
    """
    if isinstance(x, nn.Parameter):  # of a module that is not registered
        return _alias(x, False)
    with torch.enable_grad():
        wide = x if x.grad_fn is not None else x.detach()
        own = wide.clone() if x.layout == torch.strided else wide
    if type(own) is not type(x) and type(x).__torch_function__ is torch._C._disabled_torch_function_impl:
        own = x.detach()
    return own


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

    Otherwise outputs and derivatives would belong to two different networks. Encoders do not take the fast path while
    any `TorchFunctionMode` is active.
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
