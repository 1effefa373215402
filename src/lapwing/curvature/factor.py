"""Which S with S Sᵀ = φ·Λ: the exact GGN, a Monte Carlo Fisher, the empirical Fisher. Each is a set of directions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import BadData, TooLarge, UnsupportedOperation, require_whole
from lapwing.likelihoods import Likelihood
from lapwing.storage import named, register

DIRECTIONS = 2048  # output directions a sample that the exact GGN goes through before it asks for a sampled factor
MISSED = 1e-3  # share of a weight's curvature that may be left out by default
NOTICED = 1e-6  # curvature that no prior precision in use tells from none


@dataclass(frozen=True, eq=False)
class Directions:
    """Vectors s[n, k] in output space, the largest of each sample first, and how many of them each sample needs."""

    columns: Tensor  # (k, n, *event, c), or (n, positions, c, r) with `order`
    needed: Tensor  # (n,)
    event: tuple[int, ...] = ()
    order: Tensor | None = None  # (n, positions · r): columns by decreasing norm
    scale: Tensor | None = None  # (n,): the first direction is the (weighted) score times this
    total: float = 1.0  # Σ ‖s‖² of all columns
    dropped: float = 0.0  # Σ ‖s‖² of those that no sample needs

    @property
    def count(self) -> int:
        """Directions of the sample that needs most."""
        return int(self.needed.max()) if self.needed.numel() else 0

    def between(self, start: int, stop: int) -> Tensor:
        """Directions start … stop − 1 of every sample, (stop − start, n, *event, c); zero beyond what it needs."""
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
        """Those of some samples."""
        if self.order is None:
            return replace(self, columns=self.columns[:, rows], needed=self.needed[rows])
        scale = None if self.scale is None else self.scale[rows]
        return replace(self, columns=self.columns[rows], needed=self.needed[rows], order=self.order[rows], scale=scale)


class Factor(ABC):
    """Directions s[n, r] in output space whose outer products sum to φ·Λ of each sample, or estimate it."""

    dispersion_power = 1  # the curvature scales as 1/φ to this power
    definite = True  # whether the curvature has no eigenvalues below zero
    exact = False  # whether the directions of a sample sum to φ·Λ exactly, so that products with Λ replace them
    sampled = False  # whether every pass draws new directions
    mergeable = True  # whether sums over parts of the data add up: shards, and fits that were interrupted
    limit: int | None = None  # directions per sample beyond which a fit is refused; None: no limit
    tolerance: float | None = None  # share of Σ tr Λ that may be left out; None: what is below rounding
    structures: tuple[str, ...] = ()  # the only ones that have an estimator for it, the usual one first; () is all

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
        """The same directions, those of each sample times the root of its weight, with those left out that may be;
        `scored` asks for the score to be the first of them, where the likelihood can turn them so. `reach` (n, k): the
        square of which a unit of curvature in output space is multiplied by on its way to k weights or others like
        them."""
        columns = torch.stack(list(self.directions(likelihood, f, y, generator)))
        if weights is not None:
            columns = columns * weights.to(columns).sqrt().reshape(-1, *(1,) * (columns.ndim - 2))
        return Directions(columns, torch.full((len(f),), len(columns), device=f.device))

    @abstractmethod
    def width(self, outputs: int) -> int:
        """How many directions a sample with so many outputs has (an upper bound, for memory)."""

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
        raise UnsupportedOperation(f"factor is one of {sorted(factors)} or 'auto', got {factor!r}")
    return factors[factor]()


@register(name="ggn")
@dataclass(frozen=True, eq=False)
class GGN(Factor):
    """The generalized Gauss–Newton matrix: one direction for each column of S and each event position.

    `limit` is the number of directions a sample beyond which `TooLarge` is raised (tokens × classes, pixels ×
    classes, thousands of classes): a sampled factor is then the practical choice.

    `tolerance` is the share of the curvature in output space, Σ tr Λ of a batch, that may be left out: the smallest
    directions are, and samples of which nothing is left cost a forward pass only. None leaves out what is below the
    rounding of the network's dtype, unless a large input that few other samples have takes it to a weight that would
    miss it; 0 leaves out nothing (but for the basis of `EKFAC`, see there). Confident
    classifiers gain most: `GGN(tolerance=1e-3)` needs less than one of nine directions a sample on a trained CIFAR-10
    network. The summary says what was dropped. Matrix-free products leave out whole samples only.
    """

    limit: int = DIRECTIONS
    tolerance: float | None = None
    exact = True

    def __post_init__(self) -> None:
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
        total = float(sizes.sum())
        tolerance = torch.finfo(f.dtype).eps if self.tolerance is None else self.tolerance
        ascending = sizes.flatten().sort().values
        most = int((ascending.cumsum(0) <= tolerance * total).sum())
        kept = sizes >= (ascending[most] if most < len(ascending) else torch.inf)  # of equal ones all or none
        if reach is not None and self.tolerance is None:
            rare = _matter_to_some_weight(sizes, kept, reach)
            kept |= rare[:, None] & (sizes > 0)
        if scale is not None:  # whatever its size, the first goes along with the others
            kept[:, 0] = kept.any(1)
            scale = torch.where(kept[:, 0], scale, 0.0)
        dropped = float(sizes[~kept].sum())
        return Directions(root, kept.sum(1), tuple(f.shape[1:-1]), order, scale, total, dropped)

    def directions(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        self.require(f)
        root = likelihood.factor(f, y)  # (n, *event, c, r)
        n, c, r = root.shape[0], root.shape[-2], root.shape[-1]
        root = root.reshape(n, -1, c, r)
        used = [[True] * r] if root.shape[1] == 1 else root.ne(0).any(2).any(0).tolist()  # ignored positions have none
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


def _matter_to_some_weight(sizes: Tensor, kept: Tensor, reach: Tensor) -> Tensor:
    """Samples whose dropped directions (sizes (n, k), not kept) hold more than `MISSED` of the curvature of a weight
    that this batch gives, and more than `NOTICED` of a prior precision of one; (n,)."""
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
    """The Fisher information by `samples` targets a datum drawn from the network's own predictive; unbiased."""

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
    """Outer products of each sample's own gradient. It vanishes where the network interpolates; for comparison."""

    dispersion_power = 2

    def directions(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        yield likelihood.score(f, y) * likelihood.common_factor.detach().to(f)

    def width(self, outputs: int) -> int:
        return 1
