"""Distributions over the outputs f of the network, (B, *event, C)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods.marginal import safe_sqrt
from lapwing.model.module import outside_autocast
from lapwing.predictive.fixed import base_points, fixed_generator
from lapwing.predictive.softmax import DenseSpread, SharedSpread, Spread

_BLOCK = 2**24  # elements of f in one block of points
SAMPLES = 1024
"""Points of f in a Monte Carlo expectation; a power of two suits their sequence."""

WEIGHT_DRAWS = 128
"""The same where each costs a pass through the network."""

_DRAWS = 64  # points by weight draws in one block: a constant, so that results do not depend on the batch

Sampler = Callable[[int, torch.Generator | None], Tensor]


class FunctionDistribution(ABC):
    """What the posterior says about f at a batch of inputs. Independent over the batch unless `joint`."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """(B, *event, C)."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """(B, *event, C), the marginal variance of each output."""

    @property
    @abstractmethod
    def covariance(self) -> Tensor:
        """(B, *event, C, C) between the outputs of an item; (B, *event, C, B, *event, C) where `joint`."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, *event, C) draws, correlated over inputs exactly where `joint`. Without a generator the draws come
        from a fixed seed: the same at every call."""

    @abstractmethod
    def blocks(self, n: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """About n points (k, B, *event, C), block by block, that stand with equal weights for each item's own law.

        For expectations item by item: without a generator all items share the same base points, so an expectation
        does not depend on what else is in the batch (and the points say nothing about correlation over inputs).
        """

    @abstractmethod
    def scaled(self, factor: float) -> FunctionDistribution:
        """The distribution of factor·f."""

    @property
    def item_covariance(self) -> Tensor:
        """(B, *event, C, C), also where `joint`."""
        return self.covariance

    @property
    def joint(self) -> bool:
        """Whether covariance and samples reach over inputs."""
        return False

    @property
    def has_covariance(self) -> bool:
        """Whether `item_covariance` is at hand, or cheaper than samples."""
        return True

    @property
    def usual(self) -> int:
        """How many points an expectation takes if no number is given."""
        return SAMPLES

    @property
    def mirrored(self) -> bool:
        """Whether the second half of each block is the mirror image of the first."""
        return False

    @property
    def spread(self) -> Spread | None:
        """Roots of the covariances of all items, (items, C, C), for expectations of a softmax; None where there are
        only draws."""
        return None

    @outside_autocast
    def points(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """All blocks at once, (S, B, *event, C)."""
        return torch.cat(list(self.blocks(n, generator)))


@dataclass(frozen=True, eq=False, init=False, repr=False)
class GaussianFunction(FunctionDistribution):
    """f ~ N(mean, covariance), the linearized predictive of the outputs.

    Each of `covariance`, `variance` is a tensor or a function without arguments, called once and when needed. With
    `sampler(n, generator)`, draws (n, B, *event, C) need no covariance at all, and are taken to be joint over inputs
    (as weight samples are); expectations item by item then come from `root`, if it gives R (C, C) and s (B, C) with
    covariances R diag(s²) Rᵀ, from draws and their mirror images otherwise; those of a softmax from the covariances,
    if `closed` says that they are worth their cost. `joint=True`: covariance is (B, *event,
    C, B, *event, C). `contrasts` is for targets that do not see the average of f over C (a softmax), whose variance
    under a wide prior drowns all others in rounding: the covariance of f minus that average, or True to take it from
    `covariance`. Expectations item by item use it.

    Example: `GaussianFunction(mean, variance=lambda: diagonal(x), sampler=weight_draws)`.
    """

    _mean: Tensor
    _covariance: Tensor | Callable[[], Tensor] | None
    _variance: Tensor | Callable[[], Tensor] | None
    _sampler: Sampler | None
    _joint: bool
    _contrasts: Callable[[], Tensor] | bool
    _root: Callable[[], tuple[Tensor, Tensor] | None] | None
    _closed: bool

    def __init__(
        self,
        mean: Tensor,
        covariance: Tensor | Callable[[], Tensor] | None = None,
        *,
        variance: Tensor | Callable[[], Tensor] | None = None,
        sampler: Sampler | None = None,
        joint: bool = False,
        contrasts: Callable[[], Tensor] | bool = False,
        root: Callable[[], tuple[Tensor, Tensor] | None] | None = None,
        closed: bool = False,
    ) -> None:
        if covariance is None and variance is None and sampler is None:
            raise ValueError("GaussianFunction needs a covariance, a variance or a sampler; all are missing.")
        fields = {"mean": mean, "covariance": covariance, "variance": variance, "sampler": sampler, "joint": joint}
        for name, value in (fields | {"contrasts": contrasts, "root": root, "closed": closed}).items():
            object.__setattr__(self, f"_{name}", value)

    @property
    def mean(self) -> Tensor:
        return self._mean

    @property
    def joint(self) -> bool:
        return self._joint

    @property
    def has_covariance(self) -> bool:
        if self._covariance is None:
            return self.mean.shape[-1] == 1 and self._variance is not None
        return self._sampler is None or self._closed or self.mean.ndim == 2  # tokens and pixels: rather by samples

    def scaled(self, factor: float) -> GaussianFunction:
        covariance, variance, sampler, contrasts = self._covariance, self._variance, self._sampler, self._contrasts
        return GaussianFunction(
            factor * self.mean,
            None if covariance is None else lambda: factor**2 * self.covariance,
            variance=None if variance is None else lambda: factor**2 * self.variance,
            sampler=None if sampler is None else lambda n, generator: factor * sampler(n, generator),
            joint=self._joint,
            contrasts=(lambda: factor**2 * contrasts()) if callable(contrasts) else contrasts,
            root=lambda: None if self._found_root is None else (factor * self._found_root[0], self._found_root[1]),
            closed=self._closed,
        )

    @cached_property
    @outside_autocast
    def covariance(self) -> Tensor:
        if self._covariance is None:
            if self.mean.shape[-1] == 1 and not self._joint:
                return self.variance[..., None]
            raise UnsupportedOperation(
                "this distribution of f was made from variances or a sampler and knows no covariance: "
                "use .variance or .sample(n)."
            )
        value = self._covariance() if callable(self._covariance) else self._covariance
        shape = self.mean.shape * 2 if self._joint else (*self.mean.shape, self.mean.shape[-1])
        if value.shape != shape:
            raise ValueError(f"expected a covariance of shape {tuple(shape)}, got {tuple(value.shape)}")
        return value

    @cached_property
    @outside_autocast
    def variance(self) -> Tensor:
        if self._variance is not None:
            return self._variance() if callable(self._variance) else self._variance
        if self._covariance is None:
            return self.points(1024).var(0)
        if self._joint:
            size = self.mean.numel()
            return self.covariance.reshape(size, size).diagonal().reshape(self.mean.shape)
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @cached_property
    @outside_autocast
    def item_covariance(self) -> Tensor:
        if not self._joint:
            return self.covariance
        c = self.mean.shape[-1]
        items = self.mean.numel() // c
        blocks = self.covariance.reshape(items, c, items, c).diagonal(dim1=0, dim2=2)  # (C, C, items)
        return blocks.movedim(-1, 0).reshape(*self.mean.shape, c)

    @cached_property
    @outside_autocast
    def _item_root(self) -> Tensor:
        """R (B, *event, C, C) with R R = item covariance; only its diagonal is used where C = 1."""
        if self.mean.shape[-1] == 1:
            return safe_sqrt(self.variance)[..., None]
        return symmetric_root(self.item_covariance)

    @cached_property
    @outside_autocast
    def _point_root(self) -> Tensor:
        return symmetric_root(self._contrast_covariance) if self._contrasts else self._item_root

    @cached_property
    @outside_autocast
    def _joint_root(self) -> Tensor:
        size = self.mean.numel()
        return symmetric_root(self.covariance.reshape(size, size))

    @outside_autocast
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        mean = self.mean
        generator = fixed_generator(mean.device) if generator is None else generator
        if self._sampler is not None:
            return self._sampler(n, generator)
        noise = torch.randn(n, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        if self._joint:
            return mean + (noise.reshape(n, -1) @ self._joint_root).reshape(noise.shape)
        return mean + (noise[..., None, :] @ self._item_root)[..., 0, :]

    @cached_property
    def _found_root(self) -> tuple[Tensor, Tensor] | None:
        return self._root() if self._root is not None else None

    @property
    def usual(self) -> int:
        return SAMPLES if self._sampler is None else WEIGHT_DRAWS

    @property
    def mirrored(self) -> bool:
        return self._sampler is not None and self._shared_root is None

    @cached_property
    def spread(self) -> Spread | None:
        if self._found_root is not None:
            return SharedSpread(*(part.to(self.mean) for part in self._found_root))
        if self._sampler is not None and not self._closed:
            return None
        covariance = self._contrast_covariance
        return DenseSpread(covariance.reshape(-1, *covariance.shape[-2:]))

    @property
    def _contrast_covariance(self) -> Tensor:
        """Of f minus its average over the outputs of an item."""
        if callable(self._contrasts):
            return self._contrasts()
        half = self.item_covariance - self.item_covariance.mean(-1, keepdim=True)
        return half - half.mean(-2, keepdim=True)

    @cached_property
    @outside_autocast
    def _shared_root(self) -> tuple[Tensor, Tensor] | None:
        """R and s, without what all outputs of an item share if the targets do not see it."""
        found = self._found_root
        if found is None or not self._contrasts:
            return found
        return found[0] - found[0].mean(0), found[1]

    def _by_shared_root(self, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        assert self._shared_root is not None
        (root, spread), mean = self._shared_root, self.mean
        size = max(1, _BLOCK // max(1, 4 * mean.numel()))
        base = base_points(n, mean.shape[-1], mean)[:, None] if generator is None else None
        for start in range(0, n, size):
            k = min(size, n - start)
            if base is not None:
                noise = base[start : start + k]
            else:
                noise = torch.randn(k, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
            yield mean + (noise * spread.to(mean)) @ root.to(mean).mT

    def blocks(self, n: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
        if self._shared_root is not None:
            yield from self._by_shared_root(n, generator)
            return
        if self._sampler is not None:
            generator = fixed_generator(self.mean.device) if generator is None else generator
            for start in range(0, n, _DRAWS):
                k = min(_DRAWS, n - start)
                drawn = self._sampler((k + 1) // 2, generator)
                yield torch.cat([drawn, 2 * self.mean - drawn])[:k]  # a draw's mirror image costs nothing
            return
        mean, root = self.mean, self._point_root
        size = max(1, _BLOCK // max(1, mean.numel()))
        base = base_points(n, mean.shape[-1], mean) if generator is None else None
        for start in range(0, n, size):
            k = min(size, n - start)
            if base is not None:
                yield mean + torch.einsum("sc,...cd->s...d", base[start : start + k], root)
            else:
                noise = torch.randn(k, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
                yield mean + (noise[..., None, :] @ root)[..., 0, :]


@dataclass(frozen=True, eq=False, init=False, repr=False)
class SampledFunction(FunctionDistribution):
    """The outputs of S sampled networks, samples (S, B, *event, C), with equal weights: `method="sampled"`.

    Variances are those of this mixture (divided by S). Row s is one network at all inputs, so draws are joint.
    """

    _mean: Tensor
    samples: Tensor

    def __init__(self, mean: Tensor | None, samples: Tensor) -> None:
        object.__setattr__(self, "_mean", samples.mean(0) if mean is None else mean)
        object.__setattr__(self, "samples", samples)
        if self._mean.shape != samples.shape[1:]:
            raise ValueError(f"samples {tuple(samples.shape)} do not fit a mean of shape {tuple(self._mean.shape)}")

    @property
    def mean(self) -> Tensor:
        return self._mean

    @property
    def has_covariance(self) -> bool:
        return False

    def scaled(self, factor: float) -> SampledFunction:
        return SampledFunction(factor * self.mean, factor * self.samples)

    @cached_property
    def variance(self) -> Tensor:
        return self.samples.var(0, correction=0)

    @cached_property
    @outside_autocast
    def covariance(self) -> Tensor:
        centered = self.samples - self.samples.mean(0)
        return torch.einsum("s...c,s...d->...cd", centered, centered) / len(centered)

    @outside_autocast
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.samples.device
        generator = fixed_generator(device) if generator is None else generator
        return self.samples[torch.randint(len(self.samples), (n,), generator=generator, device=device)]

    def blocks(self, n: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """The samples themselves, whatever n."""
        size = max(1, _BLOCK // max(1, self.mean.numel()))
        yield from self.samples.split(size)


@dataclass(frozen=True, eq=False, init=False, repr=False)
class MixtureFunction(FunctionDistribution):
    """Σ_k w_k p_k(f): several posteriors of one problem, for instance a Laplace approximation at each of K modes."""

    parts: tuple[FunctionDistribution, ...]
    weights: Tensor

    def __init__(self, parts: Sequence[FunctionDistribution], weights: Tensor | None = None) -> None:
        like = parts[0].mean
        weights = like.new_ones(len(parts)) if weights is None else weights.to(like)
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "weights", weights / weights.sum())

    @property
    def has_covariance(self) -> bool:
        return False

    def scaled(self, factor: float) -> MixtureFunction:
        return MixtureFunction([part.scaled(factor) for part in self.parts], self.weights)

    @cached_property
    def mean(self) -> Tensor:
        return torch.stack([w * part.mean for w, part in zip(self.weights, self.parts)]).sum(0)

    @cached_property
    def variance(self) -> Tensor:
        """Law of total variance."""
        terms = [w * (p.variance + (p.mean - self.mean).square()) for w, p in zip(self.weights, self.parts)]
        return torch.stack(terms).sum(0)

    @cached_property
    @outside_autocast
    def covariance(self) -> Tensor:
        terms = []
        for w, part in zip(self.weights, self.parts):
            shift = part.mean - self.mean
            terms.append(w * (part.item_covariance + shift[..., :, None] * shift[..., None, :]))
        return torch.stack(terms).sum(0)

    @outside_autocast
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.weights.device
        generator = fixed_generator(device) if generator is None else generator
        which = torch.multinomial(self.weights.detach(), n, replacement=True, generator=generator)
        draws = self.mean.new_empty(n, *self.mean.shape)
        for k, part in enumerate(self.parts):
            chosen = which == k
            draws[chosen] = part.sample(int(chosen.sum()), generator)
        return draws

    def blocks(self, n: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """A share of n for each part, in proportion to its weight (whole numbers by largest remainder)."""
        exact = self.weights.detach().double() * n
        counts = exact.floor().long()
        counts[(exact - counts).argsort(descending=True)[: n - int(counts.sum())]] += 1
        for part, count in zip(self.parts, counts.tolist()):
            if count:
                yield from part.blocks(count, generator)


class _SymmetricRoot(torch.autograd.Function):
    """A ↦ A^½ for positive semi-definite A, which may be singular.

    Unlike a Cholesky factor it exists for singular A, and unlike U√D it is continuous in A (signs and degenerate
    eigenvectors do not matter), so rounding in A only rounds the result. Backward: d(A^½) = U[(Uᵀ dA U) / (√d_i +
    √d_j)]Uᵀ, with 0 on the null space, where the root has no derivative.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(((matrix + matrix.mT) / 2).double())
        floor = values[..., -1:].clamp(min=0) * values.shape[-1] * torch.finfo(matrix.dtype).eps
        roots = torch.where(values > floor, values, 0.0).sqrt()
        ctx.save_for_backward(roots, vectors)
        return ((vectors * roots[..., None, :]) @ vectors.mT).to(matrix.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        roots, vectors = ctx.saved_tensors
        total = roots[..., :, None] + roots[..., None, :]
        inside = vectors.mT @ gradient.double() @ vectors
        inside = torch.where(total > 0, inside / total.masked_fill(total == 0, 1.0), 0.0)
        result = vectors @ inside @ vectors.mT
        return ((result + result.mT) / 2).to(gradient.dtype)


def symmetric_root(matrix: Tensor) -> Tensor:
    """The symmetric square root of a positive semi-definite matrix (..., C, C), in float64 inside, differentiable."""
    root: Tensor = _SymmetricRoot.apply(matrix)
    return root
