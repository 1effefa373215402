"""Every experiment writes a page, a figure and data; the numbers are finite and follow the seed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lapwing.cli import main as cli
from lapwing.cli.repository import experiments

NEEDS_DATA = {n for n, path in experiments().items() if "Needs LAPWING_DATA" in path.read_text(encoding="utf-8")}


def run(name: str, seed: int, folder: Path) -> Any:
    assert cli.main(["reproduce", name, "--smoke", "--first", str(seed), "--out", str(folder)]) == 0
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".md", ".png", ".svg"]
    assert all(path.stat().st_size > 500 for path in folder.iterdir())
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def clockless(data: Any) -> Any:
    """The numbers without what a clock or the memory of the process says, which always change."""
    if isinstance(data, dict):
        measured = ("CPU", " s", "GB", "MB", "seconds", "ratio")
        return {key: clockless(value) for key, value in data.items() if not key.endswith(measured) and "CPU" not in key}
    return data


@pytest.mark.slow
@pytest.mark.parametrize("name", experiments())
def test_outputs_exist_and_change_with_the_seed(name: str, tmp_path: Path) -> None:
    if name in NEEDS_DATA and not os.environ.get("LAPWING_DATA"):
        pytest.skip("LAPWING_DATA is not set")
    first, second = (run(name, seed, tmp_path / str(seed)) for seed in (0, 1))
    assert first["rows"]
    assert first["claims"]
    assert clockless(first["data"]) != clockless(second["data"])
    page = (tmp_path / "0" / f"{name}.md").read_text(encoding="utf-8")
    assert all(claim["quote"] in page for claim in first["claims"])
