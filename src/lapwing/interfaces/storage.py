"""One file a posterior: safetensors with a JSON header, written atomically. No pickle."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lapwing.curvature import FACTORS, STRUCTURES, Curvature, Factor, Problem, Structure
from lapwing.curvature.matrixfree import require_same_data, restored, stored
from lapwing.errors import CorruptFile, UnsupportedModel, UnsupportedOperation, VersionMismatch
from lapwing.linalg import PSD, once, pack, pack_layout, unpack, unpack_layout
from lapwing.linalg.operator import Operator
from lapwing.model import Params
from lapwing.model.convention import Convention
from lapwing.model.fingerprint import fingerprint, written
from lapwing.posterior import Prior, Tempered

FORMAT = 2  # 1: an index of all entries in place of runs
KEY = "lapwing"
PRODUCTS = "matrixfree"  # the file holds a sketch; the matrix is in its products with the data


def write(path: Path, la: Any) -> None:
    """Store a Laplace object: curvature, prior, temperature, likelihood and the fingerprint of the module."""
    if isinstance(la.curvature.matrix, Operator):
        tensors, matrix = _prefixed("matrix.", stored(la.curvature.matrix), {"type": PRODUCTS})
    else:
        tensors, matrix = _prefixed("matrix.", *pack(la.curvature.matrix))
    prior_tensors, prior = _prefixed("prior.", *la.prior.spec())
    tensors |= prior_tensors
    tensors |= {f"state.{name}": value for name, value in la.curvature.state.items()}
    layout = pack_layout(la.curvature.layout, "layout", tensors)
    tensors["statistics"] = la.curvature.statistics
    if la.curvature.gradient is not None:
        tensors["gradient"] = la.curvature.gradient
    if la.params.index is not None:
        tensors["index"] = la.params.index
    header = {
        "format": FORMAT,
        "structure": _spec(la.curvature.structure),
        "factor": _spec(la.curvature.factor),
        "matrix": matrix,
        "prior": prior,
        "temperature": [float(la.temperature.T), la.temperature.prior],
        "logit_temperature": la.logit_temperature,
        "likelihood": la.likelihood.spec(),
        "parameters": {name: list(shape) for name, shape in zip(la.params.names, la.params.shapes, strict=True)},
        "blocks": [list(names) for names in la.curvature.names],
        "layout": layout,
        "n_data": la.curvature.n_data,
        "seen": la.curvature.seen,
        "notes": list(la.curvature.notes),
        "scalar": la.options.scalar,
        "memory": la.options.memory,
        "convention": asdict(la.options.convention),
        "damped": la.damped,
        "repair": la.repair,
        "tuned": la.tuned,
        "written": written(la.module),
        "fingerprint": fingerprint(la.module, written(la.module)),
    }
    tensors, header["aliases"] = once(tensors)
    flat = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    _write_atomically(path, flat, header | {"digest": _digest(flat, header)})


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """SHA-256 of header and tensors: safetensors itself does not notice a flipped byte."""
    digest = hashlib.sha256(json.dumps({k: v for k, v in header.items() if k != "digest"}, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def _prefixed(prefix: str, tensors: Mapping[str, Tensor], spec: Any) -> tuple[dict[str, Tensor], Any]:
    return {prefix + name: value for name, value in tensors.items()}, spec


def _write_atomically(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={KEY: json.dumps(header)})
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file, or a clear error."""
    if not path.is_file():
        raise CorruptFile(f"there is no file {str(path)!r}" if not path.exists() else f"{str(path)!r} is a folder")
    damaged = f"{path.name!r} is damaged or not a Lapwing file; fit again, or restore a copy"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if KEY not in metadata:
                raise CorruptFile(f"{path.name!r} is a safetensors file, but not one that Lapwing wrote")
            header = json.loads(metadata[KEY])
            _require_format(header, path, damaged)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, ValueError, OSError, KeyError, TypeError) as error:
        if isinstance(error, CorruptFile):
            raise
        raise CorruptFile(f"{damaged} ({error})") from error
    if header.get("digest") != _digest(tensors, header):
        raise CorruptFile(f"{damaged} (its checksum does not fit its content)")
    return tensors | {name: tensors[own] for name, own in header.get("aliases", {}).items()}, header


def _require_format(header: Any, path: Path, damaged: str) -> None:
    number = header.get("format") if isinstance(header, dict) else None
    if type(number) is not int or number < 1:
        raise CorruptFile(damaged)
    if number > FORMAT:
        raise VersionMismatch(
            f"{path.name!r} has format {number}, this version of Lapwing reads up to {FORMAT}: update lapwing"
        )


def require_same_module(header: Mapping[str, Any], module: torch.nn.Module, path: Path) -> None:
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


def restore_curvature(
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    device: torch.device,
    pose: Callable[[Factor], Problem],
) -> Curvature:
    """The curvature that a file holds; `pose` is called where it has to read the data again."""
    own = lambda prefix: {k.removeprefix(prefix): v.to(device) for k, v in tensors.items() if k.startswith(prefix)}  # noqa: E731
    try:
        structure = _from_spec(header["structure"], STRUCTURES)
        factor = _from_spec(header["factor"], FACTORS)
        if header["matrix"]["type"] == PRODUCTS:
            problem = pose(factor)
            ratio = header["n_data"] / header["seen"]
            require_same_data(problem, tensors["statistics"].to(device) / ratio, header["seen"])
            matrix: PSD = restored(problem, structure, own("matrix."))
        else:
            matrix = unpack(own("matrix."), header["matrix"])
        layout = header.get("layout") or {  # a file of an earlier version holds an index of all entries
            "size": matrix.size,
            "blocks": [{"tensor": f"layout.{k}"} for k in range(len(header["blocks"]))],
        }
        return Curvature(
            matrix=matrix,
            layout=unpack_layout(tensors, layout),
            names=tuple(tuple(names) for names in header["blocks"]),
            statistics=tensors["statistics"].to(device),
            n_data=header["n_data"],
            seen=header["seen"],
            structure=structure,
            factor=factor,
            gradient=tensors["gradient"].to(device) if "gradient" in tensors else None,
            notes=tuple(header["notes"]),
            state=own("state."),
        )
    except KeyError as error:
        raise CorruptFile(f"the file lacks {error}; fit again, or restore a copy") from error


def restore_prior(tensors: Mapping[str, Tensor], header: Mapping[str, Any], device: torch.device) -> Prior:
    own = {k.removeprefix("prior."): v.to(device) for k, v in tensors.items() if k.startswith("prior.")}
    return Prior.from_spec(own, header["prior"])


def restore_convention(header: Mapping[str, Any]) -> Convention:
    """How the batches of the fit were read; a file of an earlier version does not say."""
    stored = header.get("convention", {})
    known = {field.name: stored[field.name] for field in fields(Convention) if field.name in stored}
    return Convention(**known | ({"names": tuple(known["names"])} if "names" in known else {}))


def restore_temperature(header: Mapping[str, Any]) -> Tempered:
    return Tempered(*header["temperature"])


def restore_params(tensors: Mapping[str, Tensor], header: Mapping[str, Any], module: torch.nn.Module) -> Params:
    params = Params.of(module, tuple(header["parameters"]))
    index = tensors["index"].to(params.device) if "index" in tensors else None
    return replace(params, index=index)


def _spec(choice: Structure | Factor) -> dict[str, Any]:
    """A structure or factor by its name and options; an option may be such a choice itself."""
    if type(choice) not in (*STRUCTURES.values(), *FACTORS.values()):
        raise UnsupportedOperation(
            f"{type(choice).__name__} is not one of Lapwing's own structures and factors; load could not read it back"
        )
    options: dict[str, Any] = {}
    for item in fields(choice):  # type: ignore[arg-type]
        value = getattr(choice, item.name)
        options[item.name] = _spec(value) if isinstance(value, Structure | Factor) else value
    return {"type": type(choice).__name__, "options": options}


def _from_spec(spec: Mapping[str, Any], registry: Mapping[str, type]) -> Any:
    by_name = {kind.__name__: kind for kind in (*STRUCTURES.values(), *FACTORS.values())}
    if spec["type"] not in by_name:
        raise CorruptFile(f"the file names {spec['type']!r}, which is none of {sorted(by_name)}")
    options = {k: _from_spec(v, registry) if isinstance(v, dict) else v for k, v in spec["options"].items()}
    return by_name[spec["type"]](**options)
