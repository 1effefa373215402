"""Every example is short and runs."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
