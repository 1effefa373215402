"""`install`: make this compatibility layer importable as the module `laplace` and its submodules."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lapwing.compat.laplace_torch import (
    allweights,
    backends,
    base,
    enums,
    extractor,
    front,
    functional,
    functions,
    lastweights,
    marglik,
    masks,
    matrix,
    parametric,
    subnet,
)

Names = dict[str, Any]


def _of(*sources: ModuleType, only: str = "") -> Names:
    """Return the names that modules of this package define, or only those that contain a word."""
    found: Names = {}
    for source in sources:
        for name, value in vars(source).items():
            own = getattr(value, "__module__", None) == source.__name__ and not name.startswith("__")
            if own and only.lower() in name.lower():
                found[name] = value
    return found


def contents() -> dict[str, Names]:
    """Return what each module of laplace-torch offers, by the module's name."""
    own = _of(base, parametric, allweights, functional, only="Laplace")
    whole = {name: value for name, value in own.items() if "LLLaplace" not in name}
    last = _of(lastweights) | {"FunctionalLLLaplace": functional.FunctionalLLLaplace}
    utils = {
        "enums": _of(enums),
        "feature_extractor": _of(extractor),
        "matrix": {"Kron": matrix.Kron, "KronDecomposed": matrix.KronDecomposed},
        "metrics": {"RunningNLLMetric": functions.RunningNLLMetric},
        "subnetmask": {name: value for name, value in _of(masks).items() if name.endswith("Mask")},
        "swag": {"fit_diagonal_swag_var": masks.fit_diagonal_swag_var},
        "utils": _of(functions) | {"symeig": matrix.symeig},
    }
    curvature = {name: _of(backends, only=name) for name in ("asdfghjkl", "asdl", "backpack", "curvlinops")}
    interfaces = ("CurvatureInterface", "GGNInterface", "EFInterface")
    curvature["curvature"] = {name: getattr(backends, name) for name in interfaces}
    everything = whole | last | _of(subnet, enums) | {"Laplace": front.Laplace}
    return {
        "laplace": everything | {"marglik_training": marglik.marglik_training},
        "laplace.baselaplace": whole,
        "laplace.lllaplace": last,
        "laplace.subnetlaplace": _of(subnet),
        "laplace.laplace": {"Laplace": front.Laplace},
        "laplace.marglik_training": {"marglik_training": marglik.marglik_training},
        "laplace.utils": {name: value for part in utils.values() for name, value in part.items()},
        **{f"laplace.utils.{name}": part for name, part in utils.items()},
        "laplace.curvature": {name: value for part in curvature.values() for name, value in part.items()},
        **{f"laplace.curvature.{name}": part for name, part in curvature.items()},
    }


def install() -> None:
    """Make this layer importable as module `laplace`, for packages that import laplace-torch.

    Call it before they are imported. An installed laplace-torch is hidden for the rest of the process.

        lapwing.compat.laplace_torch.install()
        from laplace import Laplace
    """
    offered = contents()
    for name in [known for known in sys.modules if known == "laplace" or known.startswith("laplace.")]:
        del sys.modules[name]
    _place(offered)


def place_beside(package: str) -> None:
    """Make laplace-torch's submodules importable below `package`, as in `lapwing.compat.laplace_torch.utils`."""
    offered = {name.replace("laplace", package, 1): names for name, names in contents().items() if name != "laplace"}
    _place(offered)


def _place(offered: dict[str, Names]) -> None:
    """Create modules with these names and contents."""
    for name, names in offered.items():
        module = ModuleType(name, f"Lapwing in the place of laplace-torch's {name}.")
        inside = any(other.startswith(f"{name}.") for other in offered)
        module.__spec__ = ModuleSpec(name, None, is_package=inside)
        module.__dict__.update(names)
        module.__dict__["__all__"] = [key for key in names if not key.startswith("_")]
        if inside:
            module.__path__ = []
        sys.modules[name] = module
    for name in offered:
        parent, _, own = name.rpartition(".")
        if parent and not hasattr(sys.modules[parent], own):
            setattr(sys.modules[parent], own, sys.modules[name])
