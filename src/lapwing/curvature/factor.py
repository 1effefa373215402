"""Factors: which S with S Sᵀ = φ·Λ the curvature Σ Jᵀ S Sᵀ J uses (exact GGN, Monte Carlo or empirical Fisher).

The columns of S are directions in output space; a structure back-propagates them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import BadData, TooLarge, UnsupportedOperation, nearest, require_whole
from lapwing.likelihoods import Likelihood
from lapwing.storage import named, register

DIRECTIONS = 2048  # output directions per sample beyond which the exact GGN is refused
MISSED = 1e-3  # share of the curvature of a weight that may be left out by default
NOTICED = 1e-6  # curvature so small that no usual prior precision tells it from zero


@dataclass(frozen=True, eq=False)
class Directions:
    """Vectors s[n, k] in output space, the largest first for each sample, and how many each sample needs."""

    columns: Tensor  # (k, n, *event, c), or (n, positions, c, r) with `order`
    needed: Tensor  # (n,)
    event: tuple[int, ...] = ()
    order: Tensor | None = None  # (n, positions · r): columns by decreasing norm
    scale: Tensor | None = None  # (n,): the first direction is the (weighted) score times this
    total: float = 1.0  # Σ ‖s‖² of all columns
    dropped: float = 0.0  # Σ ‖s‖² of columns that no sample needs

    @property
    def count(self) -> int:
        """The largest number of directions that a sample needs."""
        return int(self.needed.max()) if self.needed.numel() else 0

    def between(self, start: int, stop: int) -> Tensor:
        """Return directions start … stop − 1 of every sample, (stop − start, n, *event, c); zeros beyond its need."""
        if self.order is None:
            return self.columns[start:stop]
        n, positions, c, r = self.columns.shape
        if positions == 1:
            return self._sorted[start:stop].reshape(-1, n, *self.event, c)
        which = self.order[:, start:stop]
        place, column = which // r, which % r
        sample = torch.arange(n, device=which.device)[:, None]
        values = self.columns[sample, place, :, column]  # (n, k, c)
        rank = torch.arange(which.shape[1], device=which.device)
        values = values * (start + rank < self.needed[:, None])[..., None]
        out = values.new_zeros(len(rank), n, positions, c)
        out[rank, sample, place] = values
        return out.reshape(len(rank), n, *self.event, c)

    @cached_property
    def _sorted(self) -> Tensor:
        """All directions of outputs without event dimensions, (k, n, c)."""
        assert self.order is not None
        columns = self.columns[:, 0]
        found = columns.gather(-1, self.order[:, None].expand(columns.shape)).permute(2, 0, 1)
        rank = torch.arange(len(found), device=found.device)
        return found * (rank[:, None] < self.needed)[..., None]

    def take(self, rows: Tensor) -> Directions:
        """Take the directions of some samples."""
        if self.order is None:
            return replace(self, columns=self.columns[:, rows], needed=self.needed[rows])
        scale = None if self.scale is None else self.scale[rows]
        return replace(self, columns=self.columns[rows], needed=self.needed[rows], order=self.order[rows], scale=scale)


class Factor(ABC):
    """Directions s[n, r] in output space whose outer products sum to φ·Λ of each sample, or estimate it.

    A factor of your own says how many directions there are (`width`) and yields them (`directions`).

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", factor=lapwing.MCFisher(samples=4))
    """

    dispersion_power = 1  # the curvature scales as 1/φ to this power
    definite = True  # whether the curvature has no eigenvalues below zero
    exact = False  # whether the directions of a sample sum to φ·Λ exactly, so that products with Λ replace them
    sampled = False  # whether directions are random draws
    mergeable = True  # whether sums over parts of the data add up, for processes and interrupted fits
    limit: int | None = None  # directions per sample beyond which a fit is refused; None: no limit
    tolerance: float | None = None  # share of Σ tr Λ that may be left out; None: what is below rounding
    structures: tuple[str, ...] = ()  # structures that can use it, the usual one first; () means all

    @property
    def has_directions(self) -> bool:
        """Whether there are directions in output space at all."""
        return type(self).directions is not Factor.directions

    def directions(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        """Yield tensors (n, *event, c), one per direction."""
        raise UnsupportedOperation(f"factor {type(self).__name__} has no directions: use factor='ggn' here")

    def choose(
        self,
        likelihood: Likelihood,
        f: Tensor,
        y: Tensor,
        weights: Tensor | None = None,
        generator: torch.Generator | None = None,
        scored: bool = False,
        reach: Tensor | None = None,
    ) -> Directions:
        """Return the directions of a batch, times the root of each sample's weight, without negligible ones.

        `scored` asks for the score as the first direction, where the likelihood can rotate S that way. `reach` (n, k)
        holds inputs of each sample, whose squares multiply its curvature on the way to weights of a first layer.
        """
        columns = torch.stack(list(self.directions(likelihood, f, y, generator)))
        if weights is not None:
            columns = columns * weights.to(columns).sqrt().reshape(-1, *(1,) * (columns.ndim - 2))
        return Directions(columns, torch.full((len(f),), len(columns), device=f.device))

    @abstractmethod
    def width(self, outputs: int) -> int:
        """Return how many directions a sample with this number of outputs has at most.

        Examples:
            >>> lapwing.GGN().width(10), lapwing.MCFisher(samples=2).width(10)
            (10, 2)
        """

    def require(self, f: Tensor) -> None:
        """Raise `TooLarge` where a sample with outputs like f has more directions than the factor's limit."""
        if self.limit is not None and f[0].numel() > self.limit:
            raise TooLarge(
                f"the exact {type(self).__name__} needs up to {f[0].numel():,} output directions per sample, outputs "
                f"{tuple(f.shape[1:])}, more than {self.limit:,}. Use factor='mc' (Monte Carlo Fisher), or "
                "GGN(limit=...) to insist."
            )


def resolve_factor(factor: str | Factor) -> Factor | None:
    """Return the factor that `factor=` means, an object or a name; None for "auto"."""
    if isinstance(factor, Factor):
        return factor
    if factor == "auto":
        return None
    factors = named(Factor)
    if factor not in factors:
        raise UnsupportedOperation(
            f"factor is one of {sorted(factors)} or 'auto', got {factor!r}{nearest(factor, factors)}"
        )
    return factors[factor]()


@register(name="ggn")
@dataclass(frozen=True, eq=False)
class GGN(Factor):
    """The generalized Gauss–Newton matrix: one direction per column of S and per event position.

    `limit` is the number of directions per sample beyond which `TooLarge` is raised (tokens × classes, pixels ×
    classes, thousands of classes): a sampled factor is then the practical choice.

    `tolerance` is the share of the curvature in output space, Σ tr Λ of a batch, that may be left out. The smallest
    directions are left out first, and a sample without directions costs only a forward pass. None leaves out what is
    below the rounding of the network's dtype, unless a weight would miss it because few samples have a large input
    there; 0 leaves out nothing (except in the basis of `EKFAC`). Confident classifiers gain most:
    `GGN(tolerance=1e-3)` needs less than one of nine directions per sample on a trained CIFAR-10 network. The summary
    says what was dropped. Matrix-free products leave out whole samples only.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", factor=lapwing.GGN(tolerance=1e-3))
    """

    limit: int = DIRECTIONS
    tolerance: float | None = None
    exact = True

    def __post_init__(self) -> None:
        if self.limit != DIRECTIONS:
            require_whole("limit", self.limit)
        number = isinstance(self.tolerance, int | float) and not isinstance(self.tolerance, bool)
        if self.tolerance is not None and not (number and 0 <= self.tolerance < 1):
            raise BadData(f"the tolerance is a share of the curvature, 0 ≤ tolerance < 1, got {self.tolerance!r}")

    def choose(
        self,
        likelihood: Likelihood,
        f: Tensor,
        y: Tensor,
        weights: Tensor | None = None,
        generator: torch.Generator | None = None,
        scored: bool = False,
        reach: Tensor | None = None,
    ) -> Directions:
        self.require(f)
        root, scale = (likelihood.scored_factor(f, y) if scored else None) or (likelihood.factor(f, y), None)
        root = root.reshape(len(f), -1, *root.shape[-2:])  # (n, positions, c, r)
        if weights is not None:
            root = root * weights.to(root).sqrt()[:, None, None, None]
            scale = None if scale is None else torch.where(weights > 0, scale / weights.to(scale).sqrt(), 0.0)
        sizes = torch.linalg.vector_norm(root, dim=2).flatten(1).double().square()
        ranked = sizes if scale is None else torch.cat([torch.full_like(sizes[:, :1], torch.inf), sizes[:, 1:]], 1)
        order = ranked.sort(dim=-1, descending=True, stable=True).indices
        sizes = sizes.gather(-1, order)
        kept = larger(sizes, torch.finfo(f.dtype).eps if self.tolerance is None else self.tolerance)
        if reach is not None and self.tolerance is None:
            rare = _matter_to_some_weight(sizes, kept, reach)
            kept |= rare[:, None] & (sizes > 0)
        if scale is not None:  # the score is kept whenever another direction is
            kept[:, 0] = kept.any(1)
            scale = torch.where(kept[:, 0], scale, 0.0)
        dropped = float(sizes[~kept].sum())
        return Directions(root, kept.sum(1), tuple(f.shape[1:-1]), order, scale, float(sizes.sum()), dropped)

    def directions(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        self.require(f)
        root = likelihood.factor(f, y)  # (n, *event, c, r)
        n, c, r = root.shape[0], root.shape[-2], root.shape[-1]
        root = root.reshape(n, -1, c, r)
        used = [[True] * r] if root.shape[1] == 1 else root.ne(0).any(2).any(0).tolist()  # ignored ones have none
        for e in range(root.shape[1]):
            for column in range(r):
                s = root[:, e, :, column]
                if root.shape[1] == 1:
                    yield s.reshape(f.shape)
                elif used[e][column]:
                    only = torch.zeros_like(root[..., 0])
                    only[:, e] = s
                    yield only.reshape(f.shape)

    def width(self, outputs: int) -> int:
        return outputs


def larger(sizes: Tensor, share: float) -> Tensor:
    """Return a mask of the sizes to keep: the smallest are left out while they hold at most this share of the sum.

    Equal sizes are kept or left out together.
    """
    ascending = sizes.flatten().sort().values
    most = int((ascending.cumsum(0) <= share * sizes.sum()).sum())
    return sizes >= (ascending[most] if most < len(ascending) else torch.inf)


def _matter_to_some_weight(sizes: Tensor, kept: Tensor, reach: Tensor) -> Tensor:
    """Return a mask (n,) of samples whose dropped directions (`sizes` (n, k), not `kept`) matter to some weight.

    They hold more than `MISSED` of the weight's curvature in this batch, and more than `NOTICED`.
    """
    lost = (sizes * ~kept).sum(1)
    rare = lost * reach.abs().amax(1).double().square() > NOTICED
    if bool(rare.any()):
        squares = reach.double().square()
        whole = MISSED * (sizes.sum(1) @ squares) + NOTICED
        rare[rare.clone()] = (lost[rare, None] * squares[rare] > whole).any(1)
    return rare


@register(name="mc")
@dataclass(frozen=True, eq=False)
class MCFisher(Factor):
    """An unbiased estimate of the Fisher information from `samples` targets per datum, drawn from the network's own
    predictions.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", factor=lapwing.MCFisher(samples=4))
    """

    samples: int = 1
    sampled = True

    def __post_init__(self) -> None:
        require_whole("samples", self.samples)

    def directions(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        for _ in range(self.samples):
            yield likelihood.sample_factor(f, y, generator) / self.samples**0.5

    def width(self, outputs: int) -> int:
        return self.samples


@register(name="empirical")
@dataclass(frozen=True, eq=False)
class EmpiricalFisher(Factor):
    """Outer products of the gradient of each sample. It vanishes where the network interpolates: for comparisons only.

    Examples:
        >>> la = lapwing.fit(model, train_loader, "classification", factor=lapwing.EmpiricalFisher())
    """

    dispersion_power = 2

    def directions(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        yield likelihood.score(f, y) * likelihood.common_factor.detach().to(f)

    def width(self, outputs: int) -> int:
        return 1
