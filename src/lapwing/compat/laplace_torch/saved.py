"""`state_dict` and pickles: tensors and plain values, with the posterior in Lapwing's own format among them."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.compat.laplace_torch.mapped import Mapped
from lapwing.compat.laplace_torch.predictive import Predictions
from lapwing.errors import BadData, UnsupportedModel
from lapwing.fitting import load
from lapwing.laplace import Laplace


class Saved(Predictions):
    """Storing a fitted posterior, and reading it back for a model with the same weights."""

    _la: Laplace | None
    mean: Tensor | None

    @property
    @abstractmethod
    def H(self) -> Any:
        """The curvature as a tensor or a `Kron`."""

    @property
    @abstractmethod
    def _network(self) -> nn.Module:
        """The network that is fitted."""

    @abstractmethod
    def _check_H_init(self) -> None:
        """Raise if the posterior is not fitted yet."""

    @abstractmethod
    def _fitted(self, found: Laplace, outputs: int) -> None:
        """Take over a new posterior."""

    def state_dict(self) -> dict[str, Any]:
        """Return the posterior and its settings as tensors and plain values, for `torch.save`."""
        self._check_H_init()
        assert self._la is not None
        return {
            "mean": self.mean,
            "H": self._stored_H(),
            "loss": self.loss,
            "prior_mean": self.prior_mean,
            "prior_precision": self.prior_precision,
            "sigma_noise": self.sigma_noise,
            "n_data": self.n_data,
            "n_outputs": self.n_outputs,
            "likelihood": self.likelihood.value,
            "temperature": self.temperature,
            "enable_backprop": self.enable_backprop,
            "cls_name": type(self).__name__,
            "mapping": isinstance(self._la.module, Mapped),
            "posterior": written(self._la),
        }

    def _stored_H(self) -> Any:
        return self.H

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, for the same class, likelihood and weights of the model.

        A model with other weights than those of the fit is refused; laplace-torch loads silently.
        """
        if type(self).__name__ != state_dict["cls_name"]:
            raise ValueError(f"the state is that of a {state_dict['cls_name']}, not of a {type(self).__name__}")
        if self.likelihood != state_dict["likelihood"]:
            raise ValueError(
                f"the state has likelihood {state_dict['likelihood']!r}, this is {self.likelihood.value!r}"
            )
        if self.n_params is not None and len(state_dict["mean"]) != self.n_params:
            raise ValueError(f"the state has {len(state_dict['mean'])} weights, the model {self.n_params}")
        if "posterior" not in state_dict:
            raise BadData(
                "this state was written by laplace-torch itself and lacks the posterior in Lapwing's format: fit again"
            )
        if self.temperature != state_dict["temperature"]:
            warnings.warn(f"the temperature becomes {state_dict['temperature']}, as it was stored", stacklevel=2)
        module: nn.Module = self._network
        try:
            found = self._read(state_dict["posterior"], Mapped(module, dict) if state_dict["mapping"] else module)
        except UnsupportedModel as error:
            raise BadData(f"the state was made with other weights than the model has: {error}") from error
        self._fitted(found, state_dict["n_outputs"])
        for name in ("prior_mean", "prior_precision", "sigma_noise", "temperature", "enable_backprop"):
            setattr(self, name, state_dict[name])

    def _read(self, stored: Tensor, module: nn.Module) -> Laplace:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "posterior.lapwing"
            path.write_bytes(stored.cpu().numpy().tobytes())
            return load(path, module, split=self._targets_of)

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_cached": None, "_backend": None, "_la": None}
        if self._la is not None:
            state["_la"] = (written(self._la), isinstance(self._la.module, Mapped))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        stored = state.pop("_la")
        vars(self).update(state, _la=None)
        if stored is not None:
            self._la = self._read(stored[0], Mapped(self._network, dict) if stored[1] else self._network)


def written(la: Laplace) -> Tensor:
    """Return the file of a posterior as a vector of bytes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.lapwing"
        la.save(path)
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
