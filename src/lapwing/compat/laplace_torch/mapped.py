"""A model that takes a whole mapping as its only argument, called the way Lapwing calls models."""

from __future__ import annotations

from typing import Any

from torch import nn


class Mapped(nn.Module):
    """Calls model(mapping) where Lapwing calls module(**mapping); `kind` makes the mapping (dict, UserDict, …)."""

    def __init__(self, model: nn.Module, kind: type) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, **inputs: Any) -> Any:
        return self.model(self.kind(inputs))
