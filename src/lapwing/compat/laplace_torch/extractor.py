"""`FeatureExtractor`: a network that also returns the inputs of its last linear layer."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn


class FeatureReduction(StrEnum):
    """How features with positions, (batch, positions, features), become (batch, features)."""

    PICK_FIRST = "pick_first"
    PICK_LAST = "pick_last"
    AVERAGE = "average"


class FeatureExtractor(nn.Module):
    """A network whose last linear layer is known by name or found in the first forward pass.

    The hooks that read features exist only during a forward pass, so that the network does not change.

        out, features = FeatureExtractor(model).forward_with_features(x)
    """

    last_layer: nn.Module | None

    def __init__(
        self,
        model: nn.Module,
        last_layer_name: str | None = None,
        enable_backprop: bool = False,
        feature_reduction: FeatureReduction | str | None = None,
    ) -> None:
        super().__init__()
        self.model, self.enable_backprop = model, enable_backprop
        self.feature_reduction = None if feature_reduction is None else FeatureReduction(feature_reduction)
        self._last_layer_name: str | None = None
        object.__setattr__(self, "last_layer", None)  # registered under `model` already
        if last_layer_name is not None:
            self.set_last_layer(last_layer_name)

    def forward(self, x: Any) -> Tensor:
        return self.find_last_layer(x) if self.last_layer is None else self.model(x)

    def forward_with_features(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the inputs of the last layer."""
        if self.last_layer is None:
            self.find_last_layer(x)
        assert self.last_layer is not None
        seen: list[Tensor] = []
        handle = self.last_layer.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
        try:
            out = self.model(x)
        finally:
            handle.remove()
        features = seen[-1] if self.enable_backprop else seen[-1].detach()
        return out, self._reduced(features)

    def _reduced(self, features: Tensor) -> Tensor:
        if features.ndim <= 2 or self.feature_reduction is None:
            return features
        positions = features.flatten(1, -2)
        if self.feature_reduction is FeatureReduction.AVERAGE:
            return positions.mean(1)
        return positions[:, 0 if self.feature_reduction is FeatureReduction.PICK_FIRST else -1]

    def set_last_layer(self, last_layer_name: str) -> None:
        """Name the last layer, as in `model.named_modules()`."""
        layer = dict(self.model.named_modules())[last_layer_name]
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"the last layer {last_layer_name!r} must be nn.Linear, it is {type(layer).__name__}")
        self._last_layer_name = last_layer_name
        object.__setattr__(self, "last_layer", layer)

    def find_last_layer(self, x: Any) -> Tensor:
        """Find the last layer as the last module without children that a forward pass calls; return the outputs."""
        if self.last_layer is not None:
            raise ValueError("the last layer is already known")
        called: list[str] = []
        leaves = {name: m for name, m in self.model.named_modules() if not any(True for _ in m.children())}
        if len(dict(self.model.named_modules())) <= 2:
            raise ValueError("the model consists of one module only, so it has no last layer apart from itself")
        handles = [
            module.register_forward_hook(lambda m, inputs, output, name=name: called.append(name))
            for name, module in leaves.items()
        ]
        try:
            out = self.model(x)
        finally:
            for handle in handles:
                handle.remove()
        if not called:
            raise ValueError("the forward pass calls no module without children: there is no last layer")
        self.set_last_layer(called[-1])
        return out


def last_layer_of(model: nn.Module, x: Any) -> str:
    """Return the name of the last layer that a forward pass in eval mode calls."""
    finder, training = FeatureExtractor(model), [m for m in model.modules() if m.training]
    try:
        model.eval()
        with torch.no_grad():
            finder(x)
    finally:
        for module in training:
            module.training = True
    assert finder._last_layer_name is not None
    return finder._last_layer_name
