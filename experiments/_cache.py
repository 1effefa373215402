"""Parts of experiments that are kept, so that a run goes on where it was stopped and others need not repeat them."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from experiments._results import plain
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lapwing.storage import replacing

AROUND = (
    "smoke",
    "quick",
    "seeds",
    "first",
    "out",
    "cache",
    "command",
)  # options that do not change what one seed gives


def cached(folder: Path | None, name: str, options: Any, compute: Callable[[], Any]) -> Any:
    """Return what `compute` returns, as JSON holds it (tensors as lists); kept in a folder under name and options."""
    if folder is None:
        return plain(compute())
    path = _path(folder, name, options, "json")
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    found = plain(compute())
    with replacing(path) as part:
        part.write_text(json.dumps(found), encoding="utf-8")
    return found


def each_seed(name: str, run: Callable[[int, Any], Any], given: argparse.Namespace) -> list[Any]:
    """Return `run(seed, given)` for every seed, as JSON holds it; with `--cache`, what other runs have kept is read."""
    told = {key: value for key, value in vars(given).items() if key not in AROUND}
    seeds = range(given.first, given.first + given.seeds)
    return [cached(given.cache, name, told | {"seed": seed}, lambda seed=seed: run(seed, given)) for seed in seeds]


def tensors(value: Any) -> Any:
    """Return numbers that JSON holds as lists as tensors in float64, inside mappings and ragged lists too."""
    if isinstance(value, Mapping):
        return {key: tensors(inner) for key, inner in value.items()}
    try:
        return torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
    except (TypeError, ValueError):
        return [tensors(inner) for inner in value]


def trained_once(
    folder: Path | None, name: str, options: Any, make: nn.Module, train: Callable[[], nn.Module]
) -> nn.Module:
    """Return the network that `train` returns, in evaluation mode; its weights are kept and put into `make`."""
    if folder is None:
        return train()
    path = _path(folder, name, options, "safetensors")
    if not path.exists():
        state = {key: value.contiguous() for key, value in train().state_dict().items()}
        with replacing(path) as part:
            save_file(state, part)
    make.load_state_dict(load_file(path))
    return make.eval()


def tensors_once(
    folder: Path | None, name: str, options: Any, compute: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the tensors that `compute` returns by name; kept in a folder under name and options."""
    if folder is None:
        return compute()
    path = _path(folder, name, options, "safetensors")
    if not path.exists():
        found = {key: value.detach().contiguous() for key, value in compute().items()}
        with replacing(path) as part:
            save_file(found, part)
    return load_file(path)


def _path(folder: Path, name: str, options: Any, suffix: str) -> Path:
    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{name}-{key}.{suffix}"
