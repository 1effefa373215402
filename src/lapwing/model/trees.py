"""Nested dicts, lists and tensors (state of optimizers, say) in one file: safetensors with JSON. No pickle."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lapwing.errors import BadData, CorruptFile
from lapwing.model.writing import replacing

PLAIN = (str, int, float, bool, type(None))


def save_tree(path: Path, tree: Any) -> None:
    """Write dicts, lists, tuples, numbers, strings, None and tensors, atomically."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(lean(tree, tensors))
    with replacing(path) as part:
        save_file(tensors, part, metadata={"tree": text, "digest": _digest(tensors, text)})


def load_tree(path: Path) -> Any:
    """What `save_tree` wrote; `CorruptFile` where a byte has changed."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, ValueError, OSError) as error:
        raise CorruptFile(f"{path} is damaged or no safetensors file ({error})") from error
    try:
        if header.get("digest") == _digest(tensors, header["tree"]):
            return full(json.loads(header["tree"]), tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"{path} is damaged: its header holds no tree that was stored ({error})") from error
    raise CorruptFile(f"{path} is damaged: its contents do not match their checksum")


def lean(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON with tensors and whatever JSON does not tell apart replaced by {kind: ...}."""
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"dict": [[lean(key, tensors), lean(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [lean(value, tensors) for value in tree]}
    if isinstance(tree, list):
        return [lean(value, tensors) for value in tree]
    if isinstance(tree, torch.dtype):
        return {"dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, PLAIN):
        return tree
    raise BadData(
        f"a {type(tree).__name__} cannot be stored: only dicts, lists, tuples, numbers, strings, None and tensors can"
    )


def full(lean: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(lean, list):
        return [full(value, tensors) for value in lean]
    if not isinstance(lean, dict):
        return lean
    ((kind, content),) = lean.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return _dtype(content)
    if kind == "tuple":
        return tuple(full(value, tensors) for value in content)
    if kind != "dict":
        raise ValueError(f"unknown kind {kind!r}")
    return {full(key, tensors): full(value, tensors) for key, value in content}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    """SHA-256: safetensors itself does not notice a flipped byte."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors, key=int):
        own = tensors[name]
        digest.update(f"{name} {own.dtype} {tuple(own.shape)}".encode())
        digest.update(own.reshape(-1).view(torch.uint8).numpy().tobytes() if own.numel() else b"")
    return digest.hexdigest()
