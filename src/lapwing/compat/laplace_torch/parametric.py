"""`ParametricLaplace`: a posterior over weights that is fitted, sampled, scored and stored by laplace-torch's names.

It holds one frozen `lapwing.Laplace`, and replaces it whenever a setting changes.
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lapwing.compat.laplace_torch.base import BaseLaplace
from lapwing.compat.laplace_torch.enums import Likelihood, LinkApprox, PredType
from lapwing.curvature import Factor, Structure
from lapwing.errors import BadData, NotReiterable, UnsupportedModel
from lapwing.fitting import fit, load
from lapwing.laplace import Laplace
from lapwing.likelihoods import BradleyTerry, Categorical, Gaussian
from lapwing.likelihoods import Likelihood as Family
from lapwing.linalg import PSD, DenseRows
from lapwing.model.batches import NoSamples
from lapwing.posterior import Belief, Prior, Tempered
from lapwing.predictive.links import predict_targets

AT_ONCE = 1024  # outputs of all items together up to which joint draws come from their covariance


class Mapped(nn.Module):
    """Calls model(mapping) where Lapwing calls module(**mapping); `kind` makes the mapping (dict, UserDict, …)."""

    def __init__(self, model: nn.Module, kind: type) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, **inputs: Any) -> Any:
        return self.model(self.kind(inputs))


class ParametricLaplace(BaseLaplace):
    """A Gaussian posterior over weights; subclasses choose which weights and which structure."""

    _pred_types: tuple[str, ...] = ("glm", "nn")
    _la: Laplace | None = None
    mean: Tensor | None = None

    def _begin(self) -> None:
        self.mean = self.prior_mean

    @property
    @abstractmethod
    def _key(self) -> Any:
        """The subset of weights and the structure that `Laplace(...)` finds the class by: a plain class attribute."""

    @property
    @abstractmethod
    def H(self) -> Any:
        """The curvature as a tensor or a `Kron`."""

    @abstractmethod
    def _structure(self) -> Structure:
        """Return the structure of the curvature."""

    def _selection(self, prefix: str) -> Any:
        """Return the value for `lapwing.fit(select=...)`; names of parameters have this prefix."""
        return "all"

    @property
    def _network(self) -> nn.Module:
        """The network that is fitted."""
        return self.model

    def _factor(self) -> Factor:
        return self._backend_cls.factor(self._backend_kwargs)

    def fit(self, train_loader: Any, override: bool = True, progress_bar: bool = False) -> None:
        """Fit the posterior at the current weights of the model; `override=False` adds data to an earlier fit.

        The number of data is the number of items that the loader yields, not `len(train_loader.dataset)`. The model
        stays in its mode (training or evaluation).
        """
        if iter(train_loader) is train_loader:
            raise NotReiterable(
                "train_loader can be read only once, and a fit reads its first batch twice: pass a list"
            )
        first = next(iter(train_loader), None)
        if first is None:
            raise NoSamples("train_loader holds no batches: pass at least one batch that is not empty")
        x, y = self._targets_of(first)
        if self._la is None or override:
            module: nn.Module = self._network
            if isinstance(first, MutableMapping):
                module = Mapped(module, type(first))
            found = fit(
                module,
                train_loader,
                self._family(),
                structure=self._structure(),
                factor=self._factor(),
                select=self._selection("model." if isinstance(module, Mapped) else ""),
                split=self._targets_of,
                progress=progress_bar,
            )
        else:
            found = self._la.update(train_loader)
        outputs = found.predict(x).function.mean
        self._require_targets(outputs, y, found.options.scalar)
        self._fitted(found, outputs.shape[-1])

    def _fitted(self, found: Laplace, outputs: int) -> None:
        """Store a new posterior."""
        self._la, self.n_data, self.n_outputs = found, round(found.n_data), outputs
        self.mean = self._mean_of(found)
        self._changed()

    def _mean_of(self, found: Laplace) -> Tensor:
        return found.posterior.mean.to(self._dtype)

    def _family(self) -> Family:
        if self.likelihood == Likelihood.REGRESSION:
            return Gaussian(noise=float(self.sigma_noise))
        return Categorical() if self.likelihood == Likelihood.CLASSIFICATION else BradleyTerry()

    def _require_targets(self, outputs: Tensor, y: Any, scalar: bool) -> None:
        if self.likelihood == Likelihood.REGRESSION and y.ndim != outputs.ndim - scalar:
            raise BadData(f"the outputs have {outputs.ndim - scalar} dimensions and the targets {y.ndim}: use the same")

    @property
    def _size(self) -> int | None:
        """The number of weights with a posterior, or None if it is not known."""
        return self.n_params

    def _zeros(self, dims: int) -> Tensor | None:
        """Return the curvature before a fit, a vector (`dims` 1) or a matrix (2); None if its size is unknown."""
        size = self._size
        return None if size is None else torch.zeros([size] * dims, device=self._device, dtype=self._dtype)

    def _init_H(self) -> None:
        """Forget the fit."""
        self._la = None
        self._changed()

    def _changed(self) -> None:
        self._cached: Laplace | None = None

    def _check_H_init(self) -> None:
        if self._la is None:
            raise AttributeError("this posterior is not fitted yet: call fit(train_loader) first")

    @property
    def _current(self) -> Laplace:
        """The fitted posterior with the current prior, noise and temperature."""
        self._check_H_init()
        assert self._la is not None
        if self._cached is None:
            belief = self._belief(differentiable=False)
            self._cached = self._la.replace(
                prior=belief.prior, likelihood=belief.likelihood, temperature=belief.temperature
            )
        return self._cached

    @property
    def posterior(self) -> Laplace:
        """The `lapwing.Laplace` behind this object, for everything that laplace-torch does not have."""
        return self._current

    def _belief(self, differentiable: bool = True) -> Belief:
        """Curvature, prior, noise and temperature; settings that require gradients keep their graph."""
        self._check_H_init()
        assert self._la is not None
        precision, mean, sigma = self.prior_precision, self.prior_mean, self.sigma_noise
        if not differentiable:
            precision, mean, sigma = precision.detach(), mean.detach(), sigma.detach()
        family = Gaussian(noise=sigma.double()) if self._la.likelihood.dispersion_name else self._la.likelihood
        prior = Prior(self._prior_of(precision), self._mean_of_prior(mean))
        return Belief(self._la.curvature, prior, family, Tempered(1 / self.temperature))

    def _prior_of(self, precision: Tensor) -> Any:
        """The prior precision as `lapwing.Prior` takes it."""
        assert self._la is not None
        if precision.numel() == 1:
            return precision.reshape(()).double()
        if len(precision) == self.n_params:
            return precision.double()
        return dict(zip(self._la.params.names, precision.double().unbind(), strict=True))

    def _mean_of_prior(self, mean: Tensor) -> Tensor:
        return (mean.reshape(()) if mean.numel() == 1 else mean).double()

    @property
    def _precision(self) -> PSD:
        return self._current.posterior.precision

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Draw weight vectors, (n_samples, P)."""
        return self._current.posterior.sample(n_samples, generator).to(self._dtype)

    def square_norm(self, value: Tensor) -> Tensor:
        """Return (value − mean)ᵀ P (value − mean) for the posterior precision P."""
        delta = value - self._require_mean()
        if self._la is None:
            return (delta * self.prior_precision_diag) @ delta
        return (delta * self._precision.matvec(delta)).sum(-1).to(self._dtype)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Return the log-density of the posterior (before a fit: of the prior) at a weight vector."""
        distance = self.square_norm(value)
        if not normalized:
            return -distance / 2
        return self.log_det_posterior_precision / 2 - value.shape[-1] / 2 * math.log(2 * math.pi) - distance / 2

    def _require_mean(self) -> Tensor:
        if self.mean is None:
            raise AttributeError("this posterior is not fitted yet: call fit(train_loader) first")
        return self.mean

    @property
    def loss(self) -> Tensor | float:
        return 0.0 if self._la is None else self._loss().to(self._dtype)

    def _loss(self) -> Tensor:
        if self._la is None:
            return torch.zeros((), dtype=torch.float64)
        if not self._la.likelihood.dispersion_name:
            return -self._la.log_likelihood.double()
        count = self.n_data * self.n_outputs
        unit = Gaussian(noise=1.0).log_likelihood(self._la.curvature.statistics)
        return -(unit + count * math.log(2 * math.pi) / 2).double()

    @property
    def scatter(self) -> Tensor:
        """(θ̂ − μ₀)ᵀ Π (θ̂ − μ₀)."""
        return self._scatter().to(self._dtype)

    def _scatter(self) -> Tensor:
        return (self._offset.square() * self.prior_precision_diag.double()).sum()

    @property
    def _offset(self) -> Tensor:
        """θ̂ − μ₀, in float64."""
        return (self._require_mean() - self.prior_mean).double()

    @property
    def log_det_prior_precision(self) -> Tensor:
        return self.prior_precision_diag.double().log().sum().to(self._dtype)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        if self._la is None:
            return self.log_det_prior_precision
        return (self._log_det_ratio() + self.prior_precision_diag.double().log().sum()).to(self._dtype)

    @property
    def log_det_ratio(self) -> Tensor:
        """log |P| − log |Π| of posterior and prior precision."""
        return self._log_det_ratio().to(self._dtype)

    def _log_det_ratio(self) -> Tensor:
        """The log-determinant ratio in float64; differentiable in prior precision and noise."""
        belief = self._belief()
        return belief.curvature.matrix.scale(belief.scale).logdet_ratio(belief.resolved_prior[1])

    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        """Return the log evidence; given settings replace the current ones. Differentiable in both.

        At a temperature other than 1 it follows the convention of laplace-torch: see `log_likelihood`.
        """
        if prior_precision is not None:
            self.prior_precision = prior_precision
        if sigma_noise is not None:
            if self.likelihood != Likelihood.REGRESSION:
                raise ValueError("sigma_noise is for likelihood='regression'")
            self.sigma_noise = sigma_noise
        fitted = self._log_likelihood() - 0.5 * (self._log_det_ratio() + self._scatter())
        return fitted.to(self._dtype)

    def functional_variance(self, Js: Tensor) -> Tensor:
        """J Σ Jᵀ of each item: Jacobians (batch, outputs, P) → (batch, outputs, outputs)."""
        self._check_jacobians(Js)
        return self._precision.quadratic(DenseRows(Js)).to(Js.dtype)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """J Σ Jᵀ across items: Jacobians (batch, outputs, P) → (batch·outputs, batch·outputs)."""
        self._check_jacobians(Js)
        size = Js.shape[0] * Js.shape[1]
        return self._precision.joint(DenseRows(Js)).reshape(size, size).to(Js.dtype)

    def _check_jacobians(self, Js: Tensor) -> None:
        size = self._precision.size
        if not isinstance(Js, Tensor) or Js.ndim != 3 or Js.shape[-1] != size:
            raise ValueError(f"Jacobians have the shape (batch, outputs, {size}), got {getattr(Js, 'shape', Js)}")

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
        """Load what `state_dict` returned, for the same class, likelihood and weights of the model.

        A model whose weights differ from those of the fit is refused; laplace-torch loads it without a message.
        """
        if type(self).__name__ != state_dict["cls_name"]:
            raise ValueError(f"the state belongs to a {state_dict['cls_name']}, not of a {type(self).__name__}")
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
        variances. Variances are those of the function: for regression they do not include the noise. With
        `fitting=True` pairs of a reward model give probabilities.
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
        """Do the same as calling the object."""
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


def written(la: Laplace) -> Tensor:
    """Return the file of a posterior as a vector of bytes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.lapwing"
        la.save(path)
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
