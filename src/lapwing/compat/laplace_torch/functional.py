"""The posterior seen from function space, on a subset of the data: `FunctionalLaplace`, `FunctionalLLLaplace`."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from lapwing.compat.laplace_torch.backends import CurvatureInterface
from lapwing.compat.laplace_torch.enums import Likelihood, PriorStructure
from lapwing.compat.laplace_torch.functions import SoDSampler
from lapwing.compat.laplace_torch.lastweights import LLLaplace
from lapwing.compat.laplace_torch.parametric import ParametricLaplace
from lapwing.curvature import Functional, Structure


class FunctionSpace(ParametricLaplace):
    """The Gaussian process of the linearized network on `n_subset` random data (by `seed`).

    The prior precision is divided by n_subset / n, as in laplace-torch. (`lapwing.Functional(points)` multiplies the
    curvature by n / points instead, so that far from the data the prior alone determines variances.) Kernels between
    outputs are exact for any architecture; `independent_outputs=True` is accepted but has no effect.
    """

    _pred_types = ("gp", "glm")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        n_subset: int | None = None,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type[CurvatureInterface] | None = None,
        backend_kwargs: MutableMapping[str, Any] | None = None,
        independent_outputs: bool = False,
        seed: int = 0,
        **last_layer: Any,
    ) -> None:
        if n_subset is None:
            raise TypeError("hessian_structure='gp' needs n_subset, the number of data that it is fitted on")
        self.n_subset, self.independent_outputs, self.seed = n_subset, independent_outputs, seed
        self._prior_factor_sod = 1.0
        super().__init__(
            model, likelihood, sigma_noise, prior_precision, prior_mean, temperature, enable_backprop,
            dict_key_x=dict_key_x, dict_key_y=dict_key_y, backend=backend, backend_kwargs=backend_kwargs, **last_layer,
        )  # fmt: skip

    def _structure(self) -> Structure:
        return Functional()

    @property
    def _prior_lengths(self) -> set[int]:
        return {1}

    def fit(self, train_loader: Any, override: bool = True, progress_bar: bool = False) -> None:
        """Fit on `n_subset` data of the loader."""
        if not override:
            raise ValueError("a posterior in function space cannot add data: fit again on all data")
        total = len(train_loader.dataset)
        if self.n_subset > total:
            raise ValueError(f"n_subset={self.n_subset}, but there are {total} data")
        subset = self._get_SoD_data_loader(train_loader)
        self._prior_factor_sod = self.n_subset / total
        super().fit(subset, True, progress_bar)
        self._changed()

    def _get_SoD_data_loader(self, train_loader: Any) -> DataLoader:
        return DataLoader(
            train_loader.dataset,
            batch_size=train_loader.batch_size or 1,
            sampler=SoDSampler(len(train_loader.dataset), self.n_subset, self.seed),
            collate_fn=train_loader.collate_fn,
        )

    def _prior_of(self, precision: Tensor) -> Any:
        return super()._prior_of(precision / self._prior_factor_sod)

    def _scatter(self) -> Tensor:
        return super()._scatter() / self._prior_factor_sod

    def optimize_prior_precision(self, *args: Any, **kwargs: Any) -> None:
        """Choose one prior precision, as `ParametricLaplace` does."""
        kwargs["prior_structure"] = PriorStructure.SCALAR
        super().optimize_prior_precision(*args, **kwargs)

    @property
    def H(self) -> None:
        """There is no curvature in weight space."""
        return None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "n_subset": self.n_subset, "prior_factor_sod": self._prior_factor_sod}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.n_subset, self._prior_factor_sod = state_dict["n_subset"], state_dict["prior_factor_sod"]
        self._changed()


class FunctionalLaplace(FunctionSpace):
    """The Gaussian process of the network that is linearized in all weights."""

    _key = ("all", "gp")


@FunctionalLaplace.register
class FunctionalLLLaplace(FunctionSpace, LLLaplace):
    """The Gaussian process of the network that is linearized in the weights of its last layer."""

    _key = ("last_layer", "gp")
