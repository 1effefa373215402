"""Which parameters get a posterior: all, the last layer, globs, lists, predicates; subnetworks pick single weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, require_whole

Selection = str | Iterable[str] | Callable[[str, Tensor], bool]


@dataclass(frozen=True, eq=False)
class Subnetwork:
    """The `size` single weights with the largest variance (of a diagonal posterior) or magnitude, or a random set."""

    size: int
    by: Literal["variance", "magnitude", "random"] = "variance"
    within: Any = "all"


def subnetwork(k: int, by: Literal["variance", "magnitude", "random"] = "variance", within: Any = "all") -> Subnetwork:
    """Select k single weights: `lapwing.fit(..., structure="full", select=lapwing.subnetwork(100))`.

    by="variance" takes the largest marginal variances of a diagonal posterior under the prior of the fit,
    "magnitude" the largest absolute weights, "random" a uniform set (with the fit's generator).
    """
    require_whole("the number of weights of a subnetwork", k)
    if by not in ("variance", "magnitude", "random"):
        raise BadData(f"a subnetwork is chosen by 'variance', 'magnitude' or 'random', got {by!r}")
    return Subnetwork(k, by, within)


def select_names(module: nn.Module, selection: Selection) -> tuple[str, ...]:
    """Names of the selected parameters in the order of `named_parameters()`; frozen and empty ones are left out."""
    free = {name: p for name, p in module.named_parameters() if p.requires_grad and p.numel()}
    every = dict(module.named_parameters())
    if not free:
        raise BadData("every parameter of the model is frozen (requires_grad=False): nothing to put a posterior on")
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
            raise BadData(f"select={pattern!r} matches no parameter; there are {_some(every)}")
        frozen = hits - set(free)
        if not isinstance(selection, str) and pattern in every and frozen:
            raise BadData(f"select names {pattern!r}, which is frozen (requires_grad=False)")
        chosen |= hits & set(free)
    if not chosen:
        raise BadData(f"select={selection!r} matches only frozen parameters (requires_grad=False)")
    return tuple(name for name in free if name in chosen)


def _patterns(selection: Any) -> tuple[bool, list[Any]]:
    """Whether a selection is of a kind that is known, and the names or globs that it lists."""
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
    """Sorted positions (k,) of the k largest scores; `values` (total,) are the weights or their variances."""
    if k > values.numel():
        raise BadData(f"a subnetwork of {k} weights was asked for, but only {values.numel()} are selected")
    if by == "random":
        order = torch.randperm(values.numel(), generator=generator, device=generator.device if generator else None)
        return order[:k].to(values.device).sort().values
    return values.abs().topk(k).indices.sort().values
