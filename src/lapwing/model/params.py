"""The selected parameters of a module as one flat vector, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, UnsupportedModel


@dataclass(frozen=True, eq=False)
class Params:
    """Names, shapes and values of the selected parameters, in the order of `named_parameters()`.

    A flat vector is the concatenation of the tensors, each flattened row-major; a tied tensor appears once, under
    its first name. `index`, if given, picks single weights out of that vector (a subnetwork); every vector that
    Lapwing hands out then has the length of `index`.
    """

    names: tuple[str, ...]
    values: tuple[Tensor, ...]
    index: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Module, names: tuple[str, ...], index: Tensor | None = None) -> Params:
        """Copy the named parameters out of a module."""
        live = dict(module.named_parameters())
        unreal = [name for name in names if live[name].is_complex()]
        if unreal:
            raise UnsupportedModel(
                f"there is no posterior over complex weights ({', '.join(unreal)}). Leave them out with select=, or "
                "keep real and imaginary parts as parameters (torch.view_as_complex)."
            )
        require_no_hooks({name: live[name] for name in names})
        return cls(names, tuple(live[name].detach().clone() for name in names), index)

    @cached_property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(v.shape for v in self.values)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of weights of each tensor."""
        return tuple(v.numel() for v in self.values)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts in the whole flat vector."""
        starts, at = [], 0
        for size in self.sizes:
            starts.append(at)
            at += size
        return tuple(starts)

    @cached_property
    def total(self) -> int:
        """Length of the whole flat vector, before `index` picks from it."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """Length P of the vectors that structures and posteriors see."""
        return self.total if self.index is None else self.index.numel()

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type that curvature is accumulated in: the widest of the parameters, at least float32."""
        wide = torch.float32
        for value in self.values:
            wide = torch.promote_types(wide, value.dtype)
        return wide

    @property
    def device(self) -> torch.device:
        return self.values[0].device

    @cached_property
    def flat(self) -> Tensor:
        """The values as one vector (P,)."""
        return self._whole if self.index is None else self._whole[self.index]

    @property
    def _whole(self) -> Tensor:
        return self.flatten(dict(zip(self.names, self.values, strict=True)))

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """{name: tensor} -> (total,)."""
        return torch.cat([tensors[name].reshape(-1).to(self.dtype) for name in self.names])

    def expand(self, theta: Tensor, base: Tensor | None = None) -> Tensor:
        """(*b, P) -> (*b, total): weights that a subnetwork leaves out come from `base`, or are zero."""
        if theta.shape[-1] != self.size:
            raise BadData(f"expected rows of length {self.size}, got {tuple(theta.shape)}")
        if self.index is None:
            return theta
        shape = (*theta.shape[:-1], self.total)
        whole = theta.new_zeros(shape) if base is None else base.to(theta).expand(shape).clone()
        return whole.index_copy(-1, self.index, theta)

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """(*b, P) -> {name: (*b, *shape)}, in each parameter's own dtype; left-out weights keep their values."""
        whole = theta
        if self.index is not None:
            whole = self.expand(theta, self._whole)
        elif theta.shape[-1] != self.total:
            raise BadData(f"expected rows of length {self.total}, got {tuple(theta.shape)}")
        return self._split(whole)

    def tangent(self, direction: Tensor) -> dict[str, Tensor]:
        """(P,) -> {name: shape}: a direction in weight space; left-out weights do not move."""
        return self._split(self.expand(direction))

    def _split(self, whole: Tensor) -> dict[str, Tensor]:
        parts = whole.split(self.sizes, dim=-1)
        return {
            name: part.reshape((*whole.shape[:-1], *value.shape)).to(value.dtype)
            for name, part, value in zip(self.names, parts, self.values, strict=True)
        }


def require_no_hooks(parameters: Mapping[str, Tensor]) -> None:
    """Refuse parameters with hooks, which may change gradients (clipping, masks): rows would not be derivatives."""
    hooked = [name for name, p in parameters.items() if p._backward_hooks]
    if hooked:
        raise UnsupportedModel(
            f"gradient hooks are registered on {', '.join(map(repr, hooked[:5]))}{' and others' * (len(hooked) > 5)} "
            "(Tensor.register_hook): they can change gradients, and curvature needs derivatives as they are. Remove "
            "them before the fit (handle.remove(), wandb.unwatch()), or leave these parameters out with select=."
        )
