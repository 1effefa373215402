"""Predictions by laplace-torch's names, from those of a fitted `lapwing.Laplace`."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from lapwing.compat.laplace_torch.base import BaseLaplace
from lapwing.compat.laplace_torch.enums import Likelihood, LinkApprox, PredType
from lapwing.laplace import Laplace
from lapwing.likelihoods import Categorical
from lapwing.predictive.prediction import predict_targets

AT_ONCE = 1024  # outputs of all items together up to which joint draws come from their covariance


class Predictions(BaseLaplace):
    """Calls, functional samples and predictive samples of a fitted posterior."""

    _pred_types: tuple[str, ...] = ("glm", "nn")

    @property
    @abstractmethod
    def _current(self) -> Laplace:
        """The fitted posterior with the present prior, noise and temperature."""

    def __call__(
        self,
        x: Any,
        pred_type: PredType | str | None = None,
        joint: bool = False,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **model_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return class probabilities, or mean and (co)variance of the outputs for regression and reward modeling.

        `joint=True` gives the covariance over all items, (batch·outputs, batch·outputs); `diagonal_output=True`
        variances. Variances are those of the function: for regression the noise is not in them. With `fitting=True`
        pairs of a reward model give probabilities.
        """
        kind = self._require_kind(pred_type, link_approx, generator)
        family = self.likelihood
        if family == Likelihood.REWARD_MODELING:
            family = Likelihood.CLASSIFICATION if fitting else Likelihood.REGRESSION
        if kind == PredType.NN:
            samples = self._nn_functional_samples(x, n_samples, generator, **model_kwargs)
            if family == Likelihood.REGRESSION:
                return samples.mean(0), samples.var(0)
            return samples.softmax(-1).mean(0)
        if family == Likelihood.REGRESSION:
            mean, covariance = self._glm_predictive_distribution(x, joint)
            narrow = diagonal_output and not joint
            return mean, covariance.diagonal(dim1=-2, dim2=-1) if narrow else covariance
        return self._probabilities(x, link_approx, n_samples, generator)

    def predictive(self, x: Any, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Another name of the call."""
        return self(x, *args, **kwargs)

    def _require_kind(self, pred_type: Any, link_approx: Any = "mc", generator: Any = None) -> PredType:
        pred_type = self._pred_types[0] if pred_type is None else pred_type
        if pred_type not in self._pred_types:
            raise ValueError(f"pred_type is one of {self._pred_types}, got {pred_type!r}")
        if link_approx not in [link.value for link in LinkApprox]:
            raise ValueError(f"link_approx is one of {[link.value for link in LinkApprox]}, got {link_approx!r}")
        if pred_type == PredType.NN and link_approx != LinkApprox.MC:
            raise ValueError("pred_type='nn' averages sampled networks: pass link_approx='mc'")
        if generator is not None and not (isinstance(generator, torch.Generator) and generator.device == self._device):
            raise ValueError(f"generator is a torch.Generator on {self._device}, got {generator!r}")
        return PredType(pred_type)

    def _predict(self, x: Any, **options: Any) -> Any:
        x = dict(x) if isinstance(x, Mapping) else x
        return self._current.predict(x, differentiable=self.enable_backprop, **options)

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of the outputs; variances with `diagonal_output`."""
        function = self._predict(X, joint=joint).function
        mean = function.mean.to(self._dtype)
        if joint:
            return mean.flatten(), function.covariance.reshape(mean.numel(), mean.numel()).to(self._dtype)
        return mean, (function.variance if diagonal_output else function.covariance).to(self._dtype)

    def functional_variance_fast(self, X: Any) -> tuple[Tensor, Tensor]:
        """Return mean and variances of the outputs, without their covariances."""
        return self._glm_predictive_distribution(X, diagonal_output=True)

    def _probabilities(self, x: Any, link: Any, n_samples: int, generator: torch.Generator | None) -> Tensor:
        function = self._predict(x).function
        samples = n_samples if link == LinkApprox.MC else None
        generator = self._generator(generator) if link == LinkApprox.MC else None
        p = predict_targets(function, Categorical(), link=LinkApprox(link).value, samples=samples, generator=generator)
        return p.probs.to(self._dtype)

    def functional_samples(
        self,
        x: Any,
        pred_type: PredType | str | None = None,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw functions at inputs, (n_samples, batch, outputs): each is one function at all inputs.

        With `diagonal_output` the outputs of an item are drawn independently of each other.
        """
        if self._require_kind(pred_type, generator=generator) == PredType.NN:
            return self._nn_functional_samples(x, n_samples, generator)
        return self._glm_functional_samples(x, n_samples, diagonal_output, self._generator(generator))

    def predictive_samples(
        self,
        x: Any,
        pred_type: PredType | str | None = None,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw as `functional_samples` does; for classification each draw is turned into probabilities."""
        draws = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
        return draws.softmax(-1) if self.likelihood == Likelihood.CLASSIFICATION else draws

    def _glm_functional_samples(self, x: Any, n: int, diagonal: bool, generator: torch.Generator) -> Tensor:
        la = self._current
        single = self._predict(x).function.mean
        if single.numel() > AT_ONCE and not (diagonal or self.enable_backprop):
            inputs = la._predictive.inputs(dict(x) if isinstance(x, Mapping) else x)
            steps = la.posterior.sample(n, generator) - la.posterior.mean
            return (single + la.network.jvp(inputs, steps)[1]).to(self._dtype)
        function = self._predict(x, joint=True).function
        if not diagonal:
            return function.sample(n, generator).to(self._dtype)
        size, c = single[..., 0].numel(), single.shape[-1]
        each = function.covariance.reshape(size, c, size, c).diagonal(dim1=1, dim2=3).movedim(-1, 0)  # (c, b, b)
        values, vectors = torch.linalg.eigh(each.double())
        root = vectors * values.clamp(min=0).sqrt()[:, None]
        noise = torch.randn(n, c, size, generator=generator, dtype=root.dtype, device=root.device)
        moved = torch.einsum("cbk,sck->sbc", root, noise).reshape(n, *single.shape)
        return (single + moved).to(self._dtype)

    def _nn_functional_samples(
        self, X: Any, n_samples: int = 100, generator: torch.Generator | None = None, **model_kwargs: Any
    ) -> Tensor:
        """Run networks with sampled weights, (n_samples, batch, outputs)."""
        la = self._current
        members = la.ensemble(n_samples, self._generator(generator))
        if not model_kwargs:
            x = dict(X) if isinstance(X, Mapping) else X
            function = members.predict(x, differentiable=self.enable_backprop).function
            return function.samples.to(self._dtype)  # type: ignore[attr-defined]
        own = copy.deepcopy(la.module).eval()
        x = X.to(self._device) if isinstance(X, Tensor) else X
        with torch.set_grad_enabled(self.enable_backprop):
            return torch.stack([functional_call(own, weights, (x,), model_kwargs) for weights in members])

    def _generator(self, generator: torch.Generator | None) -> torch.Generator:
        """A generator: the given one, or one that torch's global random state seeds."""
        if generator is not None:
            return generator
        return torch.Generator(self._device).manual_seed(int(torch.randint(2**62, ())))
