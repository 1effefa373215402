"""Prune weights and units that the posterior finds least important, and find inputs that carry no information."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, UnsupportedModel, UnsupportedOperation
from lapwing.linalg import PSD
from lapwing.model import Params
from lapwing.posterior import Belief


class Fitted(Protocol):
    """The part of a `Laplace` object that pruning needs."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def params(self) -> Params: ...
    @property
    def belief(self) -> Belief: ...


SCORES = ("posterior", "signal", "magnitude", "random")


def scores_of(by: str, theta: Tensor, precision: PSD, generator: torch.Generator | None) -> Tensor:
    """Return how important each weight is, (P,), by one of `SCORES`."""
    if by == "posterior":  # twice the loss of the quadratic log posterior when this weight alone becomes zero
        return theta.square() * precision.diagonal().double()
    if by == "signal":  # the same loss when the other weights adapt; the squared ratio of signal to noise
        return theta.square() / precision.inverse_diagonal().double()
    if by == "magnitude":
        return theta.square()
    place = None if generator is None else generator.device
    return torch.rand(theta.shape, dtype=theta.dtype, generator=generator, device=place).to(theta.device)


@dataclass(frozen=True, eq=False)
class Pruned:
    """A pruned copy of the network. The original is untouched; fine-tune the copy and fit again.

    `masks` are False where a weight of a selected parameter is zero now. After structured pruning, `removed` lists the
    units taken out of each layer, `module` is the smaller network and `masked` the same function at the old size.

    Examples:
        >>> pruned = lapwing.prune(la, 0.9)
        >>> smaller = pruned.module
    """

    module: nn.Module
    masked: nn.Module
    masks: Mapping[str, Tensor]
    scores: Mapping[str, Tensor]
    removed: Mapping[str, Tensor]

    @property
    def sparsity(self) -> float:
        """The share of the weights of the original that was removed.

        Examples:
            >>> print(f"{lapwing.prune(la, 0.5).sparsity:.2f}")
            0.4...
        """
        before = sum(p.numel() for p in self.masked.parameters())
        if self.removed:
            return 1 - sum(p.numel() for p in self.module.parameters()) / before
        return sum(int((~mask).sum()) for mask in self.masks.values()) / before

    @torch.no_grad()
    def apply(self, module: nn.Module) -> None:
        """Set masked weights of a network of the old size to zero again, after a step of fine-tuning.

        Examples:
            >>> pruned = lapwing.prune(la, 0.5)
            >>> optimizer = torch.optim.SGD(pruned.module.parameters(), lr=0.01)
            >>> nn.functional.cross_entropy(pruned.module(x), y).backward()
            >>> optimizer.step()
            >>> pruned.apply(pruned.module)  # removed weights are zero again
        """
        live = dict(module.named_parameters())
        for name, mask in self.masks.items():
            live[name].mul_(mask)


def prune(
    la: Fitted,
    sparsity: float,
    *,
    by: str = "posterior",
    structured: bool = False,
    generator: torch.Generator | None = None,
) -> Pruned:
    """Remove the least important weights, or with `structured` hidden units; `sparsity` is the share to remove.

    `by` is "posterior" (θ²·H_pp, H the posterior precision), "signal" (θ²/Σ_pp), "magnitude" or "random". Scores are
    compared across layers. With priors per weight or unit chosen by the evidence (`train(prior="unit")`), what the data
    do not need has a score near zero. Biases are not pruned one by one. Structured pruning sums the scores of the
    weights that feed a unit and returns a smaller module; it takes stacks of Linear and Conv layers (`nn.Sequential`).

    Examples:
        >>> sparse = lapwing.prune(la, 0.9).module
        >>> small = lapwing.prune(la, 0.5, structured=True).module
    """
    if by not in SCORES:
        raise UnsupportedOperation(f"by is one of {', '.join(SCORES)}; got {by!r}")
    if not 0 <= sparsity < 1:
        raise BadData(f"sparsity is a share of the weights in [0, 1), got {sparsity}")
    if la.params.index is not None:
        raise UnsupportedOperation("pruning needs whole parameters; this posterior is over single weights")
    flat = scores_of(by, la.params.flat.double(), la.belief.posterior.precision, generator)
    scores = {
        name: part.reshape(shape)
        for name, part, shape in zip(la.params.names, flat.split(la.params.sizes), la.params.shapes, strict=True)
    }
    return _by_unit(la, sparsity, scores) if structured else _by_weight(la, sparsity, scores)


def _by_weight(la: Fitted, sparsity: float, scores: dict[str, Tensor]) -> Pruned:
    chosen = {name: score for name, score in scores.items() if score.ndim > 1}
    if not chosen:
        raise UnsupportedOperation("no selected parameter has rows and columns: there is nothing to prune")
    low = _lowest(torch.cat([score.reshape(-1) for score in chosen.values()]), sparsity)
    parts = low.split([score.numel() for score in chosen.values()])
    masks = {name: ~part.reshape(scores[name].shape) for name, part in zip(chosen, parts, strict=True)}
    masked = _masked(la.module, masks)
    return Pruned(masked, masked, masks, scores, {})


def _by_unit(la: Fitted, sparsity: float, scores: dict[str, Tensor]) -> Pruned:
    layers = layers_of(la.module)
    hidden = [layer for layer in layers[:-1] if f"{layer.name}.weight" in scores]
    if not hidden:
        raise UnsupportedOperation("there is no hidden layer with selected weights: nothing to take units from")
    units = {layer.name: _unit_scores(layer, scores) for layer in hidden}
    low = _lowest(torch.cat(list(units.values())), sparsity)
    removed = {}
    for name, score, part in zip(units, units.values(), low.split([len(s) for s in units.values()]), strict=True):
        keep = ~part
        keep[score.argmax()] = True  # keep at least one unit per layer
        removed[name] = (~keep).nonzero().flatten()
    masks: dict[str, Tensor] = {}
    for layer, following in pairwise(layers):
        if layer.name in removed:
            _mask_unit(layer, following, removed[layer.name], masks)
    return Pruned(shrunk(la.module, removed), _masked(la.module, masks), masks, scores, removed)


def _unit_scores(layer: Layer, scores: dict[str, Tensor]) -> Tensor:
    total = scores[f"{layer.name}.weight"].flatten(1).sum(1)
    bias = scores.get(f"{layer.name}.bias")
    return total if bias is None else total + bias


def _mask_unit(layer: Layer, following: Layer, units: Tensor, masks: dict[str, Tensor]) -> None:
    """Mask the weights that feed the given units and those that read them."""
    for name, p in layer.module.named_parameters():
        mask = masks.setdefault(f"{layer.name}.{name}", torch.ones_like(p, dtype=torch.bool))
        mask[units] = False
    weight = following.module.weight
    mask = masks.setdefault(f"{following.name}.weight", torch.ones_like(weight, dtype=torch.bool))
    mask[:, following.columns(units, layer)] = False


def _lowest(scores: Tensor, share: float) -> Tensor:
    """Mark the lowest share of the scores, an exact number of them."""
    low = torch.zeros_like(scores, dtype=torch.bool)
    low[scores.argsort(stable=True)[: round(share * len(scores))]] = True
    return low


def _masked(module: nn.Module, masks: Mapping[str, Tensor]) -> nn.Module:
    changed = copy.deepcopy(module)
    live = dict(changed.named_parameters())
    with torch.no_grad():
        for name, mask in masks.items():
            live[name].mul_(mask.to(live[name].device))
    return changed


def relevance(la: Fitted, parameter: str | None = None) -> Tensor:
    """Return γ_j = Σ_p (1 − τ_p Σ_pp), (inputs,): how many of the weights that read input j the data determine.

    `parameter` is the weight that reads the inputs, (outputs, inputs, …); by default the first selected one. Under a
    prior per input chosen by the evidence an input that carries nothing has γ near zero: automatic relevance
    determination (MacKay 1994).

    Examples:
        >>> trained = lapwing.train(model, train_loader, "classification", epochs=2, prior="input")
        >>> lapwing.relevance(trained.laplace).shape  # one number per input
        torch.Size([4])
    """
    params = la.params
    names = [n for n, shape in zip(params.names, params.shapes, strict=True) if len(shape) > 1]
    name = names[0] if parameter is None and names else parameter
    if name not in names:
        raise BadData(f"parameter is a selected weight with columns, one of {names}; got {parameter!r}")
    prior = la.belief.resolved_prior[1]
    effective = 1 - prior.diagonal().double() * la.belief.posterior.variance.double()
    k = params.names.index(name)
    own = effective.split(params.sizes)[k].reshape(params.shapes[k])
    return own.transpose(0, 1).flatten(1).sum(1)


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
        """Return the columns of this layer's weight that read the given units of the previous layer."""
        repeats = self.module.weight.shape[1] // before.units  # positions of a unit after Flatten
        return (units[:, None] * repeats + torch.arange(repeats, device=units.device)).reshape(-1)


def layers_of(module: nn.Module) -> list[Layer]:
    """Return the layers of a stack in order; refuse a module that is not a stack."""
    found: list[Layer] = []
    for name, part in _leaves(module, ""):
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            if isinstance(part, CONV) and (part.groups != 1 or part.padding_mode != "zeros"):
                raise UnsupportedModel(
                    f"layer {name!r} has groups or a padding mode other than zeros; units cannot be removed"
                )
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


def shrunk(module: nn.Module, removed: Mapping[str, Tensor]) -> nn.Module:
    """Copy the stack without the given units of each layer."""
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
    for layer in layers:  # the sizes that a layer prints
        part = layer.module
        if isinstance(part, nn.Linear):
            part.out_features, part.in_features = part.weight.shape
        else:
            part.out_channels, part.in_channels = part.weight.shape[:2]
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
