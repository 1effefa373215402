"""Adapters of PEFT: which tensors of a model belong to which adapter, told by their containers, without PEFT itself."""

from __future__ import annotations

from torch import nn

WRAPPERS = ("base_layer", "original_module")  # under these names an adapter keeps the layer that it changes


def adapter_names(module: nn.Module) -> set[str]:
    """Return the names of all adapters that a model holds; empty for a model without adapters."""
    found: set[str] = set()
    for part in module.modules():
        config = vars(part).get("peft_config")
        if isinstance(config, dict):
            found |= {name for name in config if isinstance(name, str)}
    return found


def active_adapters(module: nn.Module) -> set[str]:
    """Return the names of the adapters that take part in the forward pass of any layer, as the layers tell."""
    found: set[str] = set()
    for part in module.modules():
        if isinstance(getattr(part, "peft_config", None), dict):  # the whole model, from which layers may differ
            continue
        active = getattr(part, "active_adapters", None)
        if isinstance(active, list | tuple) and not getattr(part, "disable_adapters", False):
            found |= {name for name in active if isinstance(name, str)}
    return found & adapter_names(module)


def adapter_containers(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the containers that hold one entry per adapter, such as `…q_proj.lora_A`."""
    names = adapter_names(module)
    kinds = (nn.ModuleDict, nn.ParameterDict)
    if not names:
        return ()
    return tuple(
        path for path, part in module.named_modules() if isinstance(part, kinds) and names & {str(key) for key in part}
    )


def adapter_tensors(module: nn.Module) -> dict[str, tuple[str, str]]:
    """Map parameters and buffers of adapters to their adapter and to their name without the adapter's.

    `…q_proj.lora_A.default.weight` belongs to `default` and is called `…q_proj.lora_A.weight` without it.
    """
    containers, names = adapter_containers(module), adapter_names(module)
    found = {}
    for name in (*dict(module.named_parameters()), *dict(module.named_buffers())):
        for path in containers:
            if name.startswith(f"{path}."):
                adapter, *rest = name[len(path) + 1 :].split(".")
                if adapter in names:
                    found[name] = (adapter, without_wrappers(".".join([path, *rest])))
                    break
    return found


def without_wrappers(name: str) -> str:
    """Return the name that a tensor has in the model without adapters around it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
