"""One file a posterior: safetensors with a JSON header, written atomically. No pickle."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lapwing.curvature import FACTORS, STRUCTURES, Curvature, Factor, Problem, Structure
from lapwing.curvature.matrixfree import require_same_data, restored, stored
from lapwing.errors import CorruptFile, LapwingError, UnsupportedModel, UnsupportedOperation, VersionMismatch
from lapwing.linalg import PSD, Layout, once, pack, pack_layout, unpack_layout, unpack_sound
from lapwing.linalg.operator import Operator
from lapwing.linalg.validity import flaw_of_values
from lapwing.model import Params
from lapwing.model.convention import Convention
from lapwing.model.fingerprint import Probe, fingerprint, written
from lapwing.model.trees import full, lean
from lapwing.model.writing import replacing
from lapwing.posterior import Prior, Tempered

FORMAT = 2  # 1: an index of all entries in place of runs
KEY = "lapwing"
ENTRIES: dict[str, Any] = {
    **dict.fromkeys(("structure", "factor", "matrix", "prior", "likelihood", "parameters"), dict),
    **dict.fromkeys(("temperature", "blocks", "notes", "written"), list),
    **dict.fromkeys(("n_data", "seen", "memory"), (int, float)),
    **dict.fromkeys(("scalar", "damped", "repair"), bool),
    **dict.fromkeys(("tuned", "fingerprint"), str),
}
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
        "damped": la.belief.damped,
        "repair": la.belief.repair,
        "tuned": la.tuned,
        "written": written(la.module),
        "fingerprint": fingerprint(la.module, written(la.module)),
    }
    if la.watch is not None and la.watch.probe is not None and la.watch.probe.storable:
        found: dict[str, Tensor] = {}
        header["probe"] = lean([la.watch.probe.inputs, la.watch.probe.outputs], found)
        tensors |= {f"probe.{name}": value for name, value in found.items()}
    tensors, header["aliases"] = once(tensors)
    flat = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    text = json.dumps(header | {"digest": _digest(flat, header)})
    with replacing(path) as part:
        save_file(flat, part, metadata={KEY: text})


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
            if header.get("digest") != _digest(tensors, header):
                raise CorruptFile(f"{damaged} (its checksum does not fit its content)")
            _require_header(header)
            return tensors | {name: tensors[own] for name, own in header.get("aliases", {}).items()}, header
    except (SafetensorError, ValueError, OSError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CorruptFile):
            raise
        raise CorruptFile(f"{damaged} ({error})") from error


def _require_format(header: Any, path: Path, damaged: str) -> None:
    number = header.get("format") if isinstance(header, dict) else None
    if type(number) is not int or number < 1:
        raise CorruptFile(damaged)
    if number > FORMAT:
        raise VersionMismatch(
            f"{path.name!r} has format {number}, this version of Lapwing reads up to {FORMAT}: update lapwing"
        )


def _require_header(header: Mapping[str, Any]) -> None:
    """Refuse a header with entries that `write` does not make, however well its checksum fits."""
    for name, kind in ENTRIES.items():
        if not isinstance(header[name], kind) or (isinstance(header[name], bool) and kind is not bool):
            raise CorruptFile(f"its entry {name!r} is {header[name]!r}")
    for name in ("n_data", "seen", "memory", "logit_temperature"):
        if not 0 < header.get(name, 1.0) < math.inf:
            raise CorruptFile(f"its entry {name!r} is {header[name]}, which is not a positive number")
    names = [name for block in header["blocks"] for name in block]
    if not set(names) <= set(header["parameters"]):
        raise CorruptFile("its blocks name weights that are none of its parameters")


@contextmanager
def intact(path: Path) -> Iterator[None]:
    """`CorruptFile` in place of whatever goes wrong with entries that are not as `write` makes them."""
    try:
        yield
    except CorruptFile:
        raise
    except (LapwingError, KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        if isinstance(error, UnsupportedModel):
            raise
        raise CorruptFile(f"{path.name!r} does not fit together ({error}); fit again, or restore a copy") from error


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


def restore_probe(
    tensors: Mapping[str, Tensor], header: Mapping[str, Any], module: torch.nn.Module, path: Path
) -> Probe | None:
    """Return the probe of the fit; refuse a module that gives other outputs for its inputs."""
    if "probe" not in header:
        return None
    device = next(module.parameters()).device
    own = {k.removeprefix("probe."): v.to(device) for k, v in tensors.items() if k.startswith("probe.")}
    inputs, outputs = full(header["probe"], own)
    probe = Probe(inputs, outputs, made_up=True)
    if not probe.agrees(module):
        raise UnsupportedModel(
            f"{path.name!r} was made with a model that gives other outputs for the same inputs, although its weights "
            "are the same (a hook, another activation, a setting such as an adapter's scaling). Load it for the model "
            "it was fitted on."
        )
    return probe


def restore_curvature(
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    params: Params,
    pose: Callable[[Factor], Problem],
    path: Path,
) -> Curvature:
    """The curvature that a file holds; `pose` is called where it has to read the data again."""
    own = lambda prefix: {  # noqa: E731
        k.removeprefix(prefix): v.to(params.device) for k, v in tensors.items() if k.startswith(prefix)
    }
    with intact(path):
        structure = _from_spec(header["structure"], Structure)
        factor = _from_spec(header["factor"], Factor)
        statistics = tensors["statistics"].to(params.device)
        reads_data = header["matrix"]["type"] == PRODUCTS
    problem = pose(factor) if reads_data else None
    if problem is not None:
        require_same_data(problem, statistics * (header["seen"] / header["n_data"]), header["seen"])
    with intact(path):
        if problem is not None:
            matrix: PSD = restored(problem, structure, own("matrix."))
        else:
            matrix = unpack_sound(own("matrix."), header["matrix"], params.size, signed=not factor.definite)
        curvature = Curvature(
            matrix=matrix,
            layout=_layout(tensors, header, params.size),
            names=tuple(tuple(names) for names in header["blocks"]),
            statistics=statistics,
            n_data=header["n_data"],
            seen=header["seen"],
            structure=structure,
            factor=factor,
            gradient=tensors["gradient"].to(params.device) if "gradient" in tensors else None,
            notes=tuple(header["notes"]),
            state=own("state."),
            params=params,
        )
        _require_sound(curvature)
    return curvature


def _layout(tensors: Mapping[str, Tensor], header: Mapping[str, Any], size: int) -> Layout:
    """Where the blocks are; a file of an earlier version holds an index of all entries."""
    blocks = [{"tensor": f"layout.{k}"} for k in range(len(header["blocks"]))]
    layout = header.get("layout") or {"size": size, "blocks": blocks}
    if layout["size"] != size:
        raise CorruptFile(f"the file places {layout['size']} weights, and there are {size}")
    return unpack_layout(tensors, layout)


def _require_sound(curvature: Curvature) -> None:
    """Refuse numbers beside the matrix that no fit can have stored."""
    found = flaw_of_values("the list of statistics", curvature.statistics, signed=True)
    if curvature.gradient is not None:
        shape = tuple(curvature.gradient.shape)
        found = found or ("" if shape == (curvature.size,) else f"the gradient has shape {shape}")
        found = found or flaw_of_values("the gradient", curvature.gradient, signed=True)
    for name, value in curvature.state.items():  # a number that an earlier version did not count is infinite
        found = found or (f"the sum {name!r} holds NaN" if bool(value.isnan().any()) else "")
        found = found or (flaw_of_values(f"the sum {name!r}", value, signed=True) if value.ndim else "")
    if len(curvature.names) not in (1, len(curvature.layout.places)):
        found = found or f"there are {len(curvature.names)} names for {len(curvature.layout.places)} blocks"
    if found:
        raise CorruptFile(f"the stored curvature is impossible: {found}; fit again, or restore a copy")


def restore_prior(tensors: Mapping[str, Tensor], header: Mapping[str, Any], params: Params) -> Prior:
    own = {k.removeprefix("prior."): v.to(params.device) for k, v in tensors.items() if k.startswith("prior.")}
    prior = Prior.from_spec(own, header["prior"], params.size)
    prior.resolve(params.names, params.sizes, device=params.device, index=params.index)
    return prior


def restore_convention(header: Mapping[str, Any]) -> Convention:
    """How the batches of the fit were read; a file of an earlier version does not say."""
    stored = header.get("convention", {})
    known = {field.name: stored[field.name] for field in fields(Convention) if field.name in stored}
    return Convention(**known | ({"names": tuple(known["names"])} if "names" in known else {}))


def restore_temperature(header: Mapping[str, Any]) -> Tempered:
    T, prior = header["temperature"]
    return Tempered(T, prior)


def restore_params(tensors: Mapping[str, Tensor], header: Mapping[str, Any], module: torch.nn.Module) -> Params:
    params = Params.of(module, tuple(header["parameters"]))
    if "index" not in tensors:
        return params
    index = tensors["index"].to(params.device)
    fits = index.dtype == torch.long and index.ndim == 1 and len(index) == len(index.unique()) > 0
    if not fits or int(index.min()) < 0 or int(index.max()) >= params.size:
        raise CorruptFile(f"the stored index does not pick weights out of {params.size:,}; fit again")
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


def _from_spec(spec: Mapping[str, Any], kind: type = object) -> Any:
    """The choice that `_spec` described, which is to be of a kind."""
    by_name = {choice.__name__: choice for choice in (*STRUCTURES.values(), *FACTORS.values())}
    if spec["type"] not in by_name:
        raise CorruptFile(f"the file names {spec['type']!r}, which is none of {sorted(by_name)}")
    if not issubclass(by_name[spec["type"]], kind):
        raise CorruptFile(f"the file names {spec['type']!r}, which is no {kind.__name__.lower()}")
    options = {k: _from_spec(v) if isinstance(v, dict) else v for k, v in spec["options"].items()}
    return by_name[spec["type"]](**options)
