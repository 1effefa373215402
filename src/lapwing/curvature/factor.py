"""Which S with S Sᵀ = φ·Λ: the exact GGN, a Monte Carlo Fisher, the empirical Fisher. Each is a set of directions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import TooLarge
from lapwing.likelihoods import Likelihood

DIRECTIONS = 2048  # output directions a sample that the exact GGN goes through before it asks for a sampled factor


class Factor(ABC):
    """Directions s[n, r] in output space whose outer products sum to φ·Λ of each sample, or estimate it."""

    dispersion_power = 1  # the curvature scales as 1/φ to this power

    @abstractmethod
    def directions(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        """Tensors (n, *event, c), one a direction."""

    @abstractmethod
    def width(self, outputs: int) -> int:
        """How many directions a sample with so many outputs has (an upper bound, for memory)."""

    def count(self, f: Tensor) -> int:
        """How many directions there will be at outputs f."""
        return self.width(f[0].numel())


@dataclass(frozen=True, eq=False)
class GGN(Factor):
    """The generalized Gauss–Newton matrix, exactly: one direction for each column of S and each event position.

    `limit` is the number of directions a sample beyond which `TooLarge` is raised (tokens × classes, pixels ×
    classes, thousands of classes): a sampled factor is then the practical choice.
    """

    limit: int = DIRECTIONS

    def directions(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        self.require(f)
        root = likelihood.factor(f, y)  # (n, *event, c, r)
        n, c, r = root.shape[0], root.shape[-2], root.shape[-1]
        root = root.reshape(n, -1, c, r)
        for e in range(root.shape[1]):
            for column in range(r):
                s = root[:, e, :, column]
                if root.shape[1] == 1:
                    yield s.reshape(f.shape)
                elif bool(s.any()):  # ignored positions have no direction
                    only = torch.zeros_like(root[..., 0])
                    only[:, e] = s
                    yield only.reshape(f.shape)

    def width(self, outputs: int) -> int:
        return outputs

    def require(self, f: Tensor) -> None:
        """Raise `TooLarge` where a sample has too many output directions."""
        if f[0].numel() > self.limit:
            raise TooLarge(
                f"the exact GGN needs up to {f[0].numel():,} output directions a sample, outputs {tuple(f.shape[1:])}, "
                f"more than {self.limit:,}. Use factor='mc' (Monte Carlo Fisher), or GGN(limit=...) to insist."
            )


@dataclass(frozen=True, eq=False)
class MCFisher(Factor):
    """The Fisher information by `samples` targets a datum drawn from the network's own predictive; unbiased."""

    samples: int = 1

    def directions(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        for _ in range(self.samples):
            yield likelihood.sample_factor(f, y, generator) / self.samples**0.5

    def width(self, outputs: int) -> int:
        return self.samples


@dataclass(frozen=True, eq=False)
class EmpiricalFisher(Factor):
    """Outer products of each sample's own gradient. It vanishes where the network interpolates; for comparison."""

    dispersion_power = 2

    def directions(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        yield likelihood.score(f, y) * likelihood.dispersion.detach().to(f)

    def width(self, outputs: int) -> int:
        return 1


@dataclass(frozen=True, eq=False)
class Hessian(Factor):
    """The exact Hessian of the negative log-likelihood, for dense structures. It may be indefinite.

    Not of the form Σ Jᵀ S Sᵀ J: `Full`, `BlockDiag` and `Diag` have their own estimator for it.
    """

    def directions(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        raise TypeError("the exact Hessian is not a sum of squares and has no directions")

    def width(self, outputs: int) -> int:
        return 0
