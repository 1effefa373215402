"""`BaseLaplace`: a model with settings that may change at any time, and the tuning of its prior precision."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lapwing.compat.laplace_torch.backends import CurvatureInterface, CurvlinopsGGN
from lapwing.compat.laplace_torch.enums import Likelihood, LinkApprox, PredType, PriorStructure, TuningMethod
from lapwing.compat.laplace_torch.functions import RunningNLLMetric, fix_prior_prec_structure, gaussian_nll, validate
from lapwing.errors import BadData, NotPositiveDefinite


class MissingKey(BadData, KeyError):
    """Raised when a batch that is a mapping has no entry with the targets."""

    __str__ = Exception.__str__


class BaseLaplace(ABC):
    """A model, a likelihood and the settings of its posterior, before or after a fit.

    `prior_precision` may be one number, one per parameter tensor or one per weight. `temperature` divides the
    likelihood (it is 1/T of `lapwing.fit`). Arguments have the names and the order of laplace-torch, and most are also
    attributes, because some packages copy attributes into arguments.
    """

    n_params: int | None
    n_layers: int | None
    _pred_types: tuple[str, ...]

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
            raise ValueError("sigma_noise other than 1 is only for likelihood='regression'")
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
        """Reset to the state before a fit."""

    @abstractmethod
    def _changed(self) -> None:
        """Discard cached values that depend on the settings."""

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def backend(self) -> CurvatureInterface:
        """The backend object, which can compute Jacobians."""
        if self._backend is None:
            self._backend = self._backend_cls(
                self.model,
                self.likelihood,
                dict_key_x=self.dict_key_x,
                dict_key_y=self.dict_key_y,
                **self._backend_kwargs,
            )
        return self._backend

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood: what the outputs mean. After a fit, it affects only how predictions are returned."""
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
        """The number that the log-likelihood is divided by."""
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
        """The factor 1/σ²/temperature of the curvature."""
        return 1 / self.sigma_noise.square() / self.temperature

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
            raise MissingKey(f"a batch has the keys {list(batch)}; dict_key_y={self.dict_key_y!r} is not among them")
        return dict(batch), batch[self.dict_key_y]

    @abstractmethod
    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        """Return the log evidence under the given settings, or else the current ones."""

    def optimize_prior_precision(
        self,
        pred_type: PredType | str | None = None,
        method: TuningMethod | str = TuningMethod.MARGLIK,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: PriorStructure | str = PriorStructure.SCALAR,
        val_loader: Any = None,
        loss: Any = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
    ) -> None:
        """Choose the prior precision by the evidence ("marglik") or on held-out data ("gridsearch").

        "marglik" takes `n_steps` of Adam from `init_prior_prec`, with one precision, one per parameter tensor or one
        per weight. "gridsearch" tries `grid_size` precisions from 10^min to 10^max and takes the one with the smallest
        loss: by default the negative log-likelihood, which for regression uses the predictive variance and the noise. A
        metric starts from zero for every candidate.
        """
        pred_type = self._pred_types[0] if pred_type is None else pred_type
        assert pred_type in self._pred_types, f"pred_type is one of {self._pred_types}, got {pred_type!r}"
        if method == TuningMethod.MARGLIK:
            if val_loader is not None:
                warnings.warn("method='marglik' does not read val_loader; method='gridsearch' does", stacklevel=2)
            self._maximize_evidence(n_steps, lr, init_prior_prec, prior_structure, progress_bar)
        elif method == TuningMethod.GRIDSEARCH:
            if val_loader is None:
                raise ValueError("method='gridsearch' needs held-out data: val_loader=")
            interval = torch.logspace(log_prior_prec_min, log_prior_prec_max, grid_size)
            score = self._default_loss() if loss is None else loss
            options = {"pred_type": pred_type, "link_approx": link_approx, "n_samples": n_samples}
            self.prior_precision = self._gridsearch(score, interval, val_loader, progress_bar=progress_bar, **options)
        else:
            raise ValueError(f"method is 'marglik' or 'gridsearch', got {method!r}")
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")

    def _maximize_evidence(self, n_steps: int, lr: float, start: Any, structure: Any, progress_bar: bool) -> None:
        self.prior_precision = start if isinstance(start, Tensor) else torch.as_tensor(float(start))
        if len(self.prior_precision) == 1 and structure != PriorStructure.SCALAR:
            assert self.n_layers is not None
            assert self.n_params is not None
            self.prior_precision = fix_prior_prec_structure(
                self.prior_precision.item(), structure, self.n_layers, self.n_params, self._device, self._dtype
            )
        log_precision = self.prior_precision.detach().log().requires_grad_()
        optimizer = torch.optim.Adam([log_precision], lr=lr)
        with torch.enable_grad():
            for _ in tqdm(range(n_steps), "[Optimizing marginal likelihood]", disable=not progress_bar):
                optimizer.zero_grad()
                (-self.log_marginal_likelihood(log_precision.exp())).backward()
                optimizer.step()
        self.prior_precision = log_precision.detach().exp()

    def _default_loss(self) -> Any:
        if self.likelihood != Likelihood.REGRESSION:
            return RunningNLLMetric().to(self._device)

        def with_noise(means: Tensor, variances: Tensor, targets: Tensor) -> Tensor:
            spread = variances.diagonal(dim1=-2, dim2=-1) if variances.ndim > means.ndim else variances
            return gaussian_nll(means, spread + self.sigma_noise.detach().square(), targets)

        return with_noise

    def _gridsearch(
        self, loss: Any, interval: Tensor, val_loader: Any, *, progress_bar: bool = False, **options: Any
    ) -> Tensor:
        """Return the precision with the smallest loss."""
        results = []
        for precision in tqdm(interval, "[Grid search]", disable=not progress_bar):
            self.prior_precision = precision
            try:
                found = validate(self, val_loader, loss, dict_key_y=self.dict_key_y, **options)
            except NotPositiveDefinite:
                found = math.inf
            results.append(found if math.isfinite(found) else math.inf)
        if not math.isfinite(min(results)):
            raise ValueError("no prior precision of the grid has a finite loss on val_loader")
        return interval[results.index(min(results))]
