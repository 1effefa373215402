"""A door to BoTorch: a Laplace posterior as a `Model` for Bayesian optimization."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import BadData, UnsupportedOperation
from lapwing.laplace import Laplace

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its import compiles with torch.jit
        from botorch.models.model import FantasizeMixin, Model
        from botorch.models.utils.assorted import fantasize as fantasizing
        from botorch.posteriors import GPyTorchPosterior
        from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
        from linear_operator import to_linear_operator
except ImportError as error:
    raise ImportError("lapwing.botorch needs BoTorch: pip install 'lapwing-torch[botorch]'") from error

__all__ = ["LaplaceModel"]

AT_ONCE = 2**28  # bytes of kernel factors in memory at a time, where no gradients are kept
JITTERS = {torch.float64: (1e-12, 1e-10, 1e-8, 1e-6), torch.float32: (1e-7, 1e-6, 1e-5, 1e-4)}


@dataclass(frozen=True, eq=False)
class Observations:
    """N targets that the linearized model is conditioned on, per batch: f̂ + J(θ − θ̂) + noise.

    `left` and `right` (*b, N, k) are the kernel factors of their inputs, `residual` (*b′, N) is y − f̂ and `noise`
    (*b′, N) its variance. Batch shapes broadcast.
    """

    left: Tensor
    right: Tensor
    residual: Tensor
    noise: Tensor

    @cached_property
    def root(self) -> Tensor:
        """The Cholesky factor of J A⁻¹ Jᵀ + R, (*b, N, N)."""
        kernel = _symmetric(self.left @ self.right.mT)
        return torch.linalg.cholesky(_definite(kernel + torch.diag_embed(self.noise)))

    @cached_property
    def step(self) -> Tensor:
        """(J A⁻¹ Jᵀ + R)⁻¹ (y − f̂), (*b, N, 1), whose product with the kernel is how far the mean moves."""
        root = self.root
        shape = torch.broadcast_shapes(root.shape[:-2], self.residual.shape[:-1])
        root, residual = root.expand(*shape, *root.shape[-2:]), self.residual.expand(*shape, -1)
        return torch.cholesky_solve(residual[..., None], root)

    def and_then(self, other: Observations) -> Observations:
        """Both sets of targets together."""
        pairs = ((self.left, other.left, 2), (self.right, other.right, 2))
        rows = [_joined(a, b, own) for a, b, own in pairs]
        vectors = [_joined(a, b, 1) for a, b in ((self.residual, other.residual), (self.noise, other.noise))]
        return Observations(*rows, *vectors)


class LaplaceModel(Model, FantasizeMixin):
    """A posterior over the weights of a regression network as a BoTorch model.

    `posterior(X)` for X (*b, q, d) is the Gaussian over the linearized network's outputs, joint over the q points of
    each batch and over the m outputs, with gradients in X. `condition_on_observations` and `fantasize` add targets
    without training: the linearized model is conditioned exactly, by an update whose rank is the number of targets,
    its mean moves too, and the network itself stays as it is. With a temperature T, every target counts T times, as
    those of the fit do.

    `input_transform` and `outcome_transform` are BoTorch's. They must be fitted already: the network was trained on
    transformed inputs and outcomes. Posteriors are in the original units. A classifier's posterior is that of its
    logits, and cannot be conditioned.

    Examples:
        >>> from botorch.acquisition import qLogExpectedImprovement
        >>> from lapwing.botorch import LaplaceModel
        >>> acquisition = qLogExpectedImprovement(LaplaceModel(regression), best_f=targets.max())
        >>> acquisition(torch.zeros(5, 2, 1)).shape  # five pairs of points
        torch.Size([5])
    """

    input_transform: Any
    outcome_transform: Any

    def __init__(
        self, la: Laplace, *, input_transform: nn.Module | None = None, outcome_transform: nn.Module | None = None
    ) -> None:
        super().__init__()
        if not isinstance(la, Laplace):
            raise BadData(f"expected a posterior made by lapwing.fit, got {type(la).__name__}")
        outputs = _outputs(la)
        if la.likelihood.noise_variance(outputs) is None and not la.likelihood.has_logits:
            raise UnsupportedOperation(
                f"the outputs of a network with {la.likelihood} are not predictions of the target. LaplaceModel takes "
                "regression with constant noise (likelihood 'regression'), or the logits of a classifier."
            )
        self.la = la
        self.likelihood = la.likelihood
        self._picked = tuple(range(outputs.shape[-1]))
        self._added: Observations | None = None
        self._batch = torch.Size()
        for name, transform in (("input_transform", input_transform), ("outcome_transform", outcome_transform)):
            if transform is not None:
                _require_fitted(name, transform)
                setattr(self, name, transform)
        self.eval()

    @property
    def num_outputs(self) -> int:
        """The number of outputs m."""
        return len(self._picked)

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of the targets that the model was conditioned on; empty for a fit."""
        return self._batch

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """Return the joint Gaussian over the outputs at X (*b, q, d), of shape (*b, q, m).

        `observation_noise=True` adds the noise of the likelihood; a tensor (*b, q, m) is added as variances, in the
        units of the network's outputs.

        Examples:
            >>> from lapwing.botorch import LaplaceModel
            >>> LaplaceModel(regression).posterior(torch.zeros(5, 2, 1)).variance.shape
            torch.Size([5, 2, 1])
        """
        if output_indices is not None:
            return self.subset_output(output_indices).posterior(
                X, observation_noise=observation_noise, posterior_transform=posterior_transform
            )
        _require_points(X)
        self.eval()
        inputs = self.transform_inputs(X)
        mean, covariance = self._joint(inputs)
        if observation_noise is not False:
            given = observation_noise if isinstance(observation_noise, Tensor) else None
            covariance = covariance + torch.diag_embed(self._noise(mean, given).flatten(-2))
        mean, covariance = mean.to(X), _definite(covariance.to(X))
        if self.num_outputs == 1:
            normal = MultivariateNormal(mean[..., 0], to_linear_operator(covariance))
        else:
            normal = MultitaskMultivariateNormal(mean, to_linear_operator(covariance))
        found = GPyTorchPosterior(distribution=normal)
        if hasattr(self, "outcome_transform"):
            found = self.outcome_transform.untransform_posterior(found, X=inputs)
        return found if posterior_transform is None else posterior_transform(posterior=found, X=X)

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> LaplaceModel:
        """Return the model after it has seen targets Y (*b′, n, m) at X (*b, n, d), without training.

        The posterior over the weights of the linearized model becomes N(θ̂ + Σ′J′ᵀR⁻¹(y − f̂), Σ′) with Σ′⁻¹ = Σ⁻¹ +
        J′ᵀR⁻¹J′. `noise` (variances, in the units of the network's outputs) replaces that of the likelihood.

        Examples:
            >>> from lapwing.botorch import LaplaceModel
            >>> after = LaplaceModel(regression).condition_on_observations(torch.zeros(1, 1), torch.ones(1, 1))
            >>> mean = after.posterior(inputs).mean
        """
        _require_points(X)
        self.eval()
        if Y.shape[-2:] != (X.shape[-2], self.num_outputs):
            raise BadData(
                f"expected targets of shape (..., {X.shape[-2]}, {self.num_outputs}) for X of shape {tuple(X.shape)}, "
                f"got {tuple(Y.shape)}"
            )
        inputs = self.transform_inputs(X)
        if hasattr(self, "outcome_transform"):
            Y, _ = self.outcome_transform(Y, X=inputs)
        if not bool(Y.isfinite().all()):
            raise BadData("the targets to condition on are not finite")
        batch = torch.broadcast_shapes(self._batch, X.shape[:-2], Y.shape[:-2])
        if not X.shape[-2]:
            return self._changed(self._added, batch)
        f, left, right = self._factors(inputs)
        residual = Y.to(f) - f
        variance = self._noise(residual, noise) / torch.as_tensor(self.la.temperature.T).to(f)
        new = Observations(left.flatten(-3, -2), right.flatten(-3, -2), residual.flatten(-2), variance.flatten(-2))
        return self._changed(new if self._added is None else self._added.and_then(new), batch)

    def fantasize(
        self, X: Tensor, sampler: Any, observation_noise: Tensor | None = None, **kwargs: Any
    ) -> LaplaceModel:
        """Return the model conditioned on targets that `sampler` draws at X from its own posterior, with noise.

        Examples:
            >>> from botorch.sampling import SobolQMCNormalSampler
            >>> from lapwing.botorch import LaplaceModel
            >>> sampler = SobolQMCNormalSampler(torch.Size([4]))
            >>> fantasies = LaplaceModel(regression).fantasize(torch.zeros(1, 1), sampler)
            >>> fantasies.posterior(inputs).mean.shape
            torch.Size([4, 40, 1])
        """
        kwargs.pop("propagate_grads", None)  # gradients are kept wherever X has them
        with fantasizing():
            if not X.shape[-2]:
                Y = X.new_empty(*sampler.sample_shape, *X.shape[:-2], 0, self.num_outputs)
            else:
                noise = True if observation_noise is None else observation_noise
                Y = sampler(self.posterior(X, observation_noise=noise))
            return self.condition_on_observations(X, Y, noise=observation_noise, **kwargs)

    def subset_output(self, idcs: Sequence[int]) -> LaplaceModel:
        """Return the model of some outputs; observations that it was conditioned on are kept."""
        m = self.num_outputs
        if not all(-m <= k < m for k in idcs) or not len(idcs):
            raise BadData(f"output indices {list(idcs)} do not name some of {m} outputs")
        made = self._changed(self._added, self._batch)
        made._picked = tuple(self._picked[k] for k in idcs)
        if hasattr(self, "outcome_transform"):
            made.outcome_transform = self.outcome_transform.subset_output([k % m for k in idcs]).eval()
        return made

    def _changed(self, added: Observations | None, batch: torch.Size) -> LaplaceModel:
        transforms = {name: getattr(self, name, None) for name in ("input_transform", "outcome_transform")}
        made = LaplaceModel(self.la, **transforms)
        made._picked, made._added, made._batch = self._picked, added, batch
        return made

    def _set_transformed_inputs(self) -> None:
        """Do nothing: no training inputs are kept that a transform would apply to."""

    def _factors(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """f (*b, q, m) at transformed inputs and its kernel factors (*b, q, m, k), in float64."""
        keep = torch.is_grad_enabled() and X.requires_grad
        found = self.la.kernel_factors(X.reshape(-1, X.shape[-1]), differentiable=keep)
        f, left, right = (each.double() for each in found)
        shared = found[1] is found[2]
        if f.ndim != 2:
            raise UnsupportedOperation(f"the network has outputs of shape {tuple(f.shape[1:])} per input, not (m,)")
        if self._picked != tuple(range(f.shape[-1])):
            picked = list(self._picked)
            f, left, right = f[:, picked], left[:, picked], right[:, picked]
        batch = X.shape[:-1]
        left = left.reshape(*batch, *left.shape[1:])
        return f.reshape(*batch, -1), left, left if shared else right.reshape(*batch, *right.shape[1:])

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (*b, q, m) and covariance (*b, q·m, q·m) of the outputs at transformed inputs, in float64."""
        flat = X.reshape(-1, *X.shape[-2:])
        per = 24 * X.shape[-2] * len(self._picked) * self.la.params.size
        size = max(1, AT_ONCE // per)
        if self._added is None and len(flat) > size and not (torch.is_grad_enabled() and X.requires_grad):
            parts = [self._joint(part) for part in flat.split(size)]
            mean, covariance = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
            return mean.reshape(*X.shape[:-1], -1), covariance.reshape(*X.shape[:-2], *covariance.shape[-2:])
        mean, left, right = self._factors(X)
        left, right = left.flatten(-3, -2), right.flatten(-3, -2)
        covariance = _symmetric(left @ right.mT)
        if (added := self._added) is not None:
            cross = left @ added.right.mT  # (*b, q·m, N)
            mean = mean + (cross @ added.step)[..., 0].unflatten(-1, mean.shape[-2:])
            half = torch.linalg.solve_triangular(added.root, cross.mT, upper=False)
            covariance = covariance - half.mT @ half
        batch = torch.broadcast_shapes(X.shape[:-2], self._batch)
        return mean.expand(*batch, -1, -1), covariance.expand(*batch, -1, -1)

    def _noise(self, like: Tensor, given: Tensor | None) -> Tensor:
        """The variances of the noise at the points of `like` (*b, q, m)."""
        if given is not None:
            if not bool((given > 0).all()):
                raise BadData("the variances of the noise must be positive")
            return given.to(like).expand(like.shape)
        variance = self.likelihood.noise_variance(_outputs(self.la))
        if variance is None:
            raise UnsupportedOperation(
                f"{self.likelihood} has no noise that is added to the outputs: observation_noise, conditioning and "
                "fantasies are for regression"
            )
        return variance.detach().to(like)[list(self._picked)].expand(like.shape)


def _outputs(la: Laplace) -> Tensor:
    """A few outputs f of the network."""
    probe = None if la.watch is None else la.watch.probe
    if probe is None:
        raise UnsupportedOperation("this posterior does not know an input of its network: fit it again")
    return la.network.outputs(probe.outputs)


def _require_fitted(name: str, transform: Any) -> None:
    """Refuse transforms that learn from data and have seen none, which would quietly do nothing."""
    untouched = getattr(transform, "learn_coefficients", False) and getattr(transform, "offset", None) is not None
    if untouched and bool((transform.offset == 0).all()) and bool((transform.coefficient == 1).all()):
        raise BadData(
            f"{name} has not been fitted: apply it to the training inputs first (and train the network on the result), "
            "or give its bounds"
        )


def _require_points(X: Tensor) -> None:
    if X.ndim < 2:
        raise BadData(f"expected X of shape (..., q, d), got {tuple(X.shape)}")


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def _definite(matrix: Tensor) -> Tensor:
    """Return a covariance that has a Cholesky factor: as it is, or with the least sufficient addition to its diagonal.

    Covariances of more points than weights are singular, and rounding makes them indefinite.
    """
    known = matrix.detach()
    if not bool(known.isfinite().all()):
        raise BadData("the covariance of the outputs is not finite: look for overflow in the network or its inputs")
    jitter = torch.zeros_like(known[..., :1, 0])
    scale = known.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp(min=1e-12)
    for level in (*JITTERS.get(matrix.dtype, JITTERS[torch.float32]), math.inf):
        failed = torch.linalg.cholesky_ex(known + torch.diag_embed(jitter.expand(known.shape[:-1])))[1] != 0
        if not bool(failed.any()):
            break
        if level == math.inf:
            raise UnsupportedOperation("the covariance of the outputs is not positive definite: use float64")
        jitter = torch.where(failed[..., None], level * scale, jitter)
    return matrix if not bool(jitter.any()) else matrix + torch.diag_embed(jitter.expand(known.shape[:-1]))


def _joined(a: Tensor, b: Tensor, own: int) -> Tensor:
    """Concatenate along the first of the last `own` dimensions; batch dimensions broadcast."""
    batch = torch.broadcast_shapes(a.shape[:-own], b.shape[:-own])
    return torch.cat([each.expand(*batch, *each.shape[-own:]) for each in (a, b)], -own)
