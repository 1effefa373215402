"""Distributions over the outputs f of the network, (B, *event, C), and how logits spread, as a softmax asks for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from lapwing.errors import UnsupportedOperation
from lapwing.likelihoods.marginal import safe_sqrt
from lapwing.linalg.rows import chunks
from lapwing.model.calls import outside_autocast
from lapwing.predictive.decompositions import MatrixPowers, symmetric_root
from lapwing.predictive.softmax import SEED, SOME, Spread, apart_from, base_points, fixed_points

ITEMS = 2**23  # elements of covariances of logits under way at a time
BLOCK = 2**24  # elements of f in one block of points
SAMPLES = 1024
"""Points of f in a Monte Carlo expectation; a power of two suits the Sobol sequence."""

WEIGHT_DRAWS = 128
"""Points of f in a Monte Carlo expectation where each costs a pass through the network."""

CLOSED_FORM = 64
"""Outputs per sample up to which everything comes from covariances; beyond, `sample` takes one JVP per draw."""

COVARIANCES = 1024
"""Outputs per sample up to which class probabilities come from covariances; beyond, they come from draws by JVPs.
Equally accurate probabilities would need more draws than there are outputs."""

_DRAWS = 64  # points by weight draws per block: a constant, so that results do not depend on the batch

Sampler = Callable[[int, torch.Generator | None], Tensor | Iterator[Tensor]]
"""(n, generator) → n draws of f, (n, B, *event, C), at once or in pieces (k, B, *event, C)."""


class FunctionDistribution(ABC):
    """The distribution of f at a batch of inputs, independent over the batch unless `joint`."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """The mean, (B, *event, C)."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """The marginal variance of each output, (B, *event, C)."""

    @property
    @abstractmethod
    def covariance(self) -> Tensor:
        """The covariance of the outputs of an item, (B, *event, C, C); (B, *event, C, B, *event, C) where `joint`."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw f, (n, B, *event, C), correlated over inputs where `joint`; from a fixed seed without a generator."""

    @abstractmethod
    def blocks(self, n: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """Yield about n points in blocks (k, B, *event, C), for expectations under the law of each item on its own.

        All points have the same weight. Without a generator all items share the same base points, so an expectation
        does not depend on what else is in the batch; the points say nothing about correlation over inputs.
        """

    @abstractmethod
    def scaled(self, factor: float) -> FunctionDistribution:
        """Return the distribution of factor·f."""

    @abstractmethod
    def take(self, index: Tensor) -> FunctionDistribution:
        """Return the distribution at some items of the batch, chosen by a tensor of their numbers."""

    def stored(self) -> FunctionDistribution:
        """Return the same distribution made of tensors alone, so that it can be pickled without the network."""
        return self

    @property
    def item_covariance(self) -> Tensor:
        """The covariance of the outputs of each item, (B, *event, C, C), also where `joint`."""
        return self.covariance

    @property
    def joint(self) -> bool:
        """Whether covariance and samples reach over inputs."""
        return False

    @property
    def has_covariance(self) -> bool:
        """Whether `item_covariance` is known and cheaper than samples."""
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
    def needs_network(self) -> bool:
        """Whether points come from passes through the network, which a stored distribution has no longer."""
        return False

    @property
    def normal(self) -> bool:
        """Whether each item is Gaussian, so that closed forms and quadrature apply."""
        return False

    @property
    def shared_root(self) -> tuple[Tensor, ...] | None:
        """R (C, C) and s (B, *event, C) where the covariance of every item is R diag(s²) Rᵀ; None elsewhere.

        R⁻¹ may come third, where it is at hand.
        """
        return None

    @property
    def contrast_covariance(self) -> Tensor | None:
        """The covariance of f minus its average over the outputs of an item; None where there are only draws."""
        return None

    @property
    def spread(self) -> Spread | None:
        """The spread of logits of all items, where there is a shorter way to it than a root or a covariance."""
        return None

    @outside_autocast
    def points(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return all blocks at once, (S, B, *event, C)."""
        return torch.cat(list(self.blocks(n, generator)))


@dataclass(frozen=True, eq=False, init=False, repr=False)
class GaussianFunction(FunctionDistribution):
    """f ~ N(mean, covariance), the linearized predictive of the outputs.

    `covariance` and `variance` are tensors, or functions without arguments that are called once, when needed.
    `sampler(n, generator)` draws (n, B, *event, C) without a covariance, joint over inputs as weight samples are, at
    once or in pieces of fewer draws.
    Expectations per item then use `root`, if that gives R (C, C) and s (B, C) with covariances R diag(s²) Rᵀ, and
    otherwise the draws with their mirror images; those of a softmax use the covariances if `closed` says that they
    are worth their cost. With `joint=True` the covariance is (B, *event, C, B, *event, C).

    `contrasts` serves targets that do not see the average of f over C (a softmax). Under a wide prior the variance of
    that average drowns all others in rounding, so expectations per item use the covariance of f minus the average:
    give it as a function, or True to compute it from `covariance`. `spread` gives the same as a `Spread`.

    Example: `GaussianFunction(mean, variance=lambda: diagonal(x), sampler=weight_draws)`.
    """

    _mean: Tensor
    _covariance: Tensor | Callable[[], Tensor] | None
    _variance: Tensor | Callable[[], Tensor] | None
    _sampler: Sampler | None
    _joint: bool
    _contrasts: Callable[[], Tensor] | bool
    _root: Callable[[], tuple[Tensor, ...] | None] | None
    _closed: bool
    _spread: Callable[[], Spread | None] | None

    def __init__(
        self,
        mean: Tensor,
        covariance: Tensor | Callable[[], Tensor] | None = None,
        *,
        variance: Tensor | Callable[[], Tensor] | None = None,
        sampler: Sampler | None = None,
        joint: bool = False,
        contrasts: Callable[[], Tensor] | bool = False,
        root: Callable[[], tuple[Tensor, ...] | None] | None = None,
        closed: bool = False,
        spread: Callable[[], Spread | None] | None = None,
    ) -> None:
        if covariance is None and variance is None and sampler is None:
            raise ValueError("GaussianFunction needs a covariance, a variance or a sampler; all are missing.")
        self.__dict__.update(
            _mean=mean, _covariance=covariance, _variance=variance, _sampler=sampler, _joint=joint,
            _contrasts=contrasts, _root=root, _closed=closed, _spread=spread,
        )  # fmt: skip

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
            sampler=None if sampler is None else lambda n, g: (factor * part for part in self._drawn(n, g)),
            joint=self._joint,
            contrasts=(lambda: factor**2 * contrasts()) if callable(contrasts) else contrasts,
            root=lambda: None if self._found_root is None else scaled_root(self._found_root, factor),
            closed=self._closed,
        )

    def take(self, index: Tensor) -> GaussianFunction:
        covariance, variance, sampler, contrasts = self._covariance, self._variance, self._sampler, self._contrasts

        def chosen() -> Tensor:
            some = self.covariance[index]
            return some.index_select(self.mean.ndim, index) if self._joint else some

        def root() -> tuple[Tensor, ...] | None:
            found = self._found_root
            return None if found is None else (found[0], found[1][index], *found[2:])

        return GaussianFunction(
            self.mean[index],
            None if covariance is None else chosen,
            variance=None if variance is None else lambda: self.variance[index],
            sampler=None if sampler is None else lambda n, g: (part[:, index] for part in self._drawn(n, g)),
            joint=self._joint,
            contrasts=(lambda: contrasts()[index]) if callable(contrasts) else contrasts,
            root=None if self._root is None else root,
            closed=self._closed,
        )

    def stored(self) -> GaussianFunction:
        """Return the same law of each item from tensors alone.

        Draws of weights become draws from the covariance of each item, independent between items unless `joint`.
        Where there is no covariance, the mean and the variance remain, and what needs draws raises.
        """
        root = None if self._found_root is None else tuple(part.detach() for part in self._found_root)
        whole = self._covariance is not None and (self._joint or (root is None and self.has_covariance))
        single = self._variance is not None and self.mean.shape[-1] == 1
        covariance: Any = self.covariance.detach() if whole else None
        contrasts: Any = bool(self._contrasts)
        if covariance is None and root is not None:
            covariance = RootCovariance(root)
        elif callable(self._contrasts):
            contrasts = Known(self._contrasts().detach()) if whole else False
        return GaussianFunction(
            self.mean.detach(),
            covariance,
            variance=self.variance.detach(),
            sampler=no_more_draws if covariance is None and self._sampler is not None and not single else None,
            joint=self._joint,
            contrasts=contrasts,
            root=None if root is None else Known(root),
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
            return torch.cat(list(self._drawn(n, generator)))
        noise = torch.randn(n, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        if self._joint:
            return mean + (noise.reshape(n, -1) @ self._joint_root).reshape(noise.shape)
        return mean + (noise[..., None, :] @ self._item_root)[..., 0, :]

    def _drawn(self, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Yield draws from the sampler in the pieces that it gives."""
        assert self._sampler is not None
        found = self._sampler(n, generator)
        yield from (found,) if isinstance(found, Tensor) else found

    @cached_property
    def _found_root(self) -> tuple[Tensor, ...] | None:
        return self._root() if self._root is not None else None

    @property
    def usual(self) -> int:
        return SAMPLES if self._sampler is None else WEIGHT_DRAWS

    @property
    def mirrored(self) -> bool:
        return self._sampler is not None and self._visible_root is None

    @property
    def needs_network(self) -> bool:
        return self.mirrored

    @property
    def normal(self) -> bool:
        return True

    @property
    def shared_root(self) -> tuple[Tensor, ...] | None:
        return self._found_root

    @property
    def spread(self) -> Spread | None:
        return None if self._spread is None else self._spread()

    @property
    def contrast_covariance(self) -> Tensor | None:
        return None if self._sampler is not None and not self._closed else self._contrast_covariance

    @property
    def _contrast_covariance(self) -> Tensor:
        if callable(self._contrasts):
            return self._contrasts()
        half = self.item_covariance - self.item_covariance.mean(-1, keepdim=True)
        return half - half.mean(-2, keepdim=True)

    @cached_property
    @outside_autocast
    def _visible_root(self) -> tuple[Tensor, ...] | None:
        """R and s, without what all outputs of an item share if the targets do not see it."""
        found = self._found_root
        if found is None or not self._contrasts:
            return found
        return found[0] - found[0].mean(0), found[1]

    def _by_visible_root(self, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        assert self._visible_root is not None
        root, spread, mean = *self._visible_root[:2], self.mean
        size = max(1, BLOCK // max(1, 4 * mean.numel()))
        base = base_points(n, mean.shape[-1], mean) if generator is None else None
        for start in range(0, n, size):
            k = min(size, n - start)
            if base is not None:
                noise = base[start : start + k].reshape(k, *(1,) * (mean.ndim - 1), -1)
            else:
                noise = torch.randn(k, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
            yield mean + (noise * spread.to(mean)) @ root.to(mean).mT

    def blocks(self, n: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
        if self._visible_root is not None:
            yield from self._by_visible_root(n, generator)
            return
        if self._sampler is not None:
            generator = fixed_generator(self.mean.device) if generator is None else generator
            for start in range(0, n, _DRAWS):
                left = min(_DRAWS, n - start)
                for drawn in self._drawn((left + 1) // 2, generator):
                    yield torch.cat([drawn, 2 * self.mean - drawn])[:left]  # a draw's mirror image costs nothing
                    left -= 2 * len(drawn)
            return
        mean, root = self.mean, self._point_root
        size = n if torch.compiler.is_compiling() else max(1, BLOCK // max(1, mean.numel()))
        base = fixed_points(n, mean.shape[-1], SEED, mean.dtype).to(mean.device) if generator is None else None
        for start in range(0, n, size):
            k = min(size, n - start)
            if base is not None:
                yield mean + torch.einsum("sc,...cd->s...d", base[start : start + k], root)
            else:
                noise = torch.randn(k, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
                yield mean + (noise[..., None, :] @ root)[..., 0, :]


@dataclass(frozen=True, eq=False)
class Known:
    """A value as a function without arguments, which can be pickled."""

    value: Any

    def __call__(self) -> Any:
        return self.value


@dataclass(frozen=True, eq=False)
class RootCovariance:
    """R diag(s²) Rᵀ per item from R (C, C) and s (B, *event, C), computed when it is called."""

    root: tuple[Tensor, ...]

    def __call__(self) -> Tensor:
        spread = self.root[1].square()[..., None, :]
        return ((self.root[0] * spread) @ self.root[0].mT).to(spread.dtype)


def no_more_draws(n: int, generator: torch.Generator | None) -> Tensor:
    """Refuse draws of a stored distribution that has neither a covariance nor the network."""
    raise UnsupportedOperation(
        "this prediction was pickled or moved, and its draws need the network, which stayed behind: draw before "
        "pickling, p.sample(n), or predict again."
    )


def scaled_root(root: tuple[Tensor, ...], factor: float) -> tuple[Tensor, ...]:
    """Return the shared root of `factor` times the outputs."""
    left, spread, *inverse = root
    return (factor * left, spread, *(each / factor for each in inverse))


def from_root(root: Tensor, spread: Tensor) -> Tensor:
    """Return R diag(s²) Rᵀ of each item, (B, C, C), a few items at a time."""
    c = len(root)
    found = root.new_empty(len(spread), c, c)
    for start, length in chunks(len(spread), c * c * root.element_size()):
        own = spread[start : start + length].square()
        torch.matmul(root * own[:, None], root.mT, out=found[start : start + length])
    return found


def contrasts(c: int, like: Tensor) -> Tensor:
    """Return Helmert's orthonormal basis (c − 1, c) of c outputs without their average."""
    rank = torch.arange(1, c, dtype=torch.float64, device=like.device)
    basis = torch.tril(torch.ones(c - 1, c, dtype=torch.float64, device=like.device))
    basis[:, 1:].diagonal().copy_(-rank)
    return (basis / (rank * (rank + 1)).sqrt()[:, None]).to(like.dtype)


def fixed_generator(device: torch.device) -> torch.Generator:
    """Return the generator that stands in where none is given."""
    return torch.Generator(device).manual_seed(SEED)


def seeded(seed: int | None, device: torch.device) -> torch.Generator | None:
    """Return a fresh generator for a seed, so that results do not depend on the order of questions."""
    return None if seed is None else torch.Generator(device).manual_seed(seed)


def shares(weights: Tensor, n: int) -> list[int]:
    """Divide n draws among the parts of a mixture in proportion to their weights, rounded by largest remainder."""
    exact = weights.detach().double() * n
    counts = exact.floor().long()
    counts[(exact - counts).argsort(descending=True)[: n - int(counts.sum())]] += 1
    return counts.tolist()


@dataclass(frozen=True, eq=False)
class DenseSpread(Spread):
    """The spread of logits whose covariance (n, K, K), that of f minus its average over the K logits, is given."""

    covariance: Tensor

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """C^½, c · C^−½ and c = 1 / diag(C⁻¹), where the average of f, which C lacks, is free."""
        wide, k = self.covariance.double(), self.covariance.shape[-1]
        top = wide.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        top = top.clamp(min=torch.finfo(torch.float64).tiny ** 0.5)
        rounding = k * torch.finfo(self.covariance.dtype).eps
        root, back, inverse = MatrixPowers.apply(wide + top / k, rounding, 3)  # top on the average, taken away again
        conditional = 1 / (inverse.diagonal(dim1=-2, dim2=-1) - 1 / (k * top[..., 0]))
        back = conditional[..., None] * (back - top.rsqrt() / k)
        like = self.covariance.dtype
        return (root - top.sqrt() / k).to(like), back.to(like), conditional.to(like)

    @property
    def conditional(self) -> Tensor:
        return self._parts[2]

    def root(self, pivot: Tensor) -> Tensor:
        """A Cholesky factor, cheaper than the symmetric root; the average, which C lacks, gets a variance too."""
        wide, k = self.covariance.double(), self.covariance.shape[-1]
        top = wide.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        level = top.clamp(min=torch.finfo(torch.float64).tiny ** 0.5)
        ridge = k * torch.finfo(self.covariance.dtype).eps * level
        eye = torch.eye(k, dtype=wide.dtype, device=wide.device)
        found, failed = torch.linalg.cholesky_ex(wide + level / k + ridge * eye)
        found = torch.where((failed > 0)[:, None, None], torch.inf, found)  # takes the other way then
        return (found - found.gather(1, pivot.unsqueeze(-1).expand(-1, 1, k))).to(self.covariance)

    def apart(self, pivot: Tensor) -> Tensor:
        return apart_from(self.covariance, pivot)

    def steps(self, z: Tensor) -> Tensor:
        return _product(z, self._parts[0])

    def own(self, z: Tensor) -> Tensor:
        return _product(z, self._parts[1])

    @property
    def variance(self) -> Tensor:
        return self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0)

    def times(self, v: Tensor) -> Tensor:
        return v @ self.covariance

    def take(self, items: Tensor) -> DenseSpread:
        part = DenseSpread(self.covariance[items])
        if "_parts" in self.__dict__:
            part.__dict__["_parts"] = tuple(each[items] for each in self._parts)
        return part

    @property
    def chunk(self) -> int:
        return max(1, ITEMS // self.covariance.shape[1:].numel())


def _product(z: Tensor, matrices: Tensor) -> Tensor:
    """Return A_n z_s for points (S, K) and matrices (n, K, K), (K, n, S)."""
    n, k, _ = matrices.shape
    return (matrices.transpose(0, 1).reshape(k * n, k) @ z.mT).reshape(k, n, len(z))


@dataclass(frozen=True, eq=False)
class SharedSpread(Spread):
    """The spread of logits with covariances R diag(s²) Rᵀ, one R (K, K) for all items and s (n, K): a last layer."""

    left: Tensor
    spread: Tensor
    inverse: Tensor | None = None  # of the left side, where it is at hand
    squares: Tensor | None = None  # (R_kj − R_pj)² as (p, k·j), for few classes, where it is at hand
    centered: tuple[Tensor, Tensor] | None = None  # R minus its average over the logits, and its squares, likewise

    @cached_property
    def _dual(self) -> Tensor:
        """R^−T."""
        found = torch.linalg.inv(self.left.double()) if self.inverse is None else self.inverse
        return found.mT.to(self.left)

    @cached_property
    def _precision(self) -> tuple[Tensor, Tensor]:
        """V⁻¹1 and the diagonal of V⁻¹ − V⁻¹1 1ᵀV⁻¹ / 1ᵀV⁻¹1, each (n, K): the average of f is free."""
        dual, inverse = self._dual.double(), 1 / self.spread.double().square()
        along = (inverse * dual.sum(0)) @ dual.mT
        diagonal = inverse @ dual.square().mT - along.square() / along.sum(-1, keepdim=True)
        return along, diagonal

    @property
    def conditional(self) -> Tensor:
        return (1 / self._precision[1]).to(self.spread)

    def root(self, pivot: Tensor) -> Tensor:
        return (self.left - embedding(pivot, self.left)) * self.spread.unsqueeze(1)

    def apart(self, pivot: Tensor) -> Tensor:
        if self.squares is not None:
            each = embedding(pivot, self.squares).view(-1, *self.left.shape)
            return (each * self.spread.square().unsqueeze(1)).sum(-1)
        if self.spread.shape[-1] <= SOME:
            return self.root(pivot).square().sum(-1)
        own = (self._centered[pivot[:, 0]] * self.spread.square()) @ self._centered.mT  # covariances with the pivot
        found = self.variance + self.variance.gather(1, pivot) - 2 * own
        return found.scatter(1, pivot, 0.0).clamp(min=0)

    @cached_property
    def _centered(self) -> Tensor:
        """R minus its average over the logits."""
        return self.left - self.left.mean(0) if self.centered is None else self.centered[0]

    @cached_property
    def variance(self) -> Tensor:
        squares = self._centered.square() if self.centered is None else self.centered[1]
        return self.spread.square() @ squares.mT

    def times(self, v: Tensor) -> Tensor:
        return ((v @ self._centered) * self.spread.square().unsqueeze(1)) @ self._centered.mT

    def steps(self, z: Tensor) -> Tensor:
        each = self.spread.mT.unsqueeze(-1) * z.mT.unsqueeze(1)
        return (self._centered @ each.flatten(1)).unflatten(-1, each.shape[1:])

    def own(self, z: Tensor) -> Tensor:
        along = self._precision[0].to(self.spread)
        each = z.mT.unsqueeze(1) / self.spread.mT.unsqueeze(-1)
        back = (self._dual @ each.flatten(1)).unflatten(-1, each.shape[1:])
        shared = (along / along.sum(-1, keepdim=True)).mT.unsqueeze(-1)
        return self.conditional.mT.unsqueeze(-1) * (back - shared * back.sum(0))

    def take(self, items: Tensor) -> SharedSpread:
        part = replace(self, spread=self.spread[items])
        part.__dict__.update({name: self.__dict__[name] for name in ("_dual", "_centered") if name in self.__dict__})
        if "variance" in self.__dict__:
            part.__dict__["variance"] = self.variance[items]
        return part

    @property
    def chunk(self) -> int:
        classes = self.spread.shape[-1]
        return max(1, ITEMS // (classes * min(classes, SOME)))


def spread_of(function: FunctionDistribution) -> Spread | None:
    """Return the roots of the covariances of all items, (items, C, C); None where there are only draws."""
    found = function.spread
    if found is not None:
        return found
    shared = function.shared_root
    if shared is not None:
        root, spread, *inverse = (part.to(function.mean) for part in shared)
        return SharedSpread(root, spread.reshape(-1, spread.shape[-1]), next(iter(inverse), None))
    covariance = function.contrast_covariance
    return None if covariance is None else DenseSpread(covariance.reshape(-1, *covariance.shape[-2:]))
