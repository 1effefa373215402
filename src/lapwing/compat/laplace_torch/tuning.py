"""`optimize_prior_precision`: by the evidence with laplace-torch's Adam, or on a grid of held-out scores."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lapwing.compat.laplace_torch.enums import (
    Likelihood,
    LinkApprox,
    PredType,
    PriorStructure,
    TuningMethod,
)
from lapwing.compat.laplace_torch.functions import RunningNLLMetric, fix_prior_prec_structure, gaussian_nll, validate
from lapwing.compat.laplace_torch.settings import BaseLaplace
from lapwing.errors import NotPositiveDefinite


class Tuned(BaseLaplace):
    """The choice of the prior precision."""

    _pred_types: tuple[str, ...]

    @abstractmethod
    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        """Return the log evidence under the given settings, or the present ones."""

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
        per weight. "gridsearch" takes the one of `grid_size` precisions from 10^min to 10^max with the smallest loss:
        by default the negative log-likelihood, which for regression needs the predictive variance and the noise. A
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
