"""What a report says about models and data beside the scores: settings, sizes and names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lapwing.evaluation.results import Result

BELIEF = ("likelihood", "prior", "temperature", "logit_temperature", "tuned", "n_data")  # settings of a posterior


def settings_of(model: Any, module: nn.Module) -> dict[str, str]:
    """Return what a report says about a model: its kind, its network, and the settings that it has."""
    found = {} if model is module else {"kind": type(model).__name__}
    weights = sum(p.numel() for p in module.parameters())
    if weights:
        found["network"] = f"{type(module).__name__}, {weights:,} weights"
    curvature = getattr(model, "curvature", None)
    if curvature is not None and hasattr(curvature, "structure"):
        found["structure"] = f"{curvature.structure.name}, factor {type(curvature.factor).__name__}"
    elif dataclasses.is_dataclass(model):
        for each in dataclasses.fields(model):
            value = getattr(model, each.name)
            if isinstance(value, int | float | str):
                found[each.name] = f"{value:.4g}" if isinstance(value, float) else str(value)
    for name in BELIEF if hasattr(model, "predict") else ():
        value = getattr(model, name, None)
        if value is not None and not callable(value) and value not in ("", 1.0):
            found[name.replace("_", " ")] = f"{value:.6g}" if isinstance(value, float) else str(value)
    notes = [*getattr(curvature, "notes", ()), *getattr(getattr(model, "tuning", None), "messages", ())]
    return found | ({"notes": "; ".join(str(note) for note in notes)} if notes else {})


def data_facts(data: Any, ood: Mapping[str, Any], results: Mapping[str, Result]) -> dict[str, str]:
    """Return what a report says about the data: how many items, and the name of the data set where it has one."""
    first = next(iter(results.values()))
    facts = {"test data": _data_words(data, first.count)}
    return facts | {f"outside: {name}": _data_words(each, first.outside[name].count) for name, each in ood.items()}


def _data_words(data: Any, count: int) -> str:
    whole = getattr(data, "dataset", None)
    name = "" if whole is None or type(whole).__module__.startswith("torch.") else f" of {type(whole).__name__}"
    first = data[0] if isinstance(data, tuple | list) and data else data
    first = first[0] if isinstance(first, tuple | list) and first else first
    shape = tuple(getattr(first, "shape", ())[1:])
    return f"{count:,} items{name}" + (f" of shape {shape}" if shape else "")


def class_names(data: Any, modules: Iterable[nn.Module]) -> Sequence[str]:
    """Return the names of classes that a data set (`classes`) or a network's configuration (`id2label`) knows."""
    found = getattr(getattr(data, "dataset", data), "classes", None)
    if isinstance(found, list | tuple) and all(isinstance(each, str) for each in found):
        return found
    for module in modules:
        labels = getattr(getattr(module, "config", None), "id2label", None)
        if isinstance(labels, Mapping) and not any(str(v).startswith("LABEL_") for v in labels.values()):
            return [str(labels[k]) for k in sorted(labels)]
    return ()


def feature_names(data: Any) -> Sequence[str]:
    """Return the names of the columns of a data frame in (X, y)."""
    table = data[0] if isinstance(data, tuple) and data else data
    return [str(name) for name in getattr(table, "columns", ())]
