"""Parts of experiments that are kept: computed once per name and options."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments._cache import cached, each_seed, tensors, trained_once
from torch import nn

from lapwing.errors import BadData


def test_a_part_is_computed_once_per_name_and_options(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> dict[str, torch.Tensor]:
        calls.append(1)
        return {"x": torch.tensor([1.0, len(calls)])}

    first = cached(tmp_path / "deep", "part", {"size": 3}, compute)
    assert first == {"x": [1.0, 1.0]}
    assert cached(tmp_path / "deep", "part", {"size": 3}, compute) == first
    assert cached(tmp_path / "deep", "part", {"size": 4}, compute) == {"x": [1.0, 2.0]}
    assert cached(tmp_path / "deep", "other", {"size": 3}, compute) == {"x": [1.0, 3.0]}
    assert cached(None, "part", {"size": 3}, compute) == {"x": [1.0, 4.0]}
    assert len(calls) == 4


def test_numbers_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="finite"):
        cached(tmp_path, "part", {}, lambda: [float("nan")])
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_with_the_seeds_that_are_missing(tmp_path: Path) -> None:
    ran: list[int] = []

    def run(seed: int, given: Any) -> tuple[int, torch.Tensor]:
        ran.append(seed)
        return given.size, torch.tensor([float(seed)])

    given = Namespace(smoke=False, quick=False, seeds=2, first=0, out=None, cache=tmp_path, size=7)
    assert each_seed("toy", run, given) == [[7, [0.0]], [7, [1.0]]]
    more = Namespace(**vars(given) | {"seeds": 3, "out": tmp_path / "elsewhere"})
    assert each_seed("toy", run, more) == [[7, [0.0]], [7, [1.0]], [7, [2.0]]]
    assert ran == [0, 1, 2]
    assert each_seed("toy", run, Namespace(**vars(given) | {"size": 8, "seeds": 1})) == [[8, [0.0]]]
    assert ran == [0, 1, 2, 0]


def test_a_network_is_trained_once(tmp_path: Path) -> None:
    made: list[nn.Module] = []

    def train() -> nn.Module:
        made.append(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        return made[-1]

    for _ in range(2):
        found = trained_once(tmp_path, "net", {"seed": 0}, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), train)
        assert not found.training
        assert all(bool((a == b).all()) for a, b in zip(found.state_dict().values(), made[0].state_dict().values()))
    assert len(made) == 1
    assert trained_once(None, "net", {"seed": 0}, nn.Identity(), train) is made[1]


def test_lists_become_tensors() -> None:
    found = tensors({"x": [1, 2], "ragged": [[1.0], [1.0, 2.0]], "name": "sine"})
    assert torch.equal(found["x"], torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert [len(each) for each in found["ragged"]] == [1, 2]
    assert found["name"] == "sine"
