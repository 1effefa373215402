"""Posteriors over single weights: `FullSubnetLaplace`, `DiagSubnetLaplace`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from lapwing.compat.laplace_torch.allweights import DenseCurvature, DiagLaplace, DiagonalCurvature, FullLaplace
from lapwing.compat.laplace_torch.backends import CurvatureInterface, EFInterface, GGNInterface
from lapwing.compat.laplace_torch.enums import Likelihood
from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.laplace import Laplace
from lapwing.model import subnetwork


class SubnetLaplace(ParametricLaplace):
    """A posterior over the weights at `subnetwork_indices`; all other weights are fixed.

    la = Laplace(model, "classification", "subnetwork", "full", subnetwork_indices=mask.indices)
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        subnetwork_indices: Tensor | None = None,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        backend: type[CurvatureInterface] | None = None,
        backend_kwargs: Any = None,
        asdl_fisher_kwargs: Any = None,
        **kwargs: Any,
    ) -> None:
        if asdl_fisher_kwargs is not None:
            raise ValueError("asdl_fisher_kwargs is not for a subnetwork")
        if backend is not None and not issubclass(backend, GGNInterface | EFInterface):
            raise ValueError(f"a subnetwork needs a backend with a GGN or an empirical Fisher, got {backend.__name__}")
        total = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._indices = _checked(subnetwork_indices, total)
        self.n_params_subnet = len(self._indices)
        super().__init__(
            model, likelihood, sigma_noise, prior_precision, prior_mean, temperature,
            backend=backend, backend_kwargs={**(backend_kwargs or {}), "subnetwork_indices": self._indices}, **kwargs,
        )  # fmt: skip

    def _selection(self, prefix: str) -> Any:
        return subnetwork(indices=self._indices)

    @property
    def _size(self) -> int | None:
        return self.n_params_subnet

    @property
    def _prior_lengths(self) -> set[int]:
        return {*super()._prior_lengths, self.n_params_subnet}

    @property
    def prior_precision_diag(self) -> Tensor:
        """One prior precision per weight of the subnetwork."""
        if len(self.prior_precision) == self.n_params_subnet:
            return self.prior_precision
        return self._per_weight(self.prior_precision)[self._indices.to(self._device)]

    def _prior_of(self, precision: Tensor) -> Any:
        return precision.reshape(()).double() if precision.numel() == 1 else self.prior_precision_diag.double()

    def _mean_of_prior(self, mean: Tensor) -> Tensor:
        return super()._mean_of_prior(mean) if mean.numel() == 1 else mean.double()[self._indices.to(mean.device)]

    def _mean_of(self, found: Laplace) -> Tensor:
        return parameters_to_vector([p for p in self.model.parameters() if p.requires_grad]).detach()

    @property
    def subnetwork_indices(self) -> Tensor:
        """The positions of the weights of the subnetwork."""
        return self._indices

    @property
    def mean_subnet(self) -> Tensor:
        """The weights of the subnetwork."""
        return self._require_mean()[self._indices.to(self._device)]

    @property
    def _offset(self) -> Tensor:
        return self.mean_subnet.double() - self._mean_of_prior(self.prior_mean)

    def square_norm(self, value: Tensor) -> Tensor:
        """Return the distance of weights of the subnetwork, or of all weights, from the mean under the precision."""
        own = value if value.shape[-1] == self.n_params_subnet else value[..., self._indices.to(self._device)]
        delta = own - self.mean_subnet
        return (delta * self._precision.matvec(delta)).sum(-1).to(self._dtype)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        own = value if value.shape[-1] == self.n_params_subnet else value[..., self._indices.to(self._device)]
        return super().log_prob(own, normalized)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw vectors of all weights; weights outside the subnetwork are fixed."""
        return self.assemble_full_samples(super().sample(n_samples, generator))

    def assemble_full_samples(self, subnet_samples: Tensor) -> Tensor:
        """Put samples of the subnetwork among the other weights."""
        whole = self._require_mean().repeat(len(subnet_samples), 1)
        whole[:, self._indices.to(self._device)] = subnet_samples
        return whole


@FullLaplace.register
class FullSubnetLaplace(SubnetLaplace, DenseCurvature):
    """A dense curvature of a subnetwork."""

    _key = ("subnetwork", "full")


@DiagLaplace.register
class DiagSubnetLaplace(SubnetLaplace, DiagonalCurvature):
    """A diagonal curvature of a subnetwork."""

    _key = ("subnetwork", "diag")


def _checked(indices: Any, total: int) -> Tensor:
    """Check that indices are a vector of distinct positions (int64) among so many weights."""
    if indices is None:
        raise ValueError(
            "subset_of_weights='subnetwork' needs subnetwork_indices, the positions of its weights in "
            "parameters_to_vector(model.parameters()); a mask chooses them, for example "
            "LargestMagnitudeSubnetMask(model, n_params_subnet=100).select()"
        )
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64 or indices.ndim != 1 or not len(indices):
        raise ValueError(f"subnetwork_indices is a vector of positions (torch.int64), not empty, got {indices!r}")
    if bool((indices < 0).any() | (indices >= total).any()) or len(indices.unique()) < len(indices):
        raise ValueError(f"subnetwork_indices are distinct positions in 0 … {total - 1}")
    return indices
