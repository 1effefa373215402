"""The user's network with its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lapwing.cli.files.objects import guarded, made, read_object
from lapwing.errors import BadData

WRAPPED = ("state_dict", "model_state_dict", "model")  # keys under which checkpoints keep the weights
PREFIXES = ("module.", "_orig_mod.", "model.")  # of data parallel, torch.compile and Lightning
SHOWN = 4


def read_model(text: str, weights: Path | None = None, device: str | None = None) -> nn.Module:
    """The module that `file.py:name` names, or that it returns when called, with the weights of a file.

    Example:
        >>> model = read_model("net.py:Net", Path("net.pt"))
    """
    found = read_object(text)
    model = found if isinstance(found, nn.Module) else made(found, text)
    if not isinstance(model, nn.Module):
        raise BadData(f"{text} is a {type(model).__name__}, not a torch.nn.Module or a function that returns one")
    if weights is not None:
        load_weights(model, read_weights(weights), weights.name)
    return model if device is None else guarded(lambda: model.to(torch.device(device)), f"moving the model to {device}")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file or of a state dict that torch.save wrote; nothing is unpickled beyond them."""
    if not path.is_file():
        raise BadData(f"there is no file of weights {str(path)!r}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, by what the file is
        raise BadData(
            f"{path.name} is no file of tensors alone: write the model's state_dict() and nothing else, as .pt or "
            f".safetensors ({str(error).strip().partition(chr(10))[0][:120]})"
        ) from error
    for key in WRAPPED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()
    ):
        raise BadData(f"{path.name} holds no state dict, nor one under any of {', '.join(WRAPPED)}")
    return dict(found)


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Put weights into a model, or say which keys and shapes do not fit.

    Step counters of batch norms and second names of tied weights may be missing.
    """
    live = model.state_dict()
    given = _without_prefix(tensors, live)
    places = {live[key].data_ptr() for key in given if key in live}
    missing = [
        key
        for key, value in live.items()
        if key not in given and not key.endswith("num_batches_tracked") and value.data_ptr() not in places
    ]
    unexpected = [key for key in given if key not in live]
    if missing or unexpected:
        raise BadData(f"{name} does not belong to this model: it {_lacks(missing, unexpected)}")
    wrong = [
        f"{key} {_kind(value)} instead of {_kind(live[key])}"
        for key, value in given.items()
        if value.shape != live[key].shape or value.is_complex() != live[key].is_complex()
    ]
    if wrong:
        raise BadData(f"{name} does not belong to this model: it has {_some(wrong)}")
    model.load_state_dict(dict(given), strict=False)


def _without_prefix(tensors: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Without the prefix of a wrapper that all keys share and the model does not have."""
    for prefix in PREFIXES:
        if tensors and all(key.startswith(prefix) for key in tensors) and not any(k.startswith(prefix) for k in live):
            return {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


def _kind(tensor: Tensor) -> str:
    return f"{'complex ' if tensor.is_complex() else ''}{tuple(tensor.shape)}"


def _lacks(missing: list[str], unexpected: list[str]) -> str:
    parts = [f"lacks {_some(missing)}"] if missing else []
    return " and ".join([*parts, *([f"has {_some(unexpected)}, which the model lacks"] if unexpected else [])])


def _some(items: Iterable[str]) -> str:
    found = list(items)
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
