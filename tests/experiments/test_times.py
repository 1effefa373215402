"""Times of experiments: put into ABOUT where they belong, and measured."""

import ast
from typing import Any

import pytest
from experiments._times import timed, with_time

from lapwing.cli.repository import experiments

ONE_LINE = 'import x\n\nABOUT = {"paper": "001, τ", "minutes": None, "page": "a.md"}\nA = 1\n'
SEVERAL = 'ABOUT = {\n    "paper": "001",\n    "minutes": 3,\n    "quick": 0.2,\n}\n'


def about(source: str) -> Any:
    node = next(each for each in ast.parse(source).body if isinstance(each, ast.Assign))
    return ast.literal_eval(node.value)


@pytest.mark.parametrize("source", [ONE_LINE, SEVERAL])
@pytest.mark.parametrize("field", ["minutes", "quick"])
def test_a_time_replaces_the_old_one_and_nothing_else(source: str, field: str) -> None:
    told = with_time(source, field, 1.5)
    assert about(told) == about(source) | {field: 1.5}
    assert with_time(told, field, 1.5) == told
    assert with_time(told, field, 12.0).replace("12", "1.5") == told


@pytest.mark.parametrize("name", experiments())
def test_every_script_takes_a_time(name: str) -> None:
    source = experiments()[name].read_text(encoding="utf-8")
    assert '"minutes": 0.3' in with_time(source, "minutes", 0.3)


@pytest.mark.slow
def test_a_run_is_timed() -> None:
    found = timed("toy_cubic", "smoke", ["--help"], None)
    assert found.code == 0
    assert 0 < found.cpu
    assert 0 < found.wall
    assert found.peak > 10
