"""Files that an earlier version wrote (format 2, in `format2/`) are read, with the numbers they had then."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lapwing
from lapwing.curvature.resume import Journal
from lapwing.storage import load_tree, read_file
from tests.storage.format2 import make

EXPECTED: dict[str, Any] = json.loads((make.HERE / "numbers.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_posteriors(name: str, tmp_path: Path) -> None:
    file = make.HERE / f"{name}.lapwing"
    assert read_file(file)[1]["format"] == 2
    la = lapwing.load(file, make.model(), data=make.data())
    again = tmp_path / "again"
    la.save(again)
    for found in (la, lapwing.load(again, make.model(), data=make.data())):
        for key, value in make.numbers(found).items():
            expected = torch.tensor(EXPECTED[name][key], dtype=torch.float64)
            torch.testing.assert_close(torch.tensor(value, dtype=torch.float64), expected, rtol=1e-6, atol=1e-9)


def test_every_structure_has_a_file() -> None:
    assert set(make.STRUCTURES) <= set(EXPECTED)


def test_a_training_goes_on(tmp_path: Path) -> None:
    shutil.copytree(make.HERE / "training", tmp_path / "training")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = make.train(tmp_path / "training")
    assert len(result.history) > 0


def test_an_interrupted_fit_is_found() -> None:
    file = make.HERE / "fit" / "fit.safetensors"
    tree = load_tree(file)
    journal = Journal(file, tree["identity"])
    assert journal.found is not None
    assert journal.found["read"] == 10
