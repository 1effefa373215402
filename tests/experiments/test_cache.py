"""Parts of experiments that are kept: computed once per name and options."""

from pathlib import Path

import pytest
import torch
from experiments._cache import cached

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
