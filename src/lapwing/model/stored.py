"""The description of a module in the file of a posterior, and the checks when the file is read for a module."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lapwing.errors import CorruptFile, LapwingError, UnsupportedModel
from lapwing.model.batches import Convention
from lapwing.model.watch import Probe, contents, tensor_bytes, written
from lapwing.storage import full, lean, prefixed, under


def fingerprint(module: nn.Module, skip: Iterable[str] = ()) -> str:
    """Return the SHA-256 of parameters, buffers, plain tensors, numbers and strings, except those in `skip`."""
    text, state = contents(module, skip)
    digest = hashlib.sha256(text.encode())
    for name, tensor in state:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def describe_module(
    module: nn.Module, probe: Probe | None, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Add the fingerprint of a module and a probe to the tensors and the header of a file."""
    own: dict[str, Any] = {"written": written(module), "fingerprint": fingerprint(module, written(module))}
    found: dict[str, Tensor] = {}
    if probe is not None and probe.storable:
        own["probe"] = lean([probe.inputs, probe.outputs], found)
    return {**tensors, **prefixed("probe.", found)}, {**header, **own}


@contextmanager
def intact(path: Path) -> Iterator[None]:
    """Raise `CorruptFile` in place of errors that come from impossible entries of a file."""
    try:
        yield
    except CorruptFile:
        raise
    except (LapwingError, KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        if isinstance(error, UnsupportedModel):
            raise
        raise CorruptFile(f"{path.name!r} does not fit together ({error}); fit again, or restore a copy") from error


def require_same_module(header: Mapping[str, Any], module: nn.Module, path: Path) -> None:
    """Refuse a module with other parameters, shapes or weights than the file was made with."""
    live = dict(module.named_parameters())
    for name, shape in header["parameters"].items():
        if name not in live:
            raise UnsupportedModel(f"{path.name!r} belongs to a model with a parameter {name!r}, which this one lacks")
        if list(live[name].shape) != shape:
            raise UnsupportedModel(
                f"{path.name!r} belongs to a model whose {name!r} has shape {tuple(shape)}; here it is "
                f"{tuple(live[name].shape)}"
            )
    if fingerprint(module, header["written"]) != header["fingerprint"]:
        raise UnsupportedModel(
            f"{path.name!r} was made with other weights or buffers than this model has now. Load the weights it was "
            "fitted on first."
        )


def restore_probe(
    tensors: Mapping[str, Tensor], header: Mapping[str, Any], module: nn.Module, path: Path
) -> Probe | None:
    """Return the probe of the fit; refuse a module that gives other outputs for its inputs."""
    if "probe" not in header:
        return None
    device = next(module.parameters()).device
    inputs, outputs = full(header["probe"], under("probe.", tensors, device))
    probe = Probe(inputs, outputs, made_up=True)
    if not probe.agrees(module):
        raise UnsupportedModel(
            f"{path.name!r} was made with a model that gives other outputs for the same inputs, although its weights "
            "are the same (a hook, another activation, a setting such as an adapter's scaling). Load it for the model "
            "it was fitted on."
        )
    return probe


def restore_convention(header: Mapping[str, Any]) -> Convention:
    """Say how the batches of the fit were read; a file of an earlier version does not tell."""
    stored = header.get("convention", {})
    known = {field.name: stored[field.name] for field in fields(Convention) if field.name in stored}
    return Convention(**known | ({"names": tuple(known["names"])} if "names" in known else {}))
