"""`BaseLaplace`: a model with the settings of laplace-torch, which may change at any time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lapwing.compat.laplace_torch.backends import CurvatureInterface, CurvlinopsGGN
from lapwing.compat.laplace_torch.enums import Likelihood
from lapwing.errors import BadData


class MissingKey(BadData, KeyError):
    """A batch that is a mapping lacks the entry with the targets."""

    __str__ = Exception.__str__


class BaseLaplace(ABC):
    """A model, a likelihood and the settings of its posterior, before or after a fit.

    `prior_precision` may be one number, one per parameter tensor or one per weight. `temperature` divides the
    likelihood (1/T of `lapwing.fit`). Arguments have the names and the order of laplace-torch, and most are attributes,
    because some packages read the one to fill the other.
    """

    n_params: int | None
    n_layers: int | None

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type[CurvatureInterface] | None = None,
        backend_kwargs: MutableMapping[str, Any] | None = None,
        asdl_fisher_kwargs: MutableMapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.likelihood = likelihood
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.is_subset_params = len(self.params) < len(list(model.parameters()))
        self.n_params, self.n_layers = sum(p.numel() for p in self.params), len(self.params)
        self._changed()
        self.sigma_noise = sigma_noise
        if self.likelihood != Likelihood.REGRESSION and bool(self.sigma_noise != 1):
            raise ValueError("sigma_noise other than 1 is for likelihood='regression'")
        self.prior_precision = prior_precision
        self.prior_mean = prior_mean
        self.temperature = temperature
        self.enable_backprop = enable_backprop
        self.dict_key_x, self.dict_key_y = dict_key_x, dict_key_y
        given = type(backend) if isinstance(backend, CurvatureInterface) else backend  # some pass la.backend on
        self._backend_cls = CurvlinopsGGN if given is None else given
        self._backend_kwargs = dict(backend_kwargs or {})
        self._backend: CurvatureInterface | None = None
        self.n_outputs = 0
        self.n_data = 0
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Take the state of an object that is not fitted."""

    @abstractmethod
    def _changed(self) -> None:
        """Forget what depends on the settings."""

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def backend(self) -> CurvatureInterface:
        """The backend object, which computes Jacobians for those who ask for them."""
        if self._backend is None:
            self._backend = self._backend_cls(
                self.model,
                self.likelihood,
                dict_key_x=self.dict_key_x,
                dict_key_y=self.dict_key_y,
                **self._backend_kwargs,
            )
        return self._backend

    # --- settings ---------------------------------------------------------------------------------------------------

    @property
    def likelihood(self) -> Likelihood:
        """What the outputs mean; after a fit, it decides only how predictions are returned."""
        return self._likelihood

    @likelihood.setter
    def likelihood(self, likelihood: Likelihood | str) -> None:
        if likelihood not in [kind.value for kind in Likelihood]:
            raise ValueError(f"likelihood is one of {[kind.value for kind in Likelihood]}, got {likelihood!r}")
        self._likelihood = Likelihood(likelihood)

    @property
    def prior_mean(self) -> Tensor:
        """The prior mean: one number, or one per weight."""
        return self._prior_mean

    @prior_mean.setter
    def prior_mean(self, prior_mean: float | Tensor) -> None:
        value = self._number("prior_mean", prior_mean)
        if value.ndim and len(value) not in (1, self.n_params):
            raise ValueError(f"prior_mean has {len(value)} entries, expected 1 or {self.n_params}")
        self._prior_mean = value
        self._changed()

    @property
    def prior_precision(self) -> Tensor:
        """The prior precision, a vector: one number, one per parameter tensor or one per weight."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, prior_precision: float | Tensor) -> None:
        value = self._number("prior_precision", prior_precision).reshape(-1)
        if len(value) not in self._prior_lengths:
            raise ValueError(
                f"prior_precision has {len(value)} entries, expected one of {sorted(self._prior_lengths)}: a number, "
                "one per parameter tensor, or one per weight"
            )
        self._prior_precision = value
        self._changed()

    @property
    def _prior_lengths(self) -> set[int]:
        return {1, self.n_layers or 1, self.n_params or 1}

    @property
    def prior_precision_diag(self) -> Tensor:
        """One prior precision per weight, (P,)."""
        return self._per_weight(self.prior_precision)

    def _per_weight(self, values: Tensor) -> Tensor:
        """Expand a number, or one per tensor, to one per weight."""
        if values.numel() == 1:
            return values.reshape(()) * torch.ones(self.n_params or 0, device=self._device, dtype=self._dtype)
        if len(values) == self.n_params:
            return values
        return values.repeat_interleave(torch.tensor([p.numel() for p in self.params], device=values.device))

    @property
    def sigma_noise(self) -> Tensor:
        """The standard deviation of the noise, a 0-d tensor."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, sigma_noise: float | Tensor) -> None:
        value = self._number("sigma_noise", sigma_noise)
        if value.numel() > 1:
            raise ValueError("sigma_noise is one number. For one per output, use lapwing.fit(..., Gaussian(noise=...))")
        self._sigma_noise = value.reshape(())
        self._changed()

    @property
    def temperature(self) -> float:
        """What the log-likelihood is divided by."""
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        self._temperature = temperature
        self._changed()

    def _number(self, name: str, value: Any) -> Tensor:
        """Return a real number, or a vector of them, on the device and in the dtype of the model."""
        real = np.isscalar(value) and not isinstance(value, str) and np.isreal(value)
        if not (real or isinstance(value, Tensor)):
            raise ValueError(f"{name} is a number or a tensor, got {value!r}")
        found = torch.as_tensor(value, device=self._device, dtype=self._dtype)
        if found.ndim > 1:
            raise ValueError(f"{name} is a number or a vector, got shape {tuple(found.shape)}")
        return found

    @property
    def _H_factor(self) -> Tensor:
        """What the curvature is multiplied with, 1/σ²/temperature."""
        return 1 / self.sigma_noise.square() / self.temperature

    # --- the likelihood of the training data -------------------------------------------------------------------------

    @property
    @abstractmethod
    def loss(self) -> Tensor | float:
        """−Σ log p of the training data, for regression ½ Σ (y − f)²; 0 before a fit."""

    @property
    def log_likelihood(self) -> Tensor:
        """The tempered log-likelihood of the training data; differentiable in `sigma_noise`.

        As in laplace-torch, the temperature divides the squared residuals but not the normalizer of the Gaussian.
        """
        return self._log_likelihood().to(self._dtype)

    @abstractmethod
    def _loss(self) -> Tensor:
        """Return the loss in float64."""

    def _log_likelihood(self) -> Tensor:
        """Return the tempered log-likelihood in float64."""
        sigma = self.sigma_noise.double()
        found = -self._loss() / sigma.square() / self.temperature
        if self.likelihood != Likelihood.REGRESSION:
            return found
        return found - self.n_data * self.n_outputs * torch.log(sigma * math.sqrt(2 * math.pi))

    def _targets_of(self, batch: Any) -> tuple[Any, Any]:
        """Return inputs and targets of a batch, a pair or a mapping."""
        if not isinstance(batch, MutableMapping):
            x, y = batch
            return x, y
        if self.dict_key_y not in batch:
            raise MissingKey(f"a batch has the keys {list(batch)}; dict_key_y={self.dict_key_y!r} is none of them")
        return dict(batch), batch[self.dict_key_y]
