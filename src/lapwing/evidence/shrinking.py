"""Taking units out of a stack of Linear and Conv layers: a smaller module that computes the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.errors import UnsupportedModel

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
UNITWISE = (  # act on each unit alone, whatever their number
    nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Dropout, nn.Dropout2d, nn.Identity,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d, nn.Flatten,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Layer:
    """A Linear or Conv layer of the stack, and the norms between it and the next."""

    name: str
    module: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    norms: tuple[str, ...] = ()

    @property
    def units(self) -> int:
        return self.module.weight.shape[0]

    def columns(self, units: Tensor, before: Layer) -> Tensor:
        """Columns of this layer's weight that read the given units of the layer before it."""
        repeats = self.module.weight.shape[1] // before.units  # positions of a unit after Flatten
        return (units[:, None] * repeats + torch.arange(repeats, device=units.device)).reshape(-1)


def layers_of(module: nn.Module) -> list[Layer]:
    """The layers of a stack, in order; refuses everything that is not one."""
    found: list[Layer] = []
    for name, part in _leaves(module, ""):
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            _require_whole(name, part)
            if found and part.weight.shape[1] % found[-1].units:
                raise UnsupportedModel(
                    f"layer {name!r} reads {part.weight.shape[1]} inputs, no multiple of the {found[-1].units} units "
                    f"of {found[-1].name!r}: the stack is not a plain chain"
                )
            found.append(Layer(name, part))
        elif isinstance(part, NORM) and found:
            found[-1] = Layer(found[-1].name, found[-1].module, (*found[-1].norms, name))
        elif not isinstance(part, UNITWISE):
            raise UnsupportedModel(
                f"structured pruning takes units out of nn.Sequential stacks of Linear, Conv, BatchNorm, pooling and "
                f"elementwise layers; {name or 'the model'!r} is a {type(part).__name__}. Prune single weights "
                "(structured=False) instead."
            )
    if len(found) < 2:
        raise UnsupportedModel(f"a stack with hidden units has at least two layers with weights, found {len(found)}")
    return found


def _leaves(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(module, nn.Sequential):
        yield name, module
        return
    for key, part in module.named_children():
        yield from _leaves(part, f"{name}.{key}" if name else key)


def _require_whole(name: str, part: nn.Module) -> None:
    if isinstance(part, CONV) and (part.groups != 1 or part.padding_mode != "zeros"):
        raise UnsupportedModel(f"layer {name!r} has groups or a padding mode other than zeros; units cannot be removed")


def shrunk(module: nn.Module, removed: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the stack without the given units of each layer."""
    small = copy.deepcopy(module)
    parts = dict(small.named_modules())
    layers = layers_of(small)
    original = layers_of(module)
    for k, layer in enumerate(layers):
        gone = removed.get(layer.name)
        if gone is None or not len(gone):
            continue
        keep = _others(layer.units, gone)
        _cut(parts[layer.name], 0, keep)
        for name in layer.norms:
            _cut(parts[name], 0, keep)
        following = layers[k + 1]
        columns = _others(following.module.weight.shape[1], original[k + 1].columns(gone, original[k]))
        _cut(parts[following.name], 1, columns)
    for layer in layers:
        _rename(layer.module)
    return small


def _others(count: int, gone: Tensor) -> Tensor:
    keep = torch.ones(count, dtype=torch.bool, device=gone.device)
    keep[gone] = False
    return keep.nonzero().flatten()


def _cut(part: nn.Module, axis: int, keep: Tensor) -> None:
    for name, p in list(part.named_parameters(recurse=False)):
        if p.ndim > axis:
            chosen = p.detach().index_select(axis, keep.to(p.device)).clone()
            setattr(part, name, nn.Parameter(chosen, requires_grad=p.requires_grad))
    if axis == 0 and isinstance(part, NORM):
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.ndim:
                setattr(part, name, buffer.index_select(0, keep.to(buffer.device)).clone())
        part.num_features = len(keep)


def _rename(part: nn.Module) -> None:
    """Let the sizes that a layer prints be those of its weight."""
    if isinstance(part, nn.Linear):
        part.out_features, part.in_features = part.weight.shape
    elif isinstance(part, CONV):
        part.out_channels, part.in_channels = part.weight.shape[:2]
