"""A structure and a factor of one's own: found by name, priced, resumed and judged like ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.cli import main as cli
from lapwing.curvature import Accumulator, Factor, Problem, Structure
from lapwing.curvature.curvature import Estimate, accumulate
from lapwing.linalg import Diagonal, Jacobian
from lapwing.model import Plan
from tests.dense import jacobian


class Total(Accumulator):
    """The trace of the curvature."""

    def __init__(self, problem: Problem) -> None:
        params = problem.network.params
        self.size, self.tensors = params.size, {"trace": torch.zeros((), dtype=params.dtype)}

    def update(self, jacobian: Jacobian, fresh: Tensor | None) -> None:
        self.tensors["trace"] += jacobian.square_sum().sum()

    def finish(self) -> Diagonal:
        return Diagonal((self.tensors["trace"] / self.size).expand(self.size).clone())


@lapwing.register(name="isotropic")
@dataclass(frozen=True, eq=False)
class Isotropic(Structure):
    """The mean of the diagonal, for every weight."""

    mergeable = True

    def bytes(self, plan: Plan, itemsize: int) -> int:
        return itemsize

    def estimate(self, problem: Problem) -> Estimate:
        return accumulate(problem, Total(problem))


@lapwing.register(name="sized")
@dataclass(frozen=True, eq=False)
class Sized(Isotropic):
    """One that cannot be made from its name alone."""

    size: int


@lapwing.register(name="outputs")
@dataclass(frozen=True, eq=False)
class Outputs(Factor):
    """Λ = I: one direction per output."""

    def width(self, outputs: int) -> int:
        return outputs

    def directions(self, likelihood: Any, f: Tensor, y: Tensor, generator: Any = None) -> Iterator[Tensor]:
        for unit in torch.eye(f.shape[-1], dtype=f.dtype):
            yield unit.expand_as(f)


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


MODEL = network()
DATA = (torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3)


def test_it_is_found_by_name_saved_and_loaded(tmp_path: Path) -> None:
    la = lapwing.fit(MODEL, DATA, "classification", structure="isotropic", progress=False)
    diagonal = lapwing.fit(MODEL, DATA, "classification", structure="diag", progress=False)
    assert float(la.curvature.matrix.trace()) == pytest.approx(float(diagonal.curvature.matrix.trace()), rel=1e-5)
    la.save(tmp_path / "own.lapwing")
    again = lapwing.load(tmp_path / "own.lapwing", MODEL)
    assert isinstance(again.curvature.structure, Isotropic)
    torch.testing.assert_close(again.predict(DATA[0]).probs, la.predict(DATA[0]).probs)


def test_its_evidence_is_no_bound_unless_it_says_so() -> None:
    la = lapwing.fit(MODEL, DATA, "classification", structure="isotropic", progress=False)
    full = lapwing.fit(MODEL, DATA, "classification", structure="full", progress=False)
    assert "not a bound of the full GGN's" in la.summary()
    warnings = lapwing.compare({"own": la, "full": full}).warnings
    assert any(w.startswith("own: ") and "no bound" in w for w in warnings)


def test_an_interrupted_fit_goes_on(tmp_path: Path) -> None:
    la = lapwing.fit(MODEL, DATA, "classification", structure="isotropic", checkpoint=tmp_path, progress=False)
    assert la.curvature.seen == 24
    with pytest.raises(lapwing.UnsupportedOperation, match="isotropic"):
        lapwing.fit(MODEL, DATA, "classification", structure="lowrank", checkpoint=tmp_path, progress=False)


def test_a_name_without_its_arguments() -> None:
    with pytest.raises(lapwing.UnsupportedOperation, match="needs arguments"):
        lapwing.fit(MODEL, DATA, "classification", structure="sized", progress=False)


def test_doctor_prices_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("from torch import nn\nmodel = nn.Linear(3, 2)\n")
    assert cli.main(["doctor", "net.py:model"]) == 0
    said = capsys.readouterr().out
    assert "isotropic" in said
    assert "sized" not in said


def test_a_factor_by_name() -> None:
    la = lapwing.fit(MODEL, DATA, "classification", structure="full", factor="outputs", progress=False)
    rows = jacobian(MODEL, DATA[0]).flatten(0, 1)
    torch.testing.assert_close(la.curvature.dense(), rows.T @ rows, rtol=1e-4, atol=1e-5)
    assert la.curvature.gradient is None


class Bare(Isotropic):
    """Returns its matrix without the totals of the pass."""

    def estimate(self, problem: Problem) -> Diagonal:  # type: ignore[override]
        return Diagonal(torch.ones(problem.network.params.size))


def test_mistakes_in_a_structure_are_named() -> None:
    data = (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))
    with pytest.raises(lapwing.UnsupportedOperation, match=r"Bare\.estimate returned Diagonal; it must return"):
        lapwing.fit(nn.Linear(2, 2), data, "classification", structure=Bare(), progress=False)
    with pytest.raises(lapwing.UnsupportedOperation, match=r"an object, not a class: pass Isotropic\(\)"):
        lapwing.fit(nn.Linear(2, 2), data, "classification", structure=Isotropic, progress=False)
