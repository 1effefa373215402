"""The selected parameters of a module: which they are, their values as one flat vector, and the place of each weight.

Selections are all parameters, the last layer, globs, lists or predicates; a subnetwork picks single weights. In a model
with adapters of PEFT, the containers of the model tell which tensors belong to which adapter, without PEFT itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, UnsupportedModel, brief, nearest, require_whole
from lapwing.linalg.blocks import Places, Run

Selection = str | Iterable[str] | Callable[[str, Tensor], bool]
View = Callable[[Tensor], Tensor]
"""A tensor of a weight's shape as a rule sees it, (groups, out, in)."""


@dataclass(frozen=True, eq=False)
class Params:
    """Names, shapes and values of the selected parameters, in the order of `named_parameters()`.

    A flat vector is the concatenation of the tensors, each flattened row-major; a tied tensor appears once, under
    its first name. `index`, if given, picks single weights out of that vector (a subnetwork); every vector that
    Lapwing hands out then has the length of `index`.
    """

    __repr__ = brief

    names: tuple[str, ...]
    values: tuple[Tensor, ...]
    index: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Module, names: tuple[str, ...], index: Tensor | None = None) -> Params:
        """Copy the named parameters out of a module."""
        live = dict(module.named_parameters())
        unreal = [name for name in names if live[name].is_complex()]
        if unreal:
            raise UnsupportedModel(
                f"there is no posterior over complex weights ({', '.join(unreal)}). Leave them out with select=, or "
                "keep real and imaginary parts as parameters (torch.view_as_complex)."
            )
        require_no_hooks({name: live[name] for name in names})
        return cls(names, tuple(live[name].detach().clone() for name in names), index)

    def to(self, device: torch.device | str) -> Params:
        """Copy the values to another device."""
        index = None if self.index is None else self.index.to(device)
        return Params(self.names, tuple(value.to(device) for value in self.values), index)

    @cached_property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(v.shape for v in self.values)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of weights of each tensor."""
        return tuple(v.numel() for v in self.values)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts in the whole flat vector."""
        starts, at = [], 0
        for size in self.sizes:
            starts.append(at)
            at += size
        return tuple(starts)

    @cached_property
    def total(self) -> int:
        """Length of the whole flat vector, before `index` picks from it."""
        return sum(self.sizes)

    @cached_property
    def size(self) -> int:
        """Length P of the vectors that structures and posteriors see."""
        return self.total if self.index is None else self.index.numel()

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type that curvature is accumulated in: the widest of the parameters, at least float32."""
        wide = torch.float32
        for value in self.values:
            wide = torch.promote_types(wide, value.dtype)
        return wide

    @cached_property
    def device(self) -> torch.device:
        return self.values[0].device

    @cached_property
    def flat(self) -> Tensor:
        """The values as one vector (P,)."""
        return self.pick(self.flatten(self.values))

    def flatten(self, tensors: Iterable[Tensor | None]) -> Tensor:
        """Flatten one tensor per parameter, such as its gradient, to (total,); None stands for zeros."""
        pairs = zip(tensors, self.values, strict=True)
        each = (torch.zeros_like(value) if t is None else t.to_dense() if t.is_sparse else t for t, value in pairs)
        return torch.cat([t.reshape(-1).to(self.dtype) for t in each])

    def pick(self, whole: Tensor) -> Tensor:
        """Return the entries of vectors (…, total) that take part, (…, P)."""
        return whole if self.index is None else whole[..., self.index]

    def expand(self, theta: Tensor, base: Tensor | None = None) -> Tensor:
        """Expand (*b, P) to (*b, total): weights that a subnetwork leaves out come from `base`, or are zero."""
        if theta.shape[-1] != self.size:
            raise BadData(f"expected rows of length {self.size}, got {tuple(theta.shape)}")
        if self.index is None:
            return theta
        shape = (*theta.shape[:-1], self.total)
        whole = theta.new_zeros(shape) if base is None else base.to(theta).expand(shape).clone()
        return whole.index_copy(-1, self.index, theta)

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Split (*b, P) into {name: (*b, *shape)} in each parameter's own dtype; left-out weights keep their values."""
        whole = theta
        if self.index is not None:
            whole = self.expand(theta, self.flatten(self.values))
        elif theta.shape[-1] != self.total:
            raise BadData(f"expected rows of length {self.total}, got {tuple(theta.shape)}")
        return self._split(whole)

    def tangent(self, direction: Tensor) -> dict[str, Tensor]:
        """Split a direction (P,) in weight space into {name: shape}; left-out weights do not move."""
        return self._split(self.expand(direction))

    def _split(self, whole: Tensor) -> dict[str, Tensor]:
        parts = whole.split(self.sizes, dim=-1)
        return {
            name: part.reshape((*whole.shape[:-1], *value.shape)).to(value.dtype)
            for name, part, value in zip(self.names, parts, self.values, strict=True)
        }


def require_no_hooks(parameters: Mapping[str, Tensor]) -> None:
    """Refuse parameters with hooks, which may change gradients (clipping, masks), so that rows are not derivatives."""
    hooked = [name for name, p in parameters.items() if p._backward_hooks]
    if hooked:
        raise UnsupportedModel(
            f"gradient hooks are registered on {', '.join(map(repr, hooked[:5]))}{' and others' * (len(hooked) > 5)} "
            "(Tensor.register_hook): they can change gradients, and curvature needs derivatives as they are. Remove "
            "them before the fit (handle.remove(), wandb.unwatch()), or leave these parameters out with select=."
        )


@dataclass(frozen=True, eq=False)
class Subnetwork:
    """A selection of single weights: those with the largest variance or magnitude, a random set, or `indices`."""

    size: int
    by: Literal["variance", "magnitude", "random", "indices"] = "variance"
    within: Any = "all"
    indices: Tensor | None = None


def subnetwork(
    k: int | None = None,
    by: Literal["variance", "magnitude", "random"] = "variance",
    within: Any = "all",
    *,
    indices: Tensor | Sequence[int] | None = None,
) -> Subnetwork:
    """Select k single weights: `lapwing.fit(..., structure="full", select=lapwing.subnetwork(100))`.

    by="variance" takes the largest marginal variances of a diagonal posterior under the prior of the fit,
    "magnitude" the largest absolute weights, "random" a uniform set (with the fit's generator).

    `indices` names the weights themselves: positions in the flat vector of all parameters that `within` selects, or a
    mask of that length. Vectors and matrices of the posterior are in the order of the positions. A tensor of positions
    or a mask is also accepted as `select=` itself.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", structure="full", select=lapwing.subnetwork(20))
        >>> la.posterior.covariance().shape
        torch.Size([20, 20])
        >>> three = lapwing.subnetwork(indices=[0, 5, 11])
    """
    if indices is not None:
        if k is not None:
            raise BadData("a subnetwork has either a number of weights or indices=, not both")
        return explicit_subnetwork(indices, within)
    if k is None:
        raise BadData("a subnetwork needs a number of weights, subnetwork(100), or their positions, indices=[0, 5, 11]")
    require_whole("the number of weights of a subnetwork", k)
    if by not in ("variance", "magnitude", "random"):
        hint = nearest(by, ("variance", "magnitude", "random"))
        raise BadData(f"a subnetwork is chosen by 'variance', 'magnitude' or 'random', got {by!r}{hint}")
    return Subnetwork(k, by, within)


def explicit_subnetwork(indices: Tensor | Sequence[int], within: Any = "all") -> Subnetwork:
    """Select the single weights at these positions, or where a mask is true."""
    given = torch.as_tensor(indices)
    if given.numel() and (given.ndim != 1 or given.is_floating_point() or given.is_complex()):
        raise BadData(
            f"the indices of a subnetwork are a vector of whole numbers or a mask (torch.bool), got {given.dtype} of "
            f"shape {tuple(given.shape)}"
        )
    if given.dtype != torch.bool and len(given.unique()) < len(given):
        raise BadData("the indices of a subnetwork hold a position more than once")
    size = int(given.sum()) if given.dtype == torch.bool else len(given)
    if not size:
        raise BadData("the indices of a subnetwork are empty: name at least one weight")
    return Subnetwork(size, "indices", within, given.detach().clone())


def explicit_weights(indices: Tensor, total: int) -> Tensor:
    """Return the positions of indices, or of a mask, in a flat vector of `total` weights."""
    if indices.dtype == torch.bool:
        if len(indices) != total:
            raise BadData(f"the mask of a subnetwork has {len(indices)} entries, but {total} weights are selected")
        return indices.nonzero().flatten()
    if int(indices.min()) < 0 or int(indices.max()) >= total:
        raise BadData(
            f"the indices of a subnetwork lie in 0 … {total - 1}, the positions in the flat vector of the selected "
            f"parameters; got {int(indices.min())} … {int(indices.max())}"
        )
    return indices.long()


def select_names(module: nn.Module, selection: Selection) -> tuple[str, ...]:
    """Return the names of the selected parameters, in order of `named_parameters()`, without frozen and empty ones.

    Frozen parameters of an active PEFT adapter take part where `select` names them: adapters that were loaded for
    inference are frozen.
    """
    every = dict(module.named_parameters())
    named = selection not in ("all", "last_layer") if isinstance(selection, str) else not callable(selection)
    active = active_adapters(module) if named else set()
    adapters = {name for name, (owner, _) in adapter_tensors(module).items() if owner in active} if active else set()
    free = {name: p for name, p in every.items() if (p.requires_grad or name in adapters) and p.numel()}
    if not free:
        way = "name the adapter's weights, as in select='*lora*'" if adapter_tensors(module) else "unfreeze some"
        raise BadData(
            f"every parameter of the model is frozen (requires_grad=False): nothing to put a posterior on; {way}"
        )
    known, patterns = _patterns(selection)
    if not known:
        raise BadData(
            f"select is 'all', 'last_layer', a glob, a list of names, a predicate (name, tensor) -> bool or a "
            f"subnetwork, got {patterns or type(selection).__name__}"
        )
    if callable(selection):
        names = [name for name, p in free.items() if selection(name, p)]
        if not names:
            raise BadData("the select predicate chose no parameter that requires grad")
        return tuple(names)
    if not patterns:
        raise BadData("select is an empty list: name at least one parameter")
    if patterns == ["all"]:
        return tuple(free)
    chosen = set()
    for pattern in patterns:
        hits = {name for name in every if fnmatchcase(name, pattern)}
        if not hits:
            hint = nearest(pattern, ("last_layer", "all", *every))
            raise BadData(f"select={pattern!r} matches no parameter; there are {_some(every)}{hint}")
        frozen = hits - set(free)
        if not isinstance(selection, str) and pattern in every and frozen:
            raise BadData(f"select names {pattern!r}, which is frozen (requires_grad=False)")
        chosen |= hits & set(free)
    if not chosen:
        raise BadData(f"select={selection!r} matches only frozen parameters (requires_grad=False)")
    return tuple(name for name in free if name in chosen)


def _patterns(selection: Any) -> tuple[bool, list[Any]]:
    """Return whether a selection is of a known kind, and the names or globs that it lists."""
    if isinstance(selection, str):
        return True, [selection]
    if isinstance(selection, nn.Module | Tensor | bytes) or not isinstance(selection, Iterable):
        return callable(selection) and not isinstance(selection, nn.Module), []
    listed = list(selection)
    return all(isinstance(name, str) for name in listed), listed


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(n) for n in names[:limit]) + more


def choose_weights(values: Tensor, k: int, by: str, generator: torch.Generator | None = None) -> Tensor:
    """Return the sorted positions (k,) of the k largest of `values` (total,): the weights or their variances."""
    if k > values.numel():
        raise BadData(f"a subnetwork of {k} weights was asked for, but only {values.numel()} are selected")
    if by == "random":
        order = torch.randperm(values.numel(), generator=generator, device=generator.device if generator else None)
        return order[:k].to(values.device).sort().values
    return values.abs().topk(k).indices.sort().values


@dataclass(frozen=True, eq=False)
class Order:
    """The order in which a rule sees the entries of a weight, (q, o, i).

    `seen` is a view of the weight whose strides show the order, or holds the position of each entry in the flat vector.
    """

    seen: Tensor
    written: bool  # whether `seen` holds positions; the memory of a view is never read

    @property
    def shape(self) -> tuple[int, int, int]:
        q, o, i = self.seen.shape
        return q, o, i

    @property
    def _steps(self) -> list[int]:
        return [step for step, size in zip(self.seen.stride(), self.shape, strict=True) if size > 1]

    def swapped(self) -> Order:
        """Exchange rows and columns."""
        return Order(self.seen.transpose(1, 2), self.written)

    def same_as(self, other: Order) -> bool:
        """Whether both have the same entries at the same places."""
        if self.shape != other.shape:
            return False
        return torch.equal(self.seen, other.seen) if self.written else self._steps == other._steps

    def places(self, params: Params, name: str, bias: str | None = None) -> Places:
        """Return the places of the parameter of that name, with its bias as a last column."""
        q, o, i = self.shape
        starts = dict(zip(params.names, params.offsets, strict=True))
        plain, turned = self.seen.is_contiguous(), q == 1 and self.seen.mT.is_contiguous()
        if self.written or not (plain or turned) or q * o == 1:
            index = (
                self.seen if self.written else flat_positions(params, name).as_strided(self.shape, self.seen.stride())
            )
            if bias is not None:
                index = torch.cat([index, flat_positions(params, bias).reshape(q, o, 1)], dim=2)
            return Places.of(index.reshape(-1))
        if bias is None and plain:
            return Places.range(starts[name], starts[name] + q * o * i)
        return Places(q * o, (Run(starts[name], i, not plain), *([] if bias is None else [Run(starts[bias], 1)])))


def orders(params: Params, name: str, views: Sequence[View]) -> list[Order]:
    """Return the order in which each rule sees a weight; positions are written out only if a rule makes no view."""
    blank = torch.empty(params.shapes[params.names.index(name)], dtype=torch.uint8)
    seen = [view(blank) for view in views]
    memory = blank.untyped_storage().data_ptr()
    if all(s.untyped_storage().data_ptr() == memory and s.numel() == blank.numel() for s in seen):
        return [Order(each, False) for each in seen]
    return [Order(view(flat_positions(params, name)), True) for view in views]


def flat_positions(params: Params, name: str) -> Tensor:
    """Return the positions of a parameter's entries in the whole flat vector, in the parameter's shape."""
    k = params.names.index(name)
    start, shape = params.offsets[k], params.shapes[k]
    return torch.arange(start, start + params.sizes[k], device=params.device).reshape(shape)


def places_of(params: Params, names: Sequence[str]) -> Places:
    """Return the places of parameters one after the other."""
    return Places.of(torch.cat([flat_positions(params, name).reshape(-1) for name in names]))


WRAPPERS = ("base_layer", "original_module")  # under these names an adapter keeps the layer that it changes


def adapter_names(module: nn.Module) -> set[str]:
    """Return the names of all adapters that a model holds; empty for a model without adapters."""
    found: set[str] = set()
    for part in module.modules():
        config = vars(part).get("peft_config")
        if isinstance(config, dict):
            found |= {name for name in config if isinstance(name, str)}
    return found


def active_adapters(module: nn.Module) -> set[str]:
    """Return the names of the adapters that take part in the forward pass of any layer, as the layers tell."""
    found: set[str] = set()
    for part in module.modules():
        if isinstance(getattr(part, "peft_config", None), dict):  # the whole model, from which layers may differ
            continue
        active = getattr(part, "active_adapters", None)
        if isinstance(active, list | tuple) and not getattr(part, "disable_adapters", False):
            found |= {name for name in active if isinstance(name, str)}
    return found & adapter_names(module)


def adapter_containers(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the containers that hold one entry per adapter, such as `…q_proj.lora_A`."""
    names = adapter_names(module)
    kinds = (nn.ModuleDict, nn.ParameterDict)
    if not names:
        return ()
    return tuple(
        path for path, part in module.named_modules() if isinstance(part, kinds) and names & {str(key) for key in part}
    )


def adapter_tensors(module: nn.Module) -> dict[str, tuple[str, str]]:
    """Map the names of parameters and buffers of adapters to the adapter and to their name without the adapter's.

    `…q_proj.lora_A.default.weight` belongs to `default` and is called `…q_proj.lora_A.weight` without it.
    """
    containers, names = adapter_containers(module), adapter_names(module)
    found = {}
    for name in (*dict(module.named_parameters()), *dict(module.named_buffers())):
        for path in containers:
            if name.startswith(f"{path}."):
                adapter, *rest = name[len(path) + 1 :].split(".")
                if adapter in names:
                    found[name] = (adapter, without_wrappers(".".join([path, *rest])))
                    break
    return found


def without_wrappers(name: str) -> str:
    """Return the name that a tensor has in the model without adapters around it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
