"""The curvature backends of laplace-torch by name. A backend only chooses the factor; Lapwing computes it.

`CurvlinopsGGN`, `AsdlGGN` and `BackPackGGN` all stand for the exact GGN, or its Monte Carlo estimate with
`stochastic=True`. Names that end in EF stand for the empirical Fisher, names in Hessian for the exact Hessian.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from lapwing.curvature import GGN, EmpiricalFisher, Factor, Hessian, MCFisher


class CurvatureInterface(ABC):
    """The interface of a backend: a model, and Jacobians of its outputs.

    CurvlinopsGGN(model, "classification").jacobians(x)
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        last_layer: bool = False,
        subnetwork_indices: Tensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        **options: Any,
    ) -> None:
        self.model, self.likelihood, self.last_layer = model, likelihood, last_layer
        self.subnetwork_indices = subnetwork_indices
        self.dict_key_x, self.dict_key_y, self.options = dict_key_x, dict_key_y, options

    @property
    @abstractmethod
    def library(self) -> str:
        """The library that laplace-torch uses for this backend, a plain class attribute."""

    @classmethod
    @abstractmethod
    def factor(cls, options: MutableMapping[str, Any]) -> Factor:
        """Return the factor that the backend stands for, given its `backend_kwargs`."""

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Return ∂f/∂θ (batch, outputs, weights) of the trainable weights, and f (batch, outputs)."""
        weights = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        rest = {n: t for n, t in (*self.model.named_parameters(), *self.model.named_buffers()) if n not in weights}
        leaves = weights if enable_backprop else {name: p.detach() for name, p in weights.items()}

        def both(values: dict[str, Tensor], item: Any) -> tuple[Tensor, Tensor]:
            batch = item[None] if isinstance(item, Tensor) else type(x)({k: v[None] for k, v in item.items()})
            f = functional_call(self.model, {**rest, **values}, (batch,))[0]
            return f, f

        items = x if isinstance(x, Tensor) else dict(x)
        with torch.set_grad_enabled(enable_backprop):
            found, f = vmap(jacrev(both, has_aux=True), in_dims=(None, 0))(leaves, items)
        J = torch.cat([found[name].reshape(*f.shape, -1) for name in weights], -1)
        return (J if self.subnetwork_indices is None else J[..., self.subnetwork_indices]), f

    functorch_jacobians = jacobians

    def last_layer_jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Return ∂f/∂θ (batch, outputs, weights) of the last layer, and f; the model is a `FeatureExtractor`."""
        f, features = self.model.forward_with_features(x)  # type: ignore[operator]
        eye = torch.eye(f.shape[-1], dtype=features.dtype, device=features.device)
        J = torch.einsum("kc,bi->bkci", eye, features).flatten(2)
        if self.model.last_layer.bias is not None:  # type: ignore[union-attr]
            J = torch.cat([J, eye.expand(len(J), -1, -1)], -1)
        return (J, f) if enable_backprop else (J.detach(), f.detach())


class GGNInterface(CurvatureInterface):
    """The generalized Gauss–Newton matrix, exact or from `num_samples` draws with `stochastic=True`."""

    @classmethod
    def factor(cls, options: MutableMapping[str, Any]) -> Factor:
        if options.get("stochastic", False):
            return MCFisher(int(options.get("num_samples", options.get("mc_samples", 1))))
        return GGN()


class EFInterface(CurvatureInterface):
    """The empirical Fisher."""

    @classmethod
    def factor(cls, options: MutableMapping[str, Any]) -> Factor:
        return EmpiricalFisher()


class HessianInterface(CurvatureInterface):
    """The exact Hessian, for structure "full"."""

    @classmethod
    def factor(cls, options: MutableMapping[str, Any]) -> Factor:
        return Hessian()


class CurvlinopsInterface(CurvatureInterface):
    """The backends that use curvlinops in laplace-torch."""

    library = "curvlinops"


class CurvlinopsGGN(CurvlinopsInterface, GGNInterface):
    """The exact GGN, or its Monte Carlo estimate."""


class CurvlinopsEF(CurvlinopsInterface, EFInterface):
    """The empirical Fisher."""


class CurvlinopsHessian(CurvlinopsInterface, HessianInterface):
    """The exact Hessian."""


class AsdlInterface(CurvatureInterface):
    """The backends that use asdl in laplace-torch."""

    library = "asdl"


class AsdlGGN(AsdlInterface, GGNInterface):
    """The exact GGN, or its Monte Carlo estimate."""


class AsdlEF(AsdlInterface, EFInterface):
    """The empirical Fisher."""


class AsdlHessian(AsdlInterface, HessianInterface):
    """The exact Hessian."""


class BackPackInterface(CurvatureInterface):
    """The backends that use backpack in laplace-torch."""

    library = "backpack"


class BackPackGGN(BackPackInterface, GGNInterface):
    """The exact GGN, or its Monte Carlo estimate."""


class BackPackEF(BackPackInterface, EFInterface):
    """The empirical Fisher."""


class AsdfghjklInterface(CurvatureInterface):
    """The backends that use asdfghjkl in laplace-torch."""

    library = "asdfghjkl"


class AsdfghjklGGN(AsdfghjklInterface, GGNInterface):
    """The exact GGN, or its Monte Carlo estimate."""


class AsdfghjklEF(AsdfghjklInterface, EFInterface):
    """The empirical Fisher."""


class AsdfghjklHessian(AsdfghjklInterface, HessianInterface):
    """The exact Hessian."""
