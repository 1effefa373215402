"""`LaplaceClassifier` and `LaplaceRegressor`: networks with a posterior, used like any scikit-learn estimator."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from lapwing.fitting import fit, load_bytes
from lapwing.laplace import Laplace
from lapwing.model.calls import evaluated, output_tensor
from lapwing.predictive import Prediction
from lapwing.saving import bytes_of
from lapwing.sklearn.networks import Pair, Schedule, Standardized, made_by, mlp

FEWEST = 10  # held-out samples below which nothing is held out
TUNING = 150  # samples that tune="auto" asks for to choose everything on held-out data; with fewer, the evidence helps


class _LaplaceEstimator(BaseEstimator, ABC):
    """What both estimators share: making, training and fitting, and the predictive distribution."""

    def __init__(
        self,
        module: Any = None,
        *,
        hidden: tuple[int, ...] | int | None = None,
        structure: Any = "auto",
        select: Any = "all",
        prior: Any = 1.0,
        tune: str | None = "auto",
        epochs: int = 1000,
        patience: int = 20,
        batch_size: int | None = None,
        learning_rate: float = 0.01,
        optimizer: Callable[[Any], Any] | None = None,
        validation_fraction: float = 0.2,
        standardize: bool = True,
        random_state: Any = None,
    ) -> None:
        self.module = module
        self.hidden = hidden
        self.structure = structure
        self.select = select
        self.prior = prior
        self.tune = tune
        self.epochs = epochs
        self.patience = patience
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.optimizer = optimizer
        self.validation_fraction = validation_fraction
        self.standardize = standardize
        self.random_state = random_state

    _task: str
    _layers: tuple[int, ...]
    laplace_: Laplace

    @abstractmethod
    def _targets(self, y: Any, inputs: Tensor) -> Tensor:
        """Check the targets, remember what they look like and return them as a tensor."""

    @abstractmethod
    def _loss(self, y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the training loss of outputs and targets, per sample, in units that suit the learning rate."""

    def fit(self, X: Any, y: Any) -> Self:
        """Train the network, unless a trained one was given, and fit its posterior."""
        X, y = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=self._task == "regression",
            allow_nd=self.module is not None,
        )  # fmt: skip
        self._require_options()
        inputs = torch.from_numpy(np.array(X))
        targets = self._targets(y, inputs)
        if len(inputs) < 2:
            raise ValueError(f"n_samples={len(inputs)}: a network and its posterior need at least 2 samples")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        if isinstance(self.module, nn.Module):
            self.module_: nn.Module = self.module
            self.laplace_ = self._posterior((inputs, targets))
        else:
            train, stopping, tuning = self._split(inputs, targets, seed)
            self.module_ = self._trained(train, stopping, seed)
            self.laplace_ = self._posterior(train, stopping, tuning)
        return self

    def _require_options(self) -> None:
        size = 1 if self.batch_size is None else self.batch_size
        counts = {"epochs": self.epochs, "patience": self.patience, "batch_size": size}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                hint = ". Pass a network that is trained already as module=" if name == "epochs" else ""
                raise ValueError(f"{name} is a whole number of at least 1, got {value!r}{hint}")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is a share between 0 and 1, got {self.validation_fraction!r}")
        if self.tune not in ("auto", "validation", "evidence", None):
            raise ValueError(f"tune is 'auto', 'validation', 'evidence' or None, got {self.tune!r}")
        if not (self.module is None or callable(self.module)):
            raise ValueError(
                f"module is None, a trained torch.nn.Module or a function (n_features, n_outputs) -> torch.nn.Module, "
                f"got {type(self.module).__name__}"
            )

    def _split(self, x: Tensor, y: Tensor, seed: int) -> tuple[Pair, Pair | None, Pair | None]:
        """Hold out a part that stops the training and a part that tunes the posterior, if they are large enough.

        They are two parts because errors on the data that stopped the training are too small. Without a part for
        tuning, all held-out data stop the training.
        """
        count = round(self.validation_fraction * len(x))
        if count < FEWEST:
            return (x, y), None, None
        enough = TUNING if self._task == "classification" else FEWEST  # a few samples do for the noise of a regression
        needed = {"auto": enough, "validation": FEWEST}.get(self.tune or "", len(x))
        first = count // 2 if count // 2 >= needed else count
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        train, stopping, tuning = ((x[rows], y[rows]) for rows in (order[count:], order[:first], order[first:count]))
        return train, stopping, tuning if first < count else None

    def _trained(self, train: Pair, held_out: Pair | None, seed: int) -> nn.Module:
        x, y = train
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.module is None:
                net: nn.Module = mlp(x.shape[1], self._outputs, self._layers if self.hidden is None else self.hidden)
            else:
                net = made_by(self.module, x.shape[1], self._outputs)
            if self.standardize:
                net = Standardized(net, x, y if self._task == "regression" else None)
            like = next(net.parameters())
            y = y.to(like) if y.is_floating_point() else y.to(like.device)
            if held_out is not None:
                held_out = held_out[0].to(like), held_out[1].to(y)
            n = len(x)
            schedule = Schedule(
                self.epochs if held_out is not None else min(self.epochs, 200),
                self.patience,
                self.batch_size or min(256, max(16, n // 16)),
                self.learning_rate,
                self.optimizer,
                0.0 if held_out is not None else 1.0 / n,
            )
            self.n_epochs_ = schedule.run(net, self._loss(y), (x.to(like), y), held_out, seed)
        return net

    @property
    @abstractmethod
    def _outputs(self) -> int:
        """How many outputs a network needs."""

    def _posterior(self, train: Pair, stopping: Pair | None = None, tuning: Pair | None = None) -> Laplace:
        """Fit the posterior, tune it on the part for tuning, and update it with all held-out data."""
        la = fit(
            self.module_, train, self._task, structure=self.structure, select=self.select, prior=self.prior,
            progress=False,
        )  # fmt: skip
        held_out = 0 if tuning is None else len(tuning[0])
        how = ("validation" if held_out >= TUNING else "evidence") if self.tune == "auto" else self.tune
        if how == "validation":
            if tuning is None:
                raise ValueError("tune='validation' needs held-out data: more samples, or a larger validation_fraction")
            la = la.tune(tuning)
        elif how == "evidence":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "tuning by the evidence")  # the only way there is without more data
                la = la.tune()
            if tuning is not None:  # with more weights than data, the evidence takes too much of y for noise
                noise = float(la.likelihood.dispersion) ** la.likelihood.dispersion_unit
                tried = [noise * 2 ** (k / 4) for k in range(-20, 5)]  # candidates bar the network without a posterior
                la = la.tune(tuning, learn="noise", grid={"noise": tried}, rule="lowest")
        for part in (stopping, tuning) if la.curvature.structure.mergeable else ():
            la = la if part is None else la.update(part)
        return la

    def predictive(self, X: Any, **options: Any) -> Prediction:
        """Return the predictive distribution at X: a `lapwing.Prediction`. Options are those of `Laplace.predict`.

        model.predictive(X).epistemic
        """
        check_is_fitted(self, "laplace_")
        X = validate_data(self, X, reset=False, dtype=np.float64, allow_nd=self.module is not None)
        like = next(self.module_.parameters())
        return self.laplace_.predict(torch.from_numpy(np.array(X)).to(like), **options)

    def _draws(self, X: Any, n_samples: int, random_state: Any) -> np.ndarray:
        """Draw targets jointly at all inputs, (n_samples, n, …)."""
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        p = self.predictive(X, joint=True)
        generator = torch.Generator(p.function.mean.device).manual_seed(seed)
        return p.sample(n_samples, generator).cpu().numpy()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "laplace_")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the posterior as the bytes of its file."""
        state: dict[str, Any] = dict(super().__getstate__())
        if "laplace_" in state:
            state["laplace_"] = bytes_of(state["laplace_"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "laplace_" in state:
            self.laplace_ = load_bytes(state["laplace_"], self.module_)


class LaplaceClassifier(ClassifierMixin, _LaplaceEstimator):
    """A neural network classifier with a Laplace posterior over its weights, as a scikit-learn estimator.

    Parameters
    ----------
    module : None, a function, or a torch.nn.Module
        None makes an MLP with the layers `hidden`. A function (n_features, n_classes) -> Module makes a network, which
        `fit` trains. A module is taken as trained: it sees X as it is and returns logits.
    hidden : widths of the hidden layers of the MLP (a number: of its only one); by default (50,) for classes and
        (50, 50) for numbers
    structure, select, prior : those of `lapwing.fit`
    tune : "validation" tunes prior, temperatures and noise on held-out data, "evidence" tunes prior and noise by the
        evidence, None keeps `prior`. "auto" is "validation" where 150 samples or more can be held out for tuning alone
        (1,500 samples in all), since settings chosen on a few dozen samples are too often far off. With fewer, the
        evidence chooses the prior, and held-out data only the noise of a regression
    epochs, patience, batch_size, learning_rate, optimizer : the training. It stops after `patience` epochs without a
        lower held-out loss, goes on with a tenth of the learning rate, and keeps the best weights. `optimizer` is a
        function of the parameters, such as functools.partial(torch.optim.SGD, lr=0.1)
    validation_fraction : the share of the data that is held out to stop the training, and half of it to tune the
        posterior where that is done on held-out data; below 10 samples nothing is held out. The posterior reads the
        held-out data at the end
    standardize : let the network see standardized inputs (not for a trained module)
    random_state : the seed of the weights, of the held-out part and of the batches

    Attributes
    ----------
    classes_, n_features_in_, feature_names_in_ : those of scikit-learn
    module_ : the trained network, `laplace_` : its posterior, `n_epochs_` : how long it was trained

    Examples
    --------
    >>> from lapwing.sklearn import LaplaceClassifier
    >>> estimator = LaplaceClassifier(random_state=0, epochs=5).fit(x.numpy(), y.numpy())
    >>> estimator.predict_proba(x.numpy()).shape
    (8, 3)
    """

    _task = "classification"
    _layers = (50,)

    def _targets(self, y: Any, inputs: Tensor) -> Tensor:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"the data have one class, {self.classes_[0]!r}: a classifier needs at least two")
        if isinstance(self.module, nn.Module) and np.issubdtype(self.classes_.dtype, np.integer):
            few = inputs[:2].to(next(self.module.parameters()))
            outputs = output_tensor(evaluated(self.module, few)).shape[-1]
            if 0 <= self.classes_[0] and self.classes_[-1] < outputs:  # it may know classes that these data do not hold
                self.classes_ = np.arange(outputs)
                return torch.from_numpy(y.astype(np.int64))
        return torch.from_numpy(codes.astype(np.int64))

    @property
    def _outputs(self) -> int:
        return len(self.classes_)

    def _loss(self, y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        return nn.functional.cross_entropy

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities of the classes, (n, n_classes), in the order of `classes_`."""
        probs = self.predictive(X).probs.double().cpu().numpy()
        return probs / probs.sum(1, keepdims=True)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithms of the probabilities of the classes."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each sample."""
        codes = self.predict_proba(X).argmax(1)
        return self.classes_[codes]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draw classes, (n, n_samples), from the predictive distribution, joint over the inputs."""
        codes = self._draws(X, n_samples, random_state)
        return self.classes_[codes.T]


class LaplaceRegressor(RegressorMixin, _LaplaceEstimator):
    """A neural network for regression with a Laplace posterior over its weights, as a scikit-learn estimator.

    The parameters are those of `LaplaceClassifier`; `standardize` scales the targets too, and y may have several
    columns. The noise is learned. Standard deviations and covariances include it.

    Examples
    --------
    >>> from lapwing.sklearn import LaplaceRegressor
    >>> estimator = LaplaceRegressor(random_state=0, epochs=5).fit(inputs.numpy(), targets.numpy()[:, 0])
    >>> mean, std = estimator.predict(inputs.numpy(), return_std=True)
    """

    _task = "regression"
    _layers = (50, 50)

    def _targets(self, y: Any, inputs: Tensor) -> Tensor:
        y = np.array(y, dtype=np.float64)
        self._shape = y.shape[1:]
        return torch.from_numpy(y.reshape(len(y), -1))

    @property
    def _outputs(self) -> int:
        return self._shape[0] if self._shape else 1

    def _loss(self, y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        scale = y.std(0, correction=0).square().clamp(min=1e-12) if self.standardize else 1.0

        def squares(f: Tensor, targets: Tensor) -> Tensor:
            return ((f.reshape(targets.shape) - targets).square() / scale).mean() / 2

        return squares

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """Return the mean of y, and with it the standard deviation or the covariance between all inputs.

        The mean is (n,) or (n, n_outputs), the standard deviation has its shape, the covariance is (n, n) or
        (n, n, n_outputs). Both include the noise.
        """
        if return_std and return_cov:
            raise ValueError(
                "return_std and return_cov exclude each other: variances are on the diagonal of the covariance"
            )
        p = self.predictive(X, joint=return_cov)
        mean = self._outside(p.mean)
        if return_std:
            return mean, self._outside(p.stddev)
        if return_cov:
            n, outputs = len(p), p.function.mean.shape[-1]
            whole = p.function.covariance.reshape(n, outputs, n, outputs).diagonal(dim1=1, dim2=3)  # (n, n, outputs)
            noise = torch.diag_embed(p.aleatoric.reshape(n, outputs).T).movedim(0, -1)
            covariance = (whole + noise).double().cpu().numpy()
            return mean, covariance if self._shape else covariance[..., 0]
        return mean

    def _outside(self, values: Tensor) -> np.ndarray:
        """Return one row per item, in the form of the targets that were given to `fit`."""
        return values.double().cpu().numpy().reshape(len(values), *self._shape)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draw y, (n, n_samples) or (n, n_outputs, n_samples), joint over the inputs and with the noise."""
        drawn = self._draws(X, n_samples, random_state).astype(np.float64)
        return np.moveaxis(drawn.reshape(n_samples, -1, *self._shape), 0, -1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
