"""A matrix and a structure that the library does not have: one file, a registration each, then everything works."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.curvature import Accumulator, Estimate, Problem, Structure, accumulate, layout_of
from lapwing.linalg import PSD, Jacobian, Layout, Rows
from lapwing.testing import MatrixLaws, StructureLaws
from lapwing.testing.matrices import Draw


@lapwing.register
@dataclass(frozen=True, eq=False)
class BlockTridiagonal(PSD):
    """factor · T + diag(shift), T with blocks D_k on its diagonal, C_k (p_k, p_{k+1}) above and C_kᵀ below.

    By a block Cholesky factor with blocks L_k on its diagonal and B_k (p_{k+1}, p_k) below, in float64.
    """

    layout: Layout
    blocks: tuple[Tensor, ...]
    couplings: tuple[Tensor, ...]
    factor: Any = 1.0
    shift: Any = 0.0

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].dtype

    @property
    def device(self) -> torch.device:
        return self.blocks[0].device

    @property
    def _shift(self) -> Tensor:
        return torch.as_tensor(self.shift, dtype=torch.float64, device=self.device).expand(self.size)

    def _times(self, c: Any) -> Tensor:
        return torch.as_tensor(self.factor, dtype=torch.float64, device=self.device) * c

    def _cholesky(self) -> tuple[list[Tensor], list[Tensor]]:
        lower: list[Tensor] = []
        below: list[Tensor] = []
        for k, (block, shift) in enumerate(zip(self.blocks, self.layout.gather(self._shift), strict=True)):
            own = self._times(block.double()) + torch.diag(shift)
            if k:
                coupling = self._times(self.couplings[k - 1].double())
                below.append(torch.linalg.solve_triangular(lower[-1], coupling, upper=False).mT)
                own = own - below[-1] @ below[-1].mT
            factor, info = torch.linalg.cholesky_ex(own)
            if int(info):
                raise lapwing.NotPositiveDefinite("the matrix is singular. Add a prior with positive precision.")
            lower.append(factor)
        return lower, below

    def _half(self, v: Tensor) -> Tensor:
        """L⁻¹ v, (*b, P) float64."""
        lower, below = self._cholesky()
        found: list[Tensor] = []
        for k, part in enumerate(self.layout.gather(v.double())):
            part = part - found[-1] @ below[k - 1].mT if k else part
            flat = torch.linalg.solve_triangular(lower[k], part.reshape(-1, part.shape[-1]).mT, upper=False).mT
            found.append(flat.reshape(part.shape))
        return self.layout.scatter(found)

    def _other_half(self, v: Tensor) -> Tensor:
        """L⁻ᵀ v, (*b, P) float64."""
        lower, below = self._cholesky()
        parts, found = [*self.layout.gather(v.double())], []
        for k in reversed(range(len(parts))):
            part = parts[k] - found[-1] @ below[k] if found else parts[k]
            flat = torch.linalg.solve_triangular(lower[k].mT, part.reshape(-1, part.shape[-1]).mT, upper=True).mT
            found.append(flat.reshape(part.shape))
        return self.layout.scatter(found[::-1])

    def matvec(self, v: Tensor) -> Tensor:
        parts = self.layout.gather(self._vector(v).double())
        image = [part @ block.double() for part, block in zip(parts, self.blocks, strict=True)]
        for k, coupling in enumerate(self.couplings):
            image[k] = image[k] + parts[k + 1] @ coupling.double().mT
            image[k + 1] = image[k + 1] + parts[k] @ coupling.double()
        return (self._times(self.layout.scatter(image)) + v.double() * self._shift).to(self.dtype)

    def solve(self, v: Tensor) -> Tensor:
        return self._other_half(self._half(self._vector(v))).to(self.dtype)

    def logdet(self) -> Tensor:
        return torch.stack([2 * lower.diagonal().log().sum() for lower in self._cholesky()[0]]).sum()

    def diagonal(self) -> Tensor:
        own = self.layout.scatter([block.diagonal().double() for block in self.blocks])
        return (self._times(own) + self._shift).to(self.dtype)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(n, self.size, dtype=self.dtype, device=self.device, generator=generator)
        return self._other_half(noise).to(self.dtype)

    def scale(self, c: Any) -> BlockTridiagonal:
        return replace(self, factor=self._times(c), shift=self._shift * c)

    def __add__(self, other: PSD) -> PSD:
        self._matches(other)
        if other.is_diagonal:
            return replace(self, shift=self._shift + other.diagonal().double())
        if isinstance(other, BlockTridiagonal) and self.layout.same_as(other.layout):
            pairs = zip((*self.blocks, *self.couplings), (*other.blocks, *other.couplings), strict=True)
            total = [(self._times(a) + other._times(b)).to(self.dtype) for a, b in pairs]
            k = len(self.blocks)
            shift = self._shift + other._shift
            return BlockTridiagonal(self.layout, tuple(total[:k]), tuple(total[k:]), 1.0, shift)
        raise self._refuse(other, "a diagonal prior or another of the same blocks")

    def whiten(self, rows: Rows) -> Tensor:
        return self._half(rows.of_size(self.size, self.dtype).dense()).to(self.dtype)


class TaperedSums(Accumulator):
    """Σ JᵀJ of every block and of every two that follow each other."""

    def __init__(self, problem: Problem) -> None:
        self.layout, params = layout_of(problem), problem.network.params
        sizes = self.layout.sizes
        shapes = {f"block {k}": (p, p) for k, p in enumerate(sizes)}
        shapes |= {f"coupling {k}": pair for k, pair in enumerate(pairwise(sizes))}
        self.tensors = {name: torch.zeros(s, dtype=params.dtype, device=params.device) for name, s in shapes.items()}

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        rows = [own.dense().flatten(0, 1) for own in jacobian.rows]
        for k, own in enumerate(rows):
            self.tensors[f"block {k}"] += own.mT @ own
            if k + 1 < len(rows):
                self.tensors[f"coupling {k}"] += 0.5 * own.mT @ rows[k + 1]

    def finish(self) -> BlockTridiagonal:
        count = len(self.layout.sizes)
        blocks = [self.tensors[f"block {k}"] for k in range(count)]
        couplings = tuple(self.tensors[f"coupling {k}"] for k in range(count - 1))
        return BlockTridiagonal(self.layout, tuple(0.5 * (b + b.mT) for b in blocks), couplings)


@lapwing.register
@dataclass(frozen=True, eq=False)
class Tapered(Structure):
    """Blocks of layers, half of what couples neighbors, and nothing else.

    That is the product, entry by entry, of the exact curvature with a positive definite matrix of 1, ½ and 0, so it is
    positive semi-definite (Schur).
    """

    mergeable = True

    def bytes(self, plan: Any, itemsize: int) -> int:
        sizes = [block.size for block in plan.blocks]
        return (2 * itemsize + 16) * sum(a * (a + b) for a, b in zip(sizes, [*sizes[1:], 0], strict=True))

    def estimate(self, problem: Problem) -> Estimate:
        return accumulate(problem, TaperedSums(problem), row_bytes=24 * problem.network.params.size)


def tapered(ggn: Tensor, layout: Layout) -> Tensor:
    kept = torch.zeros_like(ggn)
    for k, rows in enumerate(layout.index):
        for other, columns in enumerate(layout.index):
            share = {0: 1.0, 1: 0.5}.get(abs(k - other), 0.0)
            kept[rows[:, None], columns] = share * ggn[rows[:, None], columns]
    return kept


class TestMatrixLaws(MatrixLaws):
    def curvature(self, draw: Draw) -> PSD:
        order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
        layout = Layout(12, tuple(order.split([5, 4, 3])))
        exact = tapered(draw.psd(size=12), layout)
        index = layout.index
        blocks = tuple(exact[own[:, None], own] for own in index)
        couplings = tuple(exact[a[:, None], b] for a, b in pairwise(index))
        return BlockTridiagonal(layout, blocks, couplings)


class TestMatrixLawsWithAPriorForEachWeight(TestMatrixLaws):
    def parameters(self, curvature: PSD) -> int:
        return curvature.size

    def prior(self, curvature: PSD, theta: Tensor) -> Any:
        return lapwing.linalg.Diagonal(theta)


class TestStructureLaws(StructureLaws):
    structure = Tapered()

    def expected(self, ggn: Tensor, layout: Layout) -> Tensor:
        return tapered(ggn, layout)


def data(n: int = 80) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, generator=generator)
    return x, (x.prod(-1) > 0).long()


def test_a_day_in_its_life(tmp_path: Path) -> None:
    """Fit by name, tune in both ways, predict, save, load, move, compare, update, and be a prior."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    la = lapwing.fit(net, data(), "classification", structure="tapered", progress=False)
    assert isinstance(la.curvature.matrix, BlockTridiagonal)
    by_evidence = la.tune(method="evidence", prior="layerwise")
    assert float(by_evidence.log_evidence()) > float(la.log_evidence())
    tuned = la.tune(data(40))
    tuned.save(tmp_path / "file")
    again = lapwing.load(tmp_path / "file", net)
    x = data(5)[0]
    for other in (again, again.to("cpu")):
        torch.testing.assert_close(other.predict(x).probs, tuned.predict(x).probs)
    table = str(lapwing.compare({"tapered": la, "kron": lapwing.fit(net, data(), "classification", structure="kron")}))
    assert "tapered" in table
    assert la.update(data(7)).n_data == 87
    chained = lapwing.fit(
        net, data(7), "classification", structure=Tapered(), prior=lapwing.Prior.from_posterior(tuned.posterior)
    )
    chained.save(tmp_path / "chained")
    torch.testing.assert_close(
        lapwing.load(tmp_path / "chained", net).log_evidence(), chained.log_evidence(), rtol=1e-5, atol=1e-4
    )


def test_a_class_that_is_not_registered_says_what_to_do(tmp_path: Path) -> None:
    class Unknown(Tapered):
        pass

    la = lapwing.fit(nn.Linear(2, 2), data(), "classification", structure=Unknown(), progress=False)
    la.to("cpu")
    with pytest.raises(lapwing.UnsupportedOperation, match=r"@lapwing\.register"):
        la.save(tmp_path / "file")
    with pytest.raises(lapwing.UnsupportedOperation, match="structure is one of"):
        lapwing.fit(nn.Linear(2, 2), data(), "classification", structure="unknown", progress=False)


def test_a_name_of_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="Lapwing has a Diag of its own"):
        lapwing.register(type("Diag", (Tapered,), {}))
    with pytest.raises(ValueError, match="Lapwing has a Kron of its own, called 'kron'"):
        lapwing.register(name="kron")(type("Mine", (Tapered,), {}))
    assert lapwing.curvature.resolve_structure("kron") is not None


def test_a_class_that_is_defined_again_takes_its_place() -> None:
    """As when the cell of a notebook is run twice."""
    first, second = (lapwing.register(type("Again", (Tapered,), {})) for _ in range(2))
    assert type(lapwing.curvature.resolve_structure("again")) is second is not first
