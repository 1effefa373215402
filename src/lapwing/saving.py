"""The file of a posterior: what it holds, how it is checked, and how a posterior is made from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature import Curvature, Factor, Problem, Structure
from lapwing.curvature.matrixfree import require_same_data
from lapwing.errors import BadData, CorruptFile
from lapwing.likelihoods import stored_likelihood
from lapwing.linalg import Layout, unpack_sound
from lapwing.model import Params
from lapwing.model.stored import describe_module, intact
from lapwing.posterior import Prior
from lapwing.storage import flaw_of_values, pack, prefixed, read_file, under, unpack

ENTRIES: dict[str, Any] = {
    **dict.fromkeys(("structure", "factor", "matrix", "prior", "likelihood", "parameters"), dict),
    **dict.fromkeys(("temperature", "blocks", "notes", "written"), list),
    **dict.fromkeys(("n_data", "seen", "memory"), (int, float)),
    **dict.fromkeys(("scalar", "damped", "repair"), bool),
    **dict.fromkeys(("tuned", "fingerprint"), str),
}


def bytes_of(la: Any) -> bytes:
    """Return the file of a posterior as bytes, for files of other libraries that hold it."""
    with TemporaryDirectory() as folder:
        la.save(Path(folder) / "posterior.lapwing")
        return (Path(folder) / "posterior.lapwing").read_bytes()


def stored(la: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header of a Laplace object's file.

    They hold curvature, prior, temperature, likelihood and the fingerprint of the module.
    """
    curvature = la.curvature
    parts = {
        "matrix": curvature.structure.stored(curvature.matrix),
        "structure": pack(curvature.structure),
        "factor": pack(curvature.factor),
        "prior": la.prior.spec(),
    }
    tensors: dict[str, Tensor] = {}
    for name, (own, _) in parts.items():
        tensors |= prefixed(f"{name}.", own)
    tensors |= {f"state.{name}": value for name, value in curvature.state.items()}
    layout = curvature.layout.describe(tensors, "layout")
    tensors["statistics"] = curvature.statistics
    if curvature.gradient is not None:
        tensors["gradient"] = curvature.gradient
    if la.params.index is not None:
        tensors["index"] = la.params.index
    header = {
        **{name: description for name, (_, description) in parts.items()},
        "temperature": [float(la.temperature.T), la.temperature.prior],
        "logit_temperature": la.logit_temperature,
        "likelihood": stored_likelihood(la.likelihood),
        "parameters": {name: list(shape) for name, shape in zip(la.params.names, la.params.shapes, strict=True)},
        "blocks": [list(names) for names in curvature.names],
        "layout": layout,
        "n_data": curvature.n_data,
        "seen": curvature.seen,
        "notes": list(curvature.notes),
        "scalar": la.options.scalar,
        "memory": la.options.memory,
        "convention": asdict(la.options.convention),
        "damped": la.belief.damped,
        "repair": la.belief.repair,
        "tuned": la.tuned,
    }
    probe = None if la.watch is None else la.watch.probe
    return describe_module(la.module, probe, tensors, header)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and header of the file of a posterior, or raise a clear error."""
    tensors, header = read_file(path)
    if "distilled" in header:
        raise BadData(
            f"{path.name!r} holds a distilled predictor: lapwing.Distilled.load({str(path)!r}, model) reads it"
        )
    if "mixture" in header:
        raise BadData(f"{path.name!r} holds a mixture: lapwing.load({str(path)!r}, [model1, model2, ...]) reads it")
    with intact(path):
        _require_header(header)
    return tensors, header


def read_members(path: Path) -> tuple[list[tuple[dict[str, Tensor], dict[str, Any]]], Any]:
    """Read tensors and header of each member of a mixture's file, and the weights of the members."""
    tensors, header = read_file(path)
    if "mixture" not in header:
        raise BadData(f"{path.name!r} holds one posterior, which takes one model: lapwing.load({str(path)!r}, model)")
    with intact(path):
        headers, weights = header["mixture"]["members"], header["mixture"]["weights"]
        for each in headers:
            _require_header(each)
        return [(under(f"{k}.", tensors), each) for k, each in enumerate(headers)], weights


def _require_header(header: Mapping[str, Any]) -> None:
    """Refuse a header whose entries `stored` cannot have made, even if the checksum fits."""
    for name, kind in ENTRIES.items():
        if not isinstance(header[name], kind) or (isinstance(header[name], bool) and kind is not bool):
            raise CorruptFile(f"its entry {name!r} is {header[name]!r}")
    for name in ("n_data", "seen", "memory", "logit_temperature"):
        if not 0 < header.get(name, 1.0) < math.inf:
            raise CorruptFile(f"its entry {name!r} is {header[name]}, which is not a positive number")
    names = [name for block in header["blocks"] for name in block]
    if not set(names) <= set(header["parameters"]):
        raise CorruptFile("its blocks name weights that are none of its parameters")


def restore_curvature(
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    params: Params,
    pose: Callable[[Factor], Problem],
    path: Path,
) -> Curvature:
    """Make the curvature of a file; `pose` is called where the structure has to read the data again."""
    own = lambda prefix: under(prefix, tensors, params.device)  # noqa: E731
    with intact(path):
        structure = unpack(own("structure."), header["structure"], Structure)
        factor = unpack(own("factor."), header["factor"], Factor)
        statistics = tensors["statistics"].to(params.device)
    problem = pose(factor) if structure.reads_data else None
    if problem is not None:
        require_same_data(problem, statistics * (header["seen"] / header["n_data"]), header["seen"])
    with intact(path):
        if problem is not None:
            matrix = structure.restored(own("matrix."), header["matrix"], problem)
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
    """Make the layout of the blocks; a file of an earlier version holds an index of all entries."""
    blocks = [{"tensor": f"layout.{k}"} for k in range(len(header["blocks"]))]
    layout = header.get("layout") or {"size": size, "blocks": blocks}
    if layout["size"] != size:
        raise CorruptFile(f"the file places {layout['size']} weights, and there are {size}")
    return Layout.restore(layout, tensors)


def _require_sound(curvature: Curvature) -> None:
    """Refuse numbers outside the matrix that no fit can have stored."""
    found = flaw_of_values("the list of statistics", curvature.statistics, signed=True)
    if curvature.gradient is not None:
        shape = tuple(curvature.gradient.shape)
        found = found or ("" if shape == (curvature.size,) else f"the gradient has shape {shape}")
        found = found or flaw_of_values("the gradient", curvature.gradient, signed=True)
    for name, value in curvature.state.items():  # a count that an earlier version did not keep is infinite
        found = found or (f"the sum {name!r} holds NaN" if bool(value.isnan().any()) else "")
        found = found or (flaw_of_values(f"the sum {name!r}", value, signed=True) if value.ndim else "")
    if len(curvature.names) not in (1, len(curvature.layout.places)):
        found = found or f"there are {len(curvature.names)} names for {len(curvature.layout.places)} blocks"
    if found:
        raise CorruptFile(f"the stored curvature is impossible: {found}; fit again, or restore a copy")


def restore_prior(tensors: Mapping[str, Tensor], header: Mapping[str, Any], params: Params) -> Prior:
    prior = Prior.from_spec(under("prior.", tensors, params.device), header["prior"], params.size)
    prior.resolve(params.names, params.sizes, device=params.device, index=params.index)
    return prior


def restore_params(tensors: Mapping[str, Tensor], header: Mapping[str, Any], module: torch.nn.Module) -> Params:
    params = Params.of(module, tuple(header["parameters"]))
    if "index" not in tensors:
        return params
    index = tensors["index"].to(params.device)
    fits = index.dtype == torch.long and index.ndim == 1 and len(index) == len(index.unique()) > 0
    if not fits or int(index.min()) < 0 or int(index.max()) >= params.size:
        raise CorruptFile(f"the stored index does not pick weights out of {params.size:,}; fit again")
    return replace(params, index=index)
