"""Posteriors over all trainable weights: `FullLaplace`, `KronLaplace`, `DiagLaplace`, `LowRankLaplace`."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.compat.laplace_torch.backends import CurvatureInterface
from lapwing.compat.laplace_torch.enums import Likelihood
from lapwing.compat.laplace_torch.factors import factors_of
from lapwing.compat.laplace_torch.matrix import Kron, KronDecomposed
from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.curvature import Diag, Full, LowRank, Structure
from lapwing.curvature import Kron as KronStructure
from lapwing.errors import UnsupportedOperation
from lapwing.laplace import Laplace


class DenseCurvature(ParametricLaplace):
    """The common part of posteriors with a dense curvature, over all weights, a last layer or a subnetwork."""

    def _structure(self) -> Structure:
        return Full()

    @property
    def H(self) -> Tensor | None:
        """The curvature (P, P), without prior, noise and temperature; zero before a fit."""
        if self._la is not None:
            return self._la.curvature.dense().to(self._dtype)
        return self._zeros(2)

    @property
    def posterior_precision(self) -> Tensor:
        self._check_H_init()
        assert self.H is not None
        return self._H_factor * self.H + torch.diag(self.prior_precision_diag)

    @property
    def posterior_scale(self) -> Tensor:
        """A square root L of the covariance, L Lᵀ = Σ, lower triangular."""
        return torch.linalg.cholesky(self._current.posterior.covariance().double()).to(self._dtype)

    @property
    def posterior_covariance(self) -> Tensor:
        return self._current.posterior.covariance().to(self._dtype)


class FullLaplace(DenseCurvature):
    """A dense curvature of all weights: la = FullLaplace(model, "regression"); la.fit(loader)."""

    _key = ("all", "full")


class DiagonalCurvature(ParametricLaplace):
    """The common part of posteriors with a diagonal curvature, over all weights, a last layer or a subnetwork."""

    def _structure(self) -> Structure:
        return Diag()

    @property
    def H(self) -> Tensor | None:
        """The diagonal of the curvature (P,), without prior, noise and temperature; zero before a fit."""
        if self._la is not None:
            return self._la.curvature.matrix.diagonal().to(self._dtype)
        return self._zeros(1)

    @property
    def posterior_precision(self) -> Tensor:
        self._check_H_init()
        assert self.H is not None
        return self._H_factor * self.H + self.prior_precision_diag

    @property
    def posterior_scale(self) -> Tensor:
        """The standard deviations of the weights."""
        return self.posterior_precision.rsqrt()

    @property
    def posterior_variance(self) -> Tensor:
        return 1 / self.posterior_precision


class DiagLaplace(DiagonalCurvature):
    """A diagonal curvature of all weights: la = DiagLaplace(model, "regression"); la.fit(loader)."""

    _key = ("all", "diag")


class KroneckerCurvature(ParametricLaplace):
    """The common part of posteriors with Kronecker factors: G ⊗ A per weight tensor, G per bias.

    `damping=True` damps each factor (Ritter et al. 2018, Eq. 9) in predictions and samples; in laplace-torch it has no
    effect.
    """

    _factors: Kron | None = None
    _undamped: KronDecomposed | None = None

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
        damping: bool = False,
        backend_kwargs: MutableMapping[str, Any] | None = None,
        asdl_fisher_kwargs: MutableMapping[str, Any] | None = None,
    ) -> None:
        self.damping = damping
        super().__init__(
            model, likelihood, sigma_noise, prior_precision, prior_mean, temperature, enable_backprop,
            dict_key_x, dict_key_y, backend, backend_kwargs, asdl_fisher_kwargs,
        )  # fmt: skip

    def _structure(self) -> Structure:
        return KronStructure(sharing="expand", bias="separate")

    def _init_H(self) -> None:
        self._factors = self._undamped = None
        super()._init_H()

    def _fitted(self, found: Laplace, outputs: int) -> None:
        self._factors = self._undamped = None
        super()._fitted(found, outputs)

    @property
    def _current(self) -> Laplace:
        current = super()._current
        if self.damping and not current.damped:
            current = self._cached = current.damping("factored")
        return current

    @property
    def H_facs(self) -> Kron | None:
        """The Kronecker factors, one entry per parameter tensor; None before a fit."""
        if self._la is not None and self._factors is None:
            self._factors = factors_of(self._la.curvature, self._dtype)
        return self._factors

    @property
    def H(self) -> Kron | KronDecomposed | None:
        """The decomposed factors; before a fit, factors that are zero."""
        if self.H_facs is not None:
            return self._decomposed()
        return None if self.n_params is None else Kron.init_from_model(self.params, self._device, self._dtype)

    def _stored_H(self) -> Any:
        try:
            assert self.H_facs is not None
            return [list(block) for block in self.H_facs.kfacs]
        except UnsupportedOperation:  # the posterior is stored all the same
            return None

    @property
    def _exact(self) -> KronDecomposed:
        """The decomposition without damping, computed once."""
        if self._undamped is None:
            assert self.H_facs is not None
            self._undamped = self.H_facs.decompose()
        return self._undamped

    def _decomposed(self) -> KronDecomposed:
        assert self.H_facs is not None
        if not self.damping:
            return self._exact
        root = max(self.n_data, 1) ** 0.5  # so that both factors are √n times a mean, as in the paper
        kfacs = [[block[0] / root, block[1] * root] if len(block) == 2 else block for block in self.H_facs.kfacs]
        return Kron(kfacs).decompose(damping=True)

    @property
    def posterior_precision(self) -> KronDecomposed:
        self._check_H_init()
        return self._decomposed() * self._H_factor + self.prior_precision

    def _log_det_ratio(self) -> Tensor:
        factors = self.H_facs
        if factors is None or len(factors) != self.n_layers or self._dtype.itemsize < 4:
            return super()._log_det_ratio()  # a block of several tensors, or too few digits
        values = [[v.double() for v in block] for block in self._exact.eigenvalues]
        precision = self.prior_precision.double().expand(len(values))
        scale, total = self._H_factor.double(), torch.zeros((), dtype=torch.float64, device=self._device)
        for block, tau in zip(values, precision.unbind(), strict=True):
            grid = block[0] if len(block) == 1 else torch.outer(*block)
            total = total + torch.log1p(scale * grid / tau).sum()
        return total

    @property
    def _prior_lengths(self) -> set[int]:
        return {1, self.n_layers or 1}


class KronLaplace(KroneckerCurvature):
    """Kronecker factors of all weights: la = KronLaplace(model, "classification"); la.fit(loader)."""

    _key = ("all", "kron")


class LowRankLaplace(ParametricLaplace):
    """The `rank` largest eigenvalues of the GGN over all weights, and the prior alone in all other directions."""

    _key = ("all", "lowrank")
    rank = 100

    def _structure(self) -> Structure:
        return LowRank(min(self.rank, self.n_params or self.rank))

    def fit(self, train_loader: Any, override: bool = True, progress_bar: bool = False) -> None:
        if not override:
            raise ValueError("a low-rank posterior cannot add data: fit again on all data")
        super().fit(train_loader, override, progress_bar)

    @property
    def H(self) -> tuple[Tensor, Tensor] | None:
        """Eigenvectors (P, rank) and eigenvalues of the curvature; None before a fit."""
        if self._la is None:
            return None
        values, vectors = torch.linalg.eigh(self._la.curvature.dense().double())
        kept = values > values.max() * 1e-10
        return vectors[:, kept].to(self._dtype), values[kept].to(self._dtype)

    @property
    def posterior_precision(self) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Eigenvectors and scaled eigenvalues of the curvature, and the prior precision (P,) that is added."""
        self._check_H_init()
        assert self.H is not None
        return (self.H[0], self._H_factor * self.H[1]), self.prior_precision_diag
