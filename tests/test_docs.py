"""Every Python block of every page runs as it stands, section by section.

A section sees what the ones before it on the page have defined, and what a reader takes for granted (`tests/given.py`):
a trained `model`, `train_loader`, `val_loader`, `test_loader`, `x`, `y`, and a posterior `la`. A page with a line
`<!-- slow -->` runs in `make test-slow`.
"""

import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lapwing import storage
from lapwing.model.rules import RULES
from lapwing.predictive.links import LINKS
from tests.given import given

DOCS = Path(__file__).parent.parent / "docs"
OWN = ("commandline.md",)  # tests/cli runs it, with its files


def sections(page: Path) -> list[tuple[str, str]]:
    """(heading, code) of every section of a page that has Python code."""
    found = []
    for part in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
        code = "\n".join(text for language, text in blocks if language == "python")
        found.append((part.splitlines()[0].lstrip("# "), code))
    return [(name, code) for name, code in found if code]


def pages() -> list[Any]:
    read = [page for page in sorted(DOCS.rglob("*.md")) if page.name not in OWN and "decisions" not in page.parts]
    found = [page for page in read if sections(page)]
    marks = {page: [pytest.mark.slow] if "<!-- slow -->" in page.read_text(encoding="utf-8") else [] for page in found}
    return [pytest.param(page, id=str(page.relative_to(DOCS)), marks=marks[page]) for page in found]


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Take back what a page registers: other tests have classes of the same names, or mean the real laplace-torch."""
    tables = (storage._classes, storage._names, RULES, LINKS)
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "laplace"}
    before = [{key: copy.copy(value) for key, value in table.items()} for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)
    for name in [name for name in sys.modules if name.split(".")[0] == "laplace"]:
        del sys.modules[name]
    sys.modules.update(modules)


@pytest.mark.filterwarnings("ignore::UserWarning")  # advice, such as that of tuning without held-out data
@pytest.mark.parametrize("page", pages())
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page", **given()}
    for heading, code in sections(page):
        exec(compile(code, f"{page.name}: {heading}", "exec"), names)
        printed = capsys.readouterr().out.strip()
        assert printed or "print(" not in code, f"{page.name}, {heading}: nothing came out"
