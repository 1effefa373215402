"""Posteriors over the last layer: `FullLLLaplace`, `KronLLLaplace`, `DiagLLLaplace`.

They are registered as subclasses of `FullLaplace`, `KronLaplace` and `DiagLaplace`, as in laplace-torch, so that
`isinstance(la, KronLaplace)` is true for the last layer too.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from lapwing.compat.laplace_torch.allweights import (
    DenseCurvature,
    DiagLaplace,
    DiagonalCurvature,
    FullLaplace,
    KroneckerCurvature,
    KronLaplace,
)
from lapwing.compat.laplace_torch.backends import CurvatureInterface
from lapwing.compat.laplace_torch.enums import Likelihood
from lapwing.compat.laplace_torch.extractor import FeatureExtractor, FeatureReduction
from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.laplace import Laplace


class LLLaplace(ParametricLaplace):
    """A posterior over the last layer of a copy of the model; the layer is named, or found by the fit.

    `feature_reduction` is accepted but has no effect, because the model itself reduces its features.
    """

    model: FeatureExtractor

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        feature_reduction: FeatureReduction | str | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type[CurvatureInterface] | None = None,
        last_layer_name: str | None = None,
        backend_kwargs: MutableMapping[str, Any] | None = None,
        asdl_fisher_kwargs: Any = None,
    ) -> None:
        if asdl_fisher_kwargs is not None:
            raise ValueError("asdl_fisher_kwargs is not for a posterior over the last layer")
        model = model.model if isinstance(model, FeatureExtractor) else model
        super().__init__(
            model, likelihood, sigma_noise, 1.0, 0.0, temperature, enable_backprop,
            dict_key_x, dict_key_y, backend, backend_kwargs=backend_kwargs,
        )  # fmt: skip
        own = deepcopy(model)
        for p in own.parameters():  # a frozen network has a posterior over its last layer all the same
            p.requires_grad_(p.is_floating_point())
        self.model = FeatureExtractor(own, last_layer_name, enable_backprop, feature_reduction)
        self._last_layer_name = last_layer_name
        self._known: tuple[str, ...] | None = None
        self._backend_kwargs["last_layer"] = True
        self.n_params = self.n_layers = None
        self.params = []
        self._prior_precision: Any = prior_precision
        self._prior_mean: Any = prior_mean
        self.mean = None
        if self.model.last_layer is not None:
            self._know([f"{last_layer_name}.{name}" for name in dict(self.model.last_layer.named_parameters())])

    def _know(self, names: Any) -> None:
        """Store the names of the parameters of the last layer, and check the settings against their sizes."""
        live = dict(self._network.named_parameters())
        self._known = tuple(names)
        self.params = [live[name] for name in self._known]
        self.n_params, self.n_layers = sum(p.numel() for p in self.params), len(self.params)
        self.prior_precision, self.prior_mean = self._prior_precision, self._prior_mean
        self.mean = self.prior_mean

    @property
    def _network(self) -> nn.Module:
        return self.model.model

    def _selection(self, prefix: str) -> Any:
        return "last_layer" if self._known is None else [prefix + name for name in self._known]

    def fit(self, train_loader: Any, override: bool = True, progress_bar: bool = False) -> None:
        """Fit the posterior over the last layer; `override=False` adds data to an earlier fit."""
        super().fit(train_loader, override, progress_bar)

    def _fitted(self, found: Laplace, outputs: int) -> None:
        inner = "model." if found.module is not self._network else ""
        names = [name.removeprefix(inner) for name in found.params.names]
        owner = names[0].rpartition(".")[0]
        if self.model.last_layer is None and isinstance(self._network.get_submodule(owner), nn.Linear) and owner:
            self.model.set_last_layer(owner)
        self._know(names)
        super()._fitted(found, outputs)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "_last_layer_name": self._last_layer_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        stored = state_dict.get("_last_layer_name")
        if self._last_layer_name != stored:
            raise ValueError(f"the state has last_layer_name={stored!r}, this has {self._last_layer_name!r}")
        super().load_state_dict(state_dict)


@FullLaplace.register
class FullLLLaplace(LLLaplace, DenseCurvature):
    """A dense curvature of the last layer."""

    _key = ("last_layer", "full")


@KronLaplace.register
class KronLLLaplace(LLLaplace, KroneckerCurvature):
    """Kronecker factors of the last layer."""

    _key = ("last_layer", "kron")


@DiagLaplace.register
class DiagLLLaplace(LLLaplace, DiagonalCurvature):
    """A diagonal curvature of the last layer."""

    _key = ("last_layer", "diag")
