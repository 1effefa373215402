"""Subnetwork masks, which choose the single weights of a subnetwork posterior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from lapwing.compat.laplace_torch.enums import Likelihood
from lapwing.compat.laplace_torch.extractor import FeatureExtractor, last_layer_of


class SubnetMask(ABC):
    """A choice of weights; a subclass returns a mask over all weights from `get_subnet_mask`.

    mask = LargestMagnitudeSubnetMask(model, n_params_subnet=100)
    mask.select();  mask.indices
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameter_vector = parameters_to_vector(model.parameters()).detach()
        self._n_params = len(self.parameter_vector)
        self._indices: Tensor | None = None
        self._n_params_subnet: int | None = None

    @property
    def indices(self) -> Tensor:
        """Positions of the chosen weights in `parameters_to_vector(model.parameters())`."""
        if self._indices is None:
            raise AttributeError("the subnetwork is not chosen yet: call select() first")
        return self._indices

    @property
    def n_params_subnet(self) -> int:
        """The number of chosen weights."""
        return len(self.indices) if self._n_params_subnet is None else self._n_params_subnet

    def select(self, train_loader: Any = None) -> Tensor:
        """Choose the weights, and return their positions."""
        if self._indices is not None:
            raise ValueError("the subnetwork is already chosen: make a new mask for another one")
        self._indices = self.convert_subnet_mask_to_indices(self.get_subnet_mask(train_loader))
        return self._indices

    def convert_subnet_mask_to_indices(self, subnet_mask: Tensor) -> Tensor:
        """Return the positions where a mask over all weights is 1."""
        kinds = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
        if not isinstance(subnet_mask, Tensor) or subnet_mask.dtype not in kinds or subnet_mask.ndim != 1:
            raise ValueError("a mask is a vector of 0 and 1, one per weight, of an integer type or torch.bool")
        if len(subnet_mask) != self._n_params or not bool(((subnet_mask == 0) | (subnet_mask == 1)).all()):
            raise ValueError(f"a mask has {self._n_params} entries, each 0 or 1")
        return subnet_mask.nonzero().flatten()

    @abstractmethod
    def get_subnet_mask(self, train_loader: Any) -> Tensor:
        """Return a mask over all weights."""


class ScoreBasedSubnetMask(SubnetMask):
    """The `n_params_subnet` weights with the highest scores; a subclass computes the scores."""

    def __init__(self, model: nn.Module, n_params_subnet: int) -> None:
        super().__init__(model)
        if n_params_subnet is None or n_params_subnet > self._n_params:
            raise ValueError(f"n_params_subnet is a number of weights up to {self._n_params}, got {n_params_subnet}")
        self._n_params_subnet = n_params_subnet

    @abstractmethod
    def compute_param_scores(self, train_loader: Any) -> Tensor:
        """Return one score per weight."""

    def get_subnet_mask(self, train_loader: Any) -> Tensor:
        scores = self.compute_param_scores(train_loader)
        if scores.shape != self.parameter_vector.shape:
            raise ValueError(f"expected a score for each of {self._n_params} weights, got {tuple(scores.shape)}")
        mask = torch.zeros_like(self.parameter_vector, dtype=torch.bool)
        mask[torch.argsort(scores, descending=True)[: self._n_params_subnet]] = True
        return mask


class RandomSubnetMask(ScoreBasedSubnetMask):
    """Random weights."""

    def compute_param_scores(self, train_loader: Any) -> Tensor:
        return torch.rand_like(self.parameter_vector)


class LargestMagnitudeSubnetMask(ScoreBasedSubnetMask):
    """The weights with the largest absolute values."""

    def compute_param_scores(self, train_loader: Any) -> Tensor:
        return self.parameter_vector.abs()


class LargestVarianceDiagLaplaceSubnetMask(ScoreBasedSubnetMask):
    """The weights with the largest marginal variances under a diagonal posterior over all weights."""

    def __init__(self, model: nn.Module, n_params_subnet: int, diag_laplace_model: Any) -> None:
        super().__init__(model, n_params_subnet)
        self.diag_laplace_model = diag_laplace_model

    def compute_param_scores(self, train_loader: Any) -> Tensor:
        _require_data(train_loader)
        self.diag_laplace_model.fit(train_loader)
        return self.diag_laplace_model.posterior_variance


class LargestVarianceSWAGSubnetMask(ScoreBasedSubnetMask):
    """The weights with the largest marginal variances under diagonal SWAG over all weights."""

    def __init__(
        self,
        model: nn.Module,
        n_params_subnet: int,
        likelihood: Likelihood | str = Likelihood.CLASSIFICATION,
        swag_n_snapshots: int = 40,
        swag_snapshot_freq: int = 1,
        swag_lr: float = 0.01,
    ) -> None:
        if likelihood not in (Likelihood.CLASSIFICATION, Likelihood.REGRESSION):
            raise ValueError(f"likelihood is 'classification' or 'regression', got {likelihood!r}")
        super().__init__(model, n_params_subnet)
        self.likelihood, self.swag_lr = likelihood, swag_lr
        self.swag_n_snapshots, self.swag_snapshot_freq = swag_n_snapshots, swag_snapshot_freq

    def compute_param_scores(self, train_loader: Any) -> Tensor:
        _require_data(train_loader)
        criterion = nn.CrossEntropyLoss() if self.likelihood == Likelihood.CLASSIFICATION else nn.MSELoss()
        return fit_diagonal_swag_var(
            self.model, train_loader, criterion, self.swag_n_snapshots, self.swag_snapshot_freq, self.swag_lr
        )


class ParamNameSubnetMask(SubnetMask):
    """All weights of the parameters with these names."""

    def __init__(self, model: nn.Module, parameter_names: list[str]) -> None:
        super().__init__(model)
        self._parameter_names = parameter_names

    def get_subnet_mask(self, train_loader: Any) -> Tensor:
        known = dict(self.model.named_parameters())
        missing = [name for name in self._parameter_names if name not in known]
        if missing or not self._parameter_names:
            raise ValueError(f"name at least one parameter of the model; it has no {missing}, only {list(known)}")
        chosen = set(self._parameter_names)
        parts = [torch.full((p.numel(),), name in chosen, device=p.device) for name, p in known.items()]
        return torch.cat(parts)


class ModuleNameSubnetMask(SubnetMask):
    """All weights of the modules with these names, which have no children."""

    def __init__(self, model: nn.Module, module_names: list[str]) -> None:
        super().__init__(model)
        self._module_names = module_names

    def get_subnet_mask(self, train_loader: Any) -> Tensor:
        modules = dict(self.model.named_modules())
        if not self._module_names:
            raise ValueError("name at least one module of the model")
        for name in self._module_names:
            own = modules.get(name)
            if own is None or any(True for _ in own.children()) or not any(True for _ in own.parameters()):
                raise ValueError(f"there is no module {name!r} with weights and without children in the model")
        chosen = {id(p) for name in self._module_names for p in modules[name].parameters()}
        return torch.cat([torch.full((p.numel(),), id(p) in chosen, device=p.device) for p in self.model.parameters()])


class LastLayerSubnetMask(ModuleNameSubnetMask):
    """All weights of the last layer, which is named or found in a forward pass."""

    def __init__(self, model: nn.Module, last_layer_name: str | None = None) -> None:
        super().__init__(model, [])
        self._last_layer_name = last_layer_name
        if last_layer_name is not None:
            FeatureExtractor(model, last_layer_name)  # refuses a name that is none, or no linear layer

    def get_subnet_mask(self, train_loader: Any) -> Tensor:
        _require_data(train_loader)
        if self._last_layer_name is None:
            x = next(iter(train_loader))[0][:1]
            self._last_layer_name = last_layer_of(self.model, x.to(self.parameter_vector.device))
        self._module_names = [self._last_layer_name]
        return super().get_subnet_mask(train_loader)


def fit_diagonal_swag_var(
    model: nn.Module,
    train_loader: Any,
    criterion: nn.Module,
    n_snapshots_total: int = 40,
    snapshot_freq: int = 1,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 3e-4,
    min_var: float = 1e-30,
) -> Tensor:
    """Return the variance of each weight over iterates of SGD on a copy of the model (SWAG, Maddox et al. 2019)."""
    own = deepcopy(model).train()
    weights = list(own.parameters())
    optimizer = torch.optim.SGD(weights, lr=lr, momentum=momentum, weight_decay=weight_decay)
    mean = spread = torch.zeros_like(parameters_to_vector(weights).detach())
    seen = 0
    for epoch in range(snapshot_freq * n_snapshots_total):
        for x, y in train_loader:
            optimizer.zero_grad()
            criterion(own(x.to(weights[0].device)), y.to(weights[0].device)).backward()
            optimizer.step()
        if epoch % snapshot_freq == 0:
            seen, now = seen + 1, parameters_to_vector(weights).detach()
            change, mean = now - mean, mean + (now - mean) / seen
            spread = spread + change * (now - mean)
    return (spread / seen).clamp(min=min_var)


def _require_data(train_loader: Any) -> None:
    if train_loader is None:
        raise ValueError("this mask needs training data: select(train_loader)")
